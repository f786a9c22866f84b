"""Logical tensors: what the checkpoint offers, under the names that aliases, packs and
conversions give, still by family.

A template's slots are numbered in the order in which they appear in the logical name, so that
two pieces whose names differ only in text (``…_blocks`` and ``…_scales``) number them alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

from modelquirks.quirks.family import template_of
from modelquirks.quirks.pattern import Binding, Pattern
from modelquirks.quirks.recipe import Node, Select, Source, mapped
from modelquirks.quirks.resolve import Renamed

__all__ = [
    "Bound",
    "Logical",
    "Members",
    "from_renamed",
    "matching",
    "renumbered",
    "reordered",
    "restricted",
    "slots",
    "with_slots",
]

Members = tuple[tuple[int, ...], ...]

_SLOT = re.compile(r"(?<!\{)\{(\d+)\}(?!\})")


class Bound(NamedTuple):
    """A logical piece with its slots as named variables, as recipes have them."""

    target: str
    node: Node
    variables: tuple[str, ...]


@dataclass(frozen=True, eq=False)  # by identity: comparing all members would be slow
class Logical:
    """Tensors that can be had from the checkpoint: one template, one node, its members."""

    name: str
    node: Node
    """Leaves are templates over the slots of ``name``."""
    members: Members
    rule: str = ""
    quirks: tuple[str, ...] = ()
    reforms: bool = False
    """Made of the very name it bears (transposed, say): the stored form is not the model's."""
    either: bool = False
    """The stored form may be the model's after all: the shape decides."""

    @cached_property
    def index_set(self) -> frozenset[tuple[int, ...]]:
        """The members, for looking up."""
        return frozenset(self.members)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The concrete name of each member."""
        return tuple(starmap(self.name.format, self.members))

    @cached_property
    def bound(self) -> Bound:
        """The piece with its slots as named variables: ``S0``, ``S1``…

        No placeholder of a rule has a capital, so none that is stacked over hides one of these.
        """
        variables = tuple(f"S{number}" for number in range(len(slots(self.name))))
        texts = {number: f"{{{variable}}}" for number, variable in enumerate(variables)}
        target = _SLOT.sub(lambda m: texts[int(m.group(1))], self.name)
        return Bound(target, with_slots(self.node, texts), variables)

    @cached_property
    def is_family(self) -> bool:
        """Whether all names, and no others, are of the family with the template ``name``.

        They are not if a slot is part of a word or an index is written out.
        """
        return template_of(self.name.format(*[0] * len(slots(self.name)))) == self.name

    @cached_property
    def is_stored_so(self) -> bool:
        """Whether each member is the stored tensor of its own name."""
        return isinstance(self.node, Source) and self.node.name == self.name

    def items(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each concrete name with its indices."""
        return zip(self.names, self.members, strict=True)

    def stored_as(self) -> Iterator[tuple[str, str]]:
        """Yield each (stored name, logical name) of a piece that is one stored tensor."""
        return zip(self.stored_names, self.names, strict=True)

    @cached_property
    def stored_names(self) -> tuple[str, ...]:
        """The stored name of each member of a piece that is one stored tensor."""
        if not isinstance(self.node, Source):
            raise TypeError(f"{self.name!r} is made, not stored")
        if self.is_stored_so:
            return self.names
        return tuple(starmap(self.node.name.format, self.members))

    def without(self, names: Collection[str]) -> Logical:
        """Return the members that are not called by one of *names*."""
        if not names:
            return self
        kept = tuple(member for name, member in self.items() if name not in names)
        return self if len(kept) == len(self.members) else replace(self, members=kept)


def slots(template: str) -> list[int]:
    """Return the slot numbers in *template*, in order."""
    return [int(number) for number in _SLOT.findall(template)]


def with_slots(node: Node, texts: Mapping[int, str]) -> Node:
    """Return *node* with the slots of its leaves and selections replaced by *texts*."""

    def written(template: str) -> str:
        return _SLOT.sub(lambda m: texts[int(m.group(1))], template)

    def change(n: Node) -> Node:
        match n:
            case Source(name):
                return Source(written(name))
            case Select(of, index, dim):
                return Select(of, written(index), dim)
            case _:
                return n

    return mapped(node, change)


def renumbered(template: str) -> tuple[str, list[int]]:
    """Number the slots of *template* by appearance; return it with the old numbers in order.

    >>> renumbered("a.{3}.b.{1}")
    ('a.{0}.b.{1}', [3, 1])
    """
    old = slots(template)
    new = {number: position for position, number in enumerate(old)}
    return _SLOT.sub(lambda m: f"{{{new[int(m.group(1))]}}}", template), old


def from_renamed(piece: Renamed) -> Logical:
    """Return a renamed family as a logical piece.

    A slot that the new name no longer has was fixed by a literal digit of an alias; its one
    value goes into the stored template.
    """
    if piece.name == piece.family.template and piece.members is None:
        as_stored = Logical(piece.name, Source(piece.family.template), piece.family.members)
        vars(as_stored)["names"] = piece.family.names  # what the property would write anew
        return as_stored
    name, old = renumbered(piece.name)
    members = piece.indices()
    first = members[0] if members else ()
    texts = {slot: str(value) for slot, value in enumerate(first)}
    texts |= {slot: f"{{{position}}}" for position, slot in enumerate(old)}
    renamed = Logical(
        name=name,
        node=with_slots(Source(piece.family.template), texts),
        members=members
        if old == [*range(len(first))]
        else tuple(tuple(m[slot] for slot in old) for m in members),
        rule="; ".join(step.rule for step in piece.steps),
        quirks=tuple(dict.fromkeys(step.quirk for step in piece.steps)),
    )
    if piece.members is None:
        vars(renamed)["stored_names"] = piece.family.names
    return renamed


def restricted(piece: Logical, fixed: Mapping[int, int]) -> Logical:
    """Return the members of *piece* that have the *fixed* indices, those slots written out."""
    if not fixed:
        return piece
    keep = [slot for slot in range(len(slots(piece.name))) if slot not in fixed]
    texts = {slot: str(value) for slot, value in fixed.items()}
    texts |= {slot: f"{{{position}}}" for position, slot in enumerate(keep)}
    hits = [m for m in piece.members if all(m[s] == v for s, v in fixed.items())]
    return replace(
        piece,
        name=_SLOT.sub(lambda m: texts[int(m.group(1))], piece.name),
        node=with_slots(piece.node, texts),
        members=tuple(tuple(m[slot] for slot in keep) for m in hits),
    )


def reordered(piece: Logical, order: Sequence[int]) -> Logical:
    """Return *piece* with slot ``order[0]`` as number 0, ``order[1]`` as 1…"""
    if list(order) == sorted(order):
        return piece
    texts = {old: f"{{{new}}}" for new, old in enumerate(order)}
    return replace(
        piece,
        name=_SLOT.sub(lambda m: texts[int(m.group(1))], piece.name),
        node=with_slots(piece.node, texts),
        members=tuple(tuple(member[slot] for slot in order) for member in piece.members),
    )


def matching(pieces: Iterable[Logical], pattern: Pattern) -> Iterator[tuple[Logical, Binding]]:
    """Yield the pieces, or the members of pieces, that fit *pattern*, and how."""
    for piece in pieces:
        binding = pattern.match(piece.name)
        if binding is not None and binding.fixed:
            piece = restricted(piece, binding.fixed)
            binding = pattern.match(piece.name)
        if binding is not None and piece.members:
            yield piece, binding
