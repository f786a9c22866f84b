"""Selections: conversions that take single elements out of stored stacks.

The checkpoint does not tell which elements there are names for, so these conversions go by the
names of the model: one expert each, out of the tensor in which all are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelquirks.planner.mapping.conversions import bound, rule_text, selects
from modelquirks.planner.mapping.logical import Logical, renumbered, with_slots
from modelquirks.quirks.family import Family
from modelquirks.quirks.pattern import Binding, Pattern
from modelquirks.quirks.recipe import Node, sources
from modelquirks.quirks.record import Convert, ModelQuirks
from modelquirks.quirks.resolve import Resolution

__all__ = ["find_selections"]

Index = tuple[int, ...]


def find_selections(
    pieces: Sequence[Logical],
    resolution: Resolution,
    config: Mapping[str, Any],
    wanted: Mapping[str, Family],
) -> list[Logical]:
    """Return what the selecting conversions can make of the families that the model *wanted*."""
    return [
        made
        for record in resolution.records()
        for convert in record.conversions
        if selects(convert.recipe)
        for family in wanted.values()
        for made in _made(pieces, record, convert, config, family)
    ]


def _made(
    pieces: Sequence[Logical],
    record: ModelQuirks,
    convert: Convert,
    config: Mapping[str, Any],
    family: Family,
) -> list[Logical]:
    binding = Pattern(convert.target).match(family.template)
    if binding is None:
        return []
    leaves = [_source(pieces, leaf.name, binding) for leaf in sources(convert.recipe)]
    alike: dict[tuple[int, ...], tuple[list[Node], list[Index], list[str]]] = {}
    for member in family.members:
        if any(member[slot] != value for slot, value in binding.fixed.items()):
            continue
        found = [_found(leaf, member) for leaf in leaves]
        if any(f is None for f in found):
            continue
        used = [f for f in found if f is not None]
        key = tuple(id(piece) for piece, _ in used)
        quirks = [q for piece, _ in used for q in piece.quirks]
        alike.setdefault(key, ([node for _, node in used], [], quirks))[1].append(member)
    return [
        Logical(
            name=family.template,
            node=bound(convert.recipe, iter(nodes), counts={}, index=binding.index, config=config),
            members=tuple(members),
            rule=rule_text(convert),
            quirks=tuple(dict.fromkeys([*quirks, record.name])),
        )
        for nodes, members, quirks in alike.values()
    ]


_Leaf = tuple[list[int], list[tuple[Logical, Node]]]
"""Slots of the target that the source has, in its own order; pieces with their node over them."""


def _source(pieces: Sequence[Logical], pattern: str, binding: Binding) -> _Leaf:
    name, slots = renumbered(Pattern(pattern).fill(binding))
    texts = {position: f"{{{slot}}}" for position, slot in enumerate(slots)}
    return slots, [(p, with_slots(p.node, texts)) for p in pieces if p.name == name]


def _found(leaf: _Leaf, member: Index) -> tuple[Logical, Node] | None:
    slots, candidates = leaf
    key = tuple(member[slot] for slot in slots)
    return next(((p, node) for p, node in candidates if key in p.index_set), None)
