"""Gathering a report: from a manifest, or a plan, to what a page shows of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.audit import Entry
from modelquirks.planner.placement.devicemap import expand
from modelquirks.planner.placement.memory import Device, canonical_order, show_bytes
from modelquirks.planner.placement.moduletree import held
from modelquirks.planner.placement.outlook import predicted
from modelquirks.planner.placement.placement import Placement
from modelquirks.planner.plan import Plan
from modelquirks.planner.report.content import (
    Area,
    Fact,
    FamilyRow,
    Note,
    NoteSeverity,
    Place,
    Report,
)
from modelquirks.planner.report.families import TensorFacts, family_rows, index_ranges
from modelquirks.planner.wording import compact_names, counted, summary
from modelquirks.quirks.family import group

__all__ = ["of_manifest", "of_plan"]

_SHOWN = 400
"""Families of one area, and notes, that a page lists: real checkpoints have fewer."""
_WHY = 3
"""Reasons of one family on one device that are told."""
_GRAVITY: Mapping[str, NoteSeverity] = {
    "missing": "error",
    "mismatched": "error",
    "duplicate": "error",
    "unexpected": "warning",
    "absent": "info",
    "waived": "info",
    "extra": "info",
}
"""How grave a class of the audit is; what is not here is in order."""
_ORDER: tuple[NoteSeverity, ...] = ("error", "warning", "info", "ok")


def of_manifest(manifest: Manifest) -> Report:
    """Return the report of a checkpoint alone."""
    checkpoint = manifest.to_json()
    errors = [f.message for f in manifest.findings if f.severity == "error"]
    notes, left_out = _limited(_findings(manifest.findings))
    return Report(
        title=manifest.shown,
        summary=summary(checkpoint),
        verdict="Something is wrong with it" if errors else "Its headers show nothing wrong",
        is_ok=not errors,
        problems=tuple(errors),
        facts=(Fact("Checkpoint", summary(checkpoint)),),
        areas=(_files(manifest),),
        places=(),
        device_map="",
        notes=notes,
        suggestions=(),
        n_left_out=left_out,
    )


def of_plan(plan: Plan, manifest: Manifest | None = None) -> Report:
    """Return the report of a plan; with *manifest*, also of what the files hold."""
    notes, left_out = _limited([*_findings(plan.all_findings), *_audit(plan)])
    placement = plan.placement
    what = "can be used" if plan.model is not None else "shows nothing wrong so far"
    return Report(
        title=plan.shown,
        summary=summary(plan.checkpoint),
        verdict=f"The plan {what}" if plan.ok else "The plan cannot be used",
        is_ok=plan.ok,
        problems=plan.problems,
        facts=tuple(_facts(plan)),
        areas=(*_devices(plan, manifest), *(() if manifest is None else (_files(manifest),))),
        places=tuple(_places(placement)),
        device_map=_as_json(placement),
        notes=notes,
        suggestions=tuple((s.text, s.option) for s in plan.audit.suggestions),
        n_left_out=left_out,
    )


def _facts(plan: Plan) -> Iterator[Fact]:
    audit, placement = plan.audit, plan.placement
    yield Fact("Checkpoint", summary(plan.checkpoint))
    if plan.model is not None:
        yield Fact("Model", f"{plan.model.source}, {counted(plan.model.tensors, 'tensor')}")
        total = counted(audit.n_model, "model tensor")
        yield Fact("Accounted for", f"{audit.n_accounted:,} of {total} ({audit.coverage:.1%})")
    if placement.device_map:
        rule = "a map that was given" if placement.solver == "given" else placement.solver
        yield Fact("Placed by", f"{rule}; the model runs on {placement.main_device!r}")
    if placement.prediction is not None:
        yield Fact("Prediction", predicted(placement.prediction).removeprefix("Predicted: "))
    for quirk in plan.quirks:
        origin = f" ({quirk.distribution} {quirk.version})" if quirk.distribution else ""
        yield Fact("Quirk", f"{quirk.name}{origin}: {quirk.why}")
    for names in audit.ties[:_SHOWN]:
        yield Fact("Tied", " = ".join(names))


def _files(manifest: Manifest) -> Area:
    """Return what the files hold."""
    sizes, tensors = manifest.sizes, manifest.tensors
    rows = family_rows(
        tensors, lambda name: (sizes[name], tensors[name].dtype, tensors[name].shape)
    )
    return _area("files", "files", rows, used=manifest.total_bytes)


def _devices(plan: Plan, manifest: Manifest | None) -> Iterator[Area]:
    """Yield what each device holds; if nothing could be placed, what would have to be."""
    placement = plan.placement
    facts = _loaded(plan, manifest)
    names = _names_by_device(plan, facts)
    kept: dict[str, list[str]] = {}
    for reserve in placement.reserves:
        text = f"{show_bytes(reserve.n_bytes)} for {reserve.what}: {reserve.formula}"
        kept.setdefault(reserve.device, []).append(text)
    for device in canonical_order({*placement.memory, *names}):
        memory = placement.memory.get(device)
        rows = family_rows(names.get(device, ()), facts.__getitem__, _why(placement))
        yield _area(
            str(device),
            "device",
            rows,
            used=None if memory is None else memory.used_bytes,
            capacity=None if memory is None else memory.capacity_bytes,
            kept_free=tuple(kept.get(str(device), ())),
        )
    if not placement.device_map and placement.tree is not None:
        yield _area("not placed", "unplaced", family_rows(facts, facts.__getitem__))


def _area(
    name: str,
    kind: str,
    rows: Sequence[FamilyRow],
    *,
    used: int | None = None,
    capacity: int | None = None,
    kept_free: tuple[str, ...] = (),
) -> Area:
    listed = rows[:_SHOWN]
    told = [row.n_bytes for row in listed if row.n_bytes is not None]
    rest = used - sum(told) if used is not None and len(told) == len(listed) else 0
    return Area(
        name=name,
        kind="device" if kind == "device" else "files" if kind == "files" else "unplaced",
        used_bytes=used if used is not None else sum(told) if told else None,
        capacity_bytes=capacity,
        kept_free=kept_free,
        families=tuple(listed),
        n_left_out=len(rows) - len(listed),
        rest_bytes=max(0, rest),
    )


def _loaded(plan: Plan, manifest: Manifest | None) -> Mapping[str, TensorFacts]:
    """Return bytes, dtype and shape of every tensor that will be in memory."""
    found: dict[str, TensorFacts] = {}
    if plan.model is None and manifest is not None:
        found |= {n: (t.nbytes, t.dtype, t.shape) for n, t in manifest.tensors.items()}
    for recipe in plan.recipes:
        dtype, shape = recipe.type
        size = None if dtype is None or shape is None else nbytes(dtype, shape)
        found |= dict.fromkeys(recipe.names(), (size, dtype, shape))
    if plan.placement.tree is None:
        return found
    # The tree knows what a tensor takes once it is cast; the recipe, what the files give.
    sizes = plan.placement.tree().sizes
    return {name: (size, *found.get(name, (None, None, None))[1:]) for name, size in sizes.items()}


def _names_by_device(plan: Plan, facts: Mapping[str, TensorFacts]) -> Mapping[Device, list[str]]:
    placement = plan.placement
    if placement.tree is not None:
        buffers = plan.options.offload_buffers
        tree, main = placement.tree(), placement.main_device
        pairs = held(tree, placement.devices, main, offload_buffers=buffers)
    else:
        keys = expand(placement.device_map, facts).items()
        pairs = ((name, placement.device_map[key]) for name, key in keys)
    by_device: dict[Device, list[str]] = {}
    for name, device in pairs:
        by_device.setdefault(device, []).append(name)
    return by_device


def _why(placement: Placement) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return what tells for tensors why they are where they are."""

    order = {key: number for number, key in enumerate(placement.device_map)}

    def why(names: Sequence[str]) -> tuple[str, ...]:
        by_reason: dict[str, dict[str, None]] = {}
        for key in sorted({*expand(placement.device_map, names).values()}, key=order.__getitem__):
            by_reason.setdefault(placement.reasons.get(key, ""), {})[key] = None
        if len(by_reason) == 1:
            return tuple(filter(None, by_reason))
        told = [
            f"{shown(compact_names([*keys]), 4)}: {reason}"
            for reason, keys in by_reason.items()
            if reason
        ]
        more = len(told) - _WHY
        return (*told[:_WHY], *((f"… and {more} more reasons",) if more > 0 else ()))

    return why


