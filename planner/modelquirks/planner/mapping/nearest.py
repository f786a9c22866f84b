"""The nearest candidates: what the user probably meant, for names that are left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property, lru_cache

from modelquirks.quirks.family import Family, group, show, template_of

__all__ = ["Nearest", "closest"]

Shape = tuple[int, ...] | None

_MAX_COMPARED = 12
"""Candidates that are compared letter by letter: those that share most segments."""
_LIKE = 0.6
"""Score above which a name counts as near."""


@dataclass
class Nearest:
    """Names left over on both sides, with their shapes, compared by family.

    Comparing is letter by letter and slow, so on each side only the first families asked for get
    an answer: a report shows no more than that.
    """

    missing: Mapping[str, tuple[int, ...]]
    """Model names that nothing provides."""
    spare: Mapping[str, Shape]
    """Stored names that nobody wants."""
    spare_called: Mapping[str, str]
    """Stored name → logical name, for all stored tensors."""
    limit: int = 30
    """How many families of each side are compared."""
    _asked: Counter[str] = field(default_factory=lambda: Counter[str]())

    @cached_property
    def missing_families(self) -> Mapping[str, Family]:
        """The missing names by family."""
        return group(self.missing)

    @cached_property
    def spare_families(self) -> Mapping[str, Family]:
        """The spare names by family, under their logical names."""
        return group(self.spare_called.get(name, name) for name in self.spare)

    def of_missing(self, name: str) -> tuple[str, ...]:
        """Return the families of spare tensors that come closest to *name*."""
        return self._closest("missing", name, self._spare_shown)

    def of_spare(self, stored: str) -> tuple[str, ...]:
        """Return the families of missing tensors that come closest to *stored*."""
        called = self.spare_called.get(stored, stored)
        return self._closest("spare", called, self._missing_shown)

    @cached_property
    def _missing_shown(self) -> Sequence[str]:
        return [show(template) for template in self.missing_families]

    @cached_property
    def _spare_shown(self) -> Sequence[str]:
        return [show(template) for template in self.spare_families]

    def _closest(self, side: str, name: str, candidates: Sequence[str]) -> tuple[str, ...]:
        if not candidates or self._asked[side] >= self.limit:
            return ()
        self._asked[side] += 1
        return closest(show(template_of(name)), candidates)


def closest(name: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return at most *limit* candidates that resemble *name*, best first.

    The last segments count most: a wrapper changes the front of a name, not its end.

    >>> closest("model.norm.weight", ["norm.weight", "head.bias"])
    ('norm.weight',)
    """
    listed = dict.fromkeys(candidates)
    likely = sorted(listed, key=lambda c: (-_alike(name, c), c))[:_MAX_COMPARED]
    scored = sorted((-_score(name, candidate), candidate) for candidate in likely)
    return tuple(candidate for score, candidate in scored[:limit] if -score > _LIKE)


def _alike(a: str, b: str) -> float:
    """Return how much two names have in common, by whole segments: cheap, for a first choice."""
    (left, left_set), (right, right_set) = _segments(a), _segments(b)
    shared = len(left_set & right_set) / max(len(left), len(right))
    return common_tail(left, right) + shared


@lru_cache(maxsize=4096)
def _segments(name: str) -> tuple[tuple[str, ...], frozenset[str]]:
    segments = tuple(name.split("."))
    return segments, frozenset(segments)


def _score(a: str, b: str) -> float:
    left, right = a.split("."), b.split(".")
    tail = common_tail(left, right)
    share = tail / max(len(left), len(right))
    return max(share, SequenceMatcher(None, a, b, autojunk=False).ratio()) + 0.2 * bool(tail)


def common_tail(a: Sequence[str], b: Sequence[str]) -> int:
    """Return how many last segments two names have in common."""
    count = 0
    for left, right in zip(reversed(a), reversed(b), strict=False):
        if left != right:
            break
        count += 1
    return count
