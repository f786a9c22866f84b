"""Blocks: names that follow each other and begin alike, as those of one layer do.

The 208,550 names of one real checkpoint are 61 layers, of which 60 differ in a number only. What
is true of the names of one such layer need not be found out sixty times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, groupby, islice, takewhile
from operator import itemgetter, methodcaller

__all__ = [
    "Block",
    "Tails",
    "all_different",
    "blocks_in",
    "cut_up",
    "heads_of",
    "names_of",
]

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_FIRST = re.compile(rf"(?:[^.]*\.)*?(?:{_INDEX.pattern})\.")
_KEPT, _SMALL, _MANY = 3, 16, 4096
"""Blocks that others are compared with, names that a new one has at least, and how many names are
passed over where there were none."""


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

    @classmethod
    def of(cls, head: str, tails: Tails, names: Sequence[str]) -> Block:
        """Return the block of *names*, which are at hand."""
        block = cls(head, tails)
        vars(block)["names"] = names  # what the property would make anew
        return block

    @classmethod
    def cut(cls, head: str, names: Sequence[str]) -> Block:
        """Return the block of *names*, which all begin with *head*."""
        return cls.of(head, Tails([name[len(head) :] for name in names]), names)

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


def blocks_in(names: Sequence[str]) -> list[Block]:
    """Return *names* as blocks, of which those that differ in the first index only are alike.

    >>> layers = [f"h.{layer}.{expert}.w" for layer in (0, 1) for expert in range(20)]
    >>> [(block.head, len(block)) for block in blocks_in(["embed", *layers])]
    [('', 1), ('h.0.', 20), ('h.1.', 20)]
    """
    found: list[Block] = []
    plain: list[str] = []
    kept: list[Block] = []
    at = small = 0
    while at < len(names):
        block = _like_one(kept, names, at)
        if block is None and (block := _layer(names, at)) is not None:
            kept = [block, *kept[: _KEPT - 1]]
        if block is None:  # do not try in vain for each name of many
            small = (small + 1) % _SMALL
            end = at + (1 if small else _MANY)
            plain += names[at:end]
            at = end
            continue
        if plain:
            found.append(Block("", Tails(plain)))
            plain = []
        found.append(block)
        at, small = at + len(block), 0
    return [*found, Block("", Tails(plain))] if plain else found


def cut_up(blocks: Iterable[Block]) -> list[Block]:
    """Return *blocks*, of which those without a head are cut into :func:`blocks_in` them."""
    found: list[Block] = []
    for has_head, group in groupby(blocks, lambda block: bool(block.head)):
        some = [*group]
        found += some if has_head else blocks_in([*names_of(some)])
    return found


def _like_one(kept: list[Block], names: Sequence[str], at: int) -> Block | None:
    """Return the block that begins at a place if it is like one of *kept* but for its head.

    One that was compared in vain as a whole is kept no longer, so that names made to cost time
    do not.
    """
    for other in kept:
        heads = heads_of(other.names[0], names[at])
        if heads is None or heads[0] != other.head:
            continue
        head, texts = heads[1], other.tails.texts
        these = names[at : at + len(texts)]
        if these[-1] != head + texts[-1]:
            continue
        text = "\n".join(these)
        # With as many breaks as there are between names, none is within one.
        if text.count("\n") == len(texts) - 1 and text == head + f"\n{head}".join(texts):
            return Block.of(head, other.tails, these)
        kept.remove(other)
        return None
    return None


def _layer(names: Sequence[str], at: int) -> Block | None:
    """Return the block that begins at a place and goes on as long as its first index does."""
    first = _FIRST.match(names[at])
    end = at + _SMALL
    if first is None or end > len(names) or not names[end - 1].startswith(head := first[0]):
        return None
    begins = methodcaller("startswith", head)
    these = [*takewhile(begins, islice(names, at, None))]
    return Block.cut(head, these) if len(these) >= _SMALL else None


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
