"""Recipes: how a tensor of the model is made from tensors of the checkpoint.

A recipe is a small expression of frozen nodes. In a rule the leaves are patterns
(``model.layers.{layer}.mlp.experts.{expert}.w1.weight``); in a plan they are templates over the
same variables; with the variables filled in they are names in the checkpoint. The nodes know
shapes and dtypes but no tensors: evaluation, for a whole tensor or a region of it, is the
planner's business.

Dtypes are spelled as in safetensors (``BF16``, ``F8_E4M3``, ``I32``…), shapes are tuples of
element counts, dimensions count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, cast, get_args

__all__ = [
    "Cast",
    "Chunk",
    "Concat",
    "Dequantize",
    "Interleave",
    "Join",
    "Node",
    "Opaque",
    "Part",
    "Peek",
    "Permute",
    "RecipeError",
    "Region",
    "Reshape",
    "Scheme",
    "Select",
    "Setting",
    "Settings",
    "Slice",
    "Source",
    "Split",
    "Stack",
    "TensorType",
    "Transpose",
    "children",
    "from_json",
    "infer",
    "mapped",
    "settings_of",
    "sources",
    "to_json",
]


Setting = str | int | float | bool
"""A number or text that a node is parametrised with; JSON holds it as it is."""

Settings = Mapping[str, Setting]


class RecipeError(ValueError):
    """A recipe that does not fit its sources; the message is one sentence for the audit."""


class TensorType(NamedTuple):
    """Dtype and shape of a tensor. ``None`` stands for what a bare index does not tell."""

    dtype: str | None
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        """Return for example ``BF16 [32, 128]``."""
        shape = "[?]" if self.shape is None else str(list(self.shape))
        return f"{self.dtype or '?'} {shape}"


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, by name, template or pattern."""

    name: str


@dataclass(frozen=True, slots=True)
class Cast:
    """``of``, element by element in another floating-point dtype."""

    of: Node
    dtype: str


