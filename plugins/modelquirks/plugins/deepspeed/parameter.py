"""``Parameter``: one tensor of the training model and where its bytes are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import BITS
from modelquirks.quirks.recipe import Concat, Node, Reshape, Slice, Source

__all__ = ["Fragment", "Origin", "Parameter", "Take", "cut", "recipe", "whole_tensor"]

Origin = Literal["master", "training", "frozen", "buffer"]
"""``master``: fp32, of the optimizer; ``training``: as the module had it, rounded if that was
bf16; ``frozen``: not trained, so in the module's dtype only; ``buffer``: no parameter."""


class Fragment(NamedTuple):
    """What one model-parallel rank has of a parameter: its pieces in a row, then reshaped."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredTensor, ...]
    """1-D, or one tensor of this very shape. Their names are unique in a checkpoint."""


class Take(NamedTuple):
    """A slab of one fragment: its number, and where it begins and ends in the dimension joined."""

    fragment: int
    start: int
    stop: int


class Parameter(NamedTuple):
    """Slabs of fragments, one after the other along *dim*; usually one fragment, whole."""

    name: str
    origin: Origin
    dtype: str
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    dim: int = 0
    takes: tuple[Take, ...] = ()
    """``()``: the first fragment as it is."""

    @property
    def pieces(self) -> Iterator[StoredTensor]:
        """The byte ranges that are read, in order."""
        if not self.takes:
            yield from self.fragments[0].pieces
        for number in dict.fromkeys(take.fragment for take in self.takes):
            yield from self.fragments[number].pieces


def whole_tensor(stored: StoredTensor, *, name: str) -> Fragment | None:
    """Return a stored tensor as a fragment, called *name*; None if its bytes are not there."""
    if stored.begin is None or stored.dtype is None or stored.shape is None:
        return None
    return Fragment(stored.dtype, stored.shape, (stored._replace(name=name),))


def cut(flat: StoredTensor, start: int, stop: int, *, name: str) -> StoredTensor:
    """Return elements *start* to *stop* of a 1-D tensor; ValueError if it does not have them.

    >>> cut(StoredTensor("g", "f.pt", "F32", (10,), 64, 104), 2, 5, name="a")[4:6]
    (72, 84)
    """
    if flat.begin is None or flat.dtype is None or flat.shape is None or flat.stride is not None:
        raise ValueError(f"{flat.name!r} of {flat.shard!r} is no dense tensor that is there")
    if not 0 <= start <= stop <= math.prod(flat.shape):
        raise ValueError(f"{flat.name!r} of {flat.shard!r} has no elements {start} to {stop}")
    size = BITS[flat.dtype] // 8
    begin = flat.begin + start * size
    end = flat.begin + stop * size
    return StoredTensor(name, flat.shard, flat.dtype, (stop - start,), begin, end)


def recipe(parameter: Parameter) -> Node:
    """Return how the parameter is made of its pieces, by their names.

    ValueError for a parameter without elements, of which nothing is stored.
    """
    if not any(True for _ in parameter.pieces):
        raise ValueError(f"{parameter.name!r} has no elements")
    if not parameter.takes:
        return _made(parameter.fragments[0])
    slabs = tuple(_slab(parameter, take) for take in parameter.takes)
    return slabs[0] if len(slabs) == 1 else Concat(slabs, parameter.dim)


def _slab(parameter: Parameter, take: Take) -> Node:
    fragment = parameter.fragments[take.fragment]
    if (take.start, take.stop) == (0, fragment.shape[parameter.dim]):
        return _made(fragment)
    return Slice(_made(fragment), parameter.dim, take.start, take.stop)


def _made(fragment: Fragment) -> Node:
    sources = tuple(Source(_escaped(piece.name)) for piece in fragment.pieces)
    row: Node = sources[0] if len(sources) == 1 else Concat(sources)
    alone = len(sources) == 1 and fragment.pieces[0].shape == fragment.shape
    return row if alone else Reshape(row, fragment.shape)


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")
