"""``Claim``: what records have to do with each other, before any checkpoint is there.

Which of two records wins is never a matter of order. So it can be said beforehand where one takes
the place of another, and where two ask for the same and would be a conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from modelquirks.quirks.record import LIBRARIES, Match
from modelquirks.quirks.registry import Registered

__all__ = ["Claim", "claims"]


class Claim(NamedTuple):
    """Two records that have to do with each other, in a sentence."""

    kind: Literal["override", "idle-override", "rivals"]
    """``override``: one openly replaces another. ``idle-override``: there is nothing to replace.
    ``rivals``: both ask for the same, so where both match neither would be applied."""
    records: tuple[str, ...]
    text: str


def claims(registered: Sequence[Registered]) -> tuple[Claim, ...]:
    """Return every override, and the architecture records that ask for the same.

    Two are rivals if a checkpoint can match both equally well and no pattern of names tells them
    apart: the field that counts most has a value in common, the other fields do not exclude each
    other, and neither asks for names.
    """
    return (*_overrides(registered), *_rivals(registered))


def _overrides(registered: Iterable[Registered]) -> Iterator[Claim]:
    by_name = {one.record.name: one for one in registered}
    for one in by_name.values():
        for name in sorted(one.record.overrides):
            if name in LIBRARIES:
                text = f"{_told(one)} renames before {name!r} does where both know the names"
                yield Claim("override", (one.record.name, name), text)
                continue
            if (other := by_name.get(name)) is None:
                text = f"{_told(one)} overrides {name!r}, which no plugin gives"
                yield Claim("idle-override", (one.record.name, name), text)
                continue
            rest = ""
            if other.record.role != one.record.role:
                rest = f", which does nothing: it is of role {other.record.role!r}"
                rest += f", not {one.record.role!r}"
            yield Claim(
                "idle-override" if rest else "override",
                (one.record.name, name),
                f"{_told(one)} takes the place of {_told(other)} where both match{rest}",
            )


def _rivals(registered: Iterable[Registered]) -> Iterator[Claim]:
    architectures = [one for one in registered if one.record.role == "architecture"]
    for left, right in combinations(architectures, 2):
        settled = {left.record.name, right.record.name} & {
            *left.record.overrides,
            *right.record.overrides,
        }
        if not settled and (shared := _shared(left.record.match, right.record.match)):
            yield Claim(
                "rivals",
                (left.record.name, right.record.name),
                f"{_told(left)} and {_told(right)} both ask for {shared}: where both match neither "
                "is applied. Let one declare overrides={…}, or be more specific",
            )


_FIELDS = ("architectures", "model_types", "quant_methods", "containers")


def _shared(left: Match, right: Match) -> str:
    """Return what both ask for, if nothing tells them apart; else nothing."""
    if left.specificity != right.specificity or left.specificity == 1:
        return ""
    if any((m.any_of, m.all_of, m.none_of) != ((), (), ()) for m in (left, right)):
        return ""
    shared: list[str] = []
    for name in _FIELDS:
        mine, theirs = set(getattr(left, name)), set(getattr(right, name))
        if mine and theirs:
            if not mine & theirs:
                return ""
            values = ", ".join(repr(value) for value in sorted(mine & theirs)[:3])
            shared.append(f"{name.removesuffix('s')} {values}")
    return " with ".join(shared)


def _told(one: Registered) -> str:
    return f"{one.record.name!r} from {one.origin}"
