"""How many items of each kind go where: the exact search, and the simple rule that it starts from.

:func:`dense` is the rule: kinds that gain most by a byte of fast memory come first, and each takes
the fastest home with room. :func:`search` is branch and bound over the counts: it goes through all
placements, leaving out whatever the prices of the bound prove to be no better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from modelquirks.planner.placement.bound import Bound
from modelquirks.planner.placement.program import Counts, Program, Use

__all__ = ["EXACT", "Found", "dense", "search"]

EXACT = 1e-4
"""A placement within this part of the best one is taken for the best."""


class Found(NamedTuple):
    """What a search found."""

    counts: Counts | None
    seconds: float
    """Infinite if nothing was found."""
    complete: bool
    """Whether every placement was tried or proven to be no better."""


def dense(program: Program) -> Counts | None:
    """Return what the rule of density gives; None if some item finds no room."""
    left = list(program.rooms)
    rows: dict[int, list[int]] = {}
    for kind in sorted(range(len(program.kinds)), key=lambda k: -_density(program, k)):
        rest = program.kinds[kind].n
        row = [0] * len(program.homes)
        for home in sorted(range(len(row)), key=program.seconds[kind].__getitem__):
            if program.seconds[kind][home] < inf:
                row[home] = min(rest, _room(left, program.uses[kind][home]))
                _take(left, program.uses[kind][home], row[home])
                rest -= row[home]
        if rest:
            return None
        rows[kind] = row
    counts = tuple(tuple(rows[kind]) for kind in range(len(program.kinds)))
    return counts if program.runs_on_main(counts) else None


def _density(program: Program, kind: int) -> float:
    """Return the seconds that a byte of the fastest homes saves; infinite if there is no choice."""
    ways = [
        (seconds, sum(n for _, n in use))
        for seconds, use in zip(program.seconds[kind], program.uses[kind], strict=True)
        if seconds < inf
    ]
    if not ways:
        return inf
    best, n_bytes = min(ways)
    slower = [seconds for seconds, _ in ways if seconds > best * 1.001]
    return (min(slower) - best) / max(1, n_bytes) if slower else inf


def _room(left: Sequence[int], use: Use) -> int:
    """Return how many items that take *use* there is room for."""
    return max(0, min((left[room] // n for room, n in use), default=1 << 62))


def _take(left: list[int], use: Use, n: int) -> None:
    for room, n_bytes in use:
        left[room] -= n * n_bytes


def _bulk(program: Program, kind: int) -> int:
    """Return the bytes that all items of a kind take at most."""
    taken = [sum(n for _, n in use) for use in program.uses[kind]]
    return program.kinds[kind].n * max(taken)


def search(program: Program, bound: Bound, known: Found, *, steps: int) -> Found:
    """Return the best placement by branch and bound, within *steps* choices.

    *known* is the best so far, None for none. Kinds that fill most come first; of each the homes
    that are cheapest with rooms paid for.
    """
    return _Search(program, bound, known, steps).run()


def _filled(ways: Sequence[tuple[float, int]], limits: Sequence[int], n: int) -> float:
    """Return the least that *n* items cost, no home taking more than would fill it alone."""
    cost = 0.0
    for paid, home in ways:
        taken = min(n, limits[home])
        cost += taken * paid
        n -= taken
        if not n:
            return cost
    return inf


class _Search:
    """Depth first through the counts; on an explicit stack, as there may be many kinds."""

    def __init__(self, program: Program, bound: Bound, known: Found, steps: int) -> None:
        self.program = program
        self.best = known
        self.steps = steps
        paid = bound.paid(program)
        self.order = sorted(range(len(program.kinds)), key=lambda k: -_bulk(program, k))
        self.ways = [sorted((p, h) for h, p in enumerate(paid[k]) if p < inf) for k in self.order]
        """Of each kind in order: homes with what they cost, the cheapest first."""
        self.prices = bound.prices
        tail = [0.0]
        for k, ways in zip(reversed(self.order), reversed(self.ways), strict=True):
            tail.append(tail[-1] + _filled(ways, program.limits[k], program.kinds[k].n))
        self.tail = tail[::-1]
        """The least that all kinds from there on cost, rooms paid for."""
        self.most = [self._most(k) for k in self.order]
        """What one item of each kind takes at most of each room."""
        wants = [[0] * len(program.rooms)]
        for k, most in zip(reversed(self.order), reversed(self.most), strict=True):
            n = program.kinds[k].n
            wants.append([w + n * m for w, m in zip(wants[-1], most, strict=True)])
        self.wants = wants[::-1]
        """What all kinds from there on could take of each room."""
        self.worth = sum(p * room for p, room in zip(bound.prices, program.rooms, strict=True))

    def _most(self, kind: int) -> list[int]:
        most = [0] * len(self.program.rooms)
        for use in self.program.uses[kind]:
            for room, n_bytes in use:
                most[room] = max(most[room], n_bytes)
        return most

    def _idle(self, depth: int, after: int, left: Sequence[int]) -> float:
        """Return the worth of room that nothing can take which is still to be placed.

        A room of which no more can be used is as good as a smaller one, and its price was paid for
        all of it.
        """
        idle = 0.0
        for price, room, want, one in zip(
            self.prices, left, self.wants[depth + 1], self.most[depth], strict=True
        ):
            if price and room > want + after * one:
                idle += price * (room - want - after * one)
        return idle

    def run(self) -> Found:
        """Search, and return the best."""
        if self.tail[0] == inf:
            return Found(None, inf, True)
        left = list(self.program.rooms)
        rows = [[0] * len(self.program.homes) for _ in self.order]
        stack = [self._choices(0, 0, self.program.kinds[self.order[0]].n, -self.worth, left, rows)]
        while stack:
            if self.steps <= 0:
                return self.best._replace(complete=False)
            deeper = next(stack[-1], None)
            if deeper is None:
                stack.pop()
            elif deeper is not _LEAF:
                stack.append(deeper)
        return self.best._replace(complete=True)

    def _choices(
        self, depth: int, way: int, rest: int, paid: float, left: list[int], rows: list[list[int]]
    ) -> Iterator[Iterator[Any]]:
        """Yield, for each number of the items of a kind that one home may take, what follows."""
        price, home = self.ways[depth][way]
        use = self.program.uses[self.order[depth]][home]
        last = way + 1 == len(self.ways[depth])
        most = min(rest, _room(left, use))
        limits = self.program.limits[self.order[depth]]
        others = self.ways[depth][way + 1 :]
        for n in range(most, -1 if not last else rest - 1, -1):
            self.steps -= 1
            after = rest - n
            least = paid + n * price + self.tail[depth + 1]
            if after:
                least += _filled(others, limits, after)
            if least >= self.best.seconds * (1 - EXACT):
                break  # fewer here cost only more
            _take(left, use, n)
            if least + self._idle(depth, after, left) >= self.best.seconds * (1 - EXACT):
                _take(left, use, -n)
                continue
            rows[depth][home] = n
            now = paid + n * price
            if after:
                yield self._choices(depth, way + 1, after, now, left, rows)
            elif depth + 1 < len(self.order):
                n_next = self.program.kinds[self.order[depth + 1]].n
                yield self._choices(depth + 1, 0, n_next, now, left, rows)
            else:
                self._leaf(rows)
                yield _LEAF
            rows[depth][home] = 0
            _take(left, use, -n)

    def _leaf(self, rows: list[list[int]]) -> None:
        placed = dict(zip(self.order, rows, strict=True))
        counts = tuple(tuple(placed[k]) for k in range(len(rows)))
        if self.program.runs_on_main(counts):
            seconds = self.program.cost(counts)
            if seconds < self.best.seconds:
                self.best = Found(counts, seconds, False)


_LEAF: Iterator[Any] = iter(())
