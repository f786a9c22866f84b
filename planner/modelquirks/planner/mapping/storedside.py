"""The stored side of the account: every tensor of the checkpoint in one class."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import shown
from modelquirks.planner.mapping.audit import StoredClass
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.wholes import Account
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import Expected
from modelquirks.quirks.resolve import Resolution

__all__ = ["USED", "StoredVerdict", "expected", "left_over"]


class StoredVerdict(NamedTuple):
    """The class of one stored tensor."""

    kind: StoredClass
    reason: str = ""


USED = StoredVerdict("used")


def left_over(
    manifest: Manifest,
    offers: Offers,
    account: Account,
    resolution: Resolution,
    missing: Collection[str],
) -> dict[str, StoredVerdict]:
    """Return the class of every tensor of the checkpoint that is not used, in stored order.

    *missing* are names of the model.
    """
    left = account.used.left_of(manifest)
    if not left:
        return {}
    verdicts: dict[str, StoredVerdict] = {}
    called, used = offers.called, account.used.names
    rivals = dict(_rivals(account, used)) | dict(_copies(called, used, left))
    parts = {
        part: broken.name
        for broken in offers.broken.values()
        if broken.name in missing
        for part in broken.parts
    }
    extra = _extra({name: called.get(name, name) for name in left}, resolution)
    for name in left:
        if why := offers.replaced.get(name):
            verdicts[name] = StoredVerdict("extra", why)
        elif name in rivals:
            verdicts[name] = StoredVerdict("duplicate", rivals[name])
        elif why := extra.get(name):
            verdicts[name] = StoredVerdict("extra", why)
        elif name in parts:
            reason = f"a part of {parts[name]!r}, which cannot be made"
            verdicts[name] = StoredVerdict("unexpected", reason)
        else:
            verdicts[name] = StoredVerdict("unexpected", "the model has no place for it")
    return verdicts


def _extra(left: Mapping[str, str], resolution: Resolution) -> Mapping[str, str]:
    """Return those of the *left* stored names, by their logical ones, that are no fault: why."""
    rules = [e for record in resolution.records() for e in record.extra]
    found = {name: why for name, called in left.items() if (why := expected(called, rules))}
    if resolution.library is None:
        return found
    ignored = resolution.library.extra(left.values())
    by_library = {name: ignored[called] for name, called in left.items() if called in ignored}
    return {**by_library, **found}


def expected(name: str, rules: Sequence[Expected]) -> str:
    """Return why *name* is expected to be so, or an empty text."""
    return next((e.why for e in rules if Pattern(e.names).match(name) is not None), "")


def _rivals(account: Account, used: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each unused stored tensor that would serve a model tensor which is served already."""
    for name, others in account.rivals.items():
        if name not in account.judged:
            continue
        reason = _reason(name, account.judged[name].reads)
        for offer in others:
            yield from ((stored, reason) for stored in offer.reads() if stored not in used)


def _copies(
    called: Mapping[str, str], used: Collection[str], left: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each unused stored tensor that goes by the name of a used one, after all aliases."""
    names = {called.get(stored, stored) for stored in left}
    taken: dict[str, list[str]] = {}
    for stored in used:
        if (name := called.get(stored, stored)) in names:
            taken.setdefault(name, []).append(stored)
    for stored in left:
        if served := taken.get(called.get(stored, stored)):
            yield stored, _reason(called.get(stored, stored), sorted(served))


def _reason(name: str, chosen: Sequence[str]) -> str:
    return (
        f"{name!r} is served by {shown(chosen, 2)} already; "
        "nobody can tell from headers which one is right"
    )
