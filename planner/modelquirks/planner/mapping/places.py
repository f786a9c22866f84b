"""Places: recipes over the tensors of a checkpoint become recipes over the parts that it stores.

Up to the audit a tensor that was saved in parts is one stored tensor with one name. Here, where
recipes go into the plan, its own recipe takes the place of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.mapping.recipes import Env, FamilyRecipe, stored_names
from modelquirks.quirks.recipe import (
    Concat,
    Join,
    Node,
    Select,
    Source,
    Stack,
    mapped,
    on_children,
)

__all__ = ["in_places"]


def in_places(recipes: Iterable[FamilyRecipe], manifest: Manifest) -> Iterator[FamilyRecipe]:
    """Yield *recipes* with the tensors that *manifest* has in parts replaced by those.

    Members whose parts are cut and named alike stay one recipe.
    """
    if not manifest.assembled:
        yield from recipes
        return
    for recipe in recipes:
        alike: dict[Node, list[tuple[int, ...]]] = {}
        for member, (_, env) in zip(recipe.members, recipe.items(), strict=True):
            alike.setdefault(_in_parts(recipe.node, env, manifest.assembled), []).append(member)
        for node, members in alike.items():
            yield replace(recipe, node=node, members=tuple(members))


def _in_parts(node: Node, env: Env, assembled: Mapping[str, Node]) -> Node:
    """Return *node* with those leaves replaced that *env* makes names of *assembled* tensors.

    Leaves stay templates over the variables of *env*.
    """
    if assembled.keys().isdisjoint(stored_names(node, env)):
        return node
    if isinstance(node, Stack | Join):
        return _stacked(node, env, assembled)
    if isinstance(node, Source):
        name = node.name.format_map(dict(env))
        return _renamed(assembled[name], name, node.name)
    return on_children(node, lambda child: _in_parts(child, env, assembled))


def _stacked(node: Stack | Join, env: Env, assembled: Mapping[str, Node]) -> Node:
    """Return a stack of tensors in parts: one node over the variable if all are cut alike."""
    scopes = [{**env, node.over: value} for value in range(node.count or 0)]
    elements = [_in_parts(node.of, scope, assembled) for scope in scopes]
    if all(element == elements[0] for element in elements):
        return replace(node, of=elements[0])
    filled = [_filled(element, node.over, value) for value, element in enumerate(elements)]
    if isinstance(node, Join):
        return Concat(tuple(filled), node.dim)
    return Concat(tuple(Stack(element, node.over, 1) for element in filled))


def _filled(node: Node, variable: str, value: int) -> Node:
    """Return *node* with *value* in the place of *variable* in all its templates."""
    hole = re.compile(rf"(?<!\{{)\{{{re.escape(variable)}\}}(?!\}})")

    def change(n: Node) -> Node:
        if isinstance(n, Source):
            return Source(hole.sub(str(value), n.name))
        return replace(n, index=hole.sub(str(value), n.index)) if isinstance(n, Select) else n

    return mapped(node, change)


def _renamed(parts: Node, name: str, template: str) -> Node:
    """Return the recipe *parts* of the tensor *name* with leaves that begin with *template*."""

    def change(node: Node) -> Node:
        if not isinstance(node, Source):
            return node
        if node.name.startswith(name):
            return Source(template + _escaped(node.name.removeprefix(name)))
        return Source(_escaped(node.name))

    return mapped(parts, change)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
