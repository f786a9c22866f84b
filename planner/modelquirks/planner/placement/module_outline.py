"""The outline of a real ``nn.Module``: modules that must not be split count as one tensor.

That is what :func:`~modelquirks.planner.placement.outline.outlined` would make of the whole tree,
at a fifth of its time, as what is in such a module is only named where its name matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from modelquirks.planner.model.from_module import (
    declared,
    declared_ties,
    identity,
    telling,
    ties_of,
)
from modelquirks.planner.model.loaded_sizes import LoadedSizes
from modelquirks.planner.model.skeleton import Kind
from modelquirks.planner.model.walk import (
    Contents,
    entries_of,
    flat,
    modules_of,
    outside,
)
from modelquirks.planner.names import parent
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.outline import content_of

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.model.walk import Entry

__all__ = ["tree_of_module"]

_CONTENT: Mapping[Kind, str] = {"parameter": "*", "buffer": "*buffers", "computed": "*computed"}


def tree_of_module(
    model: torch.nn.Module, no_split: str | Iterable[str] | None, sizes: LoadedSizes
) -> ModuleTree:
    """Return the modules of *model*, with the bytes of each tensor outside of *no_split* classes.

    Classes that the model itself declares are not split either. Tensors that are tied have their
    own names.
    """
    unnamed = flat(model)
    some = telling(unnamed.modules)
    sizes = sizes.keeping(some)
    given = [no_split] if isinstance(no_split, str) else no_split or ()
    whole = declared(some, "_no_split_modules").union(given)
    modules, units = outside(model, whole)
    free = list(entries_of({n: module for n, module in modules.items() if n not in units}))
    named = (name for name in modules if name in units)
    inside = dict(zip(named, unnamed.each(whole), strict=True))
    entries = _named(inside, modules, free, sizes, declared_ties(model))
    ties = ties_of(model, [*free, *chain.from_iterable(entries.values())])
    counts = _Counts(sizes, ties)
    counts.enter(None, free)
    for unit, contents in inside.items():
        if unit in entries:
            counts.enter(unit, entries[unit])
        else:
            counts.enter_all(unit, contents)
    return ModuleTree(
        sizes=counts.sizes,
        modules=tuple(modules),
        units=units,
        aliases=counts.aliases,
        buffers=frozenset(counts.stay["buffer"] | counts.stay["computed"]),
        computed=frozenset(counts.stay["computed"]),
    )


def _named(
    inside: Mapping[str, Contents],
    modules: Mapping[str, torch.nn.Module],
    free: Iterable[Entry],
    sizes: LoadedSizes,
    ties: Iterable[Sequence[str]],
) -> Mapping[str, list[Entry]]:
    """Return the tensors, by name, of the units in which a name matters.

    It does if the size depends on it, and if the tensor is tied to another one.
    """

    def entries(units: Iterable[str]) -> dict[str, list[Entry]]:
        return {unit: list(entries_of(modules_of(modules[unit], unit))) for unit in units}

    wanted = _above(chain(sizes.special, *ties))
    plain: dict[str, Contents] = {}
    for unit, contents in inside.items():
        if unit not in wanted and all(map(sizes.are_plain, contents)):
            plain[unit] = contents
    found = entries(unit for unit in inside if unit not in plain)
    keys = {unit: [*map(identity, chain(c.parameter, c.buffer))] for unit, c in plain.items()}
    others = _keys(chain(free, *found.values()))
    total = Counter(chain(others, *keys.values()))
    if len(total) < total.total():
        shared = {key for key, n_names in total.items() if n_names > 1}
        found |= entries(unit for unit, each in keys.items() if not shared.isdisjoint(each))
    return found


def _keys(entries: Iterable[Entry]) -> Iterator[object]:
    return (identity(tensor) for _, kind, tensor in entries if kind != "computed")


def _above(names: Iterable[str]) -> set[str]:
    """Return every module that one of the tensors of these names is in."""
    found: set[str] = set()
    for name in names:
        module = parent(name)
        while module and module not in found:
            found.add(module)
            module = parent(module)
        found.add("")
    return found


class _Counts:
    """The bytes of what counts as one."""

    def __init__(self, sizes: LoadedSizes, ties: Iterable[Sequence[str]]) -> None:
        self._of = sizes
        self._tied = {name for names in ties for name in names}
        self.aliases = {name: names[0] for names in ties for name in names[1:]}
        self.sizes: dict[str, int] = {}
        self.stay: dict[Kind, set[str]] = {"parameter": set(), "buffer": set(), "computed": set()}
        """Names by kind."""

    def enter(self, unit: str | None, entries: Iterable[Entry]) -> None:
        """Add tensors, by name, of a unit or of none."""
        for name, kind, tensor in entries:
            if name in self.aliases:
                continue
            alone = unit is None or name in self._tied
            counted = name if alone else content_of(unit or "", _CONTENT[kind])
            self._add(counted, kind, self._of.of_tensor(name, tensor))

    def enter_all(self, unit: str, contents: Contents) -> None:
        """Add what a unit has."""
        for kind, tensors in zip(_CONTENT, contents, strict=True):
            if tensors:
                self._add(content_of(unit, _CONTENT[kind]), kind, self._of.of_all(tensors))

    def _add(self, counted: str, kind: Kind, n_bytes: int) -> None:
        self.sizes[counted] = self.sizes.get(counted, 0) + n_bytes
        self.stay[kind].add(counted)
