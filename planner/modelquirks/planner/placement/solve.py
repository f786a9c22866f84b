"""The solver: from items and memory to a device for each item. This is the seam.

A better solver has the signature of :func:`solve`; nothing else of placement knows how it chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from modelquirks.planner.placement.fill import (
    UNLIMITED,
    Assignment,
    Problem,
    greedy,
    search,
    spread,
    unplaced,
)
from modelquirks.planner.placement.items import Cut, Item
from modelquirks.planner.placement.memory import Device, canonical_order

__all__ = ["POLICIES", "Memory", "Policy", "Shortage", "Solution", "lack", "solve"]

Policy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
POLICIES: tuple[Policy, ...] = ("auto", "balanced", "balanced_low_0", "sequential")

Memory = Mapping[Device, int | None]
"""Bytes of each device, None for no limit."""

_DISK_WEIGHT = 8
"""Bytes from the disk against bytes from the cpu: an NVMe drive is about that much slower."""
_SLACK = 1.01
"""Filling in module order may move this much more than filling every gap: maps stay short."""
_RESERVES = 16
"""So many sizes of the room for streaming are tried."""


@dataclass(frozen=True)
class Solution:
    """A device for each item."""

    problem: Problem
    devices: Assignment

    @cached_property
    def reserve(self) -> Item | None:
        """The largest item that is moved to the main device to run."""
        moved = [i for i, d in self.pairs if d in self.problem.offloaded]
        return max(moved, key=lambda item: item.run_bytes, default=None)

    @property
    def pairs(self) -> list[tuple[Item, Device]]:
        """The items with their devices, in module order."""
        return list(zip(self.problem.items, self.devices, strict=True))

    @cached_property
    def cost(self) -> int:
        """Bytes moved for one run of the model, those from the disk weighted."""
        moved = ((i, d) for i, d in self.pairs if d in self.problem.offloaded)
        return sum(i.moved_bytes * (_DISK_WEIGHT if d == "disk" else 1) for i, d in moved)


@dataclass(frozen=True)
class Shortage:
    """Why nothing fits."""

    item: Item
    """The first that finds no room."""
    left: Memory
    """What each device has left then; what must stay free for streaming is taken off."""
    reserve: int


def solve(cuts: Sequence[Cut], memory: Memory, policy: Policy) -> Solution | None:
    """Return a placement that fits, or None.

    With accelerators: everything on them, else as much on them as fits and the rest moved in
    from cpu and disk, else, if even the room for streaming is too small, the model runs on the
    cpu. The main device is the first accelerator that can be. *policy* says how the first of
    these is done: ``sequential`` fills in order; ``auto`` and ``balanced`` spread evenly;
    ``balanced_low_0`` leaves the first accelerator as empty as the others allow. In module order
    where that fits, else in any order. Coarse cuts come first, the finest where they do not fit.
    """
    accelerators = [d for d in canonical_order(memory) if d not in ("cpu", "disk")]
    for mains in ([d for d in accelerators if memory[d] != 0], ["cpu"]):
        for cut in cuts:
            for main in mains:
                problem = _problem(cut, memory, main, offload=False)
                devices = _resident(problem, policy)
                if devices is not None:
                    return Solution(problem, devices)
        for some in (cuts[:-1], cuts[-1:]):
            for main in mains:
                problems = [_problem(cut, memory, main, offload=True) for cut in some]
                found = [solution for problem in problems for solution in _offloading(problem)]
                if found:
                    return _cheapest(found)
    return None


def lack(cut: Cut, memory: Memory) -> Shortage | None:
    """Return what is missing where :func:`solve` finds nothing; None for want of any device."""
    usable = [device for device in canonical_order(memory) if memory[device] != 0]
    if not usable:
        return None
    tries: list[tuple[list[Item], Mapping[Device, int], int]] = []
    for main in dict.fromkeys([usable[0] if usable[0] != "disk" else "cpu", "cpu"]):
        problem = _problem(cut, memory, main, offload=True)
        reserved = list(_with_reserves(problem))
        for p in (problem, *reserved[:1], *reserved[-1:]):
            tries.append((*unplaced(p), p.reserve))
    lost, left, reserve = min(tries, key=lambda t: sum(item.n_bytes for item in t[0]))
    if not lost:  # every item has its place, but nothing would be on the main device
        lost = [min(cut.items, key=lambda item: item.n_bytes)]
    limited = {d: None if n > UNLIMITED // 2 else max(n, 0) for d, n in left.items()}
    return Shortage(lost[0], limited, reserve)


def _problem(cut: Cut, memory: Memory, main: Device, *, offload: bool) -> Problem:
    """Return the problem of running on *main*: it and the devices after it.

    Without any ``cpu`` in *memory* a model that is all on disk still runs on the cpu.
    """
    order = [device for device in canonical_order(memory) if memory[device] != 0]
    first = order.index(main) if main in order else len(order)
    near = [d for d in order[first:] if d not in ("cpu", "disk")] if main != "cpu" else []
    if main == "cpu" and main in order:
        near = [main]
    far = [d for d in order if d == "disk" or (d == "cpu" and main not in ("cpu", "mps"))]
    homes = (*near, *far) if offload else tuple(near)
    rooms = {d: UNLIMITED if (size := memory[d]) is None else size for d in homes}
    if main not in rooms:
        given = memory.get(main)
        rooms[main] = UNLIMITED if given is None else given
    return Problem(cut, rooms, homes, main, frozenset(far) if offload else frozenset())


def _resident(problem: Problem, policy: Policy) -> Assignment | None:
    if not problem.homes or not problem.fits_in_sum:
        return None
    spare_first = policy == "balanced_low_0"
    found = None if policy == "sequential" else spread(problem, spare_first=spare_first)
    if found is None and spare_first:
        last = replace(problem, homes=(*problem.homes[1:], *problem.homes[:1]))
        found = greedy(last, back=True)
    return found or greedy(problem, back=False) or greedy(problem, back=True) or search(problem)


def _offloading(problem: Problem) -> Iterator[Solution]:
    """Yield placements in the order in which to prefer them; all run on the main device."""
    if not problem.offloaded:
        return
    any_found = False
    for reserved in _with_reserves(problem):
        for filled in _filled(reserved):
            any_found = True
            yield Solution(reserved, filled)
    if any_found:
        return
    for reserved in _with_reserves(problem):
        if (found := search(reserved)) is not None:
            yield Solution(reserved, found)
            return


def _filled(problem: Problem) -> Iterator[Assignment]:
    """Yield what the greedy rules find for one size of the room for streaming."""
    if not problem.fits_in_sum:
        return
    hold = problem.cut.kept_bytes
    for back in (False, True):
        devices = greedy(problem, back=back)
        if devices is None and hold:
            devices = greedy(problem, back=back, hold=hold)
        if devices is not None and (problem.main == "cpu" or problem.main in devices):
            yield devices


def _with_reserves(problem: Problem) -> Iterator[Problem]:
    """Yield *problem* with each room for streaming that may be worth keeping, largest first.

    Items that need more than that to run cannot be offloaded, so less is not always better.
    """
    fitting = [size for size in problem.cut.run_sizes if size <= problem.rooms[problem.main]]
    step = max(1, -(-len(fitting) // _RESERVES))
    for size in dict.fromkeys([*fitting[::step], *fitting[-1:]]):
        yield replace(problem, reserve=size)


def _cheapest(found: Iterable[Solution]) -> Solution:
    """Return the first that moves hardly more than the best and uses as many devices."""
    solutions = list(found)
    best = min(solutions, key=lambda s: s.cost)
    n_used = len(set(best.devices))
    return next(
        s for s in solutions if s.cost <= best.cost * _SLACK and len(set(s.devices)) >= n_used
    )
