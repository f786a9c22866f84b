"""Rewrites: parts of names that are called otherwise in the model, found by what they explain.

Two families of one shape whose names agree but for a part propose that the part is renamed, as a
prefix or anywhere. The proposal that explains most is taken, the names are rewritten, and the next
is sought among what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from modelquirks.planner.infer.kin import SLOT, Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, Rule, fits
from modelquirks.planner.infer.words import contradict, likeness, plain, spelt

__all__ = [
    "Rewrite", "best_rewrite", "kept_module", "pairs", "rival_gain", "rule_of", "says_little", "split_ends",
]  # fmt: skip

_MAX_PART = 5
"""Segments of a part that is renamed."""
_MAX_TRIED = 120
"""Proposals that are weighed, those with most votes first."""
_MIN_MODULES = 2
_CLOSE = 0.03
_BREAKS = 0.6
"""What a name that is right as it is and would be renamed costs, in names explained."""


class Rewrite(NamedTuple):
    """``was`` is called ``now``: at the beginning of names, or where it comes first in them."""

    was: Path
    now: Path
    anchored: bool

    def __call__(self, path: Path) -> Path | None:
        """Return *path* rewritten; None if it does not have the part."""
        n = len(self.was)
        if self.anchored:
            return (*self.now, *path[n:]) if path[:n] == self.was else None
        for at in range(len(path) - n + 1):
            if path[at : at + n] == self.was:
                return (*path[:at], *self.now, *path[at + n :])
        return None

    def __str__(self) -> str:
        """Return the rule as people read it."""
        dots = "" if self.anchored else "…"
        return f"{dots}{'.'.join(self.was) or '(root)'}… → {dots}{'.'.join(self.now) or '(root)'}…"


class Found(NamedTuple):
    """A rewrite and what it explains."""

    rewrite: Rewrite
    hits: tuple[tuple[Left, Kin], ...]
    score: float


def split_ends(one: Path, other: Path) -> tuple[int, int]:
    """Return how many segments two paths share at the beginning, and then at the end.

    >>> split_ends(("a", "b", "c"), ("a", "x", "y", "c"))
    (1, 1)
    """
    head = 0
    top = min(len(one), len(other))
    while head < top and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < top - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


def best_rewrite(pool: Pool, taken: Iterable[Path]) -> Found | None:
    """Return the rewrite that explains most of what is left; None if none explains two modules.

    *taken* are the stored names that are right as they are.
    """
    votes = Counter(r for left, kin in pairs(pool.stored, pool.model) for r in _parts(left, kin))
    by_path: dict[Path, list[Kin]] = {}
    for kin in pool.model:
        by_path.setdefault(kin.path, []).append(kin)
    right = [*taken]
    best: Found | None = None
    for rewrite, n in votes.most_common(_MAX_TRIED):
        if best is not None and n + 0.5 <= best.score:
            break
        found = _weighed(rewrite, pool.stored, by_path, right)
        if found is not None and (best is None or found.score > best.score):
            best = found
    return best


def pairs(stored: Iterable[Left], model: Iterable[Kin]) -> Iterator[tuple[Left, Kin]]:
    """Yield each stored and model family that could be one by their shapes."""
    by_shape: dict[object, list[Kin]] = {}
    for kin in model:
        for shape in {of.shape for of in kin.types.values()}:
            by_shape.setdefault((kin.n_slots, shape), []).append(kin)
    for left in stored:
        seen: set[int] = set()
        for shape in {of.shape for of in left.kin.types.values()}:
            for kin in by_shape.get((left.kin.n_slots, shape), ()):
                if id(kin) not in seen and fits(left.kin, kin):
                    seen.add(id(kin))
                    yield left, kin


def _parts(left: Left, kin: Kin) -> Iterator[Rewrite]:
    """Yield the rewrites that would give *left* the name of *kin*."""
    was, now = left.path, kin.path
    if was == now:
        return
    head, tail = split_ends(was, now)
    a, b = was[head : len(was) - tail], now[head : len(now) - tail]
    if tail < 1 or max(len(a), len(b)) > _MAX_PART:
        return
    if [x for x in a if _is_index(x)] != [x for x in b if _is_index(x)] or contradict(a, b):
        return
    yield Rewrite(was[: len(was) - tail], now[: len(now) - tail], True)
    for before in (0, 1)[: 1 + min(1, head)]:
        for after in (0, 1)[: 1 + min(1, tail - 1)]:
            part = was[head - before : len(was) - tail + after]
            if part and part != (SLOT,):
                yield Rewrite(part, now[head - before : len(now) - tail + after], False)


def _weighed(
    rewrite: Rewrite,
    stored: Sequence[Left],
    by_path: Mapping[Path, Sequence[Kin]],
    right: Sequence[Path],
) -> Found | None:
    hits: list[tuple[Left, Kin]] = []
    for left in stored:
        path = rewrite(left.path)
        if path is None:
            continue
        hits += [(left, kin) for kin in by_path.get(path, ()) if fits(left.kin, kin)]
    modules = {left.path[:-1] for left, _ in hits}
    if len(modules) < _MIN_MODULES:
        return None
    near = likeness(spelt(rewrite.was, True), spelt(rewrite.now, True), {})
    if not any(kept_module(left.path, kin.path) for left, kin in hits):
        return None
    broken = sum(1 for path in right if rewrite(path) is not None)
    length = len(rewrite.was) + len(rewrite.now)
    score = (len(hits) + len(modules)) / 2 - _BREAKS * broken + 0.5 * near - 0.01 * length
    return Found(rewrite, tuple(hits), score) if score > 0 else None


def kept_module(was: Path, now: Path) -> Path:
    """Return the module's name after the part that differs; empty if it says nothing."""
    _, tail = split_ends(was, now)
    module = was[len(was) - tail : -1] if tail else ()
    return module if any(_tells(segment) for segment in module) else ()


