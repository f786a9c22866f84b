"""Whether two recipes make the same tensor, whatever the stored ones hold.

Each element of what a recipe makes is one element of one stored tensor. Which one is worked out for
positions, so that tensors of any size can be compared: for all of them, or for the corners and
many drawn at random.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Interleave,
    Node,
    Permute,
    RecipeError,
    Reshape,
    Select,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
    mapped,
    sources,
)

__all__ = ["equal", "put", "type_of"]

Types = Mapping[str, TensorType]
Env = Mapping[str, int]
Positions = Sequence[Any]
"""An array of indices for each dimension."""

_MOST = 1 << 12
"""Positions that are compared; of a larger tensor so many are drawn."""


def equal(one: Node, other: Node, stored: Types) -> bool:
    """Tell whether two recipes make the same of tensors of these types."""
    if one == other:
        return True
    if isinstance(one, Source) and isinstance(other, Source):
        return False
    try:
        first, second = _counted(one, stored), _counted(other, stored)
        shape = type_of(first, stored).shape
        if shape is None or shape != type_of(second, stored).shape:
            return False
        at = _positions(shape)
        return bool((_origin(first, at, stored, {}) == _origin(second, at, stored, {})).all())
    except (KeyError, ValueError, RecipeError):
        return False


def type_of(node: Node, stored: Types, env: Env | None = None) -> TensorType:
    """Return the type of *node*; the first element of a stack stands for all."""
    return infer(node, lambda name: stored[put(name, env or {}, first=True)], {})


def _counted(node: Node, stored: Types) -> Node:
    """Return *node* with the number of elements of each stack."""

    def count(each: Node) -> Node:
        if not isinstance(each, Stack) or each.count is not None:
            return each
        name = next(sources(each)).name
        n = 0
        while put(name, {each.over: n}, first=True) in stored:
            n += 1
        return replace(each, count=n)

    return mapped(node, count)


def put(name: str, env: Env, *, first: bool = False) -> str:
    """Return *name* with its variables filled in; with *first*, those that are left with 0."""
    for key, value in env.items():
        name = name.replace(f"{{{key}}}", str(value))
    return re.sub(r"\{\w+\}", "0", name) if first else name


def _positions(shape: Sequence[int]) -> Positions:
    """Return all positions of a small tensor, the corners and a draw of those of a large one."""
    total = math.prod(shape)
    if total <= _MOST:
        return list(np.unravel_index(np.arange(total), shape)) if shape else []
    drawn = np.random.default_rng(total).integers(0, shape, (_MOST, len(shape)))
    corners = np.array([*product(*((0, n - 1) for n in shape))], dtype=np.int64)
    return list(np.concatenate([drawn, corners]).T)


def _origin(node: Node, at: Positions, stored: Types, env: Env) -> Any:
    """Return where each position comes from: rows of the tensor's number and the element's."""
    match node:
        case Source(name):
            name = put(name, env)
            flat = np.ravel_multi_index(tuple(at), stored[name].shape or ()) if at else 0
            number = np.int64(zlib.crc32(name.encode()))
            return np.stack(np.broadcast_arrays(number, np.atleast_1d(flat)), -1)
        case Cast(of, _):
            return _origin(of, at, stored, env)
        case Concat() | Interleave() | Stack():
            return _spread(node, at, stored, env)
        case Chunk(of, dim, count, part):
            width = _shape(of, stored, env)[dim] // count
            return _origin(of, _moved(at, dim, width * part), stored, env)
        case Slice(of, dim, start, _):
            return _origin(of, _moved(at, dim, start), stored, env)
        case Select(of, index, dim):
            here = np.full(len(at[0]), int(index))
            return _origin(of, [*at[:dim], here, *at[dim:]], stored, env)
        case Transpose(of, a, b):
            order = list(at)
            order[a], order[b] = at[b], at[a]
            return _origin(of, order, stored, env)
        case Permute(of, dims):
            return _origin(of, [at[dims.index(d)] for d in range(len(dims))], stored, env)
        case Reshape(of, _):
            flat = np.ravel_multi_index(tuple(at), _shape(node, stored, env))
            return _origin(of, list(np.unravel_index(flat, _shape(of, stored, env))), stored, env)
        case _:
            raise ValueError(f"no way to compare a {type(node).__name__}")


def _shape(node: Node, stored: Types, env: Env) -> tuple[int, ...]:
    shape = type_of(node, stored, env).shape
    if shape is None:
        raise ValueError("a shape is not known")
    return shape


def _moved(at: Positions, dim: int, by: int) -> Positions:
    return [*at[:dim], at[dim] + by, *at[dim + 1 :]]


def _spread(node: Concat | Interleave | Stack, at: Positions, stored: Types, env: Env) -> Any:
    """Ask each part for the positions that lie in it."""
    found = np.full((len(at[0]), 2), -1, dtype=np.int64)
    for part, inner, here, there in _parts(node, at, stored, env):
        if here.any():
            found[here] = _origin(part, [axis[here] for axis in there], stored, inner)
    return found


def _parts(
    node: Concat | Interleave | Stack, at: Positions, stored: Types, env: Env
) -> Iterator[tuple[Node, Env, Any, Positions]]:
    """Yield each part, its variables, which positions lie in it, and where there."""
    match node:
        case Stack(of, over, count):
            for value in range(count or 0):
                yield of, {**env, over: value}, at[0] == value, at[1:]
        case Concat(parts, dim):
            start = 0
            for part in parts:
                stop = start + _shape(part, stored, env)[dim]
                here = (at[dim] >= start) & (at[dim] < stop)
                yield part, env, here, _moved(at, dim, -start)
                start = stop
        case Interleave(parts, dim):
            for number, part in enumerate(parts):
                there = [*at[:dim], at[dim] // len(parts), *at[dim + 1 :]]
                yield part, env, at[dim] % len(parts) == number, there
