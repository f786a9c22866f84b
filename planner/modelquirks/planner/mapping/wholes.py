"""Wholes: families of the model of which all members are served alike, judged once each.

A family is a whole if one piece alone offers its names, all of them want one type, what they are
made from has one type, and nothing is odd about it. Whatever else there is, is judged by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from modelquirks.planner.mapping.fit import Fit
from modelquirks.planner.mapping.judge import Judge, Judged, Verdict
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.offers import Offer, Offers
from modelquirks.planner.mapping.reads import Part, Used
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.family import Family, group

__all__ = ["Account", "Whole", "judged_all"]


class Whole(NamedTuple):
    """What is offered for all tensors of a family, and how it fits."""

    family: Family
    piece: Logical
    fit: Fit
    verdict: Verdict
    reads: Sequence[Part]
    """The stored tensors that all of them are made from."""

    def each(self) -> Iterator[tuple[str, Judged]]:
        """Yield what is offered for each tensor, by its name in the model."""
        for name, member in zip(self.family.names, self.family.members, strict=True):
            offer = Offer(self.piece, member)
            reads = (name,) if self.piece.is_stored_so else tuple(offer.reads())
            yield name, Judged(offer, self.fit, self.verdict, reads)


@dataclass(frozen=True)
class Account:
    """How all that the checkpoint offers serves the model."""

    skeleton: Skeleton
    wholes: Sequence[Whole]
    """In the order of the model's families."""
    apart: Sequence[str]
    """The wanted tensors that are in none of these, in the order of the model."""
    judged: Mapping[str, Judged]
    """Those of them that something is offered for, in that order."""
    rivals: Mapping[str, Sequence[Offer]]
    """Further offers for these."""

    @cached_property
    def each(self) -> Mapping[str, Judged]:
        """All that is offered, by name, in the order of the model."""
        found = {name: judged for whole in self.wholes for name, judged in whole.each()}
        found |= self.judged
        return {name: found[name] for name in self.skeleton.wanted if name in found}

    @cached_property
    def used(self) -> Used:
        """The stored tensors that are read."""
        return Used(
            (part for whole in self.wholes for part in whole.reads),
            (name for found in self.judged.values() for name in found.reads),
        )

    def in_order(self, names: Collection[str]) -> list[str]:
        """Return *names*, which are wanted, in the order of the model."""
        return [*filter(names.__contains__, self.skeleton.wanted)] if names else []


def judged_all(
    judge: Judge, skeleton: Skeleton, offers: Offers, tied: Iterable[Sequence[str]]
) -> Account:
    """Return how *offers* serve *skeleton*; families with a *tied* name are judged by name."""
    by_name = group(name for names in tied for name in names)
    families = {t: f for t, f in skeleton.families.items() if t not in by_name}
    found = (_whole(judge, skeleton, family, offers) for family in families.values())
    wholes = [whole for whole in found if whole is not None]
    done = {whole.family.template for whole in wholes}
    rest = {template: f for template, f in skeleton.families.items() if template not in done}
    names = {name for family in rest.values() for name in family.names}
    apart = [*filter(names.__contains__, skeleton.wanted)] if names else []
    ranked = offers.ranked(rest)
    judged = {
        name: judge.best_of(skeleton.wanted[name], offer, ranked.rivals.get(name, ()))
        for name in apart
        if (offer := ranked.best.get(name)) is not None
    }
    return Account(skeleton, wholes, apart, judged, ranked.rivals)


def _whole(judge: Judge, skeleton: Skeleton, family: Family, offers: Offers) -> Whole | None:
    """Return how *family* is served if it is a whole, else None."""
    piece = offers.alone.get(family.template)
    if piece is None or piece.either or family.template not in skeleton.even_types:
        return None
    if not _covers(piece, family) or not judge.dtype.is_even(family):
        return None
    reads = judge.stored.read(piece, family.members)
    if reads is None:
        return None
    offer = Offer(piece, family.members[0])
    types = judge.stored.types_of(offer.reads())
    fit, verdict = judge.fitted(skeleton.wanted[family.names[0]], offer, types.__getitem__)
    if fit.node is None or fit.warning or fit.taken:  # it speaks of each member by itself
        return None
    return Whole(family, piece, fit, verdict, reads)


def _covers(piece: Logical, family: Family) -> bool:
    """Tell whether *piece*, of that template, has every member of *family*, and none twice."""
    if piece.members == family.members:
        return True
    several = len(piece.index_set) < len(piece.members)
    return not several and piece.index_set.issuperset(family.members)
