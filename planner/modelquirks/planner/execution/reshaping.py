"""Reshaping by regions: which boxes of a tensor make up a region of it in another shape.

Row-major order is all there is to a reshape: a region of the new shape is a set of runs of
consecutive elements, and each run is a set of boxes of the old shape. Dimensions that the two
shapes share are treated apart, so that columns stay columns when only the rows are reshaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from modelquirks.quirks.recipe import Region

__all__ = ["Box", "Run", "runs"]

_Shape = tuple[int, ...]


class Box(NamedTuple):
    """A box of the old shape that is consecutive in each group of dimensions."""

    region: Region
    """In the old shape."""
    at: Region
    """Where its elements lie in the run: one pair per group."""


class Run(NamedTuple):
    """A part of the wanted region that is consecutive in each group of dimensions."""

    region: Region
    """In the new shape."""
    lengths: _Shape
    """Elements in each group."""
    boxes: tuple[Box, ...]


def runs(old: _Shape, new: _Shape, region: Region) -> Iterator[Run]:
    """Yield the runs that make up *region* of shape *new*, with where they lie in shape *old*.

    Every element of the region is in exactly one box; no box holds another element. Neither
    shape may have a size of 0.

    >>> [(run.region, [box.region for box in run.boxes]) for run in runs((4, 6), (8, 3), ((1, 3),
    ...     (0, 3)))]
    [(((1, 3), (0, 3)), [((0, 1), (3, 6)), ((1, 2), (0, 3))])]
    """
    by_group: list[list[_Piece]] = []
    start = 0
    for old_dims, new_dims in _groups(old, new):
        part = region[start : start + len(new_dims)]
        by_group.append(list(_pieces(old_dims, new_dims, part)))
        start += len(new_dims)
    for chosen in product(*by_group):
        boxes = tuple(
            Box(_joined(box for box, _ in combination), tuple(at for _, at in combination))
            for combination in product(*(piece.boxes for piece in chosen))
        )
        lengths = tuple(piece.length for piece in chosen)
        yield Run(_joined(piece.region for piece in chosen), lengths, boxes)


class _Piece(NamedTuple):
    """A run within one group of dimensions."""

    region: Region
    length: int
    boxes: tuple[tuple[Region, tuple[int, int]], ...]
    """Boxes of the old dimensions and where they lie in the run."""


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[_Shape, _Shape]]:
    """Cut both shapes into the smallest groups of dimensions with equally many elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        a = b = 1
        while True:
            if i < len(old) and (a < b or i == first_i):
                a *= old[i]
                i += 1
            elif j < len(new) and (b < a or j == first_j):
                b *= new[j]
                j += 1
            if a == b and (i > first_i or i == len(old)) and (j > first_j or j == len(new)):
                break
        yield tuple(old[first_i:i]), tuple(new[first_j:j])


def _pieces(old: _Shape, new: _Shape, region: Region) -> Iterator[_Piece]:
    """Yield the runs of *region* in one group."""
    inner = len(new)
    while inner and region[inner - 1] == (0, new[inner - 1]):
        inner -= 1  # all of these dimensions: they stay in one run
    cut = max(inner - 1, 0)
    size = math.prod(new[cut + 1 :]) if new else 1
    (start, stop) = region[cut] if new else (0, 1)
    for outer in product(*(range(a, b) for a, b in region[:cut])):
        base = 0
        for index, extent in zip(outer, new[:cut], strict=True):
            base = base * extent + index
        base *= new[cut] if new else 1
        low, high = (base + start) * size, (base + stop) * size
        box = (*((i, i + 1) for i in outer), *region[cut:])
        cuts = tuple((b, (x - low, y - low)) for b, x, y in _boxes(old, low, high))
        yield _Piece(box, high - low, cuts)


def _boxes(shape: _Shape, low: int, high: int) -> Iterator[tuple[Region, int, int]]:
    """Yield the boxes of *shape* that hold elements *low* to *high*, with their bounds."""
    if not shape:
        yield (), 0, 1
        return
    size = math.prod(shape[1:])
    first, last = low // size, high // size
    if low % size == 0 and high % size == 0:
        yield ((first, last), *((0, n) for n in shape[1:])), low, high
        return
    if first == last:
        yield from _within(shape, first, low, high)
        return
    if low % size:
        yield from _within(shape, first, low, (first + 1) * size)
        first += 1
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:])), first * size, last * size
    if high % size:
        yield from _within(shape, last, last * size, high)


def _within(shape: _Shape, index: int, low: int, high: int) -> Iterator[tuple[Region, int, int]]:
    """Yield the boxes in number *index* of the first dimension."""
    base = index * math.prod(shape[1:])
    for box, a, b in _boxes(shape[1:], low - base, high - base):
        yield ((index, index + 1), *box), a + base, b + base


def _joined(parts: Iterator[Region]) -> Region:
    return tuple(pair for part in parts for pair in part)
