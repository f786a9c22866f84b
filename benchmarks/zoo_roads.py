"""The roads a checkpoint can take into a model, and the verdict on each.

``right``: every tensor bit for bit, ties by storage, and the same answer of a forward pass.
``refused``: nothing was loaded, and the reason was given in so many words. ``failed``: an error
on the way, or tensors left without data. ``wrong``: other values, but something was said.
``silent``: other values, and nobody said a word; for ours always, because a plan that is ``ok``
has promised them.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from listening import listening
from torch import nn
from zoo_classes import class_named
from zoo_compare import Difference, differences, experts_implementation, forward_difference
from zoo_models import Truth, identity, seed_of, slots

__all__ = ["OURS", "ROADS", "Case", "Result", "travel"]


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, the class to load it into, and what must come out."""

    name: str
    checkpoint: Path
    truth: Truth
    unsure: Collection[str] = ()
    """Computed buffers that differ from one building to the next."""
    free: Collection[str] = ()
    """Names that the checkpoint does not hold: transformers initialises them anew."""
    judge_forward: bool = True
    """False where transformers' own loading does not give the same answer again."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a road went."""

    verdict: str
    reason: str = ""
    seconds: float = 0.0
    details: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


class Refused(Exception):
    """The road says itself, with a reason, that it will not do this."""


def travel(road: str, case: Case) -> Result:
    """Take *road*; everything that happens on the way becomes the verdict."""
    started = time.perf_counter()
    with listening() as said:
        try:
            result = ROADS[road](case, said)
        except Refused as refusal:
            result = Result("refused", _line(str(refusal)), details=(str(refusal)[:4000],))
        except Exception as error:
            result = Result("failed", _line(f"{type(error).__name__}: {error}"))
    return Result(
        result.verdict, result.reason, round(time.perf_counter() - started, 3),
        (*result.details, *said[:5]), result.more,
    )  # fmt: skip


def _line(text: str) -> str:
    """Return *text* as one line of bearable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else text


def _judged(
    model: nn.Module,
    case: Case,
    silent: Callable[[list[Difference]], str],
    usual: Any = None,
) -> Result:
    """Return the verdict on a loaded *model*; *silent* names it if values are wrong.

    *usual* is what computed the experts before it was loaded.
    """
    found = differences(model, case.truth, unsure=case.unsure, free=case.free)
    details = tuple(str(each) for each in found[:20])
    if found:
        without = [each for each in found if each.kind in ("meta", "absent", "fetch")]
        first = str((without or found)[0])
        verdict = "failed" if without else silent(found)
        return Result(verdict, f"{first} ({len(found)} in all)", details=details)
    if not case.judge_forward or case.free:
        return Result("right")
    answer = forward_difference(model, case.truth, usual)
    if answer is None:
        return Result("right", more={"forward": case.truth.forward is not None})
    if answer.kind == "refuses":
        return Result("right", _line(f"forward: {answer.text}"), more={"forward": "refused"})
    if answer.kind == "raises":
        return Result("failed", _line(answer.text.join(("forward: ", ""))))
    return Result(silent([answer]), f"all tensors right, but {answer}")


def _transformers(case: Case, said: list[str]) -> Result:
    """Load by ``from_pretrained``; also says what cannot be compared on other roads."""
    model_class = class_named(case.name)
    model, info = model_class.from_pretrained(case.checkpoint, output_loading_info=True)
    computed = {name: held.tensor for name, held in slots(model) if not held.persistent}
    unsure = [
        name
        for name, tensor in case.truth.computed.items()
        if name not in computed or not torch.equal(computed[name], tensor)
    ]
    told = bool(info["missing_keys"] or info["mismatched_keys"] or info["unexpected_keys"])
    asked = Case(case.name, case.checkpoint, case.truth, unsure, case.free)
    result = _judged(model.eval(), asked, lambda _: "wrong" if told or said else "silent")
    repeats = not result.reason.startswith(("forward:", "all tensors right"))
    more = {"unsure": unsure, "judge_forward": repeats}
    if not repeats:  # the tensors are right, this class only answers otherwise each time
        return Result("right", result.reason, details=result.details, more=more)
    return Result(
        result.verdict, result.reason, details=result.details, more={**result.more, **more}
    )


def _accelerate(case: Case, said: list[str]) -> Result:
    """Load as the documentation of accelerate says, with nothing else."""
    from accelerate import load_checkpoint_and_dispatch

    model = _emptied(case)
    loaded: Any = load_checkpoint_and_dispatch(model, str(case.checkpoint), device_map={"": "cpu"})
    return _judged(loaded.eval(), case, lambda _: "wrong" if said else "silent")


def _emptied(case: Case) -> Any:
    """Return the model of *case* made within accelerate's ``init_empty_weights``."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    model_class = class_named(case.name)
    source: Any = model_class.config_class
    reader: Any = source if isinstance(source, type) else AutoConfig
    config = reader.from_pretrained(case.checkpoint)
    with init_empty_weights():
        model = model_class(copy.deepcopy(config))
    model.tie_weights()
    return model.eval()


def _ours(
    case: Case, said: list[str], model: Any, device_map: Any, max_memory: Mapping[Any, Any] | None
) -> Result:
    from modelquirks.planner import Dispatcher

    plan = Dispatcher(_registry()).plan(
        case.checkpoint, model=model, device_map=device_map, max_memory=max_memory,
        allow_missing=sorted(case.free),
    )  # fmt: skip
    if not plan.ok:
        raise Refused(plan.refusal())
    usual = experts_implementation(model)
    try:
        loaded = plan.execute(model)
    except Exception as error:
        if type(error).__module__.startswith("modelquirks."):
            raise Refused(f"at execution: {error}") from error
        raise
    del said
    result = _judged(loaded.eval(), case, lambda _: "silent", usual)
    devices = {str(device) for device in plan.device_map.values()}
    return Result(
        result.verdict, result.reason, details=result.details,
        more={**result.more, "devices": sorted(devices)},
    )  # fmt: skip


