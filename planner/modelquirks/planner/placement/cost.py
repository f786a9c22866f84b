"""What a placement costs: seconds for one step of generation, from bytes and rates.

For each tensor: the bytes that are read where it runs, over the rate of that device's memory; and
if it is offloaded, the bytes that are moved in, over the slowest link on the way, and on the disk
those that must be computed first. What accelerate
does decides: beside an accelerator nothing is ever computed on the cpu, all that lies there is
moved over the link each time it runs. docs/placement.md has the formulas and their limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from modelquirks.planner.placement.machine import Machine
from modelquirks.planner.placement.memory import Device, canonical_order
from modelquirks.planner.placement.moduletree import ModuleTree, is_offloaded, runs_on

__all__ = ["NOTHING", "OBJECTIVES", "Costs", "Load", "Objective", "crossings"]

Objective = Literal["latency", "throughput", "startup"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "startup")


class Load(NamedTuple):
    """What one item, or one tensor, asks for in one step, in bytes."""

    size: int
    """All of it, moved once when the model is loaded."""
    read: float
    """Read from memory where it runs: of experts those that are routed to, of an embedding rows."""
    streamed: float
    """Moved to where it runs if it is offloaded. A module moves a stacked tensor whole."""
    state: int = 0
    """Cache of the layer, read where the layer runs."""
    made: float = 0.0
    """The part of ``streamed`` that is computed first if it is on the disk: cast, stacked."""

    def plus(self, other: Load) -> Load:
        """Return both together."""
        return Load(
            self.size + other.size,
            self.read + other.read,
            self.streamed + other.streamed,
            self.state + other.state,
            self.made + other.made,
        )


NOTHING = Load(0, 0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """Prices on one machine."""

    machine: Machine
    objective: Objective = "latency"

    def seconds(self, load: Load, device: Device, main: Device) -> float:
        """Return what one step takes of *load* on *device* while the model runs on *main*."""
        runs = self.machine[runs_on(device, main)]
        took = (load.read + load.state) / runs.read_rate
        if is_offloaded(device, main):
            took += load.streamed / self.way_in(device, main)
        if device == "disk":
            took += load.made / self.machine.make_rate
        if self.objective == "startup" and device != "disk":
            took += load.size / self.way_in("disk", runs_on(device, main))
        return took

    def way_in(self, device: Device, main: Device) -> float:
        """Return the rate, in bytes a second, of moving from *device* to where the model runs."""
        link = self.machine[main].link_rate or inf
        return min(self.machine["disk"].read_rate, link) if device == "disk" else link

    def placed(
        self,
        tree: ModuleTree,
        devices: Mapping[str, Device],
        main: Device,
        *,
        offload_buffers: bool,
    ) -> float:
        """Return the seconds of a step of a whole model, crossings included."""
        loads: dict[Device, Load] = {}

        def add(device: Device, load: Load) -> None:
            known = loads.get(device, NOTHING)
            loads[device] = known.plus(load)

        for name, size in tree.sizes.items():
            device = devices[name]
            if tree.stays(name, offload_buffers=offload_buffers):
                device = runs_on(device, main)
            moved = tree.streamed.get(name, size)
            made = tree.made.get(name, 0.0)
            add(device, Load(size, tree.read.get(name, size), moved, made=made))
        cached = tree.state_read or tree.state
        modules = {m.name: m for m in tree.root.walk()} if cached else {}
        for name, n_bytes in cached.items():
            below = modules[name].below() if name in modules else ()
            add(runs_on(devices[below[0]], main) if below else main, Load(0, 0, 0, n_bytes))
        took = sum(self.seconds(loads[device], device, main) for device in canonical_order(loads))
        return took + self.crossed([devices[name] for name in tree.tensors], main)

    def crossed(self, homes: Sequence[Device], main: Device) -> float:
        """Return the seconds that hidden states are on the way, over modules in module order."""
        return crossings(homes, main) * self.machine.crossing_seconds


def crossings(homes: Sequence[Device], main: Device) -> int:
    """Return how often a run through modules on *homes*, in that order, changes the device.

    It starts and ends on the main device, where the inputs are and the answer is wanted.

    >>> crossings([0, "cpu", 1, 1], 0)
    2
    """
    runs = [main, *(runs_on(home, main) for home in homes), main]
    return sum(one != other for one, other in pairwise(runs))
