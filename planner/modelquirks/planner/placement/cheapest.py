"""The cheapest placement of a problem, and the proof that none is cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from modelquirks.planner.placement.bound import bound_of
from modelquirks.planner.placement.cost import Costs
from modelquirks.planner.placement.counts import EXACT, Found, dense, search
from modelquirks.planner.placement.fill import Assignment, Problem
from modelquirks.planner.placement.pipeline import lined_up, pipelined
from modelquirks.planner.placement.program import Program, assignments, merged, program_of

__all__ = ["Priced", "cheaper", "least", "priced"]

_STEPS = 20_000
"""Choices of one search: about a tenth of a second."""
_RELAXED = 24
"""So many sizes of the room for streaming are told apart by the proof."""


class Priced(NamedTuple):
    """A placement of a problem and what it takes."""

    devices: Assignment
    seconds: float
    """Of one step, crossings included."""


def priced(problem: Problem, devices: Assignment, costs: Costs) -> Priced:
    """Return *devices* with its price."""
    pairs = zip(problem.items, devices, strict=True)
    took = sum(costs.seconds(item.load, device, problem.main) for item, device in pairs)
    return Priced(devices, took + costs.crossed(devices, problem.main))


def cheaper(problem: Problem, costs: Costs, known: float) -> Priced | None:
    """Return a placement that takes less than *known* seconds, the best there is; None for none."""
    program = program_of(problem, costs)
    if not program.kinds or program.least >= known * (1 - EXACT):
        return None
    found = _solved(program, known)
    if found.counts is None:
        return None
    homes = dict(assignments(program, found.counts))
    laid = priced(problem, tuple(homes[n] for n in range(len(problem.items))), costs)
    for other in (pipelined(problem, costs), lined_up(problem, laid.devices)):
        if other is not None:
            laid = min(laid, priced(problem, other, costs), key=lambda p: p.seconds)
    return laid if laid.seconds < known else None


def least(problems: Iterable[Problem], costs: Costs, known: float) -> float:
    """Return seconds that no placement can undercut, if the best one known takes *known*.

    *problems* are of the finest cut with every main device. Their items may go anywhere here, so
    the bound holds for all coarser cuts too. It is at most *known*.
    """
    lowest = known
    for problem in problems:
        for some, hops in _by_number(problem, costs):
            for reserved, allowed in _reserves(some):
                program = program_of(reserved, costs, pins=False, allowed=allowed)
                lowest = min(lowest, _proven(program, lowest - hops) + hops)
    return lowest


def _by_number(problem: Problem, costs: Costs) -> Iterator[tuple[Problem, float]]:
    """Yield *problem* on one accelerator, two, …, with what so many cost in crossings at least.

    Only if they are all alike, so that it does not matter which; else all at once, for nothing.
    """
    near = [home for home in problem.homes if home not in problem.offloaded]
    if len({costs.machine[home] for home in near}) != 1:
        yield problem, 0.0
        return
    for n in range(1, len(near) + 1):
        homes = (*near[:n], *(home for home in problem.homes if home in problem.offloaded))
        hops = n if n > 1 else 0
        yield replace(problem, homes=homes), hops * costs.machine.crossing_seconds


def _solved(program: Program, known: float) -> Found:
    """Return the best counts that take less than *known* seconds."""
    counts = dense(program)
    start = Found(None, known, False)
    if counts is not None and (seconds := program.cost(counts)) < known:
        start = Found(counts, seconds, False)
    bound = bound_of(program, start.seconds)
    if bound.seconds >= start.seconds * (1 - EXACT):
        return start._replace(complete=True)
    return search(program, bound, start, steps=_STEPS)


def _proven(program: Program, known: float) -> float:
    """Return what *program* takes at least, or *known* if that is less."""
    if not program.kinds or program.least >= known:
        return known
    bound = bound_of(program, known)
    if bound.seconds >= known * (1 - EXACT):
        return known
    found = search(program, bound, Found(None, known, False), steps=_STEPS)
    if found.complete:
        return known if found.counts is None else max(bound.seconds, found.seconds * (1 - EXACT))
    fewer = merged(program)
    if len(fewer.kinds) == len(program.kinds):
        return bound.seconds
    return max(bound.seconds, _proven(fewer, known))


def _reserves(problem: Problem) -> list[tuple[Problem, int]]:
    """Return *problem* with each size of the room for streaming, and what it lets be offloaded.

    With very many sizes some are taken together, at the least room and the most that may go.
    """
    room = problem.rooms[problem.main]
    sizes = sorted({0, *(k.item.run_bytes for k in problem.cut.kinds if k.item.run_bytes <= room)})
    if not problem.offloaded:
        sizes = [0]
    step = max(1, -(-len(sizes) // _RELAXED))
    return [
        (replace(problem, reserve=sizes[n]), sizes[min(n + step, len(sizes)) - 1])
        for n in range(0, len(sizes), step)
    ]
