"""Blocks: names that follow each other and begin alike, as those of one layer do.

The 208,550 names of one real checkpoint are 61 layers, of which 60 differ in a number only. What
is true of the names of one such layer need not be found out sixty times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from operator import itemgetter

__all__ = ["Block", "Tails", "all_different", "heads_of", "names_of"]

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, eq=False)
class Tails:
    """What names have behind their head. Blocks with the same object are alike."""

    texts: Sequence[str]

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where each is, the last one of several."""
        return dict(zip(self.texts, count(), strict=False))


@dataclass(frozen=True, eq=False)
class Block:
    """Names in order.

    >>> Block("layers.1.", Tails(["w", "b"])).names
    ['layers.1.w', 'layers.1.b']
    """

    head: str
    """What all begin with: up to an index and the dot behind it, or nothing."""
    tails: Tails

    @cached_property
    def names(self) -> Sequence[str]:
        """The names."""
        head, texts = self.head, self.tails.texts
        return [head + text for text in texts] if head else texts

    def place(self, name: str) -> int | None:
        """Return where a name is in the block, None if it is not."""
        if not name.startswith(self.head):
            return None
        return self.tails.places.get(name[len(self.head) :])

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.tails.texts)


def names_of(blocks: Iterable[Block]) -> Iterator[str]:
    """Return the names of *blocks*, in order."""
    return chain.from_iterable(block.names for block in blocks)


def heads_of(name: str, other: str) -> tuple[str, str] | None:
    """Return how two names begin, up to the one index in which they differ; None: they do not.

    >>> heads_of("layers.1.mlp.w", "layers.12.mlp.w")
    ('layers.1.', 'layers.12.')
    """
    these, those = name.split("."), other.split(".")
    pairs = enumerate(zip(these, those, strict=False))
    at, pair = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (0, ()))
    if not pair or not all(map(_INDEX.fullmatch, pair)) or these[at + 1 :] != those[at + 1 :]:
        return None
    if at + 1 == len(these):
        return None
    before = these[:at]
    return ".".join([*before, these[at], ""]), ".".join([*before, those[at], ""])


def all_different(blocks: Sequence[Block]) -> bool:
    """Tell whether no name is in *blocks* twice.

    >>> tails = Tails(["w", "b"])
    >>> all_different([Block("", Tails(["norm"])), Block("h.1.", tails), Block("h.2.", tails)])
    True
    """
    heads = [block.head for block in blocks if block.head]
    others = [*names_of(block for block in blocks if not block.head)]
    if _may_meet(heads, others):
        names = [*names_of(blocks)]
        return len({*names}) == len(names)
    each = (len(tails.places) == len(tails.texts) for tails in {b.tails for b in blocks if b.head})
    return len({*others}) == len(others) and all(each)


def _may_meet(heads: Sequence[str], others: Sequence[str]) -> bool:
    """Tell whether a name that begins with one of *heads* may be one of another, or of *others*."""
    known = {*heads}
    if len(known) < len(heads):
        return True
    for n in {*map(len, heads)}:
        longer = (head for head in heads if len(head) > n)
        if any(map(known.__contains__, map(itemgetter(slice(n)), chain(longer, others)))):
            return True
    return False
