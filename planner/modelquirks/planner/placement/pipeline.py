"""Pipelines: consecutive modules on each device, cut where the whole takes least time.

Where nothing is offloaded, all that an assignment by kinds can lose is crossings. The best
contiguous one is found exactly, by dynamic programming over where each device's part ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from modelquirks.planner.placement.cost import Costs
from modelquirks.planner.placement.fill import Assignment, Problem
from modelquirks.planner.placement.memory import Device

__all__ = ["lined_up", "pipelined"]

_MANY = 3_000
"""With more items than that, where each part ends is not tried one by one."""


def pipelined(problem: Problem, costs: Costs) -> Assignment | None:
    """Return the contiguous assignment to homes that takes least time; None if there is none.

    Devices follow one another in the order of the problem, the main one first; a device may be
    left out. Items without a choice are where they must be.
    """
    loose = [item for item in problem.items if not item.fixed]
    if problem.offloaded or not loose or len(loose) > _MANY:
        return None
    fixed: dict[Device, int] = {}
    for item in problem.items:
        for home in problem.homes_of(item) if item.fixed else ():
            fixed[home] = fixed.get(home, 0) + item.n_bytes + item.padding(home)
    homes = (problem.main, *(home for home in problem.homes if home != problem.main))
    ends = _cut(problem, costs, homes, fixed)
    if ends is None:
        return None
    parts = zip(homes, ends, strict=True)
    placed = iter([home for home, (begin, end) in parts for _ in range(begin, end)])
    return tuple(problem.homes_of(i)[0] if i.fixed else next(placed) for i in problem.items)


def lined_up(problem: Problem, devices: Assignment) -> Assignment | None:
    """Return *devices* with what stays on accelerators dealt out to them anew, in module order.

    What is offloaded stays so. None if there is one accelerator only, or something finds no room.
    """
    near = [problem.main, *(h for h in problem.homes if h != problem.main)]
    near = [home for home in near if home not in problem.offloaded]
    if len(near) < 2:
        return None
    left = {home: problem.rooms[home] for home in near}
    left[problem.main] -= problem.reserve
    pairs = list(zip(problem.items, devices, strict=True))
    for item, device in pairs:
        if device in problem.offloaded:
            left[problem.main] -= item.kept_bytes
        elif item.fixed:
            left[device] -= item.n_bytes + item.padding(device)
    found: list[Device] = []
    current = 0
    for item, device in pairs:
        home = device
        if not item.fixed and device not in problem.offloaded:
            need = item.n_bytes + item.pad_bytes
            while current + 1 < len(near) and left[near[current]] < need:
                current += 1
            home = next((h for h in (near[current], *near) if left[h] >= need), problem.main)
            left[home] -= need
        found.append(home)
    return tuple(found) if min(left.values()) >= 0 else None


def _cut(
    problem: Problem,
    costs: Costs,
    homes: Sequence[Device],
    fixed: Mapping[Device, int],
) -> list[tuple[int, int]] | None:
    """Return where the part of each home begins and ends, in loose items."""
    loose = [item for item in problem.items if not item.fixed]
    sums = [0, *accumulate(item.n_bytes + item.pad_bytes for item in loose)]
    best = [0.0, *[inf] * len(loose)]
    """Least seconds for so many of the first items on the homes so far."""
    came: list[list[int]] = []
    for home in homes:
        room = problem.rooms[home] - fixed.get(home, 0)
        took = [0.0, *accumulate(costs.seconds(i.load, home, problem.main) for i in loose)]
        found, begins = list(best), list(range(len(best)))  # left out
        hop = 0.0 if home == problem.main else costs.machine.crossing_seconds
        for begin, before in enumerate(best):
            if before == inf:
                continue
            last = bisect_right(sums, sums[begin] + room) - 1
            for end in range(begin + 1, last + 1):
                seconds = before + hop + took[end] - took[begin]
                if seconds < found[end]:
                    found[end], begins[end] = seconds, begin
        best = found
        came.append(begins)
    if best[-1] == inf:
        return None
    end, parts = len(loose), list[tuple[int, int]]()
    for begins in reversed(came):
        parts.append((begins[end], end))
        end = begins[end]
    return parts[::-1]
