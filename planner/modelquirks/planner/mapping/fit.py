"""Does what the checkpoint offers fit what the model wants, and in which dtype will it be?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from modelquirks.planner.dtypes import BITS, is_cast, is_float
from modelquirks.planner.finding import shown
from modelquirks.planner.mapping.recipes import Env, concrete, stored_names
from modelquirks.planner.mapping.templates import may_fit, may_part
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.planner.names import module_word
from modelquirks.quirks.family import Family
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Dequantize,
    Join,
    Node,
    RecipeError,
    Scheme,
    Select,
    Slice,
    Stack,
    TensorType,
    children,
    sources,
)

__all__ = ["DtypeRule", "Fit", "Types", "fit"]

Types = Callable[[str], TensorType]
"""Stored name → its type."""


@dataclass(frozen=True)
class DtypeRule:
    """Which dtype a model tensor will have. ``asked``: safetensors name, ``auto`` or None."""

    asked: str | None
    keep: tuple[Pattern, ...]
    companions: Collection[str] = ()
    """Names of parts of packed weights: what is asked of weights is not asked of these."""

    @classmethod
    def of(
        cls,
        asked: str | None,
        skeleton: Skeleton,
        keep: tuple[str, ...],
        companions: Collection[str] = (),
    ) -> DtypeRule:
        """Return the rule for *asked*; patterns of the model count for 16-bit dtypes only."""
        texts = list(keep)
        if asked in ("F16", "BF16"):
            texts += skeleton.keep_dtype
        if asked == "F16":
            texts += skeleton.keep_dtype_f16
        return cls(asked, tuple(Pattern(text) for text in texts), companions)

    def kept(self, name: str) -> bool:
        """Tell whether a tensor of the model keeps its dtype whatever is asked for."""
        return any(pattern.match(name) for pattern in self.keep)

    def is_even(self, family: Family) -> bool:
        """Tell whether the rule is one for all tensors of a family of the model."""
        if self.asked is None:
            return True
        fitting = [pattern for pattern in self.keep if may_fit(pattern, family.template)]
        if any(may_part(pattern, family.template) for pattern in fitting):
            return False
        return len({*map(self.companions.__contains__, family.names)}) == 1

    def planned(self, tensor: ModelTensor, stored: str | None, *, unpacked: bool = False) -> str:
        """Return the dtype that *tensor* will have when it is stored as *stored*.

        *unpacked*: it is a packed weight made plain, not one of the parts.
        """
        if stored is None or not (is_float(stored) and is_float(tensor.dtype)):
            return tensor.dtype
        if BITS[tensor.dtype] < 16:  # the module computes with packed values
            return tensor.dtype
        if self.asked is None or self.kept(tensor.name):
            return tensor.dtype
        if not unpacked and tensor.name in self.companions:
            return tensor.dtype
        return stored if self.asked == "auto" else self.asked


@dataclass(frozen=True)
class Fit:
    """The verdict for one model tensor: a node with its type, or why there is none."""

    node: Node | None
    type: TensorType
    problem: str = ""
    warning: str = ""
    """What is odd about the stored tensors; their names belong before it."""
    scheme: str | None = None
    """The packing that the node undoes."""
    taken: tuple[Taken, ...] = ()
    """What the node takes out of larger tensors."""


def fit(
    tensor: ModelTensor,
    node: Node,
    env: Env,
    *,
    types: Types,
    rule: DtypeRule,
    schemes: Mapping[str, Scheme],
) -> Fit:
    """Return how *node* serves *tensor*: cast to the planned dtype, or refused with the reason."""
    try:
        made = infer(node, leaf_types(node, env, types).__getitem__, schemes)
        taken = tuple(selections(node, env, types=types, schemes=schemes))
        for element in taken:
            element.check()
    except RecipeError as error:
        where = _packed_within(node, env, types, schemes)
        return Fit(None, TensorType(None, None), f"{where}{error}")
    what = "it would be made as" if is_made(node) else f"{next(stored_names(node, env), '?')!r} is"
    if made.shape is not None and made.shape != tensor.shape:
        hint = _hint(made.shape, tensor)
        return Fit(None, made, f"{what} {made}, the model wants {list(tensor.shape)}{hint}")
    scheme = uses_scheme(node)
    plain = _plain(node, made.dtype, tensor.dtype)
    planned = rule.planned(tensor, plain, unpacked=scheme is not None)
    shape = made.shape or tensor.shape
    if scheme is not None and BITS[planned] < 16:
        problem = (
            f"stored packed ({scheme}) as {shown(list(stored_names(node, env)), 4)}, and the model "
            f"wants {planned} values under this name, but has no place for what belongs to them"
        )
        return Fit(None, made, problem, scheme=scheme)
    if made.dtype is None:
        return Fit(_cast(node, planned), TensorType(planned, shape), "", "", scheme, taken)
    if problem := _dtype_problem(made.dtype, planned):
        return Fit(None, made, f"{what} {made}, the model wants {planned}: {problem}")
    warning = ""
    if is_float(made.dtype) and (BITS[made.dtype] < 16) != (BITS[planned] < 16):
        warning = f"stored as {made.dtype}, cast to {planned} as it is, without a scale"
    final = node if planned == made.dtype else _cast(node, planned)
    return Fit(final, TensorType(planned, shape), "", warning, scheme, taken)


def _packed_within(node: Node, env: Env, types: Types, schemes: Mapping[str, Scheme]) -> str:
    """Return the stored names of the first packed weight within *node* that cannot be made.

    With a colon; nothing if it is *node* itself, which the model's name tells, or has no fault.
    """
    for child in children(node):
        if isinstance(child, Dequantize):
            try:
                infer(child, leaf_types(child, env, types).__getitem__, schemes)
            except RecipeError:
                return f"{shown(list(stored_names(child, env)), 4)}: "
            except KeyError:  # one of a stack, whose number is not known here
                continue
        if found := _packed_within(child, env, types, schemes):
            return found
    return ""


class Taken(NamedTuple):
    """What is taken out of one dimension of a stored tensor, or of what is made of it."""

    stored: str
    of: Node
    """What it is taken out of, with all variables filled in."""
    dim: int
    start: int
    stop: int
    size: int | None
    """Elements in that dimension; None if the shape is not known."""

    def check(self) -> None:
        """Raise RecipeError if a stack has no such element."""
        if self.size is not None and self.stop > self.size:
            raise RecipeError(
                f"{self.stored!r} holds {self.size}, numbered from 0, and number {self.start} is "
                "wanted"
            )


def selections(
    node: Node, env: Env, *, types: Types, schemes: Mapping[str, Scheme]
) -> Iterator[Taken]:
    """Yield what *node* takes out of larger tensors: elements of stacks, parts, rows."""
    if isinstance(node, Select | Chunk | Slice):
        shape = infer(node.of, leaf_types(node.of, env, types).__getitem__, schemes).shape
        size = None if shape is None else shape[node.dim]
        start, stop = _bounds(node, env, size)
        stored = next(stored_names(node.of, env))
        yield Taken(stored, concrete(node.of, env), node.dim, start, stop, size)
    for child in children(node):
        yield from selections(child, env, types=types, schemes=schemes)


def _bounds(node: Select | Chunk | Slice, env: Env, size: int | None) -> tuple[int, int]:
    match node:
        case Select(_, index, _):
            number = int(index.format_map(env))
            return number, number + 1
        case Chunk(_, _, count, part):
            width = (size or 0) // count
            return width * part, width * (part + 1)
        case Slice(_, _, start, stop):
            return start, stop


def is_made(node: Node) -> bool:
    """Tell whether *node* computes anything but a cast."""
    return bool(children(node)) and not isinstance(node, Cast)


def leaf_types(node: Node, env: Env, types: Types) -> dict[str, TensorType]:
    """Return the type of each leaf template of *node*; all members of a stack must be alike."""
    found: dict[str, TensorType] = {}

    def visit(n: Node, scope: Env) -> None:
        if isinstance(n, Stack | Join):
            if n.count:
                visit(n.of, {**scope, n.over: 0})
                _alike(n, scope, types)
            return
        for child in children(n):
            visit(child, scope)
        for leaf in sources(n) if not children(n) else ():
            found[leaf.name] = types(leaf.name.format_map(dict(scope)))

    visit(node, env)
    return found


def _alike(stack: Stack | Join, env: Env, types: Types) -> None:
    """Raise if two tensors of a stack that should be alike are not, naming the odd one."""
    first = [(n, types(n)) for n in stored_names(stack.of, {**env, stack.over: 0})]
    for index in range(1, stack.count or 0):
        names = stored_names(stack.of, {**env, stack.over: index})
        for name, (like, expected) in zip(names, first, strict=True):
            if (found := types(name)) != expected:
                raise RecipeError(
                    f"{name!r} is {found}, but {like!r}, the first of its kind, is {expected}: "
                    "they cannot be stacked"
                )


def _plain(node: Node, made: str | None, wanted: str) -> str | None:
    """Return the dtype that counts as stored: a dequantised weight takes the model's."""
    if made is None and is_float(wanted):
        return wanted
    return made


