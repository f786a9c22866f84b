"""Reads: which stored tensors a piece is made from, by family instead of name by name.

A layer of 384 experts that is stacked reads 1,152 tensors, a model of them 208,000, in nine
families. What is true of a whole family (its type, that all of it is used) is told once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, starmap
from typing import NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.mapping.logical import Logical, Members
from modelquirks.quirks.family import Family, group, template_of
from modelquirks.quirks.recipe import Join, Node, Source, Stack, TensorType, children

__all__ = ["Part", "StoredFamilies", "Used"]

_HOLE = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")


class Part(NamedTuple):
    """Stored tensors of one family."""

    family: Family
    rows: Members
    """Their indices; one may come more than once."""
    is_all: bool
    """It is the whole family."""
    type: TensorType
    """Of each tensor of the family."""

    @property
    def names(self) -> Iterable[str]:
        """The stored names."""
        return self.family.names if self.is_all else starmap(self.family.template.format, self.rows)


@dataclass
class StoredFamilies:
    """The families of a checkpoint, asked for their types, and which of them a piece reads."""

    manifest: Manifest
    _rows: dict[tuple[object, ...], tuple[Members, Members]] = field(default_factory=dict)
    """Rows by members (kept beside, so that their number stays theirs), slots and stacks."""
    _covers: dict[tuple[int, int], tuple[bool | None, Members, Members]] = field(
        default_factory=dict
    )

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of each stored tensor; those of a family are entered when one is asked for."""
        return _Types(self.manifest)

    def even_type(self, template: str) -> TensorType | None:
        """Return the type of all tensors of a family; None if it is not one."""
        even = self.manifest.even_types.get(template)
        return None if even is None else TensorType(*even)

    def types_of(self, stored: Iterable[str]) -> Mapping[str, TensorType]:
        """Return the types of tensors of families that have one each."""
        found: dict[str, TensorType] = {}
        for template, family in group(stored).items():
            if (even := self.even_type(template)) is not None:
                found |= dict.fromkeys(family.names, even)
        return found

    def read(self, piece: Logical, members: Members) -> Sequence[Part] | None:
        """Return what *members* of *piece* are made from.

        None if some of it is not stored, or is of a family that has not one type.
        """
        parts = [self._part(*leaf, members) for leaf in _leaves(piece.node, {})]
        found = [part for part in parts if part is not None]
        return found if len(found) == len(parts) else None

    def _part(self, text: str, stacks: Mapping[str, int], members: Members) -> Part | None:
        holes: list[str] = _HOLE.findall(text)
        numbers = iter(range(len(holes)))
        family = self.manifest.families.get(_HOLE.sub(lambda _: f"{{{next(numbers)}}}", text))
        if family is None or not all(hole.isdigit() or hole in stacks for hole in holes):
            return None
        rows = self._expanded(members, holes, stacks)
        covered, type_ = self._covered(rows, family.members), self.even_type(family.template)
        if covered is None or type_ is None:
            return None
        return Part(family, rows, covered, type_)

    def _expanded(
        self, members: Members, holes: Sequence[str], stacks: Mapping[str, int]
    ) -> Members:
        """Return for each member, and each element of the stacks, the values of *holes*."""
        sizes = {name: stacks[name] for name in holes if name in stacks}
        key = (id(members), *holes, *sizes.items())
        if key not in self._rows:
            self._rows[key] = _expanded(members, holes, sizes), members
        return self._rows[key][0]

    def _covered(self, rows: Members, known: Members) -> bool | None:
        """Tell whether *rows* are all that is *known*, or only a part; None if some are not."""
        key = (id(rows), id(known))
        if key not in self._covers:
            all_of_it: bool | None = rows == known
            if not all_of_it:
                these, those = frozenset(rows), frozenset(known)
                all_of_it = these == those if these <= those else None
            self._covers[key] = all_of_it, rows, known
        return self._covers[key][0]


class _Types(dict[str, TensorType]):
    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def __missing__(self, name: str) -> TensorType:
        family = self._manifest.families[template_of(name)]
        if (even := self._manifest.even_types.get(family.template)) is not None:
            self |= dict.fromkeys(family.names, TensorType(*even))
        else:
            types = starmap(TensorType, self._manifest.uneven_types[family.template])
            self |= zip(family.names, types, strict=True)
        if name not in self:
            raise KeyError(name)
        return self[name]


def _leaves(node: Node, stacks: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield each leaf of *node* with the number of elements of the stacks around it."""
    if isinstance(node, Source):
        yield node.name, stacks
    if isinstance(node, Stack | Join):
        stacks = {**stacks, node.over: node.count or 0}
    for child in children(node):
        yield from _leaves(child, stacks)


def _expanded(members: Members, holes: Sequence[str], sizes: Mapping[str, int]) -> Members:
    width = len(members[0]) if members else 0
    place = {name: width + number for number, name in enumerate(sizes)}
    order = [int(hole) if hole.isdigit() else place[hole] for hole in holes]
    if sizes:
        elements = [*product(*map(range, sizes.values()))]
        members = tuple(member + element for member in members for element in elements)
    if order == [*range(width + len(sizes))]:
        return members
    return tuple([tuple([member[slot] for slot in order]) for member in members])


class Used:
    """Stored tensors that are read by somebody: whole families, and single names beside."""

    def __init__(self, parts: Iterable[Part], names: Iterable[str]) -> None:
        """Take what is read; *names* may be of the families too."""
        listed = [*parts]
        self.families: Mapping[str, Family] = {
            p.family.template: p.family for p in listed if p.is_all
        }
        """Those of which all is read, by template."""
        some = (p.names for p in listed if p.family.template not in self.families)
        self._singles = {*names}.union(*some)

    @property
    def names(self) -> set[str]:
        """Every name."""
        return self._singles.union(*(family.names for family in self.families.values()))

    def left_of(self, manifest: Manifest) -> list[str]:
        """Return the tensors that nobody reads, in stored order."""
        others = [f for t, f in manifest.families.items() if t not in self.families]
        left = {n for family in others for n in family.names if n not in self._singles}
        return [*filter(left.__contains__, manifest.tensors)] if left else []

    def n_bytes(self, manifest: Manifest) -> int | None:
        """Return the bytes of all of it; None if some are not known."""
        even = {t: f for t, f in self.families.items() if t in manifest.even_sizes}
        others = (f.names for t, f in self.families.items() if t not in even)
        rest = self._singles.union(*others)
        total = sum(manifest.even_sizes[t] * len(f) for t, f in even.items())
        for name in rest.difference(*(f.names for f in even.values())) if rest else ():
            if (size := manifest.sizes[name]) is None:
                return None
            total += size
        return total
