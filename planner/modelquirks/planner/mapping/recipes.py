"""``FamilyRecipe``: one recipe for all members of a family of model tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from modelquirks.quirks.recipe import (
    Concat,
    Dequantize,
    Interleave,
    Join,
    Merge,
    Node,
    Opaque,
    Part,
    RecipeError,
    Select,
    Slice,
    Source,
    Stack,
    TensorType,
    children,
    nodes,
    sources,
)
from modelquirks.quirks.recipe_json import from_json, to_json

__all__ = ["Env", "FamilyRecipe", "concrete", "is_direct", "stored_names"]

Env = Mapping[str, int]
"""Values of the variables of a template."""

_TEMPLATE = re.compile(r"(?:[^{}]++|\{\{|\}\}|\{[A-Za-z0-9_]++\})*+")
"""A template has the plain slots of :meth:`str.format` only: ``{i:>999999999}`` would take memory
without end, and ``{i.__class__}`` look at what is no business of a plan."""
_MAX_READS = 10_000_000
"""Stored tensors that the recipes of one family may read, one after another."""


@dataclass(frozen=True, slots=True)
class FamilyRecipe:
    """How the tensors of one family of the model are made.

    ``target`` and the names in ``node`` are templates for :meth:`str.format_map` over
    ``variables`` (and, below a stack, its ``over``). ``members`` holds the values of the
    variables for each tensor that this recipe makes.
    """

    target: str
    node: Node
    variables: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    type: TensorType
    """What the node gives, before any cast to the model's dtype."""
    rule: str = ""
    """The rule as text; empty if the checkpoint has the model's own name."""
    quirks: tuple[str, ...] = ()
    """Names of the records whose rules took part."""

    def items(self) -> Iterator[tuple[str, Env]]:
        """Yield each model tensor that this recipe makes, with its variables."""
        for member in self.members:
            env = dict(zip(self.variables, member, strict=True))
            yield self.target.format_map(env), env

    @property
    def template(self) -> str:
        """``target`` with numbered slots, as the template of a family has them."""
        numbers = [f"{{{number}}}" for number in range(len(self.variables))]
        # Doubled, braces that a name really has outlive the first of two fillings.
        doubled = self.target.replace("{{", "{{{{").replace("}}", "}}}}")
        return doubled.format_map(dict(zip(self.variables, numbers, strict=True)))

    def names(self) -> Iterator[str]:
        """Yield the name of each model tensor that this recipe makes."""
        return starmap(self.template.format, self.members)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data."""
        return {
            "target": self.target,
            "node": to_json(self.node),
            "variables": list(self.variables),
            "members": [list(member) for member in self.members],
            "dtype": self.type.dtype,
            "shape": None if self.type.shape is None else list(self.type.shape),
            "rule": self.rule,
            "quirks": list(self.quirks),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FamilyRecipe:
        """Return the recipe that :meth:`to_json` wrote; RecipeError if its names cannot be made."""
        shape = data["shape"]
        node = from_json(data["node"])
        texts = (data["target"], *(t for n in nodes(node) for t in _templates(n)))
        if odd_text := next((t for t in texts if not _TEMPLATE.fullmatch(t)), None):
            raise RecipeError(f"names of the recipe: {odd_text!r:.80} has other slots than {{i}}")
        if (reads := _reads(node) * max(1, len(data["members"]))) > _MAX_READS:
            raise RecipeError(f"the recipe for {data['target']!r:.80} reads {reads:,} tensors")
        recipe = cls(
            target=data["target"],
            node=node,
            variables=tuple(data["variables"]),
            members=tuple(tuple(member) for member in data["members"]),
            type=TensorType(data["dtype"], None if shape is None else tuple(shape)),
            rule=data["rule"],
            quirks=tuple(data["quirks"]),
        )
        try:
            env = dict.fromkeys(recipe.variables, 0)
            recipe.target.format_map(env)
            concrete(recipe.node, env)
        except (LookupError, ValueError, AttributeError) as error:
            raise RecipeError(
                f"the names of the recipe for {recipe.target!r}: {error!r}"
            ) from error
        if odd := [m for m in recipe.members if len(m) != len(recipe.variables)]:
            raise RecipeError(f"member {list(odd[0])} of {recipe.target!r} has not one index each")
        return recipe


def _templates(node: Node) -> Iterator[str]:
    if isinstance(node, Source):
        yield node.name
    elif isinstance(node, Select):
        yield node.index


def _reads(node: Node) -> int:
    """Return how many names of stored tensors *node* stands for."""
    inner = 1 if isinstance(node, Source) else sum(map(_reads, children(node)))
    return inner * (node.count or 0) if isinstance(node, Stack | Join) else inner


def stored_names(node: Node, env: Env) -> Iterator[str]:
    """Yield the names of the checkpoint tensors that *node* reads, stacks expanded, in order."""
    return iter(_names(node, dict(env)))


def _names(node: Node, scope: dict[str, int]) -> list[str]:
    if isinstance(node, Source):
        return [node.name.format_map(scope)]
    if isinstance(node, Stack | Join):
        return _repeated(node, scope)
    return [name for child in children(node) for name in _names(child, scope)]


def _repeated(stack: Stack | Join, scope: Mapping[str, int]) -> list[str]:
    """Return the names that the elements of *stack* are made from, one element after the other."""
    inner = dict(scope)
    names: list[str] = []
    leaves = None if _repeats(stack.of) else [leaf.name for leaf in sources(stack.of)]
    for value in range(stack.count or 0):
        inner[stack.over] = value
        if leaves is None:
            names += _names(stack.of, inner)
        else:
            names += [leaf.format_map(inner) for leaf in leaves]
    return names


def _repeats(node: Node) -> bool:
    return isinstance(node, Stack | Join) or any(map(_repeats, children(node)))


def concrete(node: Node, env: Env) -> Node:
    """Return *node* with its variables filled in: equal nodes make equal tensors.

    Variables of stacks are numbered by depth, whatever a rule calls them.
    """
    return _filled(node, {name: str(value) for name, value in env.items()}, 0)


def _filled(node: Node, scope: Mapping[str, str], depth: int) -> Node:
    match node:
        case Source(name):
            return Source(name.format_map(dict(scope)))
        case Select(of, index, dim):
            return Select(_filled(of, scope, depth), index.format_map(dict(scope)), dim)
        case Stack(of, over) | Join(of, over):
            inner = {**scope, over: f"{{{depth}}}"}
            return replace(node, of=_filled(of, inner, depth + 1), over=str(depth))
        case Concat(of) | Interleave(of) | Opaque(_, of):
            return replace(node, of=tuple(_filled(part, scope, depth) for part in of))
        case Dequantize(_, parts) | Merge(_, parts):
            filled = (Part(role, _filled(of, scope, depth)) for role, of in parts)
            return replace(node, parts=tuple(filled))
        case _:
            return replace(node, of=_filled(node.of, scope, depth))


def is_direct(node: Node) -> bool:
    """Tell whether the tensor lies in a file as it is, whole or as rows of a stored one."""
    while isinstance(node, Slice) and node.dim == 0:
        node = node.of
    return isinstance(node, Source)
