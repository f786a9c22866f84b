"""``Placement``: which tensor goes to which device, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from modelquirks.planner.finding import Finding
from modelquirks.planner.placement.cost import Costs, Objective
from modelquirks.planner.placement.devicemap import GivenMap, checked, compact, main_of, read_given
from modelquirks.planner.placement.items import Cuts
from modelquirks.planner.placement.machine import of_memory
from modelquirks.planner.placement.memory import Device, canonical_order, parse_device, show_bytes
from modelquirks.planner.placement.moduletree import (
    ModuleTree,
    is_offloaded,
    runs_on,
    used_bytes,
)
from modelquirks.planner.placement.outline import Outline, Spread, outlined
from modelquirks.planner.placement.reasons import (
    does_not_fit,
    given_reasons,
    remarks,
    solved_reasons,
)
from modelquirks.planner.placement.solve import POLICIES, Memory, Policy, Setting, Solution, solve
from modelquirks.planner.placement.wishes import Wishes, pinned
from modelquirks.planner.placement.workload import Reserve

__all__ = ["DeviceMemory", "Inputs", "ModuleTree", "Placement", "Prediction", "place"]

Pins = Sequence[tuple[str, Device]]


class DeviceMemory(NamedTuple):
    """One device of a placement, in bytes."""

    capacity_bytes: int | None
    """None: no limit, or none that is known."""
    used_bytes: int
    """What stays there while the model waits; room for streaming is not in it."""


class Prediction(NamedTuple):
    """What one step of generation takes, by the machine's rates (docs/placement.md)."""

    seconds: float
    """Of a step that makes one token of every sequence; with ``startup`` up to the first one."""
    bound_seconds: float | None
    """No placement takes less. None where nobody asked: for maps and accelerate's own rules."""
    objective: Objective
    batch: int
    machine: str
    """Whose rates these are."""

    @property
    def gap(self) -> float | None:
        """How much more than the bound it takes, at most, as a share; None without a bound."""
        if self.bound_seconds is None:
            return None
        return self.seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """What all sequences together generate; infinite for a model that reads nothing."""
        return self.batch / self.seconds if self.seconds else inf

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the gap."""
        return {**self._asdict(), "gap": self.gap}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prediction:
        """Return what :meth:`to_json` told."""
        return cls(**{name: data[name] for name in cls._fields})


@dataclass(frozen=True)
class Inputs:
    """What a placement was made from, so that others can be tried beside it."""

    tree: ModuleTree
    policy: str
    memory: Memory
    wishes: Wishes
    offload_buffers: bool

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            "tree": self.tree.to_json(),
            "policy": self.policy,
            "memory": {str(device): n for device, n in self.memory.items()},
            "wishes": self.wishes.to_json(),
            "offload_buffers": self.offload_buffers,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Inputs:
        """Return what :meth:`to_json` told."""
        return cls(
            tree=ModuleTree.from_json(data["tree"]),
            policy=data["policy"],
            memory={parse_device(device): n for device, n in data["memory"].items()},
            wishes=Wishes.from_json(data["wishes"]),
            offload_buffers=data["offload_buffers"],
        )

    def placed(self, *, memory: Memory | None = None, pins: Pins = ()) -> Placement:
        """Return the placement with other capacities, or more pins."""
        wishes = replace(self.wishes, pins=(*self.wishes.pins, *pins))
        return place(
            self.tree,
            device_map=self.policy,
            max_memory=self.memory if memory is None else memory,
            offload_buffers=self.offload_buffers,
            wishes=wishes,
        )


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
    reserves: tuple[Reserve, ...] = ()
    """What is kept free for something else than weights."""
    prediction: Prediction | None = None
    inputs: Inputs | None = field(default=None, compare=False, repr=False)
    """None for a map that somebody wrote."""
    tree: Callable[[], ModuleTree] | None = field(default=None, compare=False, repr=False)
    """Gives the bytes of every tensor. None if nothing was placed, and for a plan from a file."""

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
            "reserves": [reserve._asdict() for reserve in self.reserves],
            "prediction": None if self.prediction is None else self.prediction.to_json(),
            "reasons": dict(self.reasons),
        }


def place(
    tree: ModuleTree | Outline,
    *,
    device_map: str | Mapping[str, object],
    max_memory: Memory,
    offload_buffers: bool = False,
    wishes: Wishes | None = None,
) -> Placement:
    """Return where each tensor of *tree* goes.

    *device_map* is a policy (:func:`~modelquirks.planner.placement.solve.solve` says what each
    does) or a map, which is checked. *max_memory* is bytes by device, None for no limit, as
    :func:`~modelquirks.planner.placement.memory.normalize_max_memory` gives it; devices that
    are not in it are not used by a policy, and have no known limit for a map. *wishes* say how
    fast the devices are, what the model will do, and what must stay free or be where.

    What does not fit or is wrong with a map are findings. ValueError for a policy that there is
    not.
    """
    heeded = Wishes() if wishes is None else wishes
    if not isinstance(device_map, str):
        whole = tree if isinstance(tree, ModuleTree) else tree.whole
        return _given(whole, device_map, max_memory, heeded, offload_buffers=offload_buffers)
    for policy in POLICIES:
        if policy == device_map:
            outline = outlined(tree) if isinstance(tree, ModuleTree) else tree
            return _chosen(outline, policy, max_memory, heeded, offload_buffers=offload_buffers)
    raise ValueError(
        f"device_map {device_map!r} is not known: give one of {', '.join(POLICIES)}, or a map; "
        f"{{'': {device_map!r}}} puts the whole model on the device of that name"
    )


def _chosen(
    outline: Outline, policy: Policy, memory: Memory, wishes: Wishes, *, offload_buffers: bool
) -> Placement:
    tree = outline.coarse
    pins, wrong = pinned(tree, wishes.pins) if wishes.pins else ({}, [])
    ways = Cuts(tree, offload_buffers=offload_buffers, pins=pins)
    if not tree.tensors:
        main = main_of(canonical_order(memory))
        return Placement({"": main}, {}, {}, main, policy, {"": "has no tensors"})
    setting = _setting(memory, wishes)
    solution = None if wrong else solve(ways, setting, policy, even=not wishes.workload.context)
    inputs = Inputs(tree, policy, memory, wishes, offload_buffers)
    if solution is None:
        unused = {device: DeviceMemory(memory[device], 0) for device in canonical_order(memory)}
        why = (*wrong,) or (does_not_fit(ways, setting),)
        return Placement(
            {}, {}, unused, None, policy, {}, why, inputs=inputs, tree=lambda: outline.whole
        )
    devices = _settled(tree, solution)
    main = solution.problem.main
    used = set(devices.values())
    # Tensors of the root go to the main device: it stays the one that the solver pinned them to.
    if main not in used and not any(is_offloaded(device, main) for device in used):
        main = main_of(canonical_order(used))
    emitted = compact(tree, devices)
    return Placement(
        device_map=emitted,
        devices=Spread(emitted, lambda: outline.whole),
        memory=_memory(tree, devices, main, memory, offload_buffers=offload_buffers),
        main_device=main,
        solver=policy,
        reasons=solved_reasons(tree, emitted, solution, main),
        findings=(*remarks(solution, memory, main), *checked(tree, devices, main, given=False)),
        reserves=tuple(_reserves(solution, wishes, main)),
        prediction=_prediction(
            setting,
            wishes,
            tree,
            devices,
            main,
            bound=solution.bound,
            offload_buffers=offload_buffers,
        ),
        inputs=inputs,
        tree=lambda: outline.whole,
    )


def _setting(memory: Memory, wishes: Wishes) -> Setting:
    machine = of_memory(memory) if wishes.machine is None else wishes.machine.limited(memory)
    return Setting(
        memory=memory,
        costs=Costs(machine, wishes.workload.objective),
        running=0 if wishes.running is None else wishes.running.n_bytes,
        kept_free=wishes.kept_free,
    )


def _prediction(
    setting: Setting,
    wishes: Wishes,
    tree: ModuleTree,
    devices: Mapping[str, Device],
    main: Device,
    *,
    bound: float | None,
    offload_buffers: bool,
) -> Prediction:
    workload, machine = wishes.workload, setting.costs.machine
    seconds = setting.costs.placed(tree, devices, main, offload_buffers=offload_buffers)
    return Prediction(seconds, bound, workload.objective, workload.batch, machine.name)


def _reserves(solution: Solution, wishes: Wishes, main: Device) -> Iterator[Reserve]:
    """Yield what is kept free on each device, and why."""
    cached: dict[Device, int] = {}
    for item, device in solution.pairs:
        runs = runs_on(device, main)
        cached[runs] = cached.get(runs, 0) + item.state_bytes
    near = {runs_on(device, main) for device in solution.devices}
    for device in canonical_order({*near, *wishes.kept_free}):
        if n_bytes := cached.get(device):
            formula = f"of the layers that run there; all layers: {wishes.cached}"
            yield Reserve("cache", str(device), n_bytes, formula)
        if wishes.running is not None and device in near:
            yield wishes.running._replace(device=str(device))
        if n_bytes := wishes.kept_free.get(device):
            yield Reserve("asked for", str(device), n_bytes, "--reserve")
        if device == main and (largest := solution.reserve) is not None:
            formula = f"the largest module that is moved there to run: {largest.names[0]!r}"
            yield Reserve("streaming", str(device), largest.run_bytes, formula)


def _given(
    tree: ModuleTree,
    device_map: Mapping[str, object],
    memory: Memory,
    wishes: Wishes,
    *,
    offload_buffers: bool,
) -> Placement:
    read = read_given(tree, device_map)
    used = _memory(tree, read.devices, read.main, memory, offload_buffers=offload_buffers)
    emitted = compact(tree, read.devices)
    findings = [*read.findings, *checked(tree, read.devices, read.main, given=True)]
    findings += _too_full(tree, read, used, wishes, offload_buffers=offload_buffers)
    whole = not any(finding.code == "device-map-incomplete" for finding in findings)
    setting = _setting(memory, wishes)
    return Placement(
        device_map=emitted,
        devices=read.devices,
        memory=used,
        main_device=read.main,
        solver="given",
        reasons=given_reasons(emitted, read.keys),
        findings=tuple(findings),
        prediction=(
            _prediction(
                setting,
                wishes,
                tree,
                read.devices,
                read.main,
                bound=None,
                offload_buffers=offload_buffers,
            )
            if whole
            else None
        ),
        tree=lambda: tree,
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
    alone = {
        item.tensors[0]: item
        for item in solution.problem.items
        if item.pinned and item.pin is None and len(item.tensors) == 1
    }
    room = dict(solution.problem.rooms)
    for item, device in solution.pairs:
        runs = runs_on(device, main)
        room[runs] -= item.state_bytes
        room[device] -= item.padding(device)
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
        size = sum(alone[name].n_bytes + alone[name].padding(home) for name in own)
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


def _kept_free(tree: ModuleTree, read: GivenMap, wishes: Wishes) -> Mapping[Device, int]:
    """Return what must stay free on each device for something else than weights."""
    kept = dict(wishes.kept_free)
    if wishes.running is not None:
        for device in {runs_on(device, read.main) for device in read.devices.values()}:
            kept[device] = kept.get(device, 0) + wishes.running.n_bytes
    modules = {module.name: module for module in tree.root.walk()} if tree.state else {}
    for name, n_bytes in tree.state.items():
        below = [n for n in modules[name].below() if n in read.devices] if name in modules else []
        device = runs_on(read.devices[below[0]], read.main) if below else read.main
        kept[device] = kept.get(device, 0) + n_bytes
    return kept


def _too_full(
    tree: ModuleTree,
    read: GivenMap,
    used: Mapping[Device, DeviceMemory],
    wishes: Wishes,
    *,
    offload_buffers: bool,
) -> Iterator[Finding]:
    """Yield the devices that a given map fills beyond their capacity, or to the brim."""
    kept = _kept_free(tree, read, wishes)
    for device, (capacity, n_bytes) in used.items():
        more = kept.get(device, 0)
        if capacity is not None and n_bytes + more > capacity:
            beside = f" beside {show_bytes(more)} for cache and activations" if more else ""
            text = (
                f"the device map puts {show_bytes(n_bytes)} on {device!r}, which has "
                f"{show_bytes(capacity)}{beside}; move {show_bytes(n_bytes + more - capacity)} "
                "elsewhere"
            )
            yield Finding("over-capacity", "error", text)
    main = used.get(read.main)
    items = Cuts(tree, offload_buffers=offload_buffers).finest.items
    moved = [i for i in items if is_offloaded(read.devices.get(i.tensors[0], "cpu"), read.main)]
    largest = max(moved, key=lambda item: item.run_bytes, default=None)
    if main is None or main.capacity_bytes is None or largest is None:
        return
    left = main.capacity_bytes - main.used_bytes - kept.get(read.main, 0)
    if 0 <= left < largest.run_bytes:
        text = (
            f"{show_bytes(left)} are left on {read.main!r}, less than {largest.names[0]!r} needs, "
            f"which is moved there to run ({show_bytes(largest.run_bytes)})"
        )
        yield Finding("no-room-for-streaming", "warning", text)