def rule_of(found: Found, pool: Pool) -> Rule:
    """Return the rule: ``certain`` if the names that it keeps prove it, two without a rival.

    ``open`` if another reading is as good.
    """
    witnesses = [
        (left, kin) for left, kin in found.hits if left.path[:-1][-1:] == kin.path[:-1][-1:]
    ]
    gain = rival_gain(witnesses, pool) if witnesses else None
    if gain is not None and gain >= -_CLOSE:
        return Rule(str(found.rewrite), "open")
    kept = {kept_module(left.path, kin.path) for left, kin in found.hits} - {()}
    if len(kept) < _MIN_MODULES or gain is not None:
        return Rule(str(found.rewrite), "likely")
    return Rule(str(found.rewrite), "certain", not says_little(*found.hits[0]))


def says_little(left: Left, kin: Kin) -> bool:
    """Tell whether a change of names only adds or drops words that any model has anywhere."""
    head, tail = split_ends(left.path, kin.path)
    a = plain(left.path[head : len(left.path) - tail])
    b = plain(kin.path[head : len(kin.path) - tail])
    more, less = (a, b) if len(a) > len(b) else (b, a)
    return _inside(less, more) and not [w for w in more if w not in less and w not in _NEUTRAL]


_NEUTRAL = frozenset(
    ("model", "layer", "transformer", "mlp", "attn", "self", "embed", "module", "base", "encoder",
     "proj", "*")
)  # fmt: skip
"""Words that only say where in a model one is, in any model."""


def _is_index(segment: str) -> bool:
    return segment == SLOT or segment.isdigit()


def _tells(segment: str) -> bool:
    return not _is_index(segment)


def rival_gain(witnesses: Sequence[tuple[Left, Kin]], pool: Pool) -> float | None:
    """Return how much liker another place is that half of the *witnesses* could come from, or go to.

    None if there is no other. Less than 0: its name is less like.
    """
    other: Counter[tuple[str, Path]] = Counter()
    gain: dict[tuple[str, Path], float] = {}
    models, stored = [*pool.rival_models()], [*pool.rival_stored()]
    for left, kin in witnesses:
        _, tail = split_ends(left.path, kin.path)
        ending, mine, its = left.path[len(left.path) - tail :], left.path[:-tail], kin.path[:-tail]
        heads: set[tuple[str, Path]] = set()
        near = likeness(spelt(mine, True), spelt(its, True), {})
        for rival in models:
            if rival.path[-tail:] == ending and rival.path != kin.path and fits(left.kin, rival):
                head = rival.path[:-tail]
                if not pool.tied(rival, kin) and not _excluded(mine, its, head):
                    heads.add(("model", head))
                    gain["model", head] = likeness(spelt(mine, True), spelt(head, True), {}) - near
        for one in stored:
            if one.path[-tail:] == ending and one.kin.full != left.kin.full and fits(one.kin, kin):
                head = one.path[:-tail]
                if not _excluded(its, mine, head):
                    heads.add(("stored", head))
                    gain["stored", head] = likeness(spelt(its, True), spelt(head, True), {}) - near
        other.update(heads)
    strong = [gain[key] for key, n in other.items() if n >= max(1, len(witnesses) / 2)]
    return max(strong, default=None)


def _excluded(mine: Path, its: Path, rival: Path) -> bool:
    """Tell whether the words of *mine* speak for *its* and against *rival*."""
    a, b, c = plain(mine), plain(its), plain(rival)
    return (_inside(a, b) or _inside(b, a)) and not (_inside(a, c) or _inside(c, a))


def _inside(small: Sequence[str], large: Sequence[str]) -> bool:
    """Tell whether the words of *small* are all in *large*, in order."""
    rest = iter(large)
    return all(word in rest for word in small)
