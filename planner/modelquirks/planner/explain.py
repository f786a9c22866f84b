"""Explaining: why a tensor or module is where it is, what that costs, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.mapping.audit import Entry
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.mapping.recipes import stored_names
from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device, canonical_order
from modelquirks.planner.placement.placement import Inputs, Placement
from modelquirks.planner.plan import Plan

__all__ = ["Alternative", "Change", "Explanation", "UnknownName", "explain", "what_if"]


class UnknownName(ValueError):
    """A name that the plan knows nothing of; the message has the nearest."""


class Alternative(NamedTuple):
    """The best placement with what was asked about on another device."""

    device: Device
    seconds: float | None
    """Of a step; None if nothing fits then."""
    reason: str
    """Why nothing fits; empty if it does."""


@dataclass(frozen=True)
class Explanation:
    """What there is to say of one name."""

    name: str
    is_module: bool
    families: tuple[Entry, ...]
    """The audit of the tensors that it is or has, by family and class."""
    made_from: Mapping[str, tuple[str, ...]]
    """Tensor → stored tensors that it is made of, for a tensor that was asked about itself."""
    shares: str
    """The name whose tensor it shares; empty for none."""
    n_bytes: int | None
    """What it takes in memory; None if the plan does not know."""
    device: Device | None
    key: str
    """The entry of the device map that decides."""
    reason: str
    seconds: float | None
    """Of a step with everything where it is."""
    alternatives: tuple[Alternative, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "name": self.name,
            "is_module": self.is_module,
            "families": [entry.to_json() for entry in self.families],
            "made_from": {name: list(names) for name, names in self.made_from.items()},
            "shares": self.shares or None,
            "n_bytes": self.n_bytes,
            "device": self.device,
            "device_map_key": self.key,
            "reason": self.reason,
            "seconds": self.seconds,
            "alternatives": [alternative._asdict() for alternative in self.alternatives],
        }


class Change(NamedTuple):
    """What other capacities would change."""

    before: float | None
    after: float | None
    """Seconds of a step; None if nothing fits."""
    moved: Mapping[str, tuple[Device | None, Device | None]]
    """Module → where it is, and where it would be."""
    findings: tuple[str, ...]
    """What is said of the other placement: why nothing fits."""


def explain(plan: Plan, name: str) -> Explanation:
    """Return what *plan* says of *name*, a tensor or module of the model, or of the checkpoint.

    UnknownName if it is neither.
    """
    known = [n for e in (*plan.audit.model, *plan.audit.stored) for n in e.names]
    tree = None if plan.placement.inputs is None else plan.placement.inputs.tree
    below = f"{name}." if name else ""
    inside = [n for n in known if n == name or n.startswith(below)]
    modules = set() if tree is None else {module.name for module in tree.root.walk()}
    if not inside and name not in modules:
        near = closest(name, sorted({*known, *map(parent, known), *modules} - {""}))
        hint = f"; the nearest names are {', '.join(map(repr, near))}" if near else ""
        raise UnknownName(f"{name!r} is no module and no tensor of this plan{hint}")
    key = _key(plan.placement.device_map, name)
    device = plan.placement.device_map.get(key)
    return Explanation(
        name=name,
        is_module=name not in inside,
        families=tuple(_families(plan, name, below)),
        made_from=_made_from(plan, name),
        shares=plan.aliases.get(name, ""),
        n_bytes=_bytes(plan, name, below),
        device=device,
        key=key,
        reason=plan.placement.reasons.get(key, ""),
        seconds=None if plan.placement.prediction is None else plan.placement.prediction.seconds,
        alternatives=tuple(_alternatives(plan.placement, name, device)),
    )


def what_if(placement: Placement, memory: Mapping[Device, int | None]) -> Change:
    """Return what changes if the devices of *memory* had that much; ValueError for a given map."""
    inputs = _inputs(placement)
    other = inputs.placed(memory={**inputs.memory, **memory})
    names = dict.fromkeys((*placement.device_map, *other.device_map))
    moved: dict[str, tuple[Device | None, Device | None]] = {}
    for name in names:
        was, becomes = (p.device_map.get(_key(p.device_map, name)) for p in (placement, other))
        if was != becomes:
            moved[name] = (was, becomes)
    return Change(
        before=None if placement.prediction is None else placement.prediction.seconds,
        after=None if other.prediction is None else other.prediction.seconds,
        moved=moved,
        findings=tuple(f.message for f in other.findings if f.severity == "error"),
    )


def _inputs(placement: Placement) -> Inputs:
    if placement.inputs is None:
        raise ValueError(
            "the plan follows a device map that was given, so no other placement is known; plan "
            "with --device-map auto"
        )
    return placement.inputs


def _key(device_map: Mapping[str, Device], name: str) -> str:
    """Return the entry that decides for *name*; of a module whose parts are apart the first."""
    key = name
    while key and key not in device_map:
        key = parent(key)
    if key in device_map:
        return key
    return next((other for other in device_map if other.startswith(f"{name}.")), "")


def _families(plan: Plan, name: str, below: str) -> Iterator[Entry]:
    for entry in (*plan.audit.model, *plan.audit.stored):
        names = tuple(n for n in entry.names if n == name or n.startswith(below))
        if names:
            yield Entry(
                kind=entry.kind,
                template=entry.template,
                names=names,
                reason=entry.reason,
                rule=entry.rule,
                quirk=entry.quirk,
                nearest=entry.nearest,
            )


def _made_from(plan: Plan, name: str) -> Mapping[str, tuple[str, ...]]:
    for recipe in plan.recipes:
        for target, env in recipe.items():
            if target == name:
                return {name: tuple(stored_names(recipe.node, env))}
    return {}


def _bytes(plan: Plan, name: str, below: str) -> int | None:
    """Return the bytes in memory of what is loaded for *name*."""
    total, any_found = 0, False
    for recipe in plan.recipes:
        dtype, shape = recipe.type
        for target in recipe.names():
            if target == name or target.startswith(below):
                any_found = True
                if dtype is None or shape is None:
                    return None
                total += nbytes(dtype, shape)
    return total if any_found else None


def _alternatives(placement: Placement, name: str, device: Device | None) -> Iterator[Alternative]:
    """Yield the best placement with *name* on each other device, the cheapest first."""
    inputs = placement.inputs
    if inputs is None or device is None:
        return
    found: list[Alternative] = []
    for other in canonical_order(inputs.memory):
        if other == device or inputs.memory[other] == 0:
            continue
        tried = inputs.placed(pins=((name, other),))
        if tried.prediction is None:
            reason = next((f.message for f in tried.findings if f.severity == "error"), "")
            found.append(Alternative(other, None, reason))
        else:
            found.append(Alternative(other, tried.prediction.seconds, ""))
    yield from sorted(found, key=lambda a: (a.seconds is None, a.seconds or 0.0))


def ranges(
    moved: Mapping[str, tuple[Device | None, Device | None]],
) -> Iterator[tuple[tuple[Device | None, Device | None], Sequence[str]]]:
    """Yield each way that modules would move, with these modules."""
    by_way: dict[tuple[Device | None, Device | None], list[str]] = {}
    for name, way in moved.items():
        by_way.setdefault(way, []).append(name)
    yield from by_way.items()
