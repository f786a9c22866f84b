"""Shapes of stored tensors, from the recipes that read them and the shapes of what these make.

An index of a real checkpoint has names only. What its plan makes of a tensor tells how it is
shaped: a stacked parameter is cut into its elements, a slice says where it lies, and all slices
together say how long the whole is. Where that leaves a choice, :class:`AmbiguousError` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from infer_equal import put, type_of

from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Node,
    Permute,
    RecipeError,
    Select,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
    sources,
)

__all__ = ["AmbiguousError", "stored_types"]

Shape = tuple[int, ...]
Env = Mapping[str, int]


class AmbiguousError(ValueError):
    """The recipes leave a choice, or contradict each other."""


class _Extent(NamedTuple):
    """What is read of one dimension, and how long it is if that is known."""

    start: int
    stop: int
    total: int | None


_Uses = dict[str, list[list[_Extent]]]


def stored_types(
    truth: Iterable[tuple[str, Node]],
    model: Mapping[str, TensorType],
    known: Callable[[str], Shape | None],
) -> dict[str, TensorType]:
    """Return the type of each tensor that the recipes of *truth* read; dtypes are the model's.

    *known* gives shapes that the code of the model tells: of tensors that are cut up in a way that
    does not say how they are stored. What comes out is checked: of it each recipe makes the shape
    that the model has.
    """
    pairs = list(truth)
    uses: _Uses = {}
    dtypes: dict[str, str | None] = {}
    for target, node in pairs:
        whole = [_Extent(0, n, n) for n in model[target].shape or ()]
        for name, extents in _back(node, whole, target, {}):
            uses.setdefault(name, []).extend([extents] if extents is not None else [])
            dtypes[name] = model[target].dtype
    types = {
        name: TensorType(dtypes[name], known(name) or _joined(name, found))
        for name, found in uses.items()
    }
    for target, node in pairs:
        try:
            made = type_of(node, types).shape
        except RecipeError as error:
            raise AmbiguousError(f"{target!r}: {error}") from error
        if made != model[target].shape:
            raise AmbiguousError(f"{target!r} would be {made}, and is {model[target].shape}")
    return types


def _back(
    node: Node, read: Sequence[_Extent], target: str, env: Env
) -> Iterator[tuple[str, list[_Extent] | None]]:
    """Yield what *read* of *node* reads of each tensor; None where no node tells."""
    match node:
        case Source(name):
            yield put(name, env), list(read)
        case Cast(of, _):
            yield from _back(of, read, target, env)
        case Stack(of, over, count):
            for value in range(count or 0):
                yield from _back(of, read[1:], target, {**env, over: value})
        case Concat((first, second), dim) if "gate_up" in target:
            half = read[dim].stop // 2  # one is multiplied with the other
            for part in (first, second):
                yield from _back(part, _with(read, dim, _Extent(0, half, half)), target, env)
        case Chunk(of, dim, count, part):
            width = read[dim].stop
            place = _Extent(part * width, (part + 1) * width, count * width)
            yield from _back(of, _with(read, dim, place), target, env)
        case Slice(of, dim, start, stop):
            yield from _back(of, _with(read, dim, _Extent(start, stop, None)), target, env)
        case Select(of, index, dim):
            place = _Extent(int(index), int(index) + 1, None)
            yield from _back(of, [*read[:dim], place, *read[dim:]], target, env)
        case Transpose(of, a, b):
            yield from _back(of, _with(_with(read, a, read[b]), b, read[a]), target, env)
        case Permute(of, dims):
            inner = [read[dims.index(d)] for d in range(len(dims))]
            yield from _back(of, inner, target, env)
        case _:
            for leaf in sources(node):
                yield put(leaf.name, env), None


def _with(read: Sequence[_Extent], dim: int, extent: _Extent) -> list[_Extent]:
    return [*read[:dim], extent, *read[dim + 1 :]]


def _joined(name: str, found: Sequence[Sequence[_Extent]]) -> Shape:
    """Return the shape of which these are the parts that are read."""
    if not found:
        raise AmbiguousError(f"{name!r}: what is made of it does not tell how it is stored")
    if len({len(extents) for extents in found}) > 1:
        raise AmbiguousError(f"{name!r} would have several numbers of dimensions")
    return tuple(_size(name, dim, each) for dim, each in enumerate(zip(*found, strict=True)))


def _size(name: str, dim: int, extents: Sequence[_Extent]) -> int:
    totals = {e.total for e in extents if e.total is not None}
    if len(totals) > 1:
        raise AmbiguousError(f"dimension {dim} of {name!r} would be any of {sorted(totals)}")
    if totals:
        return totals.pop()
    end = 0
    for extent in sorted(extents):
        if extent.start > end:
            raise AmbiguousError(f"nothing reads {end} to {extent.start} of {name!r}")
        end = max(end, extent.stop)
    return end
