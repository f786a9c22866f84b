"""Comparing two sides: every tensor is on one side only, or is the same, or differs in named ways.

Headers tell names, shapes and dtypes, never values: two checkpoints that are the same here may
hold other numbers. That a tensor was renamed is said only if a record of the registry says that
both names mean one tensor of the model; what merely looks alike is a candidate, and stays removed
on one side and added on the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from modelquirks.planner.diff.sides import Item, Side
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.report.families import index_ranges
from modelquirks.planner.wording import counted, show_shape
from modelquirks.quirks.family import Family, group, show

__all__ = ["KINDS", "Change", "Difference", "Group", "Kind", "compare"]

Kind = Literal[
    "removed", "added", "renamed", "reshaped", "retyped", "moved", "remade", "reclassified"
]
"""``removed``: on the first side only. ``moved``: to another device. ``remade``: of other stored
tensors, or by another rule. ``reclassified``: ``matched`` before, ``missing`` now, say."""

KINDS: tuple[Kind, ...] = (
    "removed", "added", "renamed", "reshaped", "retyped", "moved", "remade", "reclassified",
)  # fmt: skip

_FIELDS: tuple[tuple[Kind, str], ...] = (
    ("reshaped", "shape"),
    ("retyped", "dtype"),
    ("moved", "device"),
    ("remade", "recipe"),
    ("reclassified", "state"),
)
_MOST = 30
"""Families for which candidates are sought: comparing is letter by letter."""


class Change(NamedTuple):
    """One way in which tensors differ."""

    kind: Kind
    before: str
    after: str


@dataclass(frozen=True)
class Group:
    """Tensors of one family that differ in the same ways."""

    kinds: tuple[Kind, ...]
    before: str
    """Template on the first side, each index as ``*``; empty if added."""
    after: str
    """Template on the second side; empty if removed."""
    n_tensors: int
    indices: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    certain_by: str = ""
    """The records that say that these names mean the same."""
    candidates: tuple[str, ...] = ()
    """Families of the other side that it may be now: nothing says so but their looks."""


@dataclass(frozen=True)
class Difference:
    """All that differs between two sides."""

    kind: str
    before: str
    after: str
    summaries: tuple[str, str]
    n_before: int
    n_after: int
    n_same: int
    groups: tuple[Group, ...]
    facts: tuple[tuple[str, str, str], ...]
    """What else is not the same: label, before, after. It decides nothing."""
    n_unknown: int
    """Tensors on both sides of which shape or dtype is not known on both."""
    notes: tuple[str, ...]
    """What was not compared, and why."""

    @property
    def is_same(self) -> bool:
        """Whether no tensor differs."""
        return not self.groups

    def counts(self) -> Mapping[Kind, int]:
        """Return how many tensors differ in each way."""
        found: dict[Kind, int] = {}
        for kind in KINDS:
            if n := sum(group.n_tensors for group in self.groups if kind in group.kinds):
                found[kind] = n
        return found

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "same": self.is_same, "counts": dict(self.counts())}


class _Pair(NamedTuple):
    before: str
    after: str
    certain_by: str


def compare(a: Side, b: Side) -> Difference:
    """Return what differs between *a*, the first side, and *b*."""
    pairs = [*_pairs(a, b)]
    paired_a, paired_b = {pair.before for pair in pairs}, {pair.after for pair in pairs}
    gone = [name for name in a.items if name not in paired_a]
    new = [name for name in b.items if name not in paired_b]
    differing: dict[_Pair, tuple[Change, ...]] = {}
    for pair in pairs:
        changes = tuple(_changes(a.items[pair.before], b.items[pair.after]))
        if changes or pair.certain_by:
            differing[pair] = changes
    n_unknown = sum(_is_unknown(a.items[pair.before], b.items[pair.after]) for pair in pairs)
    alone = [*_alone("removed", gone, a.items), *_alone("added", new, b.items)]
    return Difference(
        kind=a.kind,
        before=a.title,
        after=b.title,
        summaries=(a.summary, b.summary),
        n_before=len(a.items),
        n_after=len(b.items),
        n_same=len(pairs) - len(differing),
        groups=(*_with_candidates(alone), *_grouped(differing)),
        facts=tuple(
            (label, text, b.facts[label])
            for label, text in a.facts.items()
            if label in b.facts and b.facts[label] != text
        ),
        n_unknown=n_unknown,
        notes=tuple(_notes(a, b, n_unknown)),
    )


def _pairs(a: Side, b: Side) -> Iterator[_Pair]:
    """Yield the names that stand for one tensor: equal ones, and those that records say are."""
    for name in a.items:
        if name in b.items:
            yield _Pair(name, name, "")
    called_a, called_b = _called(a), _called(b)
    for meant, names in called_a.items():
        others = called_b.get(meant, ())
        # Where one side has two for it, nobody can say which of them is meant.
        if len(names) != 1 or len(others) != 1:
            continue
        (before,), (after,) = names, others
        if before == after or before in b.items or after in a.items:
            continue
        left, right = a.items[before].shape, b.items[after].shape
        if left is None or right is None or left == right:
            said = [a.logical.get(before, ("", ""))[1], b.logical.get(after, ("", ""))[1]]
            yield _Pair(before, after, ", ".join(dict.fromkeys(filter(None, said))))


def _called(side: Side) -> Mapping[str, list[str]]:
    """Return the names of one side by what they are called in the model."""
    found: dict[str, list[str]] = {}
    for name in side.items:
        found.setdefault(side.logical.get(name, (name, ""))[0], []).append(name)
    return found


def _changes(before: Item, after: Item) -> Iterator[Change]:
    for kind, field in _FIELDS:
        old, new = getattr(before, field), getattr(after, field)
        if old is None or new is None or old == new:
            continue
        if kind == "remade":
            yield Change(kind, before.made_from, after.made_from)
        elif kind == "reshaped":
            yield Change(kind, show_shape(old), show_shape(new))
        else:
            yield Change(kind, old, new)


def _grouped(differing: Mapping[_Pair, tuple[Change, ...]]) -> Iterator[Group]:
    """Yield the tensors that differ alike, by family."""
    before = _templates(pair.before for pair in differing)
    after = _templates(pair.after for pair in differing)
    alike: dict[tuple[_Pair, tuple[Change, ...]], list[_Pair]] = {}
    for pair, changes in differing.items():
        general = _Pair(before[pair.before], after[pair.after], pair.certain_by)
        alike.setdefault((general, tuple(map(_general, changes))), []).append(pair)
    for (general, changes), pairs in alike.items():
        renamed: tuple[Kind, ...] = ("renamed",) if general.certain_by else ()
        (family,) = group(pair.after for pair in pairs).values()
        yield Group(
            kinds=(*renamed, *(change.kind for change in changes)),
            before=show(general.before),
            after=show(general.after),
            n_tensors=len(pairs),
            indices=index_ranges(family)[0],
            changes=changes,
            certain_by=general.certain_by,
        )


def _general(change: Change) -> Change:
    """Return a change as it is for all of a family: names of stored tensors by their template."""
    if change.kind != "remade":
        return change
    return change._replace(before=_template(change.before), after=_template(change.after))


def _template(text: str) -> str:
    name, separator, rest = text.partition(" ")
    return f"{show(next(iter(group([name]))))}{separator}{rest}"


def _templates(names: Iterable[str]) -> Mapping[str, str]:
    return {name: family.template for family in group(names).values() for name in family.names}


class _Alone(NamedTuple):
    kind: Kind
    family: Family
    types: tuple[tuple[object, object], ...]
    """Shape and dtype of each member."""


def _alone(kind: Kind, names: Collection[str], items: Mapping[str, Item]) -> Iterator[_Alone]:
    for family in group(names).values():
        types = tuple((items[name].shape, items[name].dtype) for name in family.names)
        yield _Alone(kind, family, types)


def _with_candidates(alone: Sequence[_Alone]) -> Iterator[Group]:
    """Yield the families that are on one side only, with those of the other that fit them."""
    for number, one in enumerate(alone):
        fitting = [
            show(other.family.template)
            for other in alone
            if other.kind != one.kind and _fits(one, other)
        ]
        template = show(one.family.template)
        near = closest(template, fitting) if number < _MOST and fitting else ()
        yield Group(
            kinds=(one.kind,),
            before=template if one.kind == "removed" else "",
            after=template if one.kind == "added" else "",
            n_tensors=len(one.family),
            indices=index_ranges(one.family)[0],
            candidates=near,
        )


def _fits(one: _Alone, other: _Alone) -> bool:
    """Tell whether two families have the same indices, shapes and dtypes."""
    if len(one.family) != len(other.family):
        return False
    return dict(zip(one.family.members, one.types, strict=True)) == dict(
        zip(other.family.members, other.types, strict=True)
    )


def _is_unknown(before: Item, after: Item) -> bool:
    """Tell whether there was nothing to compare but the names."""
    return None in (before.shape, before.dtype, after.shape, after.dtype)


def _notes(a: Side, b: Side, n_unknown: int) -> Iterator[str]:
    yield from (f"{side}: {text}" for side, s in (("A", a), ("B", b)) for text in s.errors)
    if a.kind == "plan":
        return
    yield "Values were not compared: headers do not tell them."
    if n_unknown:
        tensors = counted(n_unknown, "tensor")
        yield f"Of {tensors} shape or dtype are not known on both sides: only names were compared."
