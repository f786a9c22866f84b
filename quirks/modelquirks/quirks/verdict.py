"""``Verdict``: of every record whether it applies to a checkpoint, and why, or why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from modelquirks.quirks.matching import conditions
from modelquirks.quirks.registry import Registered
from modelquirks.quirks.resolve import Facts, Resolution, first_name

__all__ = ["Verdict", "verdicts"]


class Verdict(NamedTuple):
    """What became of one record."""

    registered: Registered
    applies: bool
    why: tuple[str, ...]
    """Why it applies; or everything that keeps it from that, with what was found."""
    fits: tuple[str, ...] = ()
    """Of a record that does not apply: what it asks for and is there."""
    is_near: bool = False
    """It does not apply although config.json is one that it asks for, or it was passed over."""


def verdicts(
    registered: Iterable[Registered], resolution: Resolution, facts: Facts
) -> tuple[Verdict, ...]:
    """Return the verdict on each record, in the order given.

    *resolution* is what :func:`~modelquirks.quirks.resolve.resolve` made of the same records and
    *facts*. Each match is judged on the names that it has seen there: those of records of packed
    weights look at names after the aliases of all others, those of the others at names without
    wrappers.
    """
    applied = {a.record.name: a.why for a in resolution.applied}
    found: list[Verdict] = []
    for one in registered:
        name = one.record.name
        if name in applied:
            found.append(Verdict(one, True, (applied[name],)))
        else:
            found.append(_refused(one, resolution, facts))
    return tuple(found)


def _refused(one: Registered, resolution: Resolution, facts: Facts) -> Verdict:
    record = one.record
    is_last = record.role == "quantization"
    names = resolution.renamed if is_last else resolution.unwrapped
    judged = list(
        conditions(record.match, facts.config, lambda p: first_name(p, names), facts.container)
    )
    unmet = tuple(c.text for c in judged if not c.holds)
    fits = tuple(c.text for c in judged if c.holds and c.about != "denial")
    over = resolution.passed_over.get(record.name)
    if over is not None:
        return Verdict(one, False, (over, *unmet), fits, True)
    is_near = any(c.holds for c in judged if c.about == "config")
    return Verdict(one, False, unmet, fits, is_near)
