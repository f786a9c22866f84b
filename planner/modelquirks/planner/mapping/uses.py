"""``Rule``: what a record says, rule by rule, as people read it, and which rules find work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from modelquirks.planner.mapping.conversions import rule_text
from modelquirks.planner.mapping.offers import Offers
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import ModelQuirks, Pack
from modelquirks.quirks.resolve import Resolution

__all__ = ["Rule", "rules_of", "uses"]


class Rule(NamedTuple):
    """One rule of a record."""

    kind: str
    """``alias``, ``pack``, ``conversion``, ``tie``, ``extra``, ``absent``…"""
    text: str
    n_tensors: int | None = None
    """How many tensors of a checkpoint it is about; None: only a model would tell."""


def rules_of(record: ModelQuirks) -> Iterator[Rule]:
    """Yield every rule of *record*, in the order of its fields."""
    yield from (Rule("alias", f"{a.stored} → {a.model}") for a in record.aliases)
    yield from (Rule("pack", _pack_text(pack)) for pack in record.packs)
    yield from (Rule("conversion", rule_text(convert)) for convert in record.conversions)
    for tie in record.ties:
        when = "" if tie.when is None else f", if {tie.when}"
        yield Rule("tie", f"{' = '.join(tie.names)}{when}")
    yield from (Rule("extra", f"{e.names}: {e.why}") for e in record.extra)
    yield from (Rule("absent", f"{e.names}: {e.why}") for e in record.absent)
    yield from (Rule("no split", name) for name in record.no_split)
    yield from (Rule("keep dtype", text) for text in record.keep_dtype)
    yield from (Rule("parallel", f"{p.modules} {p.style}") for p in record.parallel)
    yield from (Rule("refuses", f"{refusal.device}: {refusal.why}") for refusal in record.refuses)


def uses(record: ModelQuirks, resolution: Resolution, offers: Offers) -> Iterator[Rule]:
    """Yield every rule of *record* with how many tensors of the checkpoint it is about.

    *resolution* is that of the checkpoint, *offers* what it offers to no model in particular. A
    rule about 0 tensors finds nothing to do there.
    """
    counts = {
        **_renames(record, resolution),
        **_packs(record, offers),
        **_conversions(record, offers),
        **_extras(record, offers),
    }
    for rule in rules_of(record):
        yield rule._replace(n_tensors=counts.get(rule.text, 0)) if rule.kind in _TOLD else rule


_TOLD = frozenset({"alias", "pack", "conversion", "extra"})


def _renames(record: ModelQuirks, resolution: Resolution) -> dict[str, int]:
    counts: dict[str, int] = {}
    for piece in resolution.renamed:
        for step in {step for step in piece.steps if step.quirk == record.name}:
            counts[step.rule] = counts.get(step.rule, 0) + len(piece.indices())
    return counts


def _packs(record: ModelQuirks, offers: Offers) -> dict[str, int]:
    counts: dict[str, int] = {}
    for found in offers.packed:
        if record.name not in found.weight.quirks:
            continue
        for pack in record.packs:
            if pack.scheme == found.scheme and Pattern(pack.weight).match(found.weight.name):
                text = _pack_text(pack)
                counts[text] = counts.get(text, 0) + len(found.weight.members)
                break
    return counts


def _conversions(record: ModelQuirks, offers: Offers) -> dict[str, int]:
    counts: dict[str, int] = {}
    for made in offers.made:
        if record.name in made.quirks:
            counts[made.rule] = counts.get(made.rule, 0) + len(made.members)
    return counts


def _extras(record: ModelQuirks, offers: Offers) -> dict[str, int]:
    return {
        f"{expected.names}: {expected.why}": sum(
            Pattern(expected.names).match(name) is not None
            for piece in offers.direct
            for name in piece.names
        )
        for expected in record.extra
    }


def _pack_text(pack: Pack) -> str:
    parts = ", ".join(f"{role} {text}" for role, text in pack.parts)
    more = "".join(f", perhaps {role} {text}" for role, text in pack.optional)
    return f"{pack.weight} ({pack.scheme}) from {parts}{more}"
