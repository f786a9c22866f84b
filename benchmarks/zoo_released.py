"""The second pass: the same models in the forms that released checkpoints have.

``save_pretrained`` of a fresh model drops what transformers only reads: prefix changes, legacy
names, base-model files for models with a head. Here its rules are inverted to write such files.
What ``from_pretrained`` makes of the same file is the truth, except for names it calls missing.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from zoo_classes import class_named
from zoo_forward import Forward, answers, same
from zoo_models import Truth, built, filled, load_truth, made, seed_of, slots
from zoo_worker import Task, taken

__all__ = ["forms", "written"]

Tensors = dict[str, torch.Tensor]


class Form(NamedTuple):
    """A file to be written, and the class to load it into."""

    name: str
    tensors: Tensors
    target: str
    config: Any
    partial: bool = False
    """Whether something is missing or left over on purpose."""


def forms(task: Task, start: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Yield a row for every road taken with every released form of the class of *task*."""
    root = Path(task.root)
    marker = task.known.get("all/build")
    if marker is None:
        if "all/build" in task.skip:
            return
        start("all/build")
        row = {"name": task.name, "form": "all", "road": "build"}
        try:
            names = dict(_make(task.name, root, root.with_name("fresh") / task.name))
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield row | {"verdict": "failed", "reason": text[:300]}
            return
        for form, reason in names.items():
            if reason:
                yield {"name": task.name, "form": form, "road": "build"} | {
                    "verdict": "failed", "reason": reason,
                }  # fmt: skip
        done = [form for form, reason in names.items() if not reason]
        yield row | {"verdict": "right", "reason": "", "more": {"forms": done}}
    else:
        done = marker["more"]["forms"]
    for form in done:
        folder = root / task.name / form
        about = json.loads((folder / "about.json").read_text())
        yield from taken(task, form, folder, start, about)


def _make(name: str, root: Path, fresh: Path) -> Iterator[tuple[str, str]]:
    """Write every form; yield its name, and why there is none."""
    shutil.rmtree(root / name, ignore_errors=True)
    if not (fresh / "about.json").exists():
        made(name, fresh)
    model, _ = built(name)
    filled(model, seed_of(name))
    truth = load_truth(fresh)
    for form in written(model, name, truth):
        try:
            _keep(form, root / name / form.name, truth if form.target == name else None)
        except Exception as error:
            shutil.rmtree(root / name / form.name, ignore_errors=True)
            yield form.name, " ".join(f"{type(error).__name__}: {error}".split())[:300]
        else:
            yield form.name, ""


def written(model: Any, name: str, truth: Truth) -> Iterator[Form]:
    """Yield the forms that the saved *model* of the class *name* can have, each only once."""
    full = {n: held.tensor.detach() for n, held in slots(model) if held.persistent}
    sources, aliases = _tied(model, truth)
    once = {n: tensor for n, tensor in full.items() if n not in aliases}
    fresh = _reverted(model, once)
    seen = [set(fresh)]
    for form, tensors in _renamed(model, once):
        if set(tensors) not in seen:
            seen.append(set(tensors))
            yield Form(form, tensors, name, model.config)
    if aliases:
        yield Form("ties-twice-equal", _reverted(model, full), name, model.config)
        other = {n: t for n, t in full.items() if n not in sources and _last(n, truth)}
        yield Form("ties-other-name", _reverted(model, other), name, model.config)
        unlike = {**full, **{n: full[n] + at for at, n in enumerate(sorted(aliases), 1)}}
        yield Form("ties-twice-different", _reverted(model, unlike), name, model.config, True)
    base = _base(model)
    if base is not None:
        inner = {n: held.tensor.detach() for n, held in slots(base) if held.persistent}
        kept = set(_tied_names(base))
        inside = {n: tensor for n, tensor in inner.items() if n not in kept}
        yield Form("base-into-head", _reverted(base, inside), name, model.config, True)
        target = type(base).__name__
        import transformers

        if getattr(transformers, target, None) is type(base):
            yield Form("head-into-base", fresh, target, base.config, True)


