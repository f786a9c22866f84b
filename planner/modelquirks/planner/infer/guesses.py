"""Guesses: single modules, matched by the words of their names within what their shapes allow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from modelquirks.planner.infer.claim import Tier, least
from modelquirks.planner.infer.hungarian import assignment
from modelquirks.planner.infer.kin import SLOT, Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, fits, shared
from modelquirks.planner.infer.ranks import Ranks, ranks_of
from modelquirks.planner.infer.words import digits_of, likeness, numberless, plain, spelt

__all__ = ["assign", "same_words"]

_CLOSE = 0.03
"""Readings whose likeness differs by less are as good."""


def same_words(pool: Pool) -> None:
    """Claim families whose names say the same in other words, where no other does."""
    from modelquirks.planner.infer.align import enter

    by_words_s = _by_words((left.path, left) for left in pool.stored)
    by_words_m = _by_words((kin.path, kin) for kin in pool.model)
    for words, lefts in by_words_s.items():
        kins = by_words_m.get(words, [])
        if any(word.isdigit() for word in words) and _renumbered(words, by_words_s, by_words_m):
            continue
        if len(lefts) == 1 and len(kins) == 1 and fits(lefts[0].kin, kins[0]):
            left, kin = lefts[0], kins[0]
            tier = least(left.tier, "likely")
            enter(pool, left, kin, tier, f"{'.'.join(words)} by either name")


def _renumbered(words: Path, ours: Iterable[Path], theirs: Iterable[Path]) -> bool:
    """Tell whether the two sides count those alike from different numbers on."""
    same = _unnumbered(words)
    counts = [sorted(w for w in side if _unnumbered(w) == same) for side in (ours, theirs)]
    return counts[0] != counts[1]


def _by_words(items: Iterable[tuple[Path, object]]) -> dict[Path, list]:
    found: dict[Path, list] = {}
    for path, item in items:
        found.setdefault(plain(path), []).append(item)
    return found


def _unnumbered(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.isdigit())


def assign(pool: Pool, *, at_least: float) -> None:
    """Match the modules that are left, so that the likeness of all names is largest.

    Those that are less alike than *at_least* are left.
    """
    from modelquirks.planner.infer.align import enter

    lefts: dict[Path, list[Left]] = {}
    kins: dict[Path, list[Kin]] = {}
    for left in pool.stored:
        lefts.setdefault(_module(left.path), []).append(left)
    for kin in pool.model:
        kins.setdefault(_module(kin.path), []).append(kin)
    rows, columns = [*lefts], [*kins]
    if not rows or not columns:
        return
    table = _table(lefts, kins)
    chosen = assignment(table)
    for row, column in enumerate(chosen):
        if column < 0 or table[row][column] < at_least:
            continue
        regret = _regret(table, chosen, row)
        tier: Tier = "open" if regret < _CLOSE else "likely"
        for left, kin in _partners(lefts[rows[row]], kins[columns[column]]):
            if any(left is one for one in pool.stored) and any(kin is k for k in pool.model):
                enter(
                    pool,
                    left,
                    kin,
                    tier,
                    f"its name is the most alike ({table[row][column]:.2f}) of those of its shape",
                )


def _table(
    lefts: Mapping[Path, Sequence[Left]], kins: Mapping[Path, Sequence[Kin]]
) -> list[list[float]]:
    """Return how well each stored module goes with each of the model."""
    rows, columns = [*lefts], [*kins]
    weight = _rarity([*rows, *columns])
    ours = ranks_of(rows, {r: _shapes(x.kin for x in lefts[r]) for r in rows}, by_name=True)
    theirs = ranks_of(columns, {c: _shapes(kins[c]) for c in columns}, by_name=False)
    return [
        [
            score and max(0.01, score + _same_rank(ours[r], theirs[c]))
            for c in columns
            for score in [_score(r, c, lefts[r], kins[c], weight)]
        ]
        for r in rows
    ]


def _shapes(kins: Iterable[Kin]) -> object:
    return tuple(sorted(str(next(iter(k.types.values())).shape) for k in kins))


def _same_rank(ours: Ranks, theirs: Ranks) -> float:
    """Return what it adds that two are in one place among equally many alike."""
    votes = [
        0.15 if rank == other else -0.05
        for rank, n in ours.values()
        for other, m in theirs.values()
        if n == m
    ]
    return max(votes, default=0.0)


def _regret(table: Sequence[Sequence[float]], chosen: Sequence[int], row: int) -> float:
    """Return what the sum loses at least if the row had another column: none, or an exchange."""
    column = chosen[row]
    mine = table[row][column]
    least = mine
    taken = {c: r for r, c in enumerate(chosen) if c >= 0}
    for c, gain in enumerate(table[row]):
        if c == column or gain <= 0:
            continue
        other = taken.get(c)
        if other is None:
            least = min(least, mine - gain)
        else:
            least = min(least, mine + table[other][c] - gain - table[other][column])
    for r, c in enumerate(chosen):
        if c < 0 and table[r][column] > 0:
            least = min(least, mine - table[r][column])
    return least


def _module(path: Path) -> Path:
    return path[:-1] if path[-1] in ("weight", "bias") else path


def _rarity(paths: Sequence[Path]) -> Mapping[str, float]:
    counts = Counter(word for path in paths for word in set(spelt(path, True)))
    return {
        word: math.log(1 + len(paths) / n) * (0.3 if word.isdigit() else 1.0)
        for word, n in counts.items()
    }


def _partners(lefts: Sequence[Left], kins: Sequence[Kin]) -> list[tuple[Left, Kin]]:
    """Return the tensors of two modules that could be one."""
    found = []
    for left in lefts:
        alike = [kin for kin in kins if fits(left.kin, kin)]
        same = [kin for kin in alike if kin.path[-1] == left.path[-1]] or [
            kin for kin in alike if not any(o.path[-1] == kin.path[-1] for o in lefts)
        ]
        if len(same) == 1:
            found.append((left, same[0]))
    return found


def _score(
    was: Path, now: Path, lefts: Sequence[Left], kins: Sequence[Kin], weight: Mapping[str, float]
) -> float:
    partners = _partners(lefts, kins)
    if not partners:
        return 0.0
    share = 2 * len(partners) / (len(lefts) + len(kins))
    words = likeness(spelt(was, True), spelt(now, True), weight)
    here = 0.0
    for one, other in zip(was, now, strict=False):
        if one != other:
            break
        here += 1
    for one, other in zip(reversed(was), reversed(now), strict=False):
        if one != other:
            break
        here += 1
    near = here / max(len(was), len(now))
    return 0.05 + 0.6 * words + 0.2 * min(near, 1.0) + 0.15 * share