_REGISTRY: list[Any] = []


def _registry() -> Any:
    """Return the installed plugins, loaded once a process."""
    from modelquirks.quirks.registry import Registry

    if not _REGISTRY:
        _REGISTRY.append(Registry.load())
    return _REGISTRY[0]


def _planned_model(case: Case) -> Any:
    """Return the model as ``--model transformers`` makes it."""
    from modelquirks.planner import Dispatcher

    if case.free:  # what the checkpoint does not hold must come from somewhere
        return _real(case)
    model = Dispatcher(_registry()).model(case.checkpoint)
    if model is None:
        raise ValueError("no plugin builds the model that config.json describes")
    return model


def _real(case: Case) -> Any:
    from transformers import AutoConfig

    model_class = class_named(case.name)
    source: Any = model_class.config_class
    reader: Any = source if isinstance(source, type) else AutoConfig
    config = reader.from_pretrained(case.checkpoint)
    return model_class(copy.deepcopy(config)).eval()


def _ours_cpu(case: Case, said: list[str]) -> Result:
    result = _ours(case, said, _planned_model(case), {"": "cpu"}, None)
    if not case.free:
        return result
    found = _missing(case)
    more = {
        "also_missing": sorted(found - set(case.free))[:20],
        "not_missing": sorted(set(case.free) - found)[:20],
    }
    return replace(result, more={**result.more, **more})


def _missing(case: Case) -> set[str]:
    """Return what our plan calls missing if nothing may be, beside what transformers does."""
    from modelquirks.planner import Dispatcher

    plan = Dispatcher(_registry()).plan(case.checkpoint, model=_real(case), device_map={"": "cpu"})
    return {name for entry in plan.audit.model if entry.kind == "missing" for name in entry.names}


def _ours_disk(case: Case, said: list[str]) -> Result:
    return _ours(case, said, _planned_model(case), {"": "disk"}, None)


def _ours_mixed(case: Case, said: list[str]) -> Result:
    """Let the planner cut: the CPU has room for a part only.

    What lies on the disk needs room where it runs, so a small model may need nearly all of it.
    """
    drawn = random.Random(seed_of(case.name, "mixed")).uniform(0.3, 0.7)
    held = (*case.truth.tensors.values(), *case.truth.computed.values())
    n_bytes = sum({identity(t): t.nbytes for t in held}.values())
    result = Result("failed")
    for share in (drawn, 0.85, 1.0, 1.5):
        memory = {"cpu": int(n_bytes * share), "disk": n_bytes * 4 + 4096}
        try:
            result = _ours(case, said, _planned_model(case), "auto", memory)
        except Refused as refusal:
            if "finds room" not in str(refusal) or share == 1.5:
                raise
        else:
            break
    return result


def _ours_map(case: Case, said: list[str]) -> Result:
    """Cut at modules drawn by lot, in a model that accelerate's own way made."""
    model = _real(case) if case.free else _emptied(case)
    return _ours(case, said, model, random_map(model, case.truth, seed_of(case.name, "map")), None)


def random_map(model: nn.Module, truth: Truth, seed: int) -> dict[str, str]:
    """Return a map of modules to CPU or disk; ties stay together, blocks stay whole."""
    chance = random.Random(seed)
    blocks = {
        kind
        for module in model.modules()
        for kind in getattr(module, "_no_split_modules", None) or ()
    }
    units = list(_units("", model, blocks, chance))
    devices = {unit: chance.choice(("cpu", "disk")) for unit in units}
    _join(devices, truth)
    if len(set(devices.values())) == 1 and len(units) > 1:
        other = "disk" if devices[units[0]] == "cpu" else "cpu"
        devices[chance.choice(units)] = other
        _join(devices, truth)
    return devices


def _join(devices: dict[str, str], truth: Truth) -> None:
    """Give all units that a chain of ties joins the same device."""
    groups = [{u for u in devices for name in names if _within(name, u)} for names in truth.ties]
    changed = True
    while changed:
        changed = False
        for owners in groups:
            if len({devices[unit] for unit in owners}) > 1:
                devices |= dict.fromkeys(owners, "cpu")
                changed = True


def _within(name: str, unit: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def _units(
    path: str, module: nn.Module, blocks: Collection[str], chance: random.Random
) -> Iterator[str]:
    own = [*module._parameters.items(), *module._buffers.items()]
    loose = [leaf for leaf, tensor in own if tensor is not None]
    children = [(f"{path}.{n}" if path else n, c) for n, c in module.named_children()]
    whole = type(module).__name__ in blocks or not children or (path and chance.random() < 0.3)
    if whole or (path and loose):
        yield path
        return
    yield from loose
    for name, child in children:
        if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            yield from _units(name, child, blocks, chance)


ROADS: dict[str, Callable[[Case, list[str]], Result]] = {
    "transformers": _transformers,
    "accelerate": _accelerate,
    "ours-cpu": _ours_cpu,
    "ours-mixed": _ours_mixed,
    "ours-map": _ours_map,
    "ours-disk": _ours_disk,
}
OURS = tuple(road for road in ROADS if road.startswith("ours"))
