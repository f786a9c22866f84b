"""Structure: tensors that one side has joined and the other apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from modelquirks.planner.infer.claim import Claim, Tier, source_of
from modelquirks.planner.infer.kin import Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, _alike, shared
from modelquirks.planner.infer.words import likeness, spelt, words_of
from modelquirks.quirks.recipe import Chunk, Concat, Node, Select, Slice

__all__ = ["joins", "splits"]

_FUSED = {
    "qkv": ("q", "k", "v"), "gqkv": ("gate", "q", "k", "v"), "kv": ("k", "v"), "qk": ("q", "k"),
    "qkvz": ("q", "k", "v", "z"), "ba": ("b", "a"), "wqkv": ("q", "k", "v"),
    "qkvg": ("q", "k", "v", "gate"), "gate up": ("gate", "up"),
}  # fmt: skip
_USUAL = (("q", "k", "v", "g"), ("gate", "up"), ("qkv", "z", "b", "a"), ("k", "v"))
_MAX_PARTS = 4


class Whole(NamedTuple):
    """A tensor of one side that is several of the other, one after another."""

    whole: Left | Kin
    parts: tuple[Left | Kin, ...]
    dim: int
    score: float
    ordered: bool
    named: bool
    """Whether the name of the whole says that it is these parts."""


def apart(pool: Pool, *, named: bool) -> None:
    """Claim what one side has in parts; with *named* only where names say so.

    Twice, as biases follow their weights.
    """
    for _ in range(2):
        joins(pool, named=named)
        splits(pool, named=named)


def joins(pool: Pool, *, named: bool) -> None:
    """Claim the model's tensors that are stored in parts; with *named* only where names say so."""
    found = [
        w
        for kin in pool.model
        for w in _wholes(kin, pool.stored, pool.joined)
        if w.named or not named
    ]
    for whole in _best_first(found):
        kin, parts = whole.whole, whole.parts
        if not any(kin is k for k in pool.model) or not all(
            any(p is s for s in pool.stored) for p in parts
        ):
            continue
        pool.joined.add((kin.path, *(p.path for p in parts)))
        node: Node = Concat(tuple(source_of(p.kin) for p in parts), whole.dim)
        if kin.over is not None:
            node = Select(node, "{e}", 0)
        members = [i for i in kin.types if all(i in p.kin.types for p in parts)]
        tier: Tier = "likely" if whole.ordered else "open"
        pool.enter(
            Claim(kin.only(members), node, tier, "stored in parts", (), tuple(p.kin for p in parts)),
            list(parts), kin,
        )  # fmt: skip


