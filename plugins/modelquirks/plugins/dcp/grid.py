"""A grid of chunks as a recipe: rectangular parts of a tensor put together along its dimensions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from modelquirks.quirks.recipe import Concat, Node, RecipeError, Region, Source

__all__ = ["Chunk", "assembled", "shown_region"]


class Chunk(NamedTuple):
    """A part of a tensor: where it belongs, and the name of the place in which it lies."""

    place: str
    region: Region


def shown_region(region: Region) -> str:
    """Return a region as it is written in Python.

    >>> shown_region(((0, 7), (0, 6)))
    '[0:7, 0:6]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"


def assembled(chunks: Sequence[Chunk], shape: tuple[int, ...]) -> Node:
    """Return how a tensor of *shape* is made of *chunks*: of rows, of columns, of both.

    Chunks of no elements are left out. :class:`RecipeError` names the first region that no chunk
    covers, or that two do.

    >>> rows = [Chunk("a", ((0, 4),)), Chunk("b", ((4, 7),))]
    >>> assembled(rows, (7,))
    Concat(of=(Source(name='a'), Source(name='b')), dim=0)
    """
    whole = tuple((0, size) for size in shape)
    if 0 in shape:
        if not chunks:
            raise RecipeError("no chunk of it is stored")
        return Source(chunks[0].place)
    return _filling(whole, [chunk for chunk in chunks if _volume(chunk.region)])


_MAX_DEPTH = 64


def _filling(region: Region, chunks: Sequence[Chunk], depth: int = 0) -> Node:
    """Return the node for *region*, which all *chunks* lie in."""
    if depth > _MAX_DEPTH:
        raise RecipeError(f"its chunks are no grid, within {shown_region(region)} neither")
    if not chunks:
        raise RecipeError(f"no chunk covers {shown_region(region)}")
    if len(chunks) == 1 and chunks[0].region == region:
        return Source(chunks[0].place)
    outside = [c for c in chunks if not _is_inside(c.region, region)]
    if outside:
        place = outside[0].place
        raise RecipeError(f"chunk {place!r} reaches out of {shown_region(region)}")
    for dim in range(len(region)):
        cuts = _cuts(region, chunks, dim)
        if len(cuts) > 2:
            slabs = zip(pairwise(cuts), _dealt(chunks, dim, cuts), strict=True)
            return Concat(tuple(_slab(region, *slab, dim, depth) for slab in slabs), dim)
    if sum(_volume(chunk.region) for chunk in chunks) < _volume(region):
        raise RecipeError(
            f"its chunks cover only part of {shown_region(region)}: "
            f"{', '.join(chunk.place for chunk in chunks[:3])}"
        )
    first, second = chunks[0], chunks[1]
    raise RecipeError(f"chunks {first.place!r} and {second.place!r} overlap or are no grid")


def _slab(
    region: Region, bounds: tuple[int, int], chunks: Sequence[Chunk], dim: int, depth: int
) -> Node:
    return _filling((*region[:dim], bounds, *region[dim + 1 :]), chunks, depth + 1)


def _dealt(chunks: Sequence[Chunk], dim: int, cuts: Sequence[int]) -> list[list[Chunk]]:
    """Return the chunks that begin between one cut along *dim* and the next."""
    found: list[list[Chunk]] = [[] for _ in cuts[1:]]
    for chunk in chunks:
        found[bisect_right(cuts, chunk.region[dim][0]) - 1].append(chunk)
    return found


def _cuts(region: Region, chunks: Sequence[Chunk], dim: int) -> list[int]:
    """Return where *region* can be cut along *dim* without cutting a chunk, with both its ends."""
    start, stop = region[dim]
    spans = sorted(chunk.region[dim] for chunk in chunks)
    cuts, reached = {start, stop}, start
    for begin, end in spans:
        if begin >= reached:
            cuts |= {reached, begin}  # what lies between, if anything, is a hole
        reached = max(reached, end)
    cuts.add(min(reached, stop))
    return sorted(cuts)


def _is_inside(inner: Region, outer: Region) -> bool:
    return all(o[0] <= i[0] <= i[1] <= o[1] for i, o in zip(inner, outer, strict=True))


def _volume(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)