def _renamed(model: Any, once: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Yield the file under other names: the model's own, with prefixes, with legacy names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    def rules(legacy: bool, prefixes: bool) -> list[Any]:
        found = get_model_conversion_mapping(model, add_legacy=legacy)
        return [rule for rule in found if prefixes or not isinstance(rule, PrefixChange)]

    yield "own-names", dict(once)
    yield "prefixed", _reverted(model, once, rules(legacy=False, prefixes=True))
    yield "legacy", _reverted(model, once, rules(legacy=True, prefixes=False))
    yield "prefixed-legacy", _reverted(model, once, rules(legacy=True, prefixes=True))
    if any(".parametrizations.weight.original" in name for name in once):
        yield "weight-norm", {_old_norm(n): t for n, t in _reverted(model, once).items()}


def _old_norm(name: str) -> str:
    """Return the name that torch's old ``weight_norm`` gives."""
    return name.replace(".parametrizations.weight.original0", ".weight_g").replace(
        ".parametrizations.weight.original1", ".weight_v"
    )


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor], rules: Any = None) -> Tensors:
    """Return *tensors* as ``save_pretrained`` would name them; with *rules* in place of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    had = vars(model).pop("_weight_conversions", None)
    if rules is not None:
        model._weight_conversions = rules
    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    finally:
        vars(model).pop("_weight_conversions", None)
        if had is not None:
            model._weight_conversions = had


def _tied_names(model: Any) -> Iterable[str]:
    """Return the names that transformers does not store, because others are tied to them."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _tied(model: Any, truth: Truth) -> tuple[set[str], set[str]]:
    """Return the names of tied tensors that are stored, and those that are not."""
    left_out = set(_tied_names(model))
    sources, aliases = set[str](), set[str]()
    for names in truth.ties:
        kept = [name for name in names if name not in left_out] or [names[0]]
        sources.add(kept[0])
        aliases.update(name for name in names if name != kept[0])
    return sources, aliases


def _last(name: str, truth: Truth) -> bool:
    """Tell whether *name* is untied, or the last of its group."""
    return all(name not in names or name == names[-1] for names in truth.ties)


def _base(model: Any) -> Any:
    """Return the base model inside *model*, None if there is none."""
    from transformers import PreTrainedModel

    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    return base if isinstance(base, PreTrainedModel) and base is not model else None


def _keep(form: Form, folder: Path, fresh: Truth | None) -> None:
    """Write the file of *form*, and what ``from_pretrained`` makes of it."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    tensors = {n: t.detach().clone().contiguous() for n, t in form.tensors.items()}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(form.config)
    config.architectures = [form.target]
    config.save_pretrained(checkpoint)
    truth, about = _oracle(form, checkpoint, fresh)
    torch.save(
        {
            "tensors": dict(truth.tensors),
            "computed": dict(truth.computed),
            "forward": None if truth.forward is None else truth.forward._asdict(),
        },
        folder / "truth.pt",
    )
    (folder / "about.json").write_text(json.dumps(about))


def _oracle(form: Form, checkpoint: Path, fresh: Truth | None) -> tuple[Truth, dict[str, Any]]:
    model_class = class_named(form.target)
    torch.manual_seed(1)
    model, info = model_class.from_pretrained(checkpoint, output_loading_info=True)
    model.eval()
    torch.manual_seed(2)
    again = dict(_values(model_class.from_pretrained(checkpoint)))
    held = dict(_values(model))
    free = set(info["missing_keys"]) | {n for n, t in held.items() if not same(t, again[n])}
    mismatched = {
        key[0] if isinstance(key, (tuple, list)) else key for key in info["mismatched_keys"]
    }
    free |= mismatched
    tied = {names for names in Truth(held, {}, None).ties if free & set(names)}
    free |= {name for names in tied for name in names}
    as_saved = (
        fresh is not None
        and not free
        and all(name in held and same(held[name], tensor) for name, tensor in fresh.tensors.items())
    )
    forward = None
    if fresh is not None and fresh.forward is not None and not free:
        forward = Forward(fresh.forward.inputs, answers(model, fresh.forward.inputs))
    computed = {n: h.tensor for n, h in slots(model) if not h.persistent}
    truth = Truth(held, computed, forward)
    if fresh is not None and not (as_saved or form.partial or free) and _has_all(fresh, held):
        # Complete, and read back otherwise: what was saved counts. Transformers 5.24 sets the
        # padding row of ChineseCLIPModel to zero after loading files of other names.
        truth = Truth(fresh.tensors, computed, fresh.forward)
    return truth, {
        "class": form.target,
        "free": sorted(free),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "as_saved": as_saved,
        "partial": form.partial,
    }


def _has_all(fresh: Truth, held: Mapping[str, torch.Tensor]) -> bool:
    shapes = {name: tensor.shape for name, tensor in held.items()}
    return shapes == {name: tensor.shape for name, tensor in fresh.tensors.items()}


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, held in slots(model):
        if held.persistent:
            yield name, held.tensor.detach()
