"""Derive: recipes for what the model wants, and the account of both sides."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelquirks.planner.checkpoint.lookalikes import look_alikes
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.audit import Audit, Entry
from modelquirks.planner.mapping.dtype_changes import dtype_changes
from modelquirks.planner.mapping.fit import DtypeRule, Fit
from modelquirks.planner.mapping.judge import Judge, Judged, Verdict, conflicts
from modelquirks.planner.mapping.logical import Logical, Members
from modelquirks.planner.mapping.nearest import Nearest
from modelquirks.planner.mapping.oddities import oddities
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.places import in_places
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.mapping.sharing import share
from modelquirks.planner.mapping.storedside import USED, StoredVerdict, expected, left_over
from modelquirks.planner.mapping.suggest import suggest
from modelquirks.planner.mapping.ties import TieGroup
from modelquirks.planner.mapping.wholes import Account, judged_all
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.family import group, show
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
    account = judged_all(judge, skeleton, offers, [tie.names for tie in ties])
    judged = account.judged
    sharing = share(ties, skeleton, judged, manifest)
    unprovided = [n for n in account.apart if n not in sharing.verdicts and n not in judged]
    absent = _absent(unprovided, resolution)
    verdicts = {
        name: sharing.verdicts.get(name)
        or (judged[name].verdict if name in judged else _unprovided(name, offers, absent, waivers))
        for name in account.apart
    }
    missing = frozenset(n for n, verdict in verdicts.items() if verdict.kind == "missing")
    left = left_over(manifest, offers, account, resolution, missing)
    nearest = _nearest(manifest, skeleton, offers, verdicts, left)
    audit = Audit(
        model=tuple(_model_entries(account, verdicts, nearest)),
        stored=tuple(_stored_entries(manifest, left, nearest)),
        ties=sharing.groups,
        unequal_ties=sharing.compare,
        suggestions=tuple(suggest(skeleton, nearest, skeleton.wanted)),
        findings=(
            *_without_value(skeleton, verdicts, resolution),
            *sharing.findings,
            *conflicts(judge, judged, account.rivals),
            *oddities(account, manifest, nearest.spare, dequantize=waivers.dequantize),
            *look_alikes(nearest.spare, missing),
            *dtype_changes(account, manifest, asked=dtype.asked),
        ),
    )
    recipes = tuple(in_places(_recipes(account, sharing.aliases), manifest))
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
    left: Mapping[str, StoredVerdict],
) -> Nearest:
    """Return what is left over on both sides, ready to be compared."""
    missing = [name for name, verdict in verdicts.items() if verdict.kind == "missing"]
    spare = [name for name, verdict in left.items() if verdict.kind == "unexpected"]
    return Nearest(
        missing={name: skeleton.wanted[name].shape for name in missing},
        spare={name: manifest.tensors[name].shape for name in spare},
        spare_called=offers.called if missing or spare else {},
    )


def _recipes(account: Account, aliases: Collection[str]) -> Iterator[FamilyRecipe]:
    """Yield the recipes of what is loaded itself: members of one piece that are made alike."""
    found = {
        whole.family.names[0]: _recipe(whole.piece, whole.fit, whole.family.members)
        for whole in account.wholes
    }
    alike: dict[tuple[int, Node, TensorType], list[tuple[int, ...]]] = {}
    # By piece and fit, as mostly one fit serves a whole piece: nodes are slow to compare.
    entered: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    firsts: dict[str, tuple[Judged, list[tuple[int, ...]]]] = {}
    for name, one in account.judged.items():
        (piece, member), fit = one.offer, one.fit
        if fit.node is None or name in aliases:
            continue
        members = entered.get(same := (id(piece), id(fit)))
        if members is None:
            key = (id(piece), fit.node, fit.type)
            if key not in alike:
                firsts[name] = one, alike.setdefault(key, [])
            members = entered[same] = alike[key]
        members.append(member)
    found |= {
        name: _recipe(one.offer.logical, one.fit, tuple(members))
        for name, (one, members) in firsts.items()
    }
    yield from map(found.__getitem__, account.in_order(found))


def _recipe(piece: Logical, fit: Fit, members: Members) -> FamilyRecipe:
    assert fit.node is not None
    return FamilyRecipe(
        target=piece.bound.target,
        node=fit.node,
        variables=piece.bound.variables,
        members=members,
        type=fit.type,
        rule=piece.rule,
        quirks=piece.quirks,
    )


_NOTHING = Verdict("missing")
"""Of a family that is no whole: each of its tensors has a verdict of its own."""


def _model_entries(
    account: Account, verdicts: Mapping[str, Verdict], nearest: Nearest
) -> Iterator[Entry]:
    wholes = {whole.family.template: whole.verdict for whole in account.wholes}
    apart = group(verdicts)
    for template, family in account.skeleton.families.items():
        usual = wholes.get(template, _NOTHING)
        own = verdicts if template in apart else {}
        for verdict, names in _by_verdict(family.names, own, usual).items():
            near = nearest.of_missing(names[0]) if verdict.kind == "missing" else ()
            kind, reason, rule, quirk = verdict
            yield Entry(kind, show(template), tuple(names), reason, rule, quirk, near)


def _stored_entries(
    manifest: Manifest, left: Mapping[str, StoredVerdict], nearest: Nearest
) -> Iterator[Entry]:
    apart = group(left)
    for template, family in manifest.families.items():
        own = left if template in apart else {}
        for verdict, names in _by_verdict(family.names, own, USED).items():
            near = nearest.of_spare(names[0]) if verdict.kind == "unexpected" else ()
            yield Entry(verdict.kind, show(template), tuple(names), verdict.reason, nearest=near)


_V = TypeVar("_V", bound=Hashable)


def _by_verdict(
    names: Sequence[str], verdicts: Mapping[str, _V], usual: _V
) -> Mapping[_V, Sequence[str]]:
    """Return the names of a family by verdict, in order of first appearance.

    *usual* is that of names without one of their own in *verdicts*.
    """
    if not verdicts:
        return {usual: names}
    found = [verdicts.get(name, usual) for name in names]
    if len({*map(id, found)}) == 1:  # mostly so, and verdicts are slow to compare
        return {found[0]: names}
    grouped: dict[_V, list[str]] = {}
    for name, verdict in zip(names, found, strict=True):
        grouped.setdefault(verdict, []).append(name)
    return grouped
