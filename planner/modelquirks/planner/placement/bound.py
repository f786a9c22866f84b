"""The bound: no placement can take less than this, whatever is tried.

The Lagrangian dual of a program: every room gets a price, in seconds, and each item goes where it
is cheapest with what it takes of rooms paid for, of each kind no more to a home than would fill it
alone. For any prices that are not negative, the sum less the worth of all rooms is at most the cost
of the best placement. Good prices are found by subgradient steps (Polyak's rule). At the best
prices the bound is at least that of the linear relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from modelquirks.planner.placement.program import Program

__all__ = ["Bound", "bound_of"]

_STEPS = 250
_CLOSE = 1e-7
"""Nearer than this, by part, is near enough."""


@dataclass(frozen=True)
class Bound:
    """A lower bound, and the prices that prove it."""

    seconds: float
    """Infinite if some kind has nowhere to go."""
    prices: tuple[float, ...]
    """Seconds a byte, by room."""

    def paid(self, program: Program) -> list[tuple[float, ...]]:
        """Return what each kind costs at each home, rooms paid for."""
        return [
            tuple(
                price + sum(self.prices[room] * n for room, n in use)
                for price, use in zip(row, uses, strict=True)
            )
            for row, uses in zip(program.seconds, program.uses, strict=True)
        ]


def bound_of(program: Program, known: float) -> Bound:
    """Return the best bound found; *known* is the cost of some placement, infinite if none is."""
    rooms = [max(room, 1) for room in program.rooms]
    best = Bound(program.least, (0.0,) * len(rooms))
    if not rooms or program.least == inf:
        return best
    # Prices by the whole room, so that rooms of all sizes are stepped alike.
    shares = [[tuple((r, n / rooms[r]) for r, n in use) for use in uses] for uses in program.uses]
    target = known if known < inf else program.least * 2 + 1e-9
    prices, scale = [0.0] * len(rooms), 1.0
    since = 0
    for _ in range(_STEPS):
        value, slope = _value(program, shares, prices)
        if value == inf:  # some kind does not find room even alone
            return Bound(inf, best.prices)
        since += 1
        if value > best.seconds:
            if value > best.seconds * (1 + 1e-4):
                since = 0
            best = Bound(value, tuple(p / room for p, room in zip(prices, rooms, strict=True)))
        if best.seconds >= target * (1 - _CLOSE):
            if known < inf:
                break
            target *= 2
        square = sum(s * s for p, s in zip(prices, slope, strict=True) if s > 0 or p > 0)
        if square == 0:
            break  # at the top
        if since > 12:
            scale, since = scale / 2, 0
            if scale < 1e-3:
                break
        step = scale * (target - value) / square
        prices = [max(0.0, p + step * s) for p, s in zip(prices, slope, strict=True)]
    return best


def _value(
    program: Program, shares: Sequence[Sequence[Sequence[tuple[int, float]]]], prices: list[float]
) -> tuple[float, list[float]]:
    """Return the dual's value at *prices*, and for each room how far it is overfilled."""
    value = -sum(prices)
    slope = [-1.0] * len(prices)
    for kind, row, uses, limits in zip(
        program.kinds, program.seconds, shares, program.limits, strict=True
    ):
        ways = sorted(
            (seconds + sum(prices[room] * share for room, share in use), home)
            for home, (seconds, use) in enumerate(zip(row, uses, strict=True))
            if seconds < inf
        )
        rest = kind.n
        for paid, home in ways:
            n = min(rest, limits[home])
            value += n * paid
            for room, share in uses[home]:
                slope[room] += n * share
            rest -= n
            if not rest:
                break
        else:
            return inf, slope
    return value, slope
