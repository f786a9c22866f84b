"""Checks: what does not fit between an adapter and its base, in words, each kind under its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modelquirks.planner.adapter.adapter import Adapter
from modelquirks.planner.adapter.base import Base
from modelquirks.planner.adapter.binding import WHOLE, Bounds
from modelquirks.planner.adapter.changes import read_name
from modelquirks.planner.adapter.config import PROMPTS
from modelquirks.planner.adapter.misfit import Misfit
from modelquirks.planner.checkpoint.manifest import MARK
from modelquirks.planner.finding import Finding, shown

__all__ = ["about", "checked", "mergeable"]

_LISTED = 10
_LORA = ("LORA", "TRAINABLE_TOKENS")


def about(adapter: Adapter, base_called: str) -> Iterator[Finding]:
    """Yield what is odd about the adapter alone, and which base it says that it is for."""
    yield from adapter.findings
    config = adapter.config
    if config.base:
        revision = f" at revision {config.revision!r}" if config.revision else ""
        text = (
            f"the adapter says that it was trained on {config.base!r}{revision}; here it is put on "
            f"{base_called!r}, and names and shapes are all that can be compared"
        )
        yield Finding("adapter-base", "info", text)
    reads = [read_name(name) for name in adapter.manifest.tensors]
    if len(named := sorted({read.adapter for read in reads if read.adapter})) > 1:
        text = f"the file holds several adapters, {shown(named)}: save one of them by itself"
        yield Finding("adapter-several", "error", text)
    if not reads:
        text = (
            "the adapter's file holds no tensor at all: as it is saved under ZeRO-3 where the "
            "weights were not gathered. Save it again with the weights gathered"
        )
        yield Finding("adapter-empty", "error", text)
    if reads and not any(read.prefixed for read in reads) and config.kind not in PROMPTS:
        text = (
            "prefix of a wrapper: the adapter's names lack 'base_model.model.', which PEFT writes "
            "before each, and are taken as names of the model. PEFT itself would load none of them "
            "and only warn"
        )
        yield Finding("adapter-prefix", "warning", text)


def mergeable(adapter: Adapter) -> Iterator[Finding]:
    """Yield why the adapter, of whatever base, cannot be merged here."""
    kind = adapter.config.kind
    if kind in PROMPTS:
        text = (
            f"{kind} adds virtual tokens and changes no weight, so there is nothing to merge; load "
            "it into a PEFT model, without --merge"
        )
        yield Finding("adapter-method", "error", text)
    elif kind not in _LORA:
        text = (
            f"adapters of the method {kind} are known by name only and cannot be merged here; load "
            "it into a PEFT model, without --merge, or merge it with PEFT"
        )
        yield Finding("adapter-method", "error", text)
    for obstacle in adapter.config.obstacles:
        text = f"the adapter is no plain LoRA and cannot be merged here: {obstacle}"
        yield Finding("adapter-method", "error", text)


def checked(adapter: Adapter, base: Base, bounds: Bounds) -> Iterator[Finding]:
    """Yield what does not fit between the adapter and its base."""
    yield from _strangers(base, bounds.strangers, adapter)
    by_kind: dict[str, list[Misfit]] = {}
    for misfit in bounds.misfits:
        by_kind.setdefault(misfit.kind, []).append(misfit)
    for kind, misfits in by_kind.items():
        if kind != "method":
            listed = "; ".join(f"{one.name!r}: {one.text}" for one in misfits[:_LISTED])
            more = f" … and {len(misfits) - _LISTED} more" if len(misfits) > _LISTED else ""
            yield Finding(f"adapter-{kind}", "error", f"the adapter does not fit: {listed}{more}")
    if adapter.config.kind == "LORA" and bounds.bound:
        yield from _completeness(adapter, base, bounds)


def _strangers(base: Base, names: Sequence[str], adapter: Adapter) -> Iterator[Finding]:
    """Yield what is said of weights that the base does not have: by prefix, by head, by name."""
    names = list(dict.fromkeys(names))
    if not names:
        return
    if (pair := base.prefixes(names)) is not None:
        source, target = pair
        option = f"--alias '{MARK}{source}**={target}**'"
        text = (
            f"prefix of a wrapper: {len(names)} weights that the adapter changes, "
            f"{shown(names, 3)}, are called {target + names[0].removeprefix(source)!r} and so on "
            f"by the model. If they are the same: {option}"
        )
        yield Finding("adapter-prefix", "error", text)
        return
    heads = [name for name in names if adapter.config.is_retrained(name)]
    if heads:
        task = f" (task_type {adapter.config.task})" if adapter.config.task else ""
        text = (
            f"another head: the adapter brings {shown(heads)}, retrained{task}, and the model has "
            f"no such module; {_near(base, heads)}build the model with that head"
        )
        yield Finding("adapter-head", "error", text)
    if others := [name for name in names if name not in heads]:
        text = (
            f"{len(others)} weights that the adapter changes are not in the model: "
            f"{shown(others)}; {_near(base, others)}is this its base?"
        )
        yield Finding("adapter-target", "error", text)


def _near(base: Base, names: Sequence[str]) -> str:
    near = dict.fromkeys(other for name in names[:3] for other in base.nearest(name))
    return f"the nearest names are {shown(near, 3)}; " if near else ""


def _completeness(adapter: Adapter, base: Base, bounds: Bounds) -> Iterator[Finding]:
    """Yield what adapter_config.json names and the file lacks, and the other way round."""
    config = adapter.config
    changed = {
        one.name.removesuffix(".weight")
        for one in bounds.bound
        if one.scheme != WHOLE or config.is_retrained(one.name)
    }
    touched = changed | {misfit.name.removesuffix(".weight") for misfit in bounds.misfits}
    wanted = [
        module
        for module, shape in base.modules.items()
        if (shape is None or len(shape) > 1)
        and config.targets != "all-linear"
        and config.targeted(module)
    ]
    if lacking := [module for module in wanted if module not in touched]:
        text = (
            f"adapter_config.json targets {len(lacking)} modules for which the adapter has no "
            f"tensors: {shown(lacking)}. PEFT would leave them as they are in the base and only "
            "warn; was the adapter trained on a base with fewer layers, or saved incompletely?"
        )
        yield Finding("adapter-incomplete", "error", text)
    idle = [
        one.name
        for one in bounds.bound
        if one.scheme == "lora" and not _is_named(one.name, wanted, adapter)
    ]
    if idle and config.targets != "all-linear":
        text = (
            f"the adapter changes {shown(idle)}, which adapter_config.json does not name among its "
            "targets: PEFT would leave these tensors out"
        )
        yield Finding("adapter-untargeted", "warning", text)


def _is_named(name: str, wanted: Sequence[str], adapter: Adapter) -> bool:
    ends = adapter.config.parameters
    return name.removesuffix(".weight") in wanted or any(
        name == end or name.endswith(f".{end}") for end in ends
    )