def _places(placement: Placement) -> Iterator[Place]:
    """Yield the device map, neighbours with one device and one reason together."""

    def alike(key: str) -> tuple[Device, str]:
        return placement.device_map[key], placement.reasons.get(key, "")

    for (device, reason), keys in groupby(placement.device_map, key=alike):
        yield Place(tuple(compact_names([*keys])), str(device), reason)


def _as_json(placement: Placement) -> str:
    return json.dumps(dict(placement.device_map), indent=1) if placement.device_map else ""


def _findings(findings: Iterable[Finding]) -> Iterator[Note]:
    for finding in findings:
        yield Note(finding.severity, finding.code, finding.message, None, (), ())


def _audit(plan: Plan) -> Iterator[Note]:
    for entry in (*plan.audit.model, *plan.audit.stored):
        families = group(entry.names).values()
        indices = index_ranges(next(iter(families)))[0] if len(families) == 1 else ()
        severity = _GRAVITY.get(entry.kind, "ok")
        yield Note(
            severity, entry.kind, entry.template, len(entry.names), indices, tuple(_how(entry))
        )


def _how(entry: Entry) -> Iterator[str]:
    if entry.rule:
        yield f"by {entry.rule}"
    if entry.quirk:
        yield f"of {entry.quirk}"
    if entry.reason:
        yield entry.reason
    if entry.nearest:
        yield f"nearest: {', '.join(entry.nearest)}"


def _limited(notes: Iterable[Note]) -> tuple[tuple[Note, ...], int]:
    """Return the gravest notes, and how many more there are."""
    ranked = sorted(notes, key=lambda note: _ORDER.index(note.severity))
    return tuple(ranked[:_SHOWN]), max(0, len(ranked) - _SHOWN)
