"""``Program``: a problem by kinds of items, as integers: how many of each kind go to which device.

80 layers of one size are one kind, so the search for the best placement has a few dozen unknowns
where there are thousands of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from modelquirks.planner.placement.cost import Costs
from modelquirks.planner.placement.fill import UNLIMITED, Problem
from modelquirks.planner.placement.items import Item, Kind
from modelquirks.planner.placement.memory import Device

__all__ = ["Counts", "Program", "Use", "merged", "program_of"]

Use = tuple[tuple[int, int], ...]
"""Rooms, by number, and the bytes that one item takes of each."""

Counts = tuple[tuple[int, ...], ...]
"""For each kind how many items go to each home."""


@dataclass(frozen=True)
class Program:
    """Minimise the seconds, with every item on one home and no room exceeded."""

    kinds: tuple[Kind, ...]
    homes: tuple[Device, ...]
    rooms: tuple[int, ...]
    """Bytes of each limited device."""
    seconds: tuple[tuple[float, ...], ...]
    """By kind and home; infinite where the kind must not go."""
    uses: tuple[tuple[Use, ...], ...]
    """By kind and home."""
    on_main: frozenset[int]
    """Homes of which one must be used: an accelerator on which nothing lies is not the main one."""

    @cached_property
    def least(self) -> float:
        """The seconds if there were room for everything everywhere."""
        return sum(kind.n * min(row) for kind, row in zip(self.kinds, self.seconds, strict=True))

    @cached_property
    def limits(self) -> tuple[tuple[int, ...], ...]:
        """By kind and home: how many items would fill the empty home."""
        return tuple(
            tuple(min((self.rooms[room] // n for room, n in use), default=kind.n) for use in uses)
            for kind, uses in zip(self.kinds, self.uses, strict=True)
        )

    def cost(self, counts: Counts) -> float:
        """Return the seconds of *counts*."""
        return sum(
            n * seconds
            for row, prices in zip(counts, self.seconds, strict=True)
            for n, seconds in zip(row, prices, strict=True)
            if n
        )

    def runs_on_main(self, counts: Counts) -> bool:
        """Tell whether something is on the main device."""
        return not self.on_main or any(row[home] for row in counts for home in self.on_main)


def program_of(
    problem: Problem, costs: Costs, *, pins: bool = True, allowed: int | None = None
) -> Program:
    """Return *problem* by kinds.

    Without *pins* every item may go anywhere. Items that need up to *allowed* bytes to run may be
    offloaded; by itself, those for which the problem keeps room.
    """
    most = problem.reserve if allowed is None else allowed
    kinds = problem.cut.kinds
    limited = [device for device, room in problem.rooms.items() if room < UNLIMITED]
    number = {device: n for n, device in enumerate(limited)}
    rooms = {**problem.rooms, problem.main: problem.rooms[problem.main] - problem.reserve}
    homes = tuple(dict.fromkeys((*problem.homes, problem.main)))
    seconds: list[tuple[float, ...]] = []
    uses: list[tuple[Use, ...]] = []
    for kind in kinds:
        rows = [
            _use(number, _taken(problem, kind.item, home))
            if _may(problem, kind.item, home, pins=pins, most=most)
            else None
            for home in homes
        ]
        fitting = [u is not None and all(n <= rooms[limited[r]] for r, n in u) for u in rows]
        seconds.append(
            tuple(
                costs.seconds(kind.item.load, home, problem.main) if fits else inf
                for home, fits in zip(homes, fitting, strict=True)
            )
        )
        uses.append(tuple(use or () for use in rows))
    must = problem.main != "cpu" and problem.main in homes
    return Program(
        kinds=kinds,
        homes=homes,
        rooms=tuple(rooms[device] for device in limited),
        seconds=tuple(seconds),
        uses=tuple(uses),
        on_main=frozenset([homes.index(problem.main)] if must else []),
    )


def _may(problem: Problem, item: Item, home: Device, *, pins: bool, most: int) -> bool:
    """Tell whether *item* may go to *home*."""
    if pins or item.pin is not None:
        homes = problem.homes_of(item)
    else:
        homes = problem.homes if not item.pinned else (*problem.homes, problem.main)
    return home in homes and (home not in problem.offloaded or item.run_bytes <= most)


def _taken(problem: Problem, item: Item, home: Device) -> Mapping[Device, int]:
    """Return the bytes that one *item* on *home* takes, by device."""
    if home in problem.offloaded:
        return {home: item.moved_bytes, problem.main: item.kept_bytes}
    return {home: item.n_bytes + item.padding(home)}


def _use(number: Mapping[Device, int], taken: Mapping[Device, int]) -> Use:
    return tuple((number[device], n) for device, n in taken.items() if n and device in number)


def merged(program: Program) -> Program:
    """Return a program with fewer kinds that costs no more: those of like size are made one.

    The one takes the least of each room and of each time that any of them takes, so whatever
    bounds it from below bounds *program*, too.
    """
    groups: list[list[int]] = []
    for kind in sorted(range(len(program.kinds)), key=lambda k: _size(program, k)):
        if groups and _size(program, kind) <= _size(program, groups[-1][0]) * _ALIKE:
            groups[-1].append(kind)
        else:
            groups.append([kind])
    homes = range(len(program.homes))
    return replace(
        program,
        kinds=tuple(
            Kind(
                program.kinds[group[0]].item,
                tuple(n for k in group for n in program.kinds[k].numbers),
            )
            for group in groups
        ),
        seconds=tuple(
            tuple(min(program.seconds[k][home] for k in group) for home in homes)
            for group in groups
        ),
        uses=tuple(
            tuple(_least([dict(program.uses[k][home]) for k in group]) for home in homes)
            for group in groups
        ),
    )


_ALIKE = 1.02


def _size(program: Program, kind: int) -> int:
    return program.kinds[kind].item.n_bytes


def _least(uses: Sequence[Mapping[int, int]]) -> Use:
    """Return what all of *uses* take at least of each room."""
    return tuple((room, n) for room in uses[0] if (n := min(use.get(room, 0) for use in uses)) > 0)


def assignments(program: Program, counts: Counts) -> Iterator[tuple[int, Device]]:
    """Yield the home of each item, by its number: of each kind the first go to the first home.

    Homes are in the order of :attr:`Program.homes`, so all kinds change from one device to the
    next at about the same layer, and a run through the model crosses devices as rarely as may be.
    """
    for kind, row in zip(program.kinds, counts, strict=True):
        numbers = iter(kind.numbers)
        for home, n in zip(program.homes, row, strict=True):
            for _ in range(n):
                yield next(numbers), home
