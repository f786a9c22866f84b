"""Evaluation of recipes: the tensor, or a region of it, from the checkpoint's tensors.

The region goes down the recipe to the sources, so that only what it needs is read. The result is
allocated once and each source is copied, and thereby cast, straight into its place; a source
that needs no change is returned as it was read, without a copy.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modelquirks.planner.dtypes import from_torch, is_cast, to_torch
from modelquirks.planner.execution.nomemory import said
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.execution.reshaping import runs
from modelquirks.quirks.nodetypes import infer, settings_of
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
    sources,
)

__all__ = [
    "EvaluationError",
    "Known",
    "Read",
    "Types",
    "elements",
    "evaluate",
    "node_type",
    "torch_shape",
    "whole",
]

_others_code = threading.RLock()
"""Held while code of others makes a tensor as a whole: nobody says that threads may run it."""
if hasattr(os, "register_at_fork"):  # a child must not inherit a lock that nobody will release
    os.register_at_fork(
        before=_others_code.acquire,
        after_in_parent=_others_code.release,
        after_in_child=_others_code.release,
    )

Read = Callable[[str, Region | None], torch.Tensor]
Types = Callable[[str], TensorType]

_CHUNK = 1 << 25
"""Elements of a packed weight that are made plain in one go; schemes compute with float32
copies of them, which this keeps below a few hundred MB."""


class EvaluationError(RuntimeError):
    """A recipe that gives no tensor; the message names recipe, sources and cause."""


def evaluate(
    node: Node,
    env: Mapping[str, int],
    *,
    read: Read,
    types: Types,
    schemes: Mapping[str, Scheme],
    region: Region | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tensor that *node* stands for, on the CPU.

    Names in *node* are templates over the variables in *env*. *read* and *types* give tensors and
    types of the checkpoint by name. With *region* only that part is made, and no more than it
    needs is read. *dtype* None leaves the dtype that the recipe has; another one is cast to
    while copying, or given to the packing scheme to compute in. Only real floating-point types
    are cast, and integers to wider ones. An F4 result has two values in each element of its last
    dimension. With *out*, which has the shape of the result and says the dtype, the result is
    written there, without a copy in between where the recipe needs none.
    """
    maker = _Maker(read, types, schemes, {})
    try:
        kind = maker.type_of(node, env)
        region = whole(kind.shape) if region is None else _checked(region, kind)
        wanted = out.dtype if out is not None else dtype or to_torch(kind.dtype)
        _castable(to_torch(kind.dtype), wanted)
        with _on_cpu():
            if out is None:
                return maker.make(node, env, region, wanted, kind.dtype)
            maker.fill_all(out, node, env, region, kind.dtype)
        return out
    except Exception as error:  # schemes are anybody's
        raise EvaluationError(f"{_described(node, env)}: {said(error)}") from error


def _on_cpu() -> AbstractContextManager[object]:
    """Return what has schemes that name no device make their tensors where the stored ones are.

    A caller may have set another default: ``torch.set_default_device("cuda")``, or the meta device
    while a model is built.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class Known(NamedTuple):
    """Dtype and shape, both known."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return for example ``BF16 [32, 128]``."""
        return f"{self.dtype} {list(self.shape)}"


def node_type(
    node: Node,
    env: Mapping[str, int],
    *,
    types: Types,
    schemes: Mapping[str, Scheme],
    read: Read | None = None,
) -> Known:
    """Return dtype and shape that *node* gives; RecipeError if they are not known or do not fit.

    Of a stack the first member speaks for all; evaluation looks at the others. *read* serves
    packed weights whose shape is not in the header but in a small companion.
    """
    maker = _Maker(read, types, schemes, {}) if read is not None else None
    return _type(node, _FirstOfStack(env), types, schemes, maker)


