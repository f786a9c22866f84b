"""``Kin``: tensors of one side that differ only in their place in lists of layers or experts.

As a family, but an index counts only where the modules at its values are alike, and the first
``n`` are all there. ``mlp.0`` and ``mlp.2``, which are steps one after the other, are names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from modelquirks.quirks.recipe import TensorType

__all__ = ["SLOT", "Index", "Kin", "Path", "kins_of", "lists_of", "literal", "stacks"]

Path = tuple[str, ...]
Index = tuple[int, ...]

SLOT = "*"
"""A segment that is an index."""
_MAX_LITERALS = 8
_DIGITS = re.compile("[0-9]{1,9}")
_INDEX = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, eq=False)
class Kin:
    """Tensors with one name but for their indices, and the type of each."""

    path: Path
    """Segments, with :data:`SLOT` for each index."""
    types: Mapping[Index, TensorType]
    over: int | None = None
    """The slot of ``full`` that is stacked over: ``path`` lacks it, and shapes begin with it."""
    count: int = 0
    """How many are stacked."""
    parent: Kin | None = None
    """Of which this has those members whose last index is ``value``."""
    value: int = 0

    @cached_property
    def full(self) -> Path:
        """The segments of the tensors' names."""
        if self.over is None:
            return self.path
        return (*self.path[: self.over], SLOT, *self.path[self.over :])

    @property
    def module(self) -> Path:
        """The path without the tensor's own word."""
        return self.path[:-1]

    @cached_property
    def n_slots(self) -> int:
        """How many indices there are."""
        return self.path.count(SLOT)

    @cached_property
    def shapes(self) -> Mapping[Index, tuple[int, ...] | None]:
        """The shape of each member."""
        return {index: of.shape for index, of in self.types.items()}

    def name(self, index: Index, inner: str = "{0}") -> str:
        """Return the name of a member; *inner* stands at the slot that is stacked over."""
        values = iter(map(str, index))
        at = self.over
        return ".".join(
            inner if number == at else next(values) if segment == SLOT else segment
            for number, segment in enumerate(self.full)
        )

    def only(self, indices: Iterable[Index]) -> Kin:
        """Return the members of these indices."""
        return replace(self, types={i: self.types[i] for i in indices if i in self.types})

    def without(self, indices: Iterable[Index]) -> Kin:
        """Return all members but those of *indices*."""
        gone = set(indices)
        return replace(self, types={i: t for i, t in self.types.items() if i not in gone})

    def at(self, path: Path) -> Kin:
        """Return the same members under another name; for plain ones only."""
        return replace(self, path=path)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.types)

    def __str__(self) -> str:
        """Return the name as people read it."""
        return ".".join(self.full)


def kins_of(tensors: Mapping[str, TensorType], lists: Collection[Path] | None = None) -> list[Kin]:
    """Return the tensors of one side, grouped; *lists* are those of :func:`lists_of`.

    >>> t = TensorType("F32", (4,))
    >>> [str(k) for k in kins_of({"h.0.w": t, "h.1.w": t, "s.0.w": t, "s.2.w": t})]
    ['h.*.w', 's.0.w', 's.2.w']
    """
    cuts = {name: tuple(name.split(".")) for name in tensors}
    segments = {name: cut for name, cut in cuts.items() if SLOT not in cut}  # no rule can say it
    lists = lists_of(tensors) if lists is None else lists
    found: dict[Path, dict[Index, TensorType]] = {}
    for name, cut in segments.items():
        path = tuple(
            SLOT if _DIGITS.fullmatch(segment) and cut[:at] in lists else segment
            for at, segment in enumerate(cut)
        )
        index = tuple(int(c) for c, s in zip(cut, path, strict=True) if s is SLOT)
        found.setdefault(path, {})[index] = tensors[name]
    return [Kin(path, types) for path, types in found.items()]


def lists_of(names: Iterable[str]) -> set[Path]:
    """Return the paths below which an integer is the place in a list."""
    below: dict[Path, dict[int, set[Path]]] = {}
    for cut in (tuple(name.split(".")) for name in names):
        for at, segment in enumerate(cut):
            if _INDEX.fullmatch(segment):
                tail = tuple(s for s in cut[at + 1 :] if not _DIGITS.fullmatch(s))
                below.setdefault(cut[:at], {}).setdefault(int(segment), set()).add(tail)
    return {
        path
        for path, children in below.items()
        if path and (_is_list(children) or (path[-1] == "experts" and [*children] == [0]))
    }


def _is_list(children: Mapping[int, set[Path]]) -> bool:
    """Tell whether modules are of one kind, and all there from the first to the last.

    A few may be missing, where there are many; of two kinds that take turns some part is in all.
    """
    last = max(children) + 1
    if len(children) < 2 or len(children) < 0.75 * last:
        return False
    common: dict[Path, int] = {}
    for tails in children.values():
        for tail in tails:
            common[tail] = common.get(tail, 0) + 1
    return 2 * max(common.values()) > len(children)


def literal(kin: Kin) -> Iterator[Kin]:
    """Yield *kin* with its last slot of few values as names."""
    at = [number for number, segment in enumerate(kin.path) if segment == SLOT]
    for slot in reversed(range(kin.n_slots)):
        values = sorted({index[slot] for index in kin.types})
        if len(values) > _MAX_LITERALS:
            continue
        for value in values:
            path = (*kin.path[: at[slot]], str(value), *kin.path[at[slot] + 1 :])
            types = {
                (*i[:slot], *i[slot + 1 :]): t for i, t in kin.types.items() if i[slot] == value
            }
            yield Kin(path, types, parent=kin, value=value)
        return


def stacks(kin: Kin, counts: Iterable[int]) -> Iterator[Kin]:
    """Yield *kin* with one of its lists stacked, where that has one of *counts* elements.

    Each outer index must have all of them, 0 to count - 1, of one type.
    """
    at = [number for number, segment in enumerate(kin.path) if segment == SLOT]
    wanted = set(counts)
    for slot in range(kin.n_slots):
        inner: dict[Index, dict[int, TensorType]] = {}
        for index, of in kin.types.items():
            inner.setdefault((*index[:slot], *index[slot + 1 :]), {})[index[slot]] = of
        count = 1 + max(index[slot] for index in kin.types)
        if count not in wanted:
            continue
        types = {
            outer: TensorType(each[0].dtype, (count, *(each[0].shape or ())))
            for outer, each in inner.items()
            if len(each) == count and len(set(each.values())) == 1 and each[0].shape is not None
        }
        if len(types) == len(inner):
            yield Kin((*kin.path[: at[slot]], *kin.path[at[slot] + 1 :]), types, at[slot], count)
