"""``Pool``: what is still to be matched on both sides, and what has been claimed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from modelquirks.planner.infer.claim import STACKED, Claim, Tier, least, source_of
from modelquirks.planner.infer.kin import Index, Kin, Path
from modelquirks.quirks.recipe import Select

__all__ = ["Left", "Pool", "Rule", "fits", "shared"]

_MIN_SHARE = 0.5
"""Of the members of the larger family, that must be in both."""


class Rule(NamedTuple):
    """A rewrite that was applied, and how sure it is."""

    text: str
    tier: Tier
    """``certain``: its witnesses have no rival."""
    covers: bool = False
    """It is certain only if it explains most of what there is under both names."""


@dataclass(frozen=True, eq=False)
class Left:
    """A stored family that is left, under the name that the rules so far give it."""

    kin: Kin
    names: tuple[Path, ...]
    """Its own name, then that after each rule."""
    rules: tuple[Rule, ...] = ()

    @property
    def path(self) -> Path:
        """The name after all rules."""
        return self.names[-1]

    @property
    def tier(self) -> Tier:
        """That of the least sure of the rules."""
        tiers: list[Tier] = ["likely" if rule.covers else rule.tier for rule in self.rules]
        return least("certain", *tiers)

    @property
    def why(self) -> str:
        """The rules, for people."""
        return "; ".join(rule.text for rule in self.rules)

    def under(self, path: Path, rule: Rule) -> Left:
        """Return it under the name that *rule* gives it."""
        return replace(self, names=(*self.names, path), rules=(*self.rules, rule))


def kind_of(dtype: str | None) -> str:
    """Return what kind of numbers a dtype holds: floats of any size may stand for each other."""
    if dtype is None:
        return "?"
    return "float" if dtype[0] in "FB" and dtype != "BOOL" else dtype


def fits(stored: Kin, model: Kin) -> bool:
    """Tell whether the members of two families that have one index have one shape.

    Some may be on one side only: half of them must be on both.
    """
    if stored.n_slots != model.n_slots or (stored.over is not None and model.over is not None):
        return False
    small, large = sorted((stored.types, model.types), key=len)
    n_shared = 0
    for index, of in small.items():
        other = large.get(index)
        if other is None:
            continue
        if of.shape != other.shape or of.shape is None or not _alike(of.dtype, other.dtype):
            return False
        n_shared += 1
    return n_shared >= max(1, _MIN_SHARE * len(large))


def shared(one: Kin, other: Kin) -> list[Index]:
    """Return the indices that both have."""
    return [index for index in one.types if index in other.types]


def _alike(one: str | None, other: str | None) -> bool:
    first, second = kind_of(one), kind_of(other)
    return first == second or "?" in (first, second)


@dataclass
class Pool:
    """Both sides, and the claims so far.

    A family may be there in two forms, plain and stacked: what takes one takes the other.
    """

    stored: list[Left] = field(default_factory=list)
    model: list[Kin] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    loose_stored: list[Left] = field(default_factory=list)
    """Taken by claims that are not certain: they are still rivals."""
    loose_model: list[Kin] = field(default_factory=list)
    model_paths: tuple[Path, ...] = ()
    """The names of all families of the model."""
    joined: set[tuple[Path, ...]] = field(default_factory=set)
    """What was found to be in parts on the other side, each with its parts."""
    ties: dict[str, int] = field(default_factory=dict)
    """Name of the model → number of the group of names that share its tensor."""

    def rival_models(self) -> Iterator[Kin]:
        """Yield the model's families that are not certainly taken."""
        yield from self.model
        yield from self.loose_model

    def rival_stored(self) -> Iterator[Left]:
        """Yield the stored families that are not certainly taken."""
        yield from self.stored
        yield from self.loose_stored

    def enter(self, claim: Claim, stored: Sequence[Left], model: Kin) -> None:
        """Enter *claim*, made of *stored* for *model*, of which it may take only some members."""
        self.claims.append(claim)
        members = set(claim.model.types)
        sure = claim.tier == "certain"
        if not sure:
            self.loose_stored += stored
            self.loose_model.append(model)
        fulls = {left.kin.full for left in stored}
        self.stored = [
            kept for left in self.stored for kept in self._kept_stored(left, fulls, members)
        ]
        groups = {self.ties[n] for i in members if (n := claim.model.name(i, "0")) in self.ties}
        self.model = [
            kept for kin in self.model for kept in self._kept(kin, model.full, members, groups)
        ]

    def _kept_stored(
        self, left: Left, fulls: Collection[Path], members: Collection[Index]
    ) -> Iterator[Left]:
        if left.kin.full not in fulls:
            yield left
        elif left.kin.over is None and left.kin.n_slots:
            rest = left.kin.without(members)
            if 0 < len(rest) < len(left.kin):
                yield replace(left, kin=rest)

    def _kept(
        self, kin: Kin, full: Path, members: Collection[Index], groups: Collection[int]
    ) -> Iterator[Kin]:
        if groups and any(self.ties.get(kin.name(i, "0")) in groups for i in kin.types):
            return
        if kin.full != full:
            yield kin
        elif kin.over is None and kin.n_slots:
            rest = kin.without(members)
            if 0 < len(rest) < len(kin):
                yield rest

    def rename(self, left: Left, kin: Kin, tier: Tier, why: str) -> None:
        """Claim that *left* is *kin*, under another name."""
        node = source_of(left.kin)
        if kin.over is not None:
            node = Select(node, f"{{{STACKED}}}", 0)
        members = kin.only(shared(kin, left.kin))
        self.enter(Claim(members, node, tier, why, (), (left.kin,), left, kin), [left], kin)

    def has_stored(self, left: Left) -> bool:
        """Tell whether *left* is still left."""
        return any(left is one for one in self.stored)

    def has_model(self, kin: Kin) -> bool:
        """Tell whether *kin* is still left."""
        return any(kin is one for one in self.model)

    def tied(self, one: Kin, other: Kin) -> bool:
        """Tell whether two families of the model share their tensors."""
        first = {self.ties[n] for i in one.types if (n := one.name(i, "0")) in self.ties}
        return bool(first) and any(self.ties.get(other.name(i, "0")) in first for i in other.types)
