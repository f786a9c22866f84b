"""``ModelTree``: a model as it will be loaded, by tensor or, where units keep together, by family.

A model can have 200,000 tensors in units that must not be split, and most of them are of a few
families. Of such a family only the number in each unit matters for a placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, count, pairwise, repeat
from operator import itemgetter
from typing import NamedTuple, TypeVar

from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.mapping.recipes import FamilyRecipe, is_direct
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.planner.names import parent
from modelquirks.planner.placement.allocator import padding
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.outline import Outline, content_of, outlined
from modelquirks.planner.placement.touched import (
    Experts,
    in_stacked_experts,
    moves_by_share,
    read_share,
    share_at_once,
    touched,
)
from modelquirks.quirks.family import Family, group
from modelquirks.quirks.recipe import Opaque, nodes

__all__ = ["ModelTree"]

_Number = TypeVar("_Number", int, float)


class _Row(NamedTuple):
    """A family that is all in units, all of one size and shape."""

    name: str
    """Of one of its tensors."""
    shape: tuple[int, ...]
    size: int
    is_made: bool
    """No file holds its tensors as they are."""
    counts: Mapping[str, int]
    """How many tensors are in each unit that has some."""


@dataclass(frozen=True)
class ModelTree:
    """What placement knows of a model before it knows the batch."""

    skeleton: Skeleton
    recipes: Sequence[FamilyRecipe] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    no_split: Collection[str] = ()

    def outline(
        self,
        experts: Experts | None,
        *,
        batch: int,
        by_expert: bool = False,
        indexed: bool = False,
    ) -> Outline:
        """Return the modules with the bytes that tensors take, and that a step of *batch* touches.

        With *by_expert* stacked experts are moved one by one, and with *indexed* as well there are
        never more than two where the model runs. With measured frequencies every
        expert is another one.
        """
        skeleton, even = self.skeleton, self.skeleton.even_types
        indexed = indexed and not self._has_opaque_experts

        def told(tree: ModuleTree, families: Iterable[str]) -> ModuleTree:
            listed = (
                (skeleton.families[t].names, even[t][1] if t in even else None) for t in families
            )
            return _padded(
                touched(
                    tree,
                    listed,
                    lambda name: skeleton.tensors[name].shape,
                    skeleton.modules,
                    experts,
                    batch=batch,
                    by_expert=by_expert,
                    indexed=indexed,
                )
            )

        def whole() -> ModuleTree:
            return told(self.whole, skeleton.families)

        if experts is not None and experts.frequencies is not None:
            return outlined(whole())
        rows = self._rows
        others = [template for template in skeleton.families if template not in rows]
        sums = _Sums(outlined(told(self._tree(others), others)).coarse)
        for row in rows.values():
            share = read_share(row.name, row.shape, skeleton.modules, experts, batch=batch)
            moves_share = moves_by_share(row.name, by_expert=by_expert)
            is_indexed = by_expert and indexed
            at_once = share_at_once(row.name, row.shape, experts) if is_indexed else 1.0
            sums.add(row, share, at_once, moves_share=moves_share)
        return Outline(sums.tree(), whole)

    @cached_property
    def whole(self) -> ModuleTree:
        """Every module, with the bytes that each tensor will take."""
        return self._tree(self.skeleton.families)

    @property
    def _has_opaque_experts(self) -> bool:
        """Whether code makes stacked experts as a whole, so that none can come alone."""
        stacked = (r for r in self.recipes if in_stacked_experts(r.target))
        return any(isinstance(node, Opaque) for recipe in stacked for node in nodes(recipe.node))

    def _tree(self, families: Collection[str]) -> ModuleTree:
        """Return the tree with the tensors of some families, and the computed ones."""
        skeleton = self.skeleton
        sizes = self._sizes(families)
        for name in self.aliases:
            sizes.pop(name, None)
        is_all = len(families) == len(skeleton.families)
        return ModuleTree(
            sizes=sizes,
            modules=tuple(skeleton.modules if is_all else self._outside),
            units=self._units,
            aliases=dict(self.aliases),
            buffers=skeleton.of_kinds("buffer", "computed"),
            computed=skeleton.of_kinds("computed"),
            made={
                name: sizes[name]
                for recipe in self.recipes
                if not is_direct(recipe.node) and (is_all or recipe.template not in self._rows)
                for name in recipe.names()
                if name in sizes
            },
        )

    @cached_property
    def _units(self) -> frozenset[str]:
        whole = self.skeleton.no_split | frozenset(self.no_split)
        modules = self.skeleton.modules
        return frozenset(compress(modules, map(whole.__contains__, modules.values())))

    @cached_property
    def _outside(self) -> list[str]:
        """The modules that are in no unit, and the units."""
        names = [*self.skeleton.modules]
        starts = [*compress(count(), map(self._units.__contains__, names))]
        found = self._not_below(names[: starts[0] if starts else None])
        for start, end in pairwise([*starts, len(names)]):
            found += self._not_below(names[start : start + 1])
            unit, inside = names[start], names[start + 1 : end]
            # Most often all that follows a unit is in it, which is told at the speed of C.
            if not all(map(str.startswith, inside, repeat(f"{unit}." if unit else ""))):
                found += self._not_below(inside)
        return found

    def _not_below(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self._is_below(name)]

    def _is_below(self, name: str) -> bool:
        """Tell whether a module is in a unit."""
        while name:
            name = parent(name)
            if name in self._units:
                return True
        return False

    @cached_property
    def _planned(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Bytes of a tensor of each family that one recipe makes, and of others by name."""
        even: dict[str, int] = {}
        made: dict[str, int] = {}
        for recipe in self.recipes:
            if recipe.type.dtype is None or recipe.type.shape is None:
                continue
            size = nbytes(recipe.type.dtype, recipe.type.shape)
            family = self.skeleton.families.get(recipe.template)
            if family is not None and family.members == recipe.members:
                even[recipe.template] = size
            else:
                made |= dict.fromkeys(recipe.names(), size)
        return even, made

    def _sizes(self, families: Collection[str]) -> dict[str, int]:
        """Return the bytes of each tensor of *families*, and of the computed, in module order."""
        even, made = self._planned
        skeleton = self.skeleton
        wanted = skeleton.wanted
        sizes: dict[str, int] = {}
        for template in families:
            names = skeleton.families[template].names
            if template in even:
                sizes |= dict.fromkeys(names, even[template])
            else:
                sizes |= {n: made[n] if n in made else wanted[n].nbytes for n in names}
        sizes |= {name: skeleton.tensors[name].nbytes for name in skeleton.of_kinds("computed")}
        return {name: sizes[name] for name in filter(sizes.__contains__, skeleton.tensors)}

    @cached_property
    def _rows(self) -> Mapping[str, _Row]:
        """The families that need no names, by template."""
        skeleton = self.skeleton
        odd = skeleton.of_kinds("buffer").union(*self.aliases.items())
        even, made = self._planned
        computed = {recipe.template for recipe in self.recipes if not is_direct(recipe.node)}
        blocks = _Blocks(self._units)
        found: dict[str, _Row] = {}
        for template, family in skeleton.families.items():
            kind = skeleton.even_types.get(template)
            if kind is None or (odd and not odd.isdisjoint(family.names)):
                continue
            size = even.get(template)
            if size is None and (not made or made.keys().isdisjoint(family.names)):
                size = nbytes(*kind)
            counts = None if size is None else blocks.counts(family)
            if size is not None and counts is not None:
                name = family.names[0]
                found[template] = _Row(name, kind[1], size, template in computed, counts)
        return found


