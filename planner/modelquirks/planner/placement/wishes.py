"""``Wishes``: what a placement shall heed beside capacities: machine, workload, room, and pins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.names import parent
from modelquirks.planner.placement.machine import Machine
from modelquirks.planner.placement.memory import Device, parse_device
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.workload import Reserve, Workload

__all__ = ["Wishes", "parse_pin", "pinned"]

_RANGE = re.compile(r"\{([0-9]{1,6})\.\.([0-9]{1,6})\}")


@dataclass(frozen=True)
class Wishes:
    """What a placement shall heed; by itself nothing but the capacities."""

    machine: Machine | None = None
    """None: the rates of such devices are assumed."""
    workload: Workload = field(default_factory=Workload)
    kept_free: Mapping[Device, int] = field(default_factory=dict)
    """Bytes that somebody wants to keep free, by device."""
    running: Reserve | None = None
    """What each device that computes needs beside weights and cache."""
    cached: str = ""
    """How the cache of a tree's modules was worked out."""
    pins: tuple[tuple[str, Device], ...] = ()
    """Modules or tensors, and where they must be."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for :meth:`from_json`."""
        return {
            "machine": None if self.machine is None else self.machine.to_json(),
            "workload": self.workload.to_json(),
            "kept_free": {str(device): n for device, n in self.kept_free.items()},
            "running": None if self.running is None else self.running._asdict(),
            "cached": self.cached,
            "pins": [[name, str(device)] for name, device in self.pins],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Wishes:
        """Return what :meth:`to_json` told."""
        return cls(
            machine=None if data["machine"] is None else Machine.from_json(data["machine"]),
            workload=Workload.from_json(data["workload"]),
            kept_free={parse_device(d): n for d, n in data["kept_free"].items()},
            running=None if data["running"] is None else Reserve(**data["running"]),
            cached=data["cached"],
            pins=tuple((name, parse_device(device)) for name, device in data["pins"]),
        )


def parse_pin(text: str) -> tuple[tuple[str, Device], ...]:
    """Return the modules and the device of ``MODULE=DEVICE``; ``{0..9}`` stands for ten numbers.

    ValueError says what to write.

    >>> parse_pin("model.layers.{0..2}.mlp=cpu")[1:]
    (('model.layers.1.mlp', 'cpu'), ('model.layers.2.mlp', 'cpu'))
    """
    name, equals, written = text.rpartition("=")
    if not equals or not name.strip():
        raise ValueError(f"pin {text!r} must be a module and a device: 'model.layers.{{0..9}}=0'")
    try:
        device = parse_device(written)
    except ValueError as error:
        raise ValueError(f"pin {text!r}: {error}") from error
    if not 0 < _n_expanded(name) <= _MAX_PINS:
        raise ValueError(f"pin {text!r} stands for {_n_expanded(name):,} modules; write {{0..9}}")
    return tuple((each, device) for each in _expanded(name.strip()))


_MAX_PINS = 100_000


def _n_expanded(name: str) -> int:
    """Return how many names *name* stands for."""
    counts = (int(last) - int(first) + 1 for first, last in _RANGE.findall(name))
    return math.prod(max(count, 0) for count in counts)


def _expanded(name: str) -> Iterator[str]:
    found = _RANGE.search(name)
    if found is None:
        yield name
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from _expanded(f"{name[: found.start()]}{number}{name[found.end() :]}")


def pinned(
    tree: ModuleTree, pins: Sequence[tuple[str, Device]]
) -> tuple[Mapping[str, Device], list[Finding]]:
    """Return the device of each tensor that is pinned, and what is wrong with the pins.

    Of two pins for one tensor the longer name decides. A pin within a module that must not be
    split holds for all of it, as it does for all that is tied.
    """
    modules = {module.name: module for module in tree.root.walk()}
    tensors = set(tree.tensors)
    placed: dict[str, tuple[str, Device]] = {}
    findings: list[Finding] = []
    for name, device in sorted(pins, key=lambda pin: pin[0].count(".") + bool(pin[0])):
        home = name
        while home and home not in modules and home not in tensors and parent(home) not in modules:
            home = parent(home)
        if home not in modules and home not in tensors:
            home = parent(home) if parent(home) in tree.units else ""
        if not home and name:
            near = closest(name, sorted({*modules, *tensors} - {""}))
            hint = f"; the nearest names are {shown(near)}" if near else ""
            text = f"pin {name!r} is no module and no tensor of the model{hint}"
            findings.append(Finding("pin-unknown", "error", text))
            continue
        covered = modules[home].below() if home in modules else (home,)
        placed |= dict.fromkeys(covered, (name, device))
    findings += _torn(tree, placed)
    return {name: device for name, (_, device) in placed.items()}, findings


def _torn(tree: ModuleTree, placed: Mapping[str, tuple[str, Device]]) -> Iterator[Finding]:
    """Yield the units and ties that pins would put on several devices."""
    wholes: list[tuple[str, Sequence[str]]] = [
        (f"module {m.name!r}, which must not be split,", m.below())
        for m in tree.root.walk()
        if m.name in tree.units
    ]
    wholes += [(f"{shown(group)}, which must be together,", group) for group in tree.groups]
    for what, names in wholes:
        devices = {placed[name] for name in names if name in placed}
        if len({device for _, device in devices}) > 1:
            told = " and ".join(f"{name}={device}" for name, device in sorted(devices, key=str))
            text = f"pins put {what} on several devices: {told}; leave one out"
            yield Finding("pin-conflict", "error", text)
