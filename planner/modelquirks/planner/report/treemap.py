"""Treemaps: rectangles in proportion to sizes, as near to squares as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Rect", "squarified"]


class Rect(NamedTuple):
    """A rectangle in per cent of the whole's width and height."""

    left: float
    top: float
    width: float
    height: float


def squarified(sizes: Sequence[float], *, aspect: float) -> list[Rect]:
    """Return a rectangle for each of *sizes*, positive and the largest first.

    *aspect* is the width of the whole by its height. Bruls, Huizing, van Wijk, "Squarified
    Treemaps", 2000: rows are laid along the shorter side, each as long as that makes its
    rectangles more square.

    >>> [rect.width for rect in squarified([3, 1], aspect=4)]
    [75.0, 25.0]
    """
    total = sum(sizes)
    if not total:
        return []
    free = Rect(0.0, 0.0, aspect, 1.0)
    areas = [size / total * aspect for size in sizes]
    found: list[Rect] = []
    while areas:
        side = min(free.width, free.height)
        count = _row_length(areas, side)
        row, areas = areas[:count], areas[count:]
        rects, free = _laid(row, free)
        found += rects
    return [
        Rect(r.left / aspect * 100, r.top * 100, r.width / aspect * 100, r.height * 100)
        for r in found
    ]


def _row_length(areas: Sequence[float], side: float) -> int:
    """Return how many of *areas* make the row whose worst rectangle is most like a square."""
    total, worst = 0.0, float("inf")
    for count, area in enumerate(areas):
        total += area
        here = _worst(areas[0], area, total, side)
        if here > worst:
            return count
        worst = here
    return len(areas)


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    if not smallest or not side:
        return float("inf")
    return max(side**2 * largest / total**2, total**2 / (side**2 * smallest))


def _laid(row: Sequence[float], free: Rect) -> tuple[list[Rect], Rect]:
    """Return the rectangles of a row along the shorter side, and what stays free."""
    total = sum(row)
    upright = free.width >= free.height
    thick = total / (free.height if upright else free.width)
    at = free.top if upright else free.left
    rects: list[Rect] = []
    for area in row:
        length = area / thick
        rects.append(
            Rect(free.left, at, thick, length) if upright else Rect(at, free.top, length, thick)
        )
        at += length
    if upright:
        return rects, Rect(free.left + thick, free.top, free.width - thick, free.height)
    return rects, Rect(free.left, free.top + thick, free.width, free.height - thick)