class _Blocks:
    """The units of a model by family."""

    def __init__(self, units: Collection[str]) -> None:
        self._families = sorted(group(units).values(), key=lambda family: len(family.template))
        self._known: dict[tuple[int, str], Mapping[str, int] | None] = {}

    def counts(self, family: Family) -> Mapping[str, int] | None:
        """Return how many tensors of *family* are in each unit; None if some are in none.

        Units in units do not count, and for want of a simple rule are told as None too.
        """
        around = [
            units
            for units in self._families
            if not units.template or family.template.startswith(f"{units.template}.")
        ]
        if len(around) != 1:
            return None
        key = (id(family.members), around[0].template)  # companions have the same members
        if key not in self._known:
            self._known[key] = _counted(family, around[0])
        return self._known[key]


def _counted(family: Family, units: Family) -> Mapping[str, int] | None:
    slots = range(units.n_slots)
    if not slots:
        return {units.names[0]: len(family)}
    names = dict(zip(map(itemgetter(*slots), units.members), units.names, strict=True))
    found = Counter(map(itemgetter(*slots), family.members))
    if not found.keys() <= names.keys():
        return None
    return {names[key]: n for key, n in found.items()}


class _Sums:
    """A coarse tree that rows are added to."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._sizes = dict(tree.sizes)
        self._padding = dict(tree.padding)
        self._made = dict(tree.made)
        self._less_read = _less(tree.sizes, tree.read)
        self._less_streamed = _less(tree.sizes, tree.streamed)
        self._less_at_once = _less(tree.sizes, tree.at_once)

    def add(self, row: _Row, share: float, at_once: float, *, moves_share: bool) -> None:
        """Add the tensors of *row*, of each of which a step reads *share*, and may move no more.

        *at_once* is the part that is where it runs at a time.
        """
        less = row.size * (1.0 - share)
        more = padding(row.size)
        for unit, n in row.counts.items():
            counted = content_of(unit)
            _add(self._sizes, counted, row.size * n)
            if less:
                _add(self._less_read, counted, less * n)
            if less and moves_share:
                _add(self._less_streamed, counted, less * n)
            if at_once < 1:
                _add(self._less_at_once, counted, row.size * (1.0 - at_once) * n)
            if more:
                _add(self._padding, counted, more * n)
            if row.is_made:
                moved = row.size - less if moves_share else row.size
                _add(self._made, counted, float(moved * n))

    def tree(self) -> ModuleTree:
        """Return the tree with all that was added."""
        return replace(
            self._tree,
            sizes=self._sizes,
            read=_less(self._sizes, self._less_read),
            streamed=_less(self._sizes, self._less_streamed),
            at_once=_less(self._sizes, self._less_at_once),
            made=self._made,
            padding=self._padding,
        )


def _add(sums: dict[str, _Number], name: str, number: _Number) -> None:
    sums[name] = sums.get(name, 0) + number


def _less(sizes: Mapping[str, int], some: Mapping[str, float]) -> dict[str, float]:
    return {name: sizes[name] - n_bytes for name, n_bytes in some.items()}


def _padded(tree: ModuleTree) -> ModuleTree:
    """Return *tree* with what the allocator of an accelerator adds."""
    padded = {size: more for size in set(tree.sizes.values()) if (more := padding(size))}
    if not padded:
        return tree
    return replace(tree, padding={n: padded[s] for n, s in tree.sizes.items() if s in padded})
