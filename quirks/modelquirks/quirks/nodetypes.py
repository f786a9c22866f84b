"""Types of recipes: the dtype and shape that a node gives, from those of its sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Dequantize,
    Interleave,
    Join,
    Merge,
    Node,
    Opaque,
    Peek,
    Permute,
    RecipeError,
    Reshape,
    Scheme,
    Select,
    Settings,
    Slice,
    Source,
    Split,
    Stack,
    TensorType,
    Transpose,
    View,
)

__all__ = ["infer", "settings_of"]

Lookup = Callable[[str], TensorType]


def infer(
    node: Node, lookup: Lookup, schemes: Mapping[str, Scheme], peek: Peek | None = None
) -> TensorType:
    """Return dtype and shape of *node*, or raise :class:`RecipeError` saying why there is none.

    *lookup* gives the type of a source; a source without shape makes the result shapeless.
    Without *peek*, so does a packed weight whose shape no header tells.

    >>> infer(Concat((Source("a"), Source("b"))), {"a": TensorType("F32", (2, 3)),
    ...       "b": TensorType("F32", (4, 3))}.__getitem__, {})
    TensorType(dtype='F32', shape=(6, 3))
    """

    def of(inner: Node) -> TensorType:
        return infer(inner, lookup, schemes, peek)

    match node:
        case Source(name):
            return lookup(name)
        case Cast(inner, dtype):
            return TensorType(dtype, of(inner).shape)
        case Concat(parts, dim):
            return _concat([of(part) for part in parts], dim)
        case Interleave(parts, dim):
            types = [of(part) for part in parts]
            _same("interleaved parts", types)
            return _concat(types, dim)
        case Stack(inner, _, count):
            return _stack(of(inner), _counted(count))
        case Join(inner, _, dim, count):
            return _concat([of(inner)] * _counted(count), dim)
        case Select(inner, _, dim):
            return _select(of(inner), dim)
        case Chunk(inner, dim, count, part):
            return _chunk(of(inner), dim, count, part)
        case Slice(inner, dim, start, stop):
            return _slice(of(inner), dim, start, stop)
        case Split() | View():
            what = type(node).__name__.lower()
            raise RecipeError(f"sizes of the {what} are not known: config.json does not give them")
        case Transpose(inner, dim0, dim1):
            return _transpose(of(inner), dim0, dim1)
        case Permute(inner, dims):
            return _permute(of(inner), dims)
        case Reshape(inner, shape):
            return _reshape(of(inner), shape)
        case Dequantize(scheme, packed):
            types_by_role = {role: of(inner) for role, inner in packed}
            _known_scheme(scheme, types_by_role, schemes)
            if any(t.shape is None for t in types_by_role.values()):
                return TensorType(None, None)
            return schemes[scheme].infer(types_by_role, settings_of(node, peek))
        case Merge(scheme, merged):
            return _merged(scheme, {role: of(inner) for role, inner in merged}, node, schemes)
        case Opaque(scheme, parts, dtype, shape):
            types_by_role = {str(number): of(part) for number, part in enumerate(parts)}
            _known_scheme(scheme, types_by_role, schemes)
            return TensorType(dtype, shape)


def settings_of(node: Dequantize | Merge | Opaque, peek: Peek | None = None) -> Settings:
    """Return the settings of a node, with what *peek* finds in the values of its parts."""
    settings = dict(node.settings)
    if peek is not None and isinstance(node, Dequantize):
        settings |= peek(node)
    return settings


def _merged(
    scheme: str, parts: Mapping[str, TensorType], node: Merge, schemes: Mapping[str, Scheme]
) -> TensorType:
    """Return the type of a weight with an adapter in it: that of the weight."""
    if scheme not in schemes:
        raise RecipeError(f"no plugin knows how to merge an adapter of the kind {scheme!r}")
    if any(type_.shape is None for type_ in parts.values()):
        return parts["weight"]
    return schemes[scheme].infer(parts, settings_of(node))


def _known_scheme(
    scheme: str, parts: Mapping[str, TensorType], schemes: Mapping[str, Scheme]
) -> None:
    if scheme not in schemes:
        raise RecipeError(
            f"stored packed as {scheme!r} ({', '.join(parts)}), "
            "and no plugin knows how to make a plain weight of that"
        )


def _counted(count: int | None) -> int:
    if count is None:
        raise RecipeError("the number of tensors to stack is not known")
    if count < 1:
        raise RecipeError("nothing to stack")
    return count


def _same(what: str, types: list[TensorType]) -> None:
    known = {t for t in types if t.shape is not None}
    if len(known) > 1:
        listed = ", ".join(sorted(map(str, known)))
        raise RecipeError(f"{what} are not alike: {listed}")


def _dim(shape: tuple[int, ...], dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise RecipeError(f"shape {list(shape)} has no dimension {dim}")
    return dim


def _concat(types: list[TensorType], dim: int) -> TensorType:
    if not types:
        raise RecipeError("nothing to join")
    dtypes = sorted({t.dtype for t in types if t.dtype is not None})
    if len(dtypes) > 1:
        raise RecipeError(f"parts have different dtypes: {', '.join(dtypes)}")
    dtype = next(iter(dtypes), None)
    known = [t.shape for t in types if t.shape is not None]
    if len(known) < len(types):
        return TensorType(dtype, None)
    rests = {s[: _dim(s, dim)] + s[dim + 1 :] for s in known}
    if len(rests) > 1:
        listed = ", ".join(str(list(s)) for s in known)
        raise RecipeError(f"shapes {listed} cannot be joined along dimension {dim}")
    first = known[0]
    total = sum(s[dim] for s in known)
    return TensorType(dtype, (*first[:dim], total, *first[dim + 1 :]))


def _stack(of: TensorType, count: int) -> TensorType:
    return TensorType(of.dtype, None if of.shape is None else (count, *of.shape))


def _select(of: TensorType, dim: int) -> TensorType:
    if of.shape is None:
        return of
    _dim(of.shape, dim)
    return TensorType(of.dtype, (*of.shape[:dim], *of.shape[dim + 1 :]))


def _chunk(of: TensorType, dim: int, count: int, part: int) -> TensorType:
    if count < 1 or not 0 <= part < count:
        raise RecipeError(f"there is no part {part} of {count}")
    if of.shape is None:
        return of
    size = of.shape[_dim(of.shape, dim)]
    if size % count:
        raise RecipeError(f"dimension {dim} of {of} cannot be cut into {count} equal parts")
    return TensorType(of.dtype, (*of.shape[:dim], size // count, *of.shape[dim + 1 :]))


def _slice(of: TensorType, dim: int, start: int, stop: int) -> TensorType:
    if of.shape is None:
        return of
    size = of.shape[_dim(of.shape, dim)]
    if not 0 <= start <= stop <= size:
        raise RecipeError(f"rows {start} to {stop} are outside of dimension {dim} of {of}")
    return TensorType(of.dtype, (*of.shape[:dim], stop - start, *of.shape[dim + 1 :]))


def _transpose(of: TensorType, dim0: int, dim1: int) -> TensorType:
    if of.shape is None:
        return of
    order = list(of.shape)
    a, b = _dim(of.shape, dim0), _dim(of.shape, dim1)
    order[a], order[b] = order[b], order[a]
    return TensorType(of.dtype, tuple(order))


def _permute(of: TensorType, dims: tuple[int, ...]) -> TensorType:
    if of.shape is None:
        return of
    if sorted(dims) != list(range(len(of.shape))):
        raise RecipeError(f"{list(dims)} is no order of the dimensions of {of}")
    return TensorType(of.dtype, tuple(of.shape[dim] for dim in dims))


def _reshape(of: TensorType, shape: tuple[int, ...]) -> TensorType:
    if of.shape is None:
        return TensorType(of.dtype, None if -1 in shape else shape)
    count, known = math.prod(of.shape), math.prod(size for size in shape if size != -1)
    free = shape.count(-1)
    if free > 1 or (free == 0 and known != count) or (free and (not known or count % known)):
        raise RecipeError(f"{of} cannot be reshaped to {list(shape)}")
    return TensorType(of.dtype, tuple(count // known if size == -1 else size for size in shape))
