"""``Placement``: which tensor goes to which device, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelquirks.planner.finding import Finding
from modelquirks.planner.placement.devicemap import GivenMap, checked, compact, main_of, read_given
from modelquirks.planner.placement.items import cuts
from modelquirks.planner.placement.memory import Device, canonical_order, show_bytes
from modelquirks.planner.placement.moduletree import ModuleTree, is_offloaded, used_bytes
from modelquirks.planner.placement.outline import Outline, Spread, outlined
from modelquirks.planner.placement.reasons import (
    does_not_fit,
    given_reasons,
    remarks,
    solved_reasons,
)
from modelquirks.planner.placement.solve import POLICIES, Memory, Policy, Solution, solve

__all__ = ["DeviceMemory", "ModuleTree", "Placement", "place"]


class DeviceMemory(NamedTuple):
    """One device of a placement, in bytes."""

    capacity_bytes: int | None
    """None: no limit, or none that is known."""
    used_bytes: int
    """What stays there while the model waits; room for streaming is not in it."""


@dataclass(frozen=True)
class Placement:
    """A device for every tensor, and the map that tells accelerate."""

    device_map: Mapping[str, Device]
    """Disjoint prefixes in module order, as few as can be; empty if there is no placement."""
    devices: Mapping[str, Device]
    """Every tensor name, owners and aliases, in module order → the device the map gives it."""
    memory: Mapping[Device, DeviceMemory]
    main_device: Device | None
    """Where the model runs: give it to ``dispatch_model``, which otherwise takes any."""
    solver: str
    """The policy; ``given`` for a map that somebody wrote, ``none`` if nothing is placed."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Key of ``device_map`` → one sentence: why there."""
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it can be used: no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the ``placement`` object of the reports."""
        return {
            "device_map": dict(self.device_map),
            "memory": {str(device): m._asdict() for device, m in self.memory.items()},
            "solver": self.solver,
            "main_device": self.main_device,
            "reasons": dict(self.reasons),
        }


def place(
    tree: ModuleTree | Outline,
    *,
    device_map: str | Mapping[str, object],
    max_memory: Memory,
    offload_buffers: bool = False,
) -> Placement:
    """Return where each tensor of *tree* goes.

    *device_map* is a policy (:func:`~modelquirks.planner.placement.solve.solve` says what each
    does) or a map, which is checked. *max_memory* is bytes by device, None for no limit, as
    :func:`~modelquirks.planner.placement.memory.normalize_max_memory` gives it; devices that
    are not in it are not used by a policy, and have no known limit for a map.

    What does not fit or is wrong with a map are findings. ValueError for a policy that there is
    not.
    """
    if not isinstance(device_map, str):
        whole = tree if isinstance(tree, ModuleTree) else tree.whole
        return _given(whole, device_map, max_memory, offload_buffers=offload_buffers)
    for policy in POLICIES:
        if policy == device_map:
            outline = outlined(tree) if isinstance(tree, ModuleTree) else tree
            return _chosen(outline, policy, max_memory, offload_buffers=offload_buffers)
    raise ValueError(
        f"device_map {device_map!r} is not known: give one of {', '.join(POLICIES)}, or a map; "
        f"{{'': {device_map!r}}} puts the whole model on the device of that name"
    )


def _chosen(
    outline: Outline, policy: Policy, memory: Memory, *, offload_buffers: bool
) -> Placement:
    tree = outline.coarse
    ways = cuts(tree, offload_buffers=offload_buffers)
    if not tree.tensors:
        main = main_of(canonical_order(memory))
        return Placement({"": main}, {}, {}, main, policy, {"": "has no tensors"})
    solution = solve(ways, memory, policy)
    if solution is None:
        unused = {device: DeviceMemory(memory[device], 0) for device in canonical_order(memory)}
        return Placement({}, {}, unused, None, policy, {}, (does_not_fit(ways, memory, policy),))
    devices = _settled(tree, solution)
    main = solution.problem.main
    if not any(is_offloaded(device, main) for device in devices.values()):
        main = main_of(canonical_order(devices.values()))
    emitted = compact(tree, devices)
    return Placement(
        device_map=emitted,
        devices=Spread(emitted, lambda: outline.whole),
        memory=_memory(tree, devices, main, memory, offload_buffers=offload_buffers),
        main_device=main,
        solver=policy,
        reasons=solved_reasons(tree, emitted, solution, main),
        findings=(*remarks(solution, memory, main), *checked(tree, devices, main, given=False)),
    )


def _given(
    tree: ModuleTree, device_map: Mapping[str, object], memory: Memory, *, offload_buffers: bool
) -> Placement:
    read = read_given(tree, device_map)
    used = _memory(tree, read.devices, read.main, memory, offload_buffers=offload_buffers)
    emitted = compact(tree, read.devices)
    findings = [*read.findings, *checked(tree, read.devices, read.main, given=True)]
    findings += _too_full(tree, read, used, offload_buffers=offload_buffers)
    return Placement(
        device_map=emitted,
        devices=read.devices,
        memory=used,
        main_device=read.main,
        solver="given",
        reasons=given_reasons(emitted, read.keys),
        findings=tuple(findings),
    )


def _settled(tree: ModuleTree, solution: Solution) -> dict[str, Device]:
    """Return the device of each tensor in module order.

    Tensors that were pinned because the parts of their module might be apart follow these if they
    are all on one device after all: on an accelerator if it has room, and if the module is
    offloaded, when they are computed buffers, which stay on the main device even so. That makes
    short maps; a main device that is an accelerator must be in one, or accelerate does not use it.
    """
    main = solution.problem.main
    placed = _followed(tree, solution, tree.computed)
    if main != "cpu" and main not in placed.values():
        placed = _followed(tree, solution, frozenset())
    return {name: placed[name] for name in tree.tensors}


def _followed(tree: ModuleTree, solution: Solution, stay: frozenset[str]) -> dict[str, Device]:
    """Return the device of each tensor; those in *stay* may follow an offloaded module."""
    placed = {name: device for item, device in solution.pairs for name in item.tensors}
    main = solution.problem.main
    alone = {i.tensors[0]: i for i in solution.problem.items if i.pinned and len(i.tensors) == 1}
    room = dict(solution.problem.rooms)
    for device, n_bytes in used_bytes(tree, placed, main, offload_buffers=False).items():
        room[device] -= n_bytes
    for module in reversed(list(tree.root.walk())):
        own = [name for name in module.tensors if name in alone]
        if not own or len(own) < len(module.tensors):
            continue
        others = {placed[name] for part in module.parts for name in part.below()}
        home = others.pop()
        if others or home == main:
            continue
        size = sum(alone[name].n_bytes for name in own)
        if is_offloaded(home, main):
            if stay.issuperset(own):
                placed |= dict.fromkeys(own, home)
        elif size <= room[home]:
            placed |= dict.fromkeys(own, home)
            room[home] -= size
    return placed


def _memory(
    tree: ModuleTree,
    devices: Mapping[str, Device],
    main: Device,
    memory: Memory,
    *,
    offload_buffers: bool,
) -> dict[Device, DeviceMemory]:
    used = used_bytes(tree, devices, main, offload_buffers=offload_buffers)
    return {
        device: DeviceMemory(memory.get(device), used.get(device, 0))
        for device in canonical_order({*memory, *used})
    }


def _too_full(
    tree: ModuleTree,
    read: GivenMap,
    used: Mapping[Device, DeviceMemory],
    *,
    offload_buffers: bool,
) -> Iterator[Finding]:
    """Yield the devices that a given map fills beyond their capacity, or to the brim."""
    for device, (capacity, n_bytes) in used.items():
        if capacity is not None and n_bytes > capacity:
            text = (
                f"the device map puts {show_bytes(n_bytes)} on {device!r}, which has "
                f"{show_bytes(capacity)}; move {show_bytes(n_bytes - capacity)} elsewhere"
            )
            yield Finding("over-capacity", "error", text)
    main = used.get(read.main)
    items = cuts(tree, offload_buffers=offload_buffers)[-1].items
    moved = [i for i in items if is_offloaded(read.devices.get(i.tensors[0], "cpu"), read.main)]
    largest = max(moved, key=lambda item: item.run_bytes, default=None)
    if main is None or main.capacity_bytes is None or largest is None:
        return
    left = main.capacity_bytes - main.used_bytes
    if 0 <= left < largest.run_bytes:
        text = (
            f"{show_bytes(left)} are left on {read.main!r}, less than {largest.names[0]!r} needs, "
            f"which is moved there to run ({show_bytes(largest.run_bytes)})"
        )
        yield Finding("no-room-for-streaming", "warning", text)
