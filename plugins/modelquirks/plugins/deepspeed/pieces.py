"""Where the parts of each parameter lie in the flat groups of the optimizer: arithmetic only.

Source: ``flatten_dense_tensors_aligned``, ``get_data_parallel_partitions`` and
``_get_groups_without_padding`` in DeepSpeed 0.19.8's ``runtime/zero/stage_1_and_2.py`` and
``zero_to_fp32.py`` for ZeRO 3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.plugins.deepspeed.parameter import Fragment, cut
from modelquirks.plugins.deepspeed.saved import Shapes
from modelquirks.plugins.deepspeed.states import Address

__all__ = [
    "Cutting",
    "addresses",
    "from_fragments",
    "from_partitions",
    "from_shares",
    "group_numel",
    "numel",
    "partition_length",
    "share_length",
]

_START_ALIGNMENT = 2  # nccl_start_alignment_factor: each partition begins at an even element


@dataclass(frozen=True)
class Cutting:
    """The parameters of one group: what can be had, and what lies in parts that are not there."""

    fragments: Mapping[str, Fragment] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name: numbers of the parts that lack."""


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


def group_numel(group: Shapes, paddings: Sequence[int] = ()) -> int:
    """Return the elements of a flat group without what is added at its end."""
    return sum(map(numel, group.values())) + sum(paddings[: len(group)])


def partition_length(total: int, count: int) -> int:
    """Return the elements of each of *count* partitions of a group of ZeRO 1 and 2.

    The last one is stored without the padding at its end, except by BF16_Optimizer.

    >>> partition_length(150, 2), partition_length(27, 2)
    (76, 14)
    """
    return _START_ALIGNMENT * -(-total // (_START_ALIGNMENT * count))


def share_length(shape: tuple[int, ...], count: int) -> int:
    """Return the elements of each rank's share of a parameter of ZeRO 3.

    >>> share_length((5, 7), 2)
    18
    """
    return -(-numel(shape) // count)


def from_partitions(
    group: Shapes,
    parts: Sequence[StoredTensor | None],
    *,
    paddings: Sequence[int] = (),
    label: str = "",
) -> Cutting:
    """Return the parameters of a group that lies end to end over *parts* (ZeRO 1 and 2).

    *group* has the order of flattening, *paddings* the elements behind each parameter. A part
    that is None is taken to have the length that it should have. The name of a piece is that of
    its parameter, *label* and the number of its part.
    """
    usual = partition_length(group_numel(group, paddings), len(parts))
    lengths = [usual if part is None else numel(part.shape or ()) for part in parts]
    begins = [0, *accumulate(lengths)]
    cutting = _Cutter(parts, label)
    offset = 0
    for position, (name, shape) in enumerate(group.items()):
        stop = offset + numel(shape)
        spans = list(_spans(begins, offset, stop))
        cutting.add(name, shape, spans)
        offset = stop + (paddings[position] if position < len(paddings) else 0)
    return cutting.done()


def _spans(begins: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts that have elements *start* to *stop*: number, and from where to where in it.

    *begins* has where each part begins, and where the last one ends.
    """
    part = max(0, bisect_right(begins, start) - 1)
    while part + 1 < len(begins) and begins[part] < stop:
        begin, end = max(start, begins[part]), min(stop, begins[part + 1])
        if begin < end:
            yield part, begin - begins[part], end - begins[part]
        part += 1


def from_shares(group: Shapes, parts: Sequence[StoredTensor | None], *, label: str = "") -> Cutting:
    """Return the parameters of a sub-group of ZeRO 3: each is cut into equal shares.

    The shares of one rank follow each other in its part; the last ones end with padding, and
    a rank may hold nothing else, in which case nobody misses its part.
    """
    cutting = _Cutter(parts, label)
    offset = 0
    for name, shape in group.items():
        length = share_length(shape, len(parts))
        cutting.add(name, shape, list(_shares(shape, len(parts), offset)))
        offset += length
    return cutting.done()


def from_fragments(
    shapes: Shapes, ranks: Sequence[Mapping[str, StoredTensor] | None], *, label: str = ""
) -> Cutting:
    """Return frozen parameters, of which each rank has a share of its own (ZeRO 3)."""
    fragments: dict[str, Fragment] = {}
    lost: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parts = [None if rank is None else rank.get(name) for rank in ranks]
        one = from_shares({name: shape}, parts, label=label)
        fragments |= one.fragments
        lost |= one.lost
    return Cutting(fragments, lost)


def addresses(
    group: Shapes, *, count: int, part: int, paddings: Sequence[int] = ()
) -> dict[str, Address]:
    """Return what one of *count* partitions holds, as ``param_slice_mappings`` tells it."""
    length = partition_length(group_numel(group, paddings), count)
    first, last = part * length, (part + 1) * length
    found: dict[str, Address] = {}
    offset = 0
    for position, (name, shape) in enumerate(group.items()):
        begin, stop = max(offset, first), min(offset + numel(shape), last)
        if begin < stop:
            found[name] = Address(begin - first, stop - begin)
        offset += numel(shape) + (paddings[position] if position < len(paddings) else 0)
    return found


def _shares(shape: tuple[int, ...], count: int, offset: int) -> Iterator[tuple[int, int, int]]:
    length, left = share_length(shape, count), numel(shape)
    for part in range(count):
        if left <= 0:
            return
        yield part, offset, offset + min(length, left)
        left -= length


class _Cutter:
    """Collects the parameters of one group."""

    def __init__(self, parts: Sequence[StoredTensor | None], label: str) -> None:
        self._parts = parts
        self._label = label
        self._fragments: dict[str, Fragment] = {}
        self._lost: dict[str, tuple[int, ...]] = {}
        there = (part.dtype for part in parts if part is not None and part.dtype)
        self._dtype = next(there, "F32")

    def add(self, name: str, shape: tuple[int, ...], spans: Sequence[tuple[int, int, int]]) -> None:
        """Add a parameter that lies in *spans*: part, first element, element behind the last."""
        pieces: list[StoredTensor] = []
        lost: list[int] = []
        for number, start, stop in spans:
            part = self._parts[number]
            try:
                if part is None:
                    raise ValueError("the part is not there")
                pieces.append(cut(part, start, stop, name=f"{name}@{self._label}{number}"))
            except ValueError:
                lost.append(number)
        # Parts that are too short leave a parameter without its end, with none to blame.
        found = sum(stop - start for _, start, stop in spans)
        if lost or found < numel(shape):
            self._lost[name] = tuple(lost)
        else:
            self._fragments[name] = Fragment(self._dtype, shape, tuple(pieces))

    def done(self) -> Cutting:
        return Cutting(self._fragments, self._lost)
