"""``Part``: which elements of a tensor one rank has. Arithmetic alone, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from modelquirks.quirks.recipe import Concat, Node, Region, Slice

__all__ = ["Cut", "Part", "PartError", "Run", "part_of"]

Run = tuple[int, int]
"""Indices from the first to before the second."""


class PartError(ValueError):
    """A way of sharding of which it is not certain what each rank has."""


class Cut(NamedTuple):
    """How one dimension of a device mesh divides a tensor among its ranks.

    With ``stride`` 1 it is torch's ``Shard``: as many equal pieces as ``torch.chunk`` makes, the
    last ones shorter or empty. More is ``_StridedShard`` with that ``split_factor``: the dimension
    is cut into ``stride`` pieces first, and the rank has its piece of each.
    """

    dim: int
    ranks: int
    """How many there are along the dimension of the mesh."""
    rank: int
    """Which of them this one is."""
    stride: int = 1


class Part(NamedTuple):
    """The elements of a tensor that one rank has: in each dimension some runs of indices."""

    runs: tuple[tuple[Run, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what the rank has."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def times(self, factor: int) -> Part:
        """Return the part with each index of the last dimension standing for *factor* of them."""
        *outer, last = self.runs
        return Part((*outer, tuple((start * factor, stop * factor) for start, stop in last)))

    def boxes(self) -> Iterator[tuple[Region, Region]]:
        """Yield the boxes it consists of: where in the rank's tensor, where in the whole one.

        >>> list(Part((((2, 4), (6, 8)),)).boxes())
        [(((0, 2),), ((2, 4),)), (((2, 4),), ((6, 8),))]
        """
        dims: list[list[tuple[Run, Run]]] = []
        for runs in self.runs:
            ends = list(accumulate(stop - start for start, stop in runs))
            places = zip([0, *ends], ends, strict=False)
            dims.append(list(zip(places, runs, strict=True)))
        for box in product(*dims):
            yield tuple(here for here, _ in box), tuple(there for _, there in box)

    def recipe(self, node: Node, shape: Sequence[int]) -> Node:
        """Return the recipe of this part of *node*, which gives a tensor of that shape."""
        for dim, (runs, size) in enumerate(zip(self.runs, shape, strict=True)):
            if runs == ((0, size),):
                continue
            pieces = tuple(Slice(node, dim, start, stop) for start, stop in runs or ((0, 0),))
            node = pieces[0] if len(pieces) == 1 else Concat(pieces, dim)
        return node


def part_of(shape: Sequence[int], cuts: Iterable[Cut]) -> Part:
    """Return what a rank has of a tensor of that shape, cut in that order.

    The cuts are one after another, as ``distribute_tensor`` of torch 2.13 makes them: each divides
    what those before have left. PartError if ``fully_shard``, which makes the cuts of its own
    dimension of the mesh last and writes them down first, would have divided it otherwise. The two
    agree wherever the tensor parallel cut is even; where they do not, torch's own
    ``full_tensor()`` of such a parameter is wrong as well.

    >>> part_of((10, 4), [Cut(0, 4, 3)])
    Part(runs=(((9, 10),), ((0, 4),)))
    >>> part_of((8,), [Cut(0, 2, 1, stride=2)])
    Part(runs=(((2, 4), (6, 8)),))
    """
    cuts = list(cuts)
    runs: list[tuple[Run, ...]] = []
    for dim, size in enumerate(shape):
        own = [cut for cut in cuts if cut.dim == dim]
        runs.append(_cut(_whole(size), own))
        if _fully_sharded(size, own) not in (None, runs[dim]):
            raise PartError(
                f"{size} elements of dimension {dim}, cut by {_told(own)}, are divided otherwise "
                "by fully_shard than its placements say: make the tensor parallel cut even"
            )
    if any(cut.dim >= len(runs) for cut in cuts):
        raise PartError(f"a tensor of shape {list(shape)} cannot be cut by {_told(cuts)}")
    return Part(tuple(runs))


def _cut(runs: tuple[Run, ...], cuts: Iterable[Cut]) -> tuple[Run, ...]:
    for cut in cuts:
        whole = _length(runs)
        pieces = (_chunk(whole, cut.stride, number) for number in range(cut.stride))
        chosen: list[Run] = []
        for start, stop in pieces:
            a, b = _chunk(stop - start, cut.ranks, cut.rank)
            chosen += _within(runs, start + a, start + b)
        runs = _joined(chosen)
    return runs


def _fully_sharded(size: int, cuts: Sequence[Cut]) -> tuple[Run, ...] | None:
    """Return what the rank has if a strided cut comes after those it was written before.

    None where no cut is strided by the very pieces that the later ones make: then it is strided
    for another reason, as the packed projections of tensor parallel models are.
    """
    for number, cut in enumerate(cuts):
        later = cuts[number + 1 :]
        if cut.stride > 1 and cut.stride == math.prod(other.ranks for other in later):
            plain = [*cuts[:number], *later, cut._replace(stride=1)]
            return _cut(_whole(size), plain)
    return None


def _whole(size: int) -> tuple[Run, ...]:
    return ((0, size),) if size else ()


def _chunk(size: int, count: int, index: int) -> Run:
    """Return piece *index* of *count* as ``torch.chunk`` cuts."""
    each = -(-size // count)
    return min(size, each * index), min(size, each * (index + 1))


def _within(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """Return the indices that are number *start* to *stop* of *runs*."""
    found: list[Run] = []
    before = 0
    for first, last in runs:
        a, b = max(start - before, 0), min(stop - before, last - first)
        if a < b:
            found.append((first + a, first + b))
        before += last - first
    return found


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


def _length(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _told(cuts: Iterable[Cut]) -> str:
    return " and ".join(
        f"{cut.ranks} ranks" + (f" with a stride of {cut.stride}" if cut.stride > 1 else "")
        for cut in cuts
    )
