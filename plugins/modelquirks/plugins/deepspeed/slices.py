"""How the slices of a tensor-parallel parameter go together, as the checkpoint itself says.

Only ``universal_checkpoint_info`` tells: its ``affine_map`` where there is one, else its patterns
(DeepSpeed 0.19.8, ``checkpoint/ds_to_universal.py``). Without it the dimension is not in the
checkpoint, and no guess is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.place_tensors import dense_stride
from modelquirks.planner.expressions import may_run_on
from modelquirks.plugins.deepspeed.parameter import Take
from modelquirks.plugins.deepspeed.saved import mapping, names, whole

__all__ = ["Joining", "joining"]

Shape = tuple[int, ...]

_NOT_JOINED = (
    "autotp_unsupported_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params",
)


_MAX_NAME = 512
"""A pattern with three stars takes as many steps as its cube."""


class Joining(NamedTuple):
    """The shape of the whole, and the slabs of the slices that make it, along *dim*."""

    shape: Shape
    dim: int
    takes: tuple[Take, ...]
    """``()``: the first slice is the whole."""


def joining(name: str, slices: Sequence[Shape], universal: Mapping[str, Any]) -> Joining | None:
    """Return how *slices*, one a tensor-parallel rank, make the parameter; None if not known.

    ``affine_map`` counts if each of its pieces is a slab, full in all dimensions but one. Of the
    patterns those are followed that replicate or join in one dimension.
    """
    if len(slices) == 1:
        return Joining(slices[0], 0, ())
    try:
        return _joining(name, slices, universal)
    except _OddPattern:
        return None


def _joining(name: str, slices: Sequence[Shape], universal: Mapping[str, Any]) -> Joining | None:
    params = mapping(mapping(universal.get("affine_map")).get("params"))
    if entry := params.get(f"^{re.escape(name)}$"):  # as AutoTP writes them
        return _affine(mapping(entry), slices)
    for pattern, entry in params.items():
        if _fits(pattern, name):
            return _affine(mapping(entry), slices)
    return _by_patterns(name, slices, universal)


def _by_patterns(
    name: str, slices: Sequence[Shape], universal: Mapping[str, Any]
) -> Joining | None:
    def listed(key: str) -> bool:
        patterns = universal.get(key)
        texts = [*patterns] if isinstance(patterns, dict) else names(patterns)
        return any(_fits(pattern, name) for pattern in texts)

    if not universal or any(listed(key) or _structured(universal, key) for key in _NOT_JOINED):
        return None
    if listed("tp_replicated_parameter_patterns"):
        return Joining(slices[0], 0, ()) if len(set(slices)) == 1 else None
    dim = 1 if listed("parameter_with_row_parallelism_patterns") else 0
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in slices}
    if any(len(shape) <= dim for shape in slices) or len(rest) != 1:
        return None
    total = sum(shape[dim] for shape in slices)
    if dim == 0 and listed("vocabulary_parameter_patterns"):
        total = min(total, whole(universal.get("original_vocab_size")) or total)
    return _along(slices, dim, total)


def _along(slices: Sequence[Shape], dim: int, total: int) -> Joining:
    """Join in order; what goes beyond *total*, the padding of a vocabulary, is dropped."""
    takes: list[Take] = []
    left = total
    for number, shape in enumerate(slices):
        if (stop := min(shape[dim], left)) > 0:
            takes.append(Take(number, 0, stop))
        left -= shape[dim]
    shape = (*slices[0][:dim], total, *slices[0][dim + 1 :])
    return Joining(shape, dim, tuple(takes))


def _structured(universal: Mapping[str, Any], key: str) -> bool:
    """Tell whether entries of *key* have a form of their own, whose patterns are not looked at."""
    value = universal.get(key)
    return isinstance(value, list | tuple) and any(not isinstance(item, str) for item in value)


class _OddPattern(ValueError):
    """A pattern that might run for ever, or is none."""


def _fits(pattern: Any, name: str) -> bool:
    if len(name) > _MAX_NAME:
        raise _OddPattern(name)
    return isinstance(pattern, str) and _compiled(pattern).match(name) is not None


@lru_cache(maxsize=1 << 14)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the checkpoint, which may be anybody's: none that takes for ever."""
    if may_run_on(pattern, repeats=3):
        raise _OddPattern(pattern)
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _OddPattern(pattern) from error


def _affine(entry: Mapping[Any, Any], slices: Sequence[Shape]) -> Joining | None:
    logical = _numbers(entry.get("logical_shape"))
    ranks = mapping(entry.get("ranks"))
    if logical is None or not logical:
        return None
    slabs: dict[tuple[int, int, int], Take] = {}
    for number, shape in enumerate(slices):
        rank = mapping(ranks.get(number, ranks.get(str(number))))
        pieces = rank.get("pieces")
        if _numbers(rank.get("shard_shape")) != shape or not isinstance(pieces, list):
            return None
        for piece in pieces:
            slab = _slab(mapping(piece), logical, shape)
            if slab is None:
                return None
            dim, at, start, length = slab
            slabs.setdefault((dim, at, length), Take(number, start, start + length))
    return _complete(logical, slabs)


def _complete(logical: Shape, slabs: Mapping[tuple[int, int, int], Take]) -> Joining | None:
    """Return the slabs in order if they are of one dimension and leave no gap."""
    # A slab that is everything has no dimension of its own: all slices are copies then.
    if whole_ones := [take for (dim, _, _), take in slabs.items() if dim < 0]:
        return Joining(logical, 0, ()) if whole_ones[0].fragment == 0 else None
    dims = {dim for dim, _, _ in slabs}
    if len(dims) != 1:
        return None
    dim, end = dims.pop(), 0
    for _, at, length in sorted(slabs):
        if at != end:
            return None
        end += length
    if end != logical[dim]:
        return None
    return Joining(logical, dim, tuple(slabs[key] for key in sorted(slabs)))


def _slab(
    piece: Mapping[Any, Any], logical: Shape, shard: Shape
) -> tuple[int, int, int, int] | None:
    """Return dimension, place in the whole, place in the slice and length of a piece.

    The dimension is -1 for a piece that is all of both.
    """
    shape = _numbers(piece.get("shape"))
    source, dest = _place(piece.get("source")), _place(piece.get("dest"))
    if shape is None or source is None or dest is None or len(shape) != len(logical):
        return None
    if len(shard) != len(logical):
        return None
    if source[1] != dense_stride(logical) or dest[1] != dense_stride(shard):
        return None
    if shape == logical == shard:
        return (-1, 0, 0, shape[0]) if source[0] == dest[0] == 0 else None
    cut = [dim for dim in range(len(shape)) if not shape[dim] == logical[dim] == shard[dim]]
    if len(cut) != 1:
        return None
    dim = cut[0]
    (at, rest), (start, odd) = divmod(source[0], source[1][dim]), divmod(dest[0], dest[1][dim])
    fits = at + shape[dim] <= logical[dim] and start + shape[dim] <= shard[dim]
    return (dim, at, start, shape[dim]) if fits and not rest and not odd else None


def _place(value: Any) -> tuple[int, Shape] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    offset, stride = whole(value[0]), _numbers(value[1])
    return None if offset is None or stride is None else (offset, stride)


def _numbers(value: Any) -> Shape | None:
    if not isinstance(value, list | tuple):
        return None
    found = tuple(number for item in value if (number := whole(item)) is not None)
    return found if len(found) == len(value) else None
