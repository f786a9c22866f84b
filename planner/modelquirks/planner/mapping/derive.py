"""Derive: recipes for what the model wants, and the account of both sides."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.audit import Audit, Entry
from modelquirks.planner.mapping.fit import DtypeRule
from modelquirks.planner.mapping.judge import Judge, Judged, Verdict, conflicts
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.nearest import Nearest
from modelquirks.planner.mapping.oddities import oddities
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.mapping.sharing import share
from modelquirks.planner.mapping.storedside import StoredVerdict, expected, stored_verdicts
from modelquirks.planner.mapping.suggest import suggest
from modelquirks.planner.mapping.ties import TieGroup
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.family import show
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import Node, Scheme, TensorType
from modelquirks.quirks.resolve import Resolution

__all__ = ["Derived", "Waivers", "derive"]


@dataclass(frozen=True)
class Waivers:
    """What the user allows."""

    missing: tuple[str, ...] = ()
    """Name patterns of model tensors that may be missing."""
    dequantize: bool = False
    """Packed weights may become plain ones."""


@dataclass(frozen=True)
class Derived:
    """Recipes for everything that will be loaded, who shares what, and the audit."""

    recipes: tuple[FamilyRecipe, ...]
    aliases: Mapping[str, str]
    """Tied name → the name whose tensor it shares."""
    compare: tuple[tuple[str, ...], ...]
    """Groups of which several copies are stored: equal ones are tied on loading."""
    audit: Audit


def derive(
    manifest: Manifest,
    skeleton: Skeleton,
    offers: Offers,
    resolution: Resolution,
    *,
    ties: Sequence[TieGroup],
    schemes: Mapping[str, Scheme],
    dtype: DtypeRule,
    waivers: Waivers,
) -> Derived:
    """Return how every tensor of the model is made, and the class of every tensor of both sides."""
    judge = Judge(manifest, dtype, schemes)
    best, rivals = offers.best, offers.rivals
    judged = {
        name: judge.either(tensor, offer, rivals.get(name, ()))
        if offer.logical.either
        else judge.judged(tensor, offer)
        for name, tensor in skeleton.wanted.items()
        if (offer := best.get(name)) is not None
    }
    sharing = share(ties, skeleton, judged, manifest)
    unprovided = [n for n in skeleton.wanted if n not in sharing.verdicts and n not in judged]
    absent = _absent(unprovided, resolution)
    verdicts = {
        name: sharing.verdicts.get(name)
        or (judged[name].verdict if name in judged else _unprovided(name, offers, absent, waivers))
        for name in skeleton.wanted
    }
    missing = frozenset(n for n, verdict in verdicts.items() if verdict.kind == "missing")
    stored = stored_verdicts(manifest, offers, judged, resolution, missing)
    nearest = _nearest(manifest, skeleton, offers, verdicts, stored)
    audit = Audit(
        model=tuple(_model_entries(skeleton, verdicts, nearest)),
        stored=tuple(_stored_entries(manifest, stored, nearest)),
        ties=sharing.groups,
        unequal_ties=sharing.compare,
        suggestions=tuple(suggest(skeleton, nearest, verdicts.keys())),
        findings=(
            *_without_value(skeleton, verdicts, resolution),
            *sharing.findings,
            *conflicts(judge, judged, offers.rivals),
            *oddities(judged, manifest, nearest.spare, dequantize=waivers.dequantize),
        ),
    )
    recipes = tuple(_recipes(judged, sharing.aliases))
    return Derived(recipes, sharing.aliases, sharing.compare, audit)


def _without_value(
    skeleton: Skeleton, verdicts: Mapping[str, Verdict], resolution: Resolution
) -> Iterator[Finding]:
    """Yield a warning for tensors that may be missing, of a model that has no value for them."""
    empty = [
        name
        for name, verdict in verdicts.items()
        if verdict.kind in ("waived", "absent") and skeleton.wanted[name].on_meta
    ]
    if empty and resolution.library is not None:
        given = resolution.library.computed(empty)
        empty = [name for name in empty if name not in given]
    if empty:
        yield Finding(
            "no-value",
            "warning",
            f"{shown(empty)} may be missing, but are on the meta device in the model: give them "
            "values before the plan is executed, which refuses otherwise",
        )


def _absent(names: Sequence[str], resolution: Resolution) -> Mapping[str, str]:
    """Return those of *names* that may be missing, and why."""
    rules = [e for record in resolution.records() for e in record.absent]
    found = {name: why for name in names if (why := expected(name, rules))}
    return found if resolution.library is None else {**resolution.library.absent(names), **found}


def _unprovided(name: str, offers: Offers, absent: Mapping[str, str], waivers: Waivers) -> Verdict:
    """Return the class of a model tensor for which the checkpoint offers nothing."""
    if (broken := offers.broken.get(name)) is not None:
        reason, quirk = broken.reason, broken.quirk
    elif why := absent.get(name):
        return Verdict("absent", why)
    else:
        reason, quirk = "nothing in the checkpoint provides it", ""
    if _any(name, waivers.missing):
        return Verdict("waived", f"{reason} (allowed by --allow-missing)", "", quirk)
    return Verdict("missing", reason, "", quirk)


def _any(name: str, patterns: Collection[str]) -> bool:
    return any(Pattern(text).match(name) is not None for text in patterns)


def _nearest(
    manifest: Manifest,
    skeleton: Skeleton,
    offers: Offers,
    verdicts: Mapping[str, Verdict],
    stored: Mapping[str, StoredVerdict],
) -> Nearest:
    """Return what is left over on both sides, ready to be compared."""
    missing = [name for name, verdict in verdicts.items() if verdict.kind == "missing"]
    spare = [name for name, verdict in stored.items() if verdict.kind == "unexpected"]
    return Nearest(
        missing={name: skeleton.wanted[name].shape for name in missing},
        spare={name: manifest.tensors[name].shape for name in spare},
        spare_called=offers.called if missing or spare else {},
    )


def _recipes(judged: Mapping[str, Judged], aliases: Collection[str]) -> Iterator[FamilyRecipe]:
    """Yield the recipes of what is loaded itself: members of one piece that are made alike."""
    alike: dict[tuple[int, Node, TensorType], tuple[Logical, list[tuple[int, ...]]]] = {}
    # By piece and fit, as mostly one fit serves a whole piece: nodes are slow to compare.
    entered: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for name, (offer, fit, _, _) in judged.items():
        if fit.node is None or name in aliases:
            continue
        members = entered.get(one := (id(offer.logical), id(fit)))
        if members is None:
            key = (id(offer.logical), fit.node, fit.type)
            members = entered[one] = alike.setdefault(key, (offer.logical, []))[1]
        members.append(offer.member)
    for (_, node, made), (piece, members) in alike.items():
        yield FamilyRecipe(
            target=piece.bound.target,
            node=node,
            variables=piece.bound.variables,
            members=tuple(members),
            type=made,
            rule=piece.rule,
            quirks=piece.quirks,
        )


def _model_entries(
    skeleton: Skeleton, verdicts: Mapping[str, Verdict], nearest: Nearest
) -> Iterator[Entry]:
    for template, family in skeleton.families.items():
        for verdict, names in _by_verdict(family.names, verdicts).items():
            near = nearest.of_missing(names[0]) if verdict.kind == "missing" else ()
            kind, reason, rule, quirk = verdict
            yield Entry(kind, show(template), tuple(names), reason, rule, quirk, near)


def _stored_entries(
    manifest: Manifest, verdicts: Mapping[str, StoredVerdict], nearest: Nearest
) -> Iterator[Entry]:
    for template, family in manifest.families.items():
        for verdict, names in _by_verdict(family.names, verdicts).items():
            near = nearest.of_spare(names[0]) if verdict.kind == "unexpected" else ()
            yield Entry(verdict.kind, show(template), tuple(names), verdict.reason, nearest=near)


_V = TypeVar("_V", bound=Hashable)


def _by_verdict(names: Sequence[str], verdicts: Mapping[str, _V]) -> Mapping[_V, Sequence[str]]:
    """Return the names of a family by verdict, in order of first appearance."""
    found = [*map(verdicts.__getitem__, names)]
    if len({*map(id, found)}) == 1:  # mostly so, and verdicts are slow to compare
        return {found[0]: names}
    grouped: dict[_V, list[str]] = {}
    for name, verdict in zip(names, found, strict=True):
        grouped.setdefault(verdict, []).append(name)
    return grouped
