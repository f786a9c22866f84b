"""``certify``: which claims are proven, when all is known that shapes and names have to say.

A claim is proven by names only, never because nothing else was left. What is not certainly taken
on either side is a rival, whatever else was guessed of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from modelquirks.planner.infer.kin import SLOT, Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, fits
from modelquirks.planner.infer.rewrites import kept_module, rival_gain, says_little, split_ends
from modelquirks.planner.infer.words import contradict, digits_of, plain, spelt
from modelquirks.quirks.recipe import Source

__all__ = ["certify"]

_MOST = 0.6
"""Of the families under each of two names, that must go to the other."""


class Candidate(NamedTuple):
    """A claim that is only renamed."""

    number: int
    left: Left
    kin: Kin
    proven: Path
    """The stored name, or what the rules make of it that are certain and come first."""


def certify(pool: Pool) -> None:
    """Call certain what is proven, until no more is."""
    while True:
        candidates = list(_candidates(pool))
        proven = {*_by_rules(candidates), *_by_words(candidates, pool)}
        proven |= {*_by_change(candidates, pool)}
        if not proven:
            return
        for number in proven:
            claim = pool.claims[number]
            pool.claims[number] = replace(claim, tier="certain")
            pool.loose_stored = [x for x in pool.loose_stored if x is not claim.left]
            pool.loose_model = [k for k in pool.loose_model if k is not claim.kin]


def _candidates(pool: Pool) -> Iterator[Candidate]:
    """Yield the claims that are likely, and only renamed."""
    cover = _Cover(pool)
    for number, claim in enumerate(pool.claims):
        left, kin = claim.left, claim.kin
        if claim.tier != "likely" or left is None or kin is None:
            continue
        if isinstance(claim.recipe, Source):
            for name in _proven(left, cover):
                yield Candidate(number, left, kin, name)


class _Cover:
    """Which names go with which, by all claims."""

    def __init__(self, pool: Pool) -> None:
        self._pairs = [
            (c.left.names if c.left is not None else (c.model.path,), c.model.path)
            for c in pool.claims
            if c.left is not None or isinstance(c.recipe, Source)
        ]
        self._known: dict[tuple[Path, Path, str], bool] = {}

    def __call__(self, was: Path, now: Path, following: str) -> bool:
        """Tell whether most of what has *following* behind one name has it behind the other."""
        key = was, now, following
        if key not in self._known:
            one, other = (*was, following), (*now, following)
            here = [any(n[: len(one)] == one for n in names) for names, _ in self._pairs]
            there = [path[: len(other)] == other for _, path in self._pairs]
            both = sum(map(all, zip(here, there, strict=True)))
            self._known[key] = both >= _MOST * max(sum(here), sum(there))
        return self._known[key]


def _proven(left: Left, cover: _Cover) -> Iterator[Path]:
    """Yield the stored name, and that after each rule until one is not certain."""
    yield left.names[0]
    for rule, was, now in zip(left.rules, left.names, left.names[1:], strict=False):
        head, tail = split_ends(was, now)
        if rule.tier != "certain":
            break
        if rule.covers and not cover(was[: len(was) - tail], now[: len(now) - tail], now[-tail]):
            break
        yield now


def _by_rules(candidates: Sequence[Candidate]) -> list[int]:
    """Return the claims whose names certain rules make equal."""
    return [c.number for c in candidates if c.proven == c.kin.path]


def _by_words(candidates: Sequence[Candidate], pool: Pool) -> list[int]:
    """Return the claims of which both names say the same in order, and no rival's does."""
    return [
        c.number
        for c in candidates
        if plain(c.proven) == plain(c.kin.path)
        and _digits(c.proven) == _digits(c.kin.path)
        and not _has_namesake(c, pool)
        and not _may_turn(c, pool)
        and not _wrong_role(c, pool)
    ]


def _digits(path: Path) -> list[str]:
    return [w for w in spelt(path) if w.isdigit()]


def _has_namesake(c: Candidate, pool: Pool) -> bool:
    mine = _unnumbered(plain(c.proven))
    for rival in pool.rival_models():
        if rival.path != c.kin.path and fits(c.left.kin, rival) and not pool.tied(rival, c.kin):
            if _unnumbered(plain(rival.path)) == mine:
                return True
    return any(
        one.names[0] != c.left.names[0]
        and fits(one.kin, c.kin)
        and any(_unnumbered(plain(name)) == mine for name in one.names)
        for one in pool.rival_stored()
    )


def _unnumbered(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.isdigit())


def _may_turn(c: Candidate, pool: Pool) -> bool:
    """Tell whether the rows may be in another order: queries and keys for rotary positions.

    Libraries order them in two ways, and shapes do not tell. Not where the module's own name is
    kept, and not where a stack of layers has learned positions and the names are those of BERT.
    """
    words = set(plain(c.kin.path))
    if not words & {"q", "k", "qk", "qkv"} or c.proven[-2:] == c.kin.path[-2:]:
        return False
    said = {word for segment in c.proven for word in segment.split("_")}
    return not (said & {"query", "key"} and _has_positions(c.kin.path, pool))


def _has_positions(path: Path, pool: Pool) -> bool:
    """Tell whether the stack of layers that *path* is in has learned positions, and no others."""
    tower = path[: path.index(SLOT)] if SLOT in path else path[:-1]
    while tower and tower[-1] in ("layer", "layers", "blocks", "block", "encoder", "stages"):
        tower = tower[:-1]
    names = [p for p in pool.model_paths if p[: len(tower)] == tower]
    if any("rot" in s or "rope" in s or "inv_freq" in s for p in names for s in p):
        return False
    return any({"position", "embed"} <= set(spelt(p)) or "relative" in spelt(p) for p in names)


def _wrong_role(c: Candidate, pool: Pool) -> bool:
    """Tell whether the first of two linear maps does not widen, or the second not narrow.

    A bias has the role of its weight.
    """
    words = plain(c.kin.path)
    role = 1 if "first" in words else -1 if "second" in words else 0
    if not role:
        return False
    if c.kin.path[-1] == "bias":
        return not any(
            x.tier == "certain" and x.left is not None and x.kin is not None
            and x.left.names[0] == (*c.left.names[0][:-1], "weight")
            and x.kin.path == (*c.kin.path[:-1], "weight")
            for x in pool.claims
        )  # fmt: skip
    shapes = {of.shape for of in c.kin.types.values()}
    return not all(s is not None and len(s) == 2 and (s[0] - s[1]) * role > 0 for s in shapes)


def _by_change(candidates: Sequence[Candidate], pool: Pool) -> list[int]:
    """Return the claims that change one part of a name as others do, whose modules keep theirs."""
    groups: dict[tuple[Path, Path, Path], list[tuple[Candidate, Path]]] = {}
    for c in candidates:
        was, now = c.proven, c.kin.path
        head, tail = split_ends(was, now)
        part, new = was[head : len(was) - tail], now[head : len(now) - tail]
        module = kept_module(was, now)
        if module and digits_of(was) == digits_of(now) and not contradict(part, new):
            groups.setdefault((was[:head], part, new), []).append((c, module))
    cover = _Cover(pool)
    found: list[int] = []
    for (head, part, new), group in groups.items():
        hits = [(replace(c.left, names=(c.proven,)), c.kin) for c, _ in group]
        if len({module for _, module in group}) < 2 or rival_gain(hits, pool) is not None:
            continue
        little = says_little(*hits[0])
        found += [
            c.number
            for c, module in group
            if little or cover((*head, *part), (*head, *new), module[0])
        ]
    return found
