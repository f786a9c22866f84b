"""Tracing: running a conversion on tensors without data, to learn its recipe.

A :class:`Traced` tensor has a shape and a dtype and the recipe that makes it. What torch does to
it, seen below autograd where a handful of primitive operations is left, gives another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelquirks.planner.dtypes import from_torch, to_torch
from modelquirks.quirks.recipe import (
    Cast,
    Concat,
    Node,
    Permute,
    Reshape,
    Slice,
    Transpose,
)

__all__ = ["Traced", "UntraceableError"]


class UntraceableError(RuntimeError):
    """A conversion does something that no recipe can say; the message names the operation."""


class Traced(torch.Tensor):
    """A tensor without storage that knows how it is made."""

    node: Node

    @staticmethod
    def __new__(cls: type[Traced], node: Node, shape: Sequence[int], dtype: torch.dtype) -> Traced:
        """Return a tensor of that shape and dtype, made by *node*."""
        traced = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        traced.node = node
        return traced

    @classmethod
    def source(cls, node: Node, dtype: str, shape: Sequence[int]) -> Traced:
        """Return a tensor of the checkpoint; *dtype* as safetensors spells it."""
        return cls(node, shape, to_torch(dtype))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the recipe: there are no values to show."""
        return f"Traced({self.node})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it as a class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record *func*, or raise :class:`UntraceableError`."""
        rule = _RULES.get(func.overloadpacket)
        if rule is None:
            raise UntraceableError(f"{func} has no recipe")
        return rule(*args, **(kwargs or {}))


def _made(node: Node, like: Traced, shape: Sequence[int]) -> Traced:
    return Traced(node, shape, like.dtype)


def _dim(tensor: torch.Tensor, dim: int, extra: int = 0) -> int:
    return dim % (tensor.dim() + extra)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    tensors = [t for t in tensors if tuple(t.shape) != (0,)]
    dim = _dim(tensors[0], dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError("tensors of several dtypes are joined")
    rests = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if len(rests) > 1:
        shapes = ", ".join(str(list(t.shape)) for t in tensors[:6])
        raise ValueError(f"tensors of shapes {shapes} are joined along dimension {dim}")
    return _made(Concat(tuple(t.node for t in tensors), dim), tensors[0], shape)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first, dim = tensors[0], _dim(tensors[0], dim, 1)
    odd = [t for t in tensors if t.shape != first.shape]
    if odd:
        shapes = f"{list(first.shape)} and {list(odd[0].shape)}"
        raise ValueError(f"tensors of shapes {shapes} are stacked")
    single = (*first.shape[:dim], 1, *first.shape[dim:])
    nodes = tuple(Reshape(t.node, single) for t in tensors)
    return _made(Concat(nodes, dim), first, (*single[:dim], len(tensors), *single[dim + 1 :]))


def _slice(
    tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Traced:
    if step != 1:
        raise UntraceableError("every other element of a tensor is taken")
    dim = _dim(tensor, dim)
    size = tensor.shape[dim]
    low, high, _ = slice(start, end).indices(size)
    if (low, high) == (0, size):
        return tensor
    shape = (*tensor.shape[:dim], max(high - low, 0), *tensor.shape[dim + 1 :])
    return _made(Slice(tensor.node, dim, low, max(high, low)), tensor, shape)


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Traced:
    return _slice(tensor, dim, start, start + length)


def _split(tensor: Traced, size: Any, dim: int = 0) -> list[Traced]:
    dim = _dim(tensor, dim)
    total = tensor.shape[dim]
    sizes = [size] * -(-total // size) if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(tensor, dim, a, min(a + n, total)) for a, n in zip(starts, sizes, strict=True)]


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    dim = _dim(tensor, dim)
    start = index % tensor.shape[dim]
    row = _slice(tensor, dim, start, start + 1)
    return _view(row, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]))


def _unbind(tensor: Traced, dim: int = 0) -> list[Traced]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _t(tensor: Traced) -> Traced:
    return _transpose(tensor, 0, 1) if tensor.dim() == 2 else tensor


def _reshape_alias(tensor: Traced, shape: Sequence[int], strides: Sequence[int]) -> Traced:
    del strides
    return _view(tensor, shape)


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    dim0, dim1 = sorted((_dim(tensor, dim0), _dim(tensor, dim1)))
    shape = list(tensor.shape)
    shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
    return _made(Transpose(tensor.node, dim0, dim1), tensor, shape)


def _permute(tensor: Traced, dims: Sequence[int]) -> Traced:
    order = tuple(_dim(tensor, dim) for dim in dims)
    return _made(Permute(tensor.node, order), tensor, [tensor.shape[dim] for dim in order])


def _view(tensor: Traced, shape: Sequence[int]) -> Traced:
    sizes = list(shape)
    if -1 in sizes:
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        sizes[sizes.index(-1)] = tensor.numel() // known
    if sizes == list(tensor.shape):
        return tensor
    return _made(Reshape(tensor.node, tuple(sizes)), tensor, sizes)


def _squeeze(tensor: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(tensor, d) for d in dims if tensor.shape[_dim(tensor, d)] == 1}
    return _view(tensor, [size for d, size in enumerate(tensor.shape) if d not in gone])


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    dim = _dim(tensor, dim, 1)
    return _view(tensor, (*tensor.shape[:dim], 1, *tensor.shape[dim:]))


def _same(tensor: Traced, *_: Any, **__: Any) -> Traced:
    return tensor


def _to_copy(tensor: Traced, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    if dtype is None or dtype == tensor.dtype:
        return tensor
    if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        raise UntraceableError(f"{tensor.dtype} is cast to {dtype}")
    return Traced(Cast(tensor.node, from_torch(dtype)), tensor.shape, dtype)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.slice: _slice,
    _aten.narrow: _narrow,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.select: _select,
    _aten.transpose: _transpose,
    _aten.t: _t,
    _aten.permute: _permute,
    _aten.view: _view,
    _aten._unsafe_view: _view,
    _aten.reshape: _view,
    _aten._reshape_alias: _reshape_alias,
    _aten.squeeze: _squeeze,
    _aten.unsqueeze: _unsqueeze,
    _aten.unbind: _unbind,
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.alias: _same,
    _aten.contiguous: _same,
    _aten._to_copy: _to_copy,
    _aten.to: _to_copy,
}
