"""``certify``: which claims are proven, when all is known that shapes and names have to say.

A claim is proven by names only, never because nothing else was left. What is not certainly taken
on either side is a rival, whatever else was guessed of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from modelquirks.planner.infer.claim import Claim
from modelquirks.planner.infer.kin import SLOT, Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, fits
from modelquirks.planner.infer.rewrites import kept_module, rival_gain, split_ends
from modelquirks.planner.infer.words import plain, spelt
from modelquirks.quirks.recipe import Source

__all__ = ["certify"]

_ROLES = {("mlp", "first"): 1, ("mlp", "second"): -1}


def certify(pool: Pool) -> None:
    """Call certain what is proven, until no more is."""
    while True:
        proven = {*_by_words(pool), *_by_change(pool)}
        if not proven:
            return
        for number in proven:
            claim = pool.claims[number]
            pool.claims[number] = replace(claim, tier="certain")
            pool.loose_stored = [x for x in pool.loose_stored if x is not claim.left]
            pool.loose_model = [k for k in pool.loose_model if k is not claim.kin]


def _candidates(pool: Pool) -> list[tuple[int, Claim, Left, Kin]]:
    """Return the claims that are only renamed, with what they are about."""
    return [
        (number, claim, claim.left, claim.kin)
        for number, claim in enumerate(pool.claims)
        if claim.tier == "likely" and claim.left is not None and claim.kin is not None
        and isinstance(claim.recipe, Source)
    ]  # fmt: skip


def _by_words(pool: Pool) -> list[int]:
    """Return the claims of which both names say the same in order, and no rival's does."""
    return [
        number
        for number, _, left, kin in _candidates(pool)
        if plain(left.proven) == plain(kin.path)
        and not _same_but_number(left.proven, kin.path)
        and not _has_namesake(left, kin, pool)
        and not _may_turn(left, kin, pool)
        and not _wrong_role(left, kin)
    ]


def _same_but_number(was: Path, now: Path) -> bool:
    """Tell whether the names have numbers that are not the same."""
    return _digits(was) != _digits(now)


def _digits(path: Path) -> list[str]:
    return [w for w in spelt(path) if w.isdigit()]


def _has_namesake(left: Left, kin: Kin, pool: Pool) -> bool:
    mine = _unnumbered(plain(left.proven))
    for rival in pool.rival_models():
        if rival.path != kin.path and fits(left.kin, rival) and not pool.tied(rival, kin):
            if _unnumbered(plain(rival.path)) == mine:
                return True
    return any(
        one.path != left.path and fits(one.kin, kin) and _unnumbered(plain(one.proven)) == mine
        for one in pool.rival_stored()
    )


def _unnumbered(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.isdigit())


def _may_turn(left: Left, kin: Kin, pool: Pool) -> bool:
    """Tell whether the rows may be in another order: queries and keys for rotary positions.

    Libraries order them in two ways, and shapes do not tell. Not where the module's own name is
    kept, and not where a stack of layers has learned positions and the names are those of BERT.
    """
    words = set(plain(kin.path))
    if not words & {"q", "k", "qk", "qkv"} or left.proven[-2:] == kin.path[-2:]:
        return False
    said = {word for segment in left.proven for word in segment.split("_")}
    return not (said & {"query", "key"} and _has_positions(kin.path, pool))


def _has_positions(path: Path, pool: Pool) -> bool:
    """Tell whether the stack of layers that *path* is in has learned positions, and no others."""
    tower = path[: path.index(SLOT)] if SLOT in path else path[:-1]
    while tower and tower[-1] in ("layer", "layers", "blocks", "block", "encoder", "stages"):
        tower = tower[:-1]
    names = [p for p in pool.model_paths if p[: len(tower)] == tower]
    if any("rot" in s or "rope" in s or "inv_freq" in s for p in names for s in p):
        return False
    return any({"position", "embed"} <= set(spelt(p)) or "relative" in spelt(p) for p in names)


def _wrong_role(left: Left, kin: Kin) -> bool:
    """Tell whether the first of two linear maps does not widen, or the second not narrow."""
    words = plain(kin.path)
    role = 1 if "first" in words else -1 if "second" in words else 0
    if not role:
        return False
    shapes = {of.shape for of in kin.types.values()}
    return not all(s is not None and len(s) == 2 and (s[0] - s[1]) * role > 0 for s in shapes)


def _by_change(pool: Pool) -> list[int]:
    """Return the claims that change one part of a name as others do, whose modules keep theirs."""
    groups: dict[tuple[Path, Path, Path], list[tuple[int, Left, Kin, Path]]] = {}
    for number, _, left, kin in _candidates(pool):
        was, now = left.proven, kin.path
        head, tail = split_ends(was, now)
        if not tail:
            continue
        change = was[:head], was[head : len(was) - tail], now[head : len(now) - tail]
        groups.setdefault(change, []).append((number, left, kin, kept_module(was, now)))
    found: list[int] = []
    for group in groups.values():
        witnesses = [(left, kin) for _, left, kin, module in group if module]
        if len({module for *_, module in group if module}) < 2:
            continue
        if rival_gain([(replace(l, path=l.proven), k) for l, k in witnesses], pool) is None:
            found += [number for number, *_, module in group if module]
    return found


def _taken(claims: Iterable[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.tier == "certain"]
