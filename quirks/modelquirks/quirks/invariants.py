"""Invariants: what holds of every record, whoever wrote it.

A record checks itself when it is made (patterns, holes, an empty match). What is here needs names
to try it on: its aliases must come to rest, its ties must not run in circles, its rules must not
contradict each other, and names it was written for must be names that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from modelquirks.quirks.pattern import Binding, Pattern, rename
from modelquirks.quirks.recipe import sources
from modelquirks.quirks.record import Alias, ModelQuirks

__all__ = ["invariant_faults"]

_MOST = 16
"""How often a wrapper may be taken off one name, as in resolve.py."""


def invariant_faults(record: ModelQuirks, examples: Iterable[str] = ()) -> tuple[str, ...]:
    """Return what is wrong with *record*, a sentence each; nothing if it is sound.

    *examples* are stored names that it was written for: each must fit one of its rules.
    """
    return (
        *_restless(record),
        *_shadowed(record),
        *_circular(record),
        *_contradictory(record),
        *_untold(record),
        *_strangers(record, examples),
    )


def _restless(record: ModelQuirks) -> Iterator[str]:
    """Aliases that find something to do in what they have made themselves."""
    for alias in record.aliases:
        name = _sample(alias.stored)
        once = _renamed(record.aliases, name)
        if record.role != "wrapper":
            twice = _renamed(record.aliases, once)
            if twice != once:
                yield (
                    f"alias {alias.stored!r} makes {once!r} of {name!r}, and the aliases of this "
                    f"record make {twice!r} of that: a name must come out as it stays"
                )
            continue
        for _ in range(_MOST):
            name, once = once, _renamed(record.aliases, once)
        if once != name:
            yield f"alias {alias.stored!r} never comes to rest: after {_MOST} rounds {once!r}"


def _shadowed(record: ModelQuirks) -> Iterator[str]:
    """Aliases that never get a name, since one before them takes all of theirs."""
    for number, alias in enumerate(record.aliases):
        names = (_sample(alias.stored, wild=wild) for wild in ("x", "other_words"))
        before = record.aliases[:number]
        takers = [
            next((a for a in before if Pattern(a.stored).match(name) is not None), None)
            for name in names
        ]
        if takers and takers[0] is not None and all(t is takers[0] for t in takers):
            yield (
                f"alias {alias.stored!r} is never used: {takers[0].stored!r} stands before it and "
                "takes its names"
            )


def _circular(record: ModelQuirks) -> Iterator[str]:
    """Ties of which a name is in several: one tensor would have two owners."""
    for left, right in combinations(record.ties, 2):
        shared = set(left.names) & set(right.names)
        if shared and left.when == right.when:
            names = ", ".join(map(repr, sorted(shared)))
            yield f"ties {left.names} and {right.names} share {names}: make them one tie"


def _contradictory(record: ModelQuirks) -> Iterator[str]:
    """What is declared superfluous and used all the same."""
    used = [part for pack in record.packs for _, part in (*pack.parts, *pack.optional)]
    used += [leaf.name for convert in record.conversions for leaf in sources(convert.recipe)]
    for expected in record.extra:
        for text in used:
            if expected.names == text:
                yield f"{text!r} is declared extra (not wanted) and is read by a rule as well"
    for convert in dict.fromkeys(record.conversions):
        if record.conversions.count(convert) > 1:
            yield f"the conversion that makes {convert.target!r} is there twice"


def _untold(record: ModelQuirks) -> Iterator[str]:
    if not record.why.strip():
        yield "why is empty: say in one sentence what this is about"
    for expected in (*record.extra, *record.absent):
        if not expected.why.strip():
            yield f"{expected.names!r} is expected without a why"


def _strangers(record: ModelQuirks, examples: Iterable[str]) -> Iterator[str]:
    """Example names that no rule of the record has anything to say about."""
    texts = [alias.stored for alias in record.aliases]
    texts += [part for pack in record.packs for _, part in (*pack.parts, *pack.optional)]
    texts += [leaf.name for convert in record.conversions for leaf in sources(convert.recipe)]
    texts += [expected.names for expected in record.extra]
    texts += [name for tie in record.ties for name in tie.names]
    for name in examples:
        called = _renamed(record.aliases, name)
        if not any(Pattern(t).match(n) is not None for t in texts for n in (name, called)):
            yield f"no rule of the record fits the example {name!r}"


def _renamed(aliases: Iterable[Alias], name: str) -> str:
    for alias in aliases:
        found = rename(Pattern(alias.stored), Pattern(alias.model), name)
        if found is not None:
            return found[0]
    return name


def _sample(text: str, *, wild: str = "x") -> str:
    """Return a name that fits the pattern *text*."""
    pattern = Pattern(text)
    index = {name: str(number + 3) for number, name in enumerate(pattern.placeholders)}
    return pattern.fill(Binding(index, (wild,) * len(pattern.wildcards), {}))