def splits(pool: Pool, *, named: bool) -> None:
    """Claim the model's tensors that are parts of a stored one; as :func:`joins`."""
    found = [
        w
        for left in pool.stored
        for w in _wholes(left, pool.model, pool.joined)
        if w.named or not named
    ]
    for whole in _best_first(found):
        left, parts = whole.whole, whole.parts
        if not any(left is s for s in pool.stored) or not all(
            any(p is k for k in pool.model) for p in parts
        ):
            continue
        pool.joined.add((left.path, *(p.path for p in parts)))
        sizes = [_size(p, whole.dim) for p in parts]
        tier: Tier = "likely" if whole.ordered else "open"
        begin = 0
        for part, size in zip(parts, sizes, strict=True):
            node: Node = source_of(left.kin)
            if len(set(sizes)) == 1:
                node = Chunk(node, whole.dim, len(parts), begin // size)
            else:
                node = Slice(node, whole.dim, begin, begin + size)
            begin += size
            if part.over is not None:
                node = Select(node, "{e}", 0)
            members = part.only(shared(part, left.kin))
            pool.enter(Claim(members, node, tier, "part of", (), (left.kin,)), [left], part)


def _best_first(found: Sequence[Whole]) -> list[Whole]:
    return sorted(found, key=lambda w: -w.score)


def _kin(one: Left | Kin) -> Kin:
    return one.kin if isinstance(one, Left) else one


def _size(one: Left | Kin, dim: int) -> int:
    return next(iter(_kin(one).types.values())).shape[dim]


def _as_weights(found: Whole, joined: Collection[tuple[Path, ...]]) -> bool:
    """Tell whether the weights beside these biases are joined so: short sums come out by chance."""
    paths = (p.path for p in (found.whole, *found.parts))
    return tuple((*p[:-1], p[-1].replace("bias", "weight")) for p in paths) in joined


def _wholes(
    whole: Left | Kin, others: Sequence[Left | Kin], joined: Collection[tuple[Path, ...]]
) -> Iterator[Whole]:
    """Yield the ways to make *whole* of two to four of *others* whose names differ in a word."""
    mine = _kin(whole)
    rank = {len(of.shape or ()) for of in mine.types.values()}
    if len(rank) != 1:
        return
    flat = rank == {1}
    for dim in range(rank.pop()):
        fitting = [o for o in others if _could_be_part(_kin(o), mine, dim)]
        groups: dict[tuple[int, Path], list[Left | Kin]] = {}
        for other in fitting:
            path = other.path
            for at in range(1, min(4, len(path)) + 1):
                if path[-at] != "*":
                    groups.setdefault(
                        (at, (*path[: len(path) - at], *path[len(path) - at + 1 :])), []
                    ).append(other)
        for (at, rest), group in groups.items():
            if not 2 <= len(group) <= 8:
                continue
            for n in range(2, _MAX_PARTS + 1):
                for parts in combinations(group, n):
                    if _adds_up(mine, [_kin(p) for p in parts], dim):
                        found = _ordered(whole, parts, dim, at, rest)
                        if not flat or _as_weights(found, joined):
                            yield found


def _could_be_part(part: Kin, whole: Kin, dim: int) -> bool:
    if part.n_slots != whole.n_slots:
        return False
    common = shared(part, whole)
    if len(common) < max(1, 0.5 * max(len(part), len(whole))):
        return False
    for index in common:
        a, b = part.types[index], whole.types[index]
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return False
        if not _alike(a.dtype, b.dtype) or a.shape[dim] >= b.shape[dim]:
            return False
        if a.shape[:dim] + a.shape[dim + 1 :] != b.shape[:dim] + b.shape[dim + 1 :]:
            return False
    return True


def _adds_up(whole: Kin, parts: Sequence[Kin], dim: int) -> bool:
    for index, of in whole.types.items():
        sizes = [p.types[index].shape[dim] for p in parts if index in p.types]
        if len(sizes) == len(parts) and sum(sizes) != of.shape[dim]:
            return False
    return any(all(i in p.types for p in parts) for i in whole.types)


def _ordered(
    whole: Left | Kin, parts: Sequence[Left | Kin], dim: int, at: int, rest: Path
) -> Whole:
    """Return the parts in the order that the names say, or the usual one."""
    own = [_word(p.path[-at]) for p in parts]
    common = set.intersection(*map(set, own))
    own = [tuple(w for w in words if w not in common) for words in own]
    fused = [x for w in _word(" ".join(whole.path[-2:])) for x in _FUSED.get(w, (w,))]
    fused = fused or []
    if "12" in fused and "w" in fused:
        fused = ["gate", "up"]
    if {"gate", "up"} <= set(fused) and sorted(own) == [("1",), ("3",)]:
        fused = ["1", "3"]
    if sorted(own) == [(), ("new",)]:
        fused, own = ["", "new"], [words or ("",) for words in own]
    near = likeness(spelt(rest, True), spelt(whole.path, True), {})
    same = spelt((*rest, *sorted(common)), True) == spelt(whole.path, True) or (
        sorted(spelt((*rest, *sorted(common)), True)) == sorted(spelt(whole.path, True))
    )
    orders = [fused, *map(list, _USUAL)]
    for number, order in enumerate(orders):
        places = [next((order.index(w) for w in words if w in order), -1) for words in own]
        if -1 not in places and len(set(places)) == len(places):
            chosen = [p for _, p in sorted(zip(places, parts, strict=True), key=lambda x: x[0])]
            labelled = number == 0
            usual = number == 1 and {"q", "k", "v"} >= {w for o in own for w in o}
            score = near + (1.0 if labelled else 0.5) + 0.1 * len(parts)
            return Whole(
                whole, tuple(chosen), dim, score, labelled or number in (1, 3, 4), labelled or same
            )
    return Whole(whole, tuple(parts), dim, near, False, False)


def _word(text: str) -> tuple[str, ...]:
    return spelt(tuple(words_of(text)), True)