@dataclass(frozen=True, slots=True)
class Concat:
    """The parts one after another along ``dim``."""

    of: tuple[Node, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Interleave:
    """Row 0 of each part, then row 1 of each part, … along ``dim``; parts have one shape."""

    of: tuple[Node, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """``of`` for each value 0 … ``count``-1 of the variable ``over``, along a new dimension 0.

    In a rule ``count`` is None: it is counted in the checkpoint, and a gap is an error.
    """

    of: Node
    over: str
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """``of`` for each value 0 … ``count``-1 of the variable ``over``, one after another.

    As a :class:`Concat` along ``dim`` of parts that differ in one index: the ranks of a tensor
    that was cut for tensor parallelism. In a rule ``count`` is None, as that of a :class:`Stack`.
    """

    of: Node
    over: str
    dim: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """One element of ``of`` along ``dim``, which is gone from the result: the way back of a stack.

    ``index`` is a template over the variables of the target: ``{expert}``.
    """

    of: Node
    index: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part number ``part`` of ``of`` cut along ``dim`` into ``count`` equal parts."""

    of: Node
    dim: int
    count: int
    part: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``stop`` of ``of`` along ``dim``."""

    of: Node
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Split:
    """Part number ``part`` of ``of`` cut along ``dim`` into ``sizes``.

    A size is a number or a product of fields of config.json
    (``"num_attention_heads*head_dim"``). Only rules hold this node: with the config at hand it
    becomes a :class:`Slice`.
    """

    of: Node
    dim: int
    sizes: tuple[int | str, ...]
    part: int


@dataclass(frozen=True, slots=True)
class Transpose:
    """``of`` with two dimensions exchanged."""

    of: Node
    dim0: int = 0
    dim1: int = 1


@dataclass(frozen=True, slots=True)
class Permute:
    """``of`` with its dimensions in another order: dimension ``dims[i]`` becomes number i."""

    of: Node
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The elements of ``of``, in row-major order, in another shape; one size may be -1."""

    of: Node
    shape: tuple[int, ...]


class Part(NamedTuple):
    """One companion of a packed weight: its role in the scheme and the tensor."""

    role: str
    of: Node


@dataclass(frozen=True, slots=True)
class Dequantize:
    """The plain weight that packed companions stand for, computed by the scheme of that name."""

    scheme: str
    parts: tuple[Part, ...]
    settings: tuple[tuple[str, Setting], ...] = ()
    """What config.json says of this weight (bits, group size…), sorted by name."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """What code makes of whole tensors: ``scheme`` gets the sources by number, ``"0"``, ``"1"``…

    For what no other node can say. Any region of it needs all of its sources.
    """

    scheme: str
    of: tuple[Node, ...]
    dtype: str
    shape: tuple[int, ...]
    settings: tuple[tuple[str, Setting], ...] = ()


Node = (
    Source
    | Cast
    | Concat
    | Interleave
    | Stack
    | Join
    | Select
    | Chunk
    | Slice
    | Split
    | Transpose
    | Permute
    | Reshape
    | Dequantize
    | Opaque
)
_SEVERAL = (Concat, Interleave, Opaque)
"""Nodes with a tuple of nodes in ``of``."""

_OPS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Node)}


Region = tuple[tuple[int, int], ...]
"""One ``(start, stop)`` pair per dimension."""


class Scheme(Protocol):
    """How the companions of one packing are read. Quantisation plugins provide these.

    A class that names this one as its base inherits what most schemes need not say. Only
    ``evaluate`` and ``peek`` get torch tensors and may import torch.
    """

    name: str
    """As in :class:`Dequantize`: lower case, for example ``mxfp4``."""

    roles: tuple[str, ...]
    """Companions that must be there, for example ``("blocks", "scales")``."""

    peeks: tuple[str, ...] = ()
    """Companions whose *values* tell what no header does (a shape, a format)."""

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return what config.json says of *weight*, by its name in the model.

        *config* is empty if there is no such file. :class:`RecipeError` says what is lacking.
        """
        return {}

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; raise :class:`RecipeError` if the parts do not fit.

        The shape is None if only the values of ``peeks`` tell it and *settings* do not hold it.
        """
        ...

    def peek(self, values: Mapping[str, Any], settings: Settings) -> Settings:
        """Return further settings from the values of the ``peeks``, for example the shape."""
        return {}

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return, by role, the region of each part that *region* of the weight needs."""
        ...

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return the tensor of *region* from those regions of the parts, in torch *dtype*."""
        ...


Peek = Callable[[Dequantize], Settings]
"""Gives what the values of the parts of a packed weight tell; needs more than headers."""

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
        case Split():
            raise RecipeError("sizes of the split are not known: config.json does not give them")
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
        case Opaque(scheme, parts, dtype, shape):
            types_by_role = {str(number): of(part) for number, part in enumerate(parts)}
            _known_scheme(scheme, types_by_role, schemes)
            return TensorType(dtype, shape)


def settings_of(node: Dequantize | Opaque, peek: Peek | None = None) -> Settings:
    """Return the settings of a node, with what *peek* finds in the values of its parts."""
    settings = dict(node.settings)
    if peek is not None and isinstance(node, Dequantize):
        settings |= peek(node)
    return settings


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


def sources(node: Node) -> Iterator[Source]:
    """Yield the leaves of *node*, left to right; those of a :class:`Stack` once, unexpanded."""
    if isinstance(node, Source):
        yield node
    for child in children(node):
        yield from sources(child)


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return *node* with *change* applied to every node, children first."""
    match node:
        case Source():
            pass
        case Concat(of) | Interleave(of) | Opaque(_, of):
            node = replace(node, of=tuple(mapped(part, change) for part in of))
        case Dequantize(_, parts):
            changed = tuple(Part(role, mapped(of, change)) for role, of in parts)
            node = replace(node, parts=changed)
        case _:
            node = replace(node, of=mapped(node.of, change))
    return change(node)


def to_json(node: Node) -> dict[str, Any]:
    """Return *node* as plain data, for the plan file."""
    data: dict[str, Any] = {"op": type(node).__name__.lower()}
    for field in fields(node):
        value = getattr(node, field.name)
        if field.name == "parts":
            value = [{"role": role, "of": to_json(of)} for role, of in value]
        elif field.name == "of":
            value = [to_json(v) for v in value] if isinstance(value, tuple) else to_json(value)
        elif field.name == "settings":
            value = dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        data[field.name] = value
    return data


def from_json(data: Any) -> Node:
    """Return the node that :func:`to_json` wrote; :class:`RecipeError` if it is none."""
    try:
        kind = _OPS[data["op"]]
        values = {f.name: _field_from_json(f.name, data[f.name]) for f in fields(kind)}
        if len(values) + 1 != len(data):
            raise RecipeError(f"unknown fields in recipe node {data['op']!r}")
        if isinstance(values.get("of"), tuple) != (kind in _SEVERAL):
            raise TypeError(f"'of' of {data['op']!r} has the wrong form")
        return cast(Node, kind(**values))
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"not a recipe: {error}") from error


def _field_from_json(name: str, value: Any) -> Any:
    match name:
        case "parts":
            return tuple(Part(str(p["role"]), from_json(p["of"])) for p in value)
        case "of":
            return tuple(map(from_json, value)) if isinstance(value, list) else from_json(value)
        case "sizes":
            return tuple(value)
        case "dims" | "shape":
            return tuple(int(size) for size in value)
        case "settings":
            return tuple(sorted(_setting(key, v) for key, v in value.items()))
        case "name" | "dtype" | "over" | "index" | "scheme":
            fits = isinstance(value, str)
        case _:  # a number; the count of a stack may be unknown
            fits = isinstance(value, int) or (name == "count" and value is None)
    if not fits:
        raise TypeError(f"{name!r} is {value!r}")
    return value


def _setting(name: str, value: Any) -> tuple[str, Setting]:
    if not isinstance(value, Setting):
        raise TypeError(f"setting {name!r} is {value!r}")
    return name, value


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below *node*."""
    match node:
        case Source():
            return ()
        case Concat(of) | Interleave(of) | Opaque(_, of):
            return of
        case Dequantize(_, parts):
            return tuple(part.of for part in parts)
        case _:
            return (node.of,)


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