def _type(
    node: Node,
    first: Mapping[str, int],
    types: Types,
    schemes: Mapping[str, Scheme],
    maker: _Maker | None,
) -> Known:
    peek: Peek | None = None if maker is None else lambda packed: maker.peek(packed, first)
    dtype, shape = infer(node, lambda name: types(name.format_map(first)), schemes, peek)
    if dtype is None or shape is None:
        raise RecipeError("dtype and shape are not known from the header")
    return Known(dtype, shape)


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that is all of a tensor."""
    return tuple((0, size) for size in shape)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return *shape* as torch counts it: elements of F4 hold two values each."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def elements(dtype: str, region: Region) -> Region:
    """Return *region* as torch counts it: elements of F4 hold two values each."""
    if dtype != "F4":
        return region
    *outer, (start, stop) = region
    return (*outer, (start // 2, stop // 2))


class _FirstOfStack(dict[str, int]):
    """Variables of which those of stacks, not being set, are 0."""

    def __missing__(self, key: str) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Maker:
    read: Read
    types: Types
    schemes: Mapping[str, Scheme]
    peeked: dict[object, Settings]
    """What the values of packed weights told, by their stored names."""

    def make(
        self, node: Node, env: Mapping[str, int], region: Region, dtype: torch.dtype, stored: str
    ) -> torch.Tensor:
        """Return *region* of *node* in *dtype*; *stored* is the dtype that the node has."""
        if 0 in _size(region):  # nothing to read, not even a scale
            return torch.empty(torch_shape(stored, _size(region)), dtype=dtype, device="cpu")
        read = self._read_at_once(node, env, region)
        if read is not None and read.dtype == dtype:
            # A stored tensor keeps its strides; what rules cut out of one is made contiguous.
            return read if isinstance(node, Source) else read.contiguous()
        out = torch.empty(torch_shape(stored, _size(region)), dtype=dtype, device="cpu")
        if read is not None:
            _copy(out, read)
        else:
            self.fill(out, node, env, region)
        return out

    def fill_all(
        self,
        out: torch.Tensor,
        node: Node,
        env: Mapping[str, int],
        region: Region,
        stored: str,
    ) -> None:
        """Write *region* of *node*, whose dtype is *stored*, to *out*, if that is made for it."""
        if tuple(out.shape) != torch_shape(stored, _size(region)):
            raise RecipeError(f"{list(out.shape)} is not the shape of region {region}")
        if out.numel():
            self.fill(out, node, env, region)

    def _read_at_once(
        self, node: Node, env: Mapping[str, int], region: Region
    ) -> torch.Tensor | None:
        """Return a source, a slice of one or one of a stack as it was read; None for others."""
        n_stacks = 0
        while True:
            if isinstance(node, Slice):
                region = _shifted(region, node.dim, node.start)
            elif isinstance(node, Stack) and node.count != 1 and _is_single(region[0]):
                (index, _), *inner = region
                outer, env, region = env, {**env, node.over: index}, tuple(inner)
                self._alike(node, env, outer)
                n_stacks += 1
            else:
                break
            node = node.of
        if not isinstance(node, Source):
            return None
        read = self.read(_name(node, env), region)
        return read[(None,) * n_stacks] if n_stacks else read

    def fill(self, out: torch.Tensor, node: Node, env: Mapping[str, int], region: Region) -> None:
        """Write *region* of *node* to *out*."""
        match node:
            case Source():
                _copy(out, self.read(_name(node, env), region))
            case Cast(of, dtype):
                self._cast(out, of, to_torch(dtype), env, region)
            case Concat(of, dim):
                self._concat(out, of, dim, env, region)
            case Interleave(of, dim):
                self._interleave(out, of, dim, env, region)
            case Stack():
                self._stack(out, node, env, region)
            case Join():
                self._join(out, node, env, region)
            case Select(of, index, dim):
                number = int(index.format_map(env))
                inner = (*region[:dim], (number, number + 1), *region[dim:])
                self.fill(out.unsqueeze(dim), of, env, inner)
            case Chunk(of, dim, count, part):
                start = self.type_of(of, env).shape[dim] // count * part
                self.fill(out, of, env, _shifted(region, dim, start))
            case Slice(of, dim, start, _):
                self.fill(out, of, env, _shifted(region, dim, start))
            case Transpose(of, dim0, dim1):
                _no_pairs(out, dim0, dim1)
                turned = list(region)
                turned[dim0], turned[dim1] = turned[dim1], turned[dim0]
                self.fill(out.transpose(dim0, dim1), of, env, tuple(turned))
            case Permute(of, dims):
                _no_pairs(out, *(dim for i, dim in enumerate(dims) if i != dim))
                back = sorted(range(len(dims)), key=dims.__getitem__)
                self.fill(out.permute(back), of, env, tuple(region[i] for i in back))
            case Reshape(of):
                self._reshape(out, node, env, region)
            case Dequantize() | Merge():
                self._by_scheme(out, node, env, region)
            case Opaque():
                self._opaque(out, node, env, region)
            case Split() | View():
                raise RecipeError("a node of a rule, without sizes, cannot be evaluated")

    def type_of(self, node: Node, env: Mapping[str, int]) -> Known:
        return _type(node, _FirstOfStack(env), self.types, self.schemes, self)

    def peek(self, node: Dequantize, env: Mapping[str, int]) -> Settings:
        """Return what the values of *node*'s parts tell; each is read once."""
        scheme = self.schemes[node.scheme]
        telling = [(role, of) for role, of in node.parts if role in scheme.peeks]
        if not telling:
            return {}
        key = (node.scheme, *(s.name.format_map(env) for _, of in telling for s in sources(of)))
        if key not in self.peeked:
            values: dict[str, torch.Tensor] = {}
            for role, of in telling:
                dtype, shape = self.type_of(of, env)
                values[role] = self.make(of, env, whole(shape), to_torch(dtype), dtype)
            self.peeked[key] = scheme.peek(values, dict(node.settings))
        return self.peeked[key]

    def _cast(
        self,
        out: torch.Tensor,
        of: Node,
        dtype: torch.dtype,
        env: Mapping[str, int],
        region: Region,
    ) -> None:
        if out.dtype == dtype:
            return self.fill(out, of, env, region)
        between = torch.empty(out.shape, dtype=dtype, device="cpu")
        self.fill(between, of, env, region)
        return _copy(out, between)

    def _join(self, out: torch.Tensor, node: Join, env: Mapping[str, int], region: Region) -> None:
        _no_pairs(out, node.dim)
        start, stop = region[node.dim]
        size = self.type_of(node.of, {**env, node.over: 0}).shape[node.dim]
        for index in range(start // size, -(-stop // size)):
            member, before = {**env, node.over: index}, index * size
            self._alike(node, member, env)
            a, b = max(start, before), min(stop, before + size)
            inner = _with(region, node.dim, (a - before, b - before))
            self.fill(out.narrow(node.dim, a - start, b - a), node.of, member, inner)

    def _alike(self, node: Stack | Join, member: Mapping[str, int], env: Mapping[str, int]) -> None:
        """Raise if a member of a stack is not of the type that the first one has."""
        first = self.type_of(node.of, {**env, node.over: 0})
        if (kind := self.type_of(node.of, member)) != first:
            raise RecipeError(
                f"{_described(node.of, member)} is {kind}, number 0 of the stack is {first}: "
                "all must be alike"
            )

    def _reshape(
        self, out: torch.Tensor, node: Reshape, env: Mapping[str, int], region: Region
    ) -> None:
        kind = self.type_of(node.of, env)
        if kind.dtype == "F4":
            raise RecipeError("F4 values, two in a byte, cannot be reshaped")
        new = self.type_of(node, env).shape
        for run in runs(kind.shape, new, region):
            shift = zip(run.region, region, strict=True)
            target = out[tuple(slice(a - start, b - start) for (a, b), (start, _) in shift)]
            flat = _flat(target, run.lengths)
            between = (
                torch.empty(run.lengths, dtype=out.dtype, device="cpu") if flat is None else flat
            )
            for box in run.boxes:
                part = between[tuple(slice(a, b) for a, b in box.at)]
                view = _flat(part, _size(box.region))
                if view is None:
                    made = self.make(node.of, env, box.region, out.dtype, kind.dtype)
                    _copy(part, made.reshape(part.shape))
                else:
                    self.fill(view, node.of, env, box.region)
            if flat is None:
                _copy(target, between.reshape(target.shape))

    def _opaque(
        self, out: torch.Tensor, node: Opaque, env: Mapping[str, int], region: Region
    ) -> None:
        parts: dict[str, torch.Tensor] = {}
        for number, of in enumerate(node.of):
            dtype, shape = self.type_of(of, env)
            parts[str(number)] = self.make(of, env, whole(shape), to_torch(dtype), dtype)
        scheme, settings = self.schemes[node.scheme], settings_of(node)
        with _others_code:
            made = scheme.evaluate(parts, region, out.dtype, settings)
        _copy(out, made)

    def _concat(
        self,
        out: torch.Tensor,
        parts: Sequence[Node],
        dim: int,
        env: Mapping[str, int],
        region: Region,
    ) -> None:
        _no_pairs(out, dim)
        start, stop = region[dim]
        before = 0
        for part in parts:
            size = self.type_of(part, env).shape[dim]
            a, b = max(start, before), min(stop, before + size)
            if a < b:
                inner = _with(region, dim, (a - before, b - before))
                self.fill(out.narrow(dim, a - start, b - a), part, env, inner)
            before += size

    def _interleave(
        self,
        out: torch.Tensor,
        parts: Sequence[Node],
        dim: int,
        env: Mapping[str, int],
        region: Region,
    ) -> None:
        _no_pairs(out, dim)
        start, stop = region[dim]
        n = len(parts)
        for number, part in enumerate(parts):
            # Row p of this part is row n·p + number of the whole.
            a, b = -(-(start - number) // n), -(-(stop - number) // n)
            if a < b:
                rows = (*([slice(None)] * dim), slice(n * a + number - start, None, n))
                self.fill(out[rows], part, env, _with(region, dim, (a, b)))

    def _stack(
        self, out: torch.Tensor, node: Stack, env: Mapping[str, int], region: Region
    ) -> None:
        (start, stop), *inner = region
        for index in range(start, stop):
            member = {**env, node.over: index}
            self._alike(node, member, env)
            self.fill(out[index - start], node.of, member, tuple(inner))

    def _by_scheme(
        self, out: torch.Tensor, node: Dequantize | Merge, env: Mapping[str, int], region: Region
    ) -> None:
        scheme = self.schemes[node.scheme]
        settings = settings_of(node, lambda packed: self.peek(packed, env))
        kinds = {role: self.type_of(of, env) for role, of in node.parts}
        types = {role: TensorType(*kind) for role, kind in kinds.items()}
        settings = {**settings, **scheme.layout(types, settings)}
        for chunk in _chunks(region):
            regions = scheme.regions(chunk, types, settings)
            parts: dict[str, torch.Tensor] = {}
            for role, of in node.parts:
                part, dtype = _checked(regions[role], kinds[role]), kinds[role].dtype
                first = isinstance(node, Merge) and role == "weight"  # cast, and changed then
                wanted = out.dtype if first else to_torch(dtype)
                parts[role] = self.make(of, env, part, wanted, dtype)
            plain = scheme.evaluate(parts, chunk, out.dtype, settings)
            if region:
                (start, _), (a, b) = region[0], chunk[0]
                _copy(out.narrow(0, a - start, b - a), plain)
            else:
                _copy(out, plain)


def _copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.shape != out.shape:
        raise RecipeError(f"shape {list(tensor.shape)} where {list(out.shape)} was expected")
    _castable(tensor.dtype, out.dtype)
    out.copy_(tensor)


def _castable(have: torch.dtype, wanted: torch.dtype) -> None:
    if have != wanted and not is_cast(from_torch(have), from_torch(wanted)):
        raise RecipeError(
            f"{have} is not cast to {wanted}: only floating-point numbers are, and integers to "
            "wider ones"
        )


def _chunks(region: Region) -> Iterator[Region]:
    """Cut *region* along its first dimension, where that is worth while.

    Rows come in multiples of 128 where there are so many, the largest block of the known
    schemes, so that scales are not read twice.
    """
    if not region:
        yield region
        return
    (start, stop), *inner = region
    rows = max(1, _CHUNK // max(1, math.prod(b - a for a, b in inner)))
    if rows > 128:
        rows -= rows % 128
    for a in range(start, stop, rows):
        yield ((a, min(a + rows, stop)), *inner)


def _flat(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return *tensor* in another shape without a copy; None if its strides do not allow that."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None


def _no_pairs(out: torch.Tensor, *dims: int) -> None:
    if out.element_size() == 1 and "float4" in str(out.dtype) and out.dim() - 1 in dims:
        raise RecipeError("F4 values, two in a byte, cannot be rearranged in the last dimension")


def _name(source: Source, env: Mapping[str, int]) -> str:
    return source.name.format_map(env)


def _with(region: Region, dim: int, bounds: tuple[int, int]) -> Region:
    return (*region[:dim], bounds, *region[dim + 1 :])


def _shifted(region: Region, dim: int, by: int) -> Region:
    start, stop = region[dim]
    return _with(region, dim, (start + by, stop + by))


def _is_single(bounds: tuple[int, int]) -> bool:
    start, stop = bounds
    return stop - start == 1


def _size(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _checked(region: Region, kind: Known) -> Region:
    shape = kind.shape
    if len(region) != len(shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(region, shape, strict=True)
    ):
        raise RecipeError(f"region {region} is not inside {kind}")
    return region


def _described(node: Node, env: Mapping[str, int]) -> str:
    """Return for example ``stack of 'experts.{e}.w1', 'experts.{e}.w3'``."""
    names = list(dict.fromkeys(_filled(leaf.name, env) for leaf in sources(node)))
    listed = ", ".join(repr(name) for name in names[:4])
    more = f" … and {len(names) - 4} more" if len(names) > 4 else ""
    what = "tensor" if isinstance(node, Source) else f"{type(node).__name__.lower()} of"
    return f"{what} {listed}{more}"


def _filled(template: str, env: Mapping[str, int]) -> str:
    """Return *template* with the variables that are known; those of stacks stay."""
    return template.format_map(_Shown({k: str(v) for k, v in env.items()}))


class _Shown(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"
