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

    @property
    def is_near(self) -> bool:
        """Whether it does not apply although something of its match fits."""
        return not self.applies and bool(self.fits)


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
    fits = tuple(c.text for c in judged if c.holds and not c.is_denial)
    over = resolution.passed_over.get(record.name)
    return Verdict(one, False, unmet if over is None else (over, *unmet), fits)
