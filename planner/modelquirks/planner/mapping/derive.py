"""Derive: recipes for what the model wants, and the account of both sides."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from modelquirks.quirks.record import Expected
from modelquirks.quirks.resolve import Resolution

__all__ = ["Derived", "Waivers", "derive"]


@dataclass(frozen=True)
class Waivers:
    """What the user allows, by name pattern."""

    missing: tuple[str, ...] = ()


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
    judged = {
        name: judge.either(tensor, offer, offers.rivals.get(name, ()))
        if offer.logical.either
        else judge.judged(tensor, offer)
        for name, tensor in skeleton.wanted.items()
        if (offer := offers.best.get(name)) is not None
    }
    sharing = share(ties, skeleton, judged, manifest)
    absent = [e for record in resolution.records() for e in record.absent]
    verdicts = {
        name: sharing.verdicts.get(name)
        or (judged[name].verdict if name in judged else _unprovided(name, offers, absent, waivers))
        for name in skeleton.wanted
    }
    extra = [e for record in resolution.records() for e in record.extra]
    missing = frozenset(n for n, verdict in verdicts.items() if verdict.kind == "missing")
    stored = stored_verdicts(manifest, offers, judged, extra, missing)
    nearest = _nearest(manifest, skeleton, offers, verdicts, stored)
    audit = Audit(
        model=tuple(_model_entries(skeleton, verdicts, nearest)),
        stored=tuple(_stored_entries(manifest, stored, nearest)),
        ties=sharing.groups,
        unequal_ties=sharing.compare,
        suggestions=tuple(suggest(skeleton, nearest, verdicts.keys())),
        findings=(
            *_without_value(skeleton, verdicts),
            *sharing.findings,
            *conflicts(judge, judged, offers.rivals),
            *oddities(judged, manifest, nearest.spare),
        ),
    )
    recipes = tuple(_recipes(judged, sharing.aliases))
    return Derived(recipes, sharing.aliases, sharing.compare, audit)


def _without_value(skeleton: Skeleton, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    """Yield a warning for tensors that may be missing, of a model that has no value for them."""
    empty = [
        name
        for name, verdict in verdicts.items()
        if verdict.kind in ("waived", "absent") and skeleton.wanted[name].on_meta
    ]
    if empty:
        yield Finding(
            "no-value",
            "warning",
            f"{shown(empty)} may be missing, but are on the meta device in the model: give them "
            "values before the plan is executed, which refuses otherwise",
        )


def _unprovided(name: str, offers: Offers, absent: Sequence[Expected], waivers: Waivers) -> Verdict:
    """Return the class of a model tensor for which the checkpoint offers nothing."""
    if (broken := offers.broken.get(name)) is not None:
        reason, quirk = broken.reason, broken.quirk
    elif why := expected(name, absent):
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
    for name, (offer, fit, _, _) in judged.items():
        if fit.node is not None and name not in aliases:
            key = (id(offer.logical), fit.node, fit.type)
            alike.setdefault(key, (offer.logical, []))[1].append(offer.member)
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
    grouped: dict[tuple[str, Verdict], list[str]] = {}
    for template, family in skeleton.families.items():
        for name in family.names:
            grouped.setdefault((template, verdicts[name]), []).append(name)
    for (template, verdict), names in grouped.items():
        near = nearest.of_missing(names[0]) if verdict.kind == "missing" else ()
        kind, reason, rule, quirk = verdict
        yield Entry(kind, show(template), tuple(names), reason, rule, quirk, near)


def _stored_entries(
    manifest: Manifest, verdicts: Mapping[str, StoredVerdict], nearest: Nearest
) -> Iterator[Entry]:
    grouped: dict[tuple[str, StoredVerdict], list[str]] = {}
    for template, family in manifest.families.items():
        for name in family.names:
            grouped.setdefault((template, verdicts[name]), []).append(name)
    for (template, verdict), names in grouped.items():
        near = nearest.of_spare(names[0]) if verdict.kind == "unexpected" else ()
        yield Entry(verdict.kind, show(template), tuple(names), verdict.reason, nearest=near)