def _cast(node: Node, dtype: str) -> Node:
    return node if isinstance(node, Cast) and node.dtype == dtype else Cast(node, dtype)


def _dtype_problem(stored: str, planned: str) -> str:
    if is_cast(stored, planned):
        return ""
    if min(BITS[stored], BITS[planned]) < 8:
        return "values of less than 8 bits lie packed in bytes and are not cast"
    if is_float(planned) and not is_float(stored):
        return "integer codes are no weights (packed or quantised? no rule says how to read them)"
    return "the values would not survive the cast"


def _hint(found: tuple[int, ...], tensor: ModelTensor) -> str:
    """Say what kind of difference people usually mean by this one."""
    wanted = tensor.shape
    if len(found) == len(wanted) == 2 and found[1] == wanted[1]:
        name = module_word(tensor.name)
        if "embed" in name or "head" in name or name in ("wte", "word_embeddings", "shared"):
            return f" (another vocabulary: {found[0]} rows stored, {wanted[0]} in the model)"
        if any(part in name for part in ("classif", "score", "out_proj")):
            return f" (another head: {found[0]} outputs stored, {wanted[0]} in the model)"
    if found == wanted[::-1]:
        return " (transposed)"
    if sorted(found) == sorted(wanted):
        return " (dimensions in another order)"
    return ""


def uses_scheme(node: Node) -> str | None:
    """Return the packing scheme that *node* undoes, if any."""
    if isinstance(node, Dequantize):
        return node.scheme
    return next((s for child in children(node) if (s := uses_scheme(child))), None)
