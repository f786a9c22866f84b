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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Cast",
    "Chunk",
    "Concat",
    "Dequantize",
    "Interleave",
    "Join",
    "Merge",
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
    "View",
    "children",
    "mapped",
    "nodes",
    "on_children",
    "sources",
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

    A size is a number or an expression in fields of config.json, with ``*`` and exact ``/``
    from left to right (``"num_attention_heads*head_dim"``, ``"vision_config.hidden_size/2"``). Only
    rules hold this node: with the config at hand it becomes a :class:`Slice`.
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


@dataclass(frozen=True, slots=True)
class View:
    """A :class:`Reshape` whose ``sizes`` are written as those of a :class:`Split`; one may be -1.

    Only rules hold this node: with the config at hand it becomes a :class:`Reshape`.
    """

    of: Node
    sizes: tuple[int | str, ...]


class Part(NamedTuple):
    """One companion of a packed or merged weight: its role in the scheme and the tensor."""

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
class Merge:
    """A weight with what an adapter changes in it, computed by the scheme of that name.

    The part ``weight`` is the plain weight; dtype and shape are its own. It is cast to the dtype
    that is asked for *before* the scheme changes it, as in a model that is loaded first and into
    which the adapter is merged then. The other parts come in the dtype that they are stored in.
    """

    scheme: str
    parts: tuple[Part, ...]
    settings: tuple[tuple[str, Setting], ...] = ()
    """What the adapter's config says of this weight (scaling…), sorted by name."""


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
    | View
    | Dequantize
    | Merge
    | Opaque
)


Region = tuple[tuple[int, int], ...]
"""One ``(start, stop)`` pair per dimension."""


class Scheme(Protocol):
    """How the companions of one packing are read. Quantisation plugins provide these.

    A class that names this one as its base inherits what most schemes need not say. Only
    ``evaluate`` and ``peek`` get torch tensors and may import torch.
    """

    name: str
    """As in :class:`Dequantize` or :class:`Merge`: lower case, for example ``mxfp4``."""

    roles: tuple[str, ...]
    """Companions that must be there, for example ``("blocks", "scales")``."""

    peeks: tuple[str, ...] = ()
    """Companions whose *values* tell what no header does (a shape, a format)."""

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return what config.json says of *weight*, by its name in the model.

        *config* is empty if there is no such file. :class:`RecipeError` says what is lacking.
        """
        return {}

    def varies(self, config: Mapping[str, Any]) -> bool:
        """Tell whether *config* may say different things of two weights.

        If not, one is asked about instead of 70,000.
        """
        return True

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; raise :class:`RecipeError` if the parts do not fit.

        The shape is None if only the values of ``peeks`` tell it and *settings* do not hold it.
        """
        ...

    def peek(self, values: Mapping[str, Any], settings: Settings) -> Settings:
        """Return further settings from the values of the ``peeks``, for example the shape."""
        return {}

    def layout(self, parts: Mapping[str, TensorType], settings: Settings) -> Settings:
        """Return further settings from the types of the whole parts: block sizes, say.

        ``regions`` and ``evaluate`` get them too; the latter sees only regions of the parts.
        """
        return {}

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return, by role, the region of each part that *region* of the weight needs."""
        ...

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return the tensor of *region* from those regions of the parts, in torch *dtype*.

        Called from several threads at once, but for an :class:`Opaque`: keep no state that one
        call changes, and change none of torch's.
        """
        ...


Peek = Callable[[Dequantize], Settings]
"""Gives what the values of the parts of a packed weight tell; needs more than headers."""


def sources(node: Node) -> Iterator[Source]:
    """Yield the leaves of *node*, left to right; those of a :class:`Stack` once, unexpanded."""
    if isinstance(node, Source):
        yield node
    for child in children(node):
        yield from sources(child)


def nodes(node: Node) -> Iterator[Node]:
    """Yield every node of *node*, those above first."""
    below = [node]
    while below:
        found = below.pop()
        yield found
        below += children(found)


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return *node* with *change* applied to every node, children first."""
    return change(on_children(node, lambda child: mapped(child, change)))


def on_children(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return *node* with *change* applied to the nodes directly below it."""
    match node:
        case Source():
            return node
        case Concat(of) | Interleave(of) | Opaque(_, of):
            return replace(node, of=tuple(map(change, of)))
        case Dequantize(_, parts) | Merge(_, parts):
            return replace(node, parts=tuple(Part(role, change(of)) for role, of in parts))
        case _:
            return replace(node, of=change(node.of))


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below *node*."""
    match node:
        case Source():
            return ()
        case Concat(of) | Interleave(of) | Opaque(_, of):
            return of
        case Dequantize(_, parts) | Merge(_, parts):
            return tuple(part.of for part in parts)
        case _:
            return (node.of,)
