"""Structure: tensors that one side has joined and the other apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from modelquirks.planner.infer.claim import STACKED, Claim, Tier, source_of
from modelquirks.planner.infer.kin import Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, _alike, shared
from modelquirks.planner.infer.words import likeness, spelt, words_of
from modelquirks.quirks.recipe import Chunk, Concat, Node, Select, Slice, TensorType

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

    whole: Left
    parts: tuple[Left, ...]
    dim: int
    score: float
    ordered: bool
    named: bool
    """Whether the name of the whole says that it is these parts."""

    @property
    def tier(self) -> Tier:
        """Of a claim: the order of the parts is known, or it is not."""
        return "likely" if self.ordered else "open"


def apart(pool: Pool, *, named: bool) -> None:
    """Claim what one side has in parts; with *named* only where names say so.

    Twice, as biases follow their weights.
    """
    for _ in range(2):
        joins(pool, named=named)
        splits(pool, named=named)


def joins(pool: Pool, *, named: bool) -> None:
    """Claim the model's tensors that are stored in parts; with *named* only where names say so."""
    models = [Left(kin, (kin.path,)) for kin in pool.model]
    found = (w for model in models for w in _wholes(model, pool.stored, pool.joined))
    for whole in _best_first(w for w in found if w.named or not named):
        kin, parts = whole.whole.kin, whole.parts
        if not pool.has_model(kin) or not all(map(pool.has_stored, parts)):
            continue
        pool.joined.add((kin.path, *(part.path for part in parts)))
        node: Node = Concat(tuple(source_of(part.kin) for part in parts), whole.dim)
        members = kin.only(i for i in kin.types if all(i in part.kin.types for part in parts))
        sources = tuple(part.kin for part in parts)
        claim = Claim(members, _selected(node, kin), whole.tier, "stored in parts", (), sources)
        pool.enter(claim, parts, kin)


def splits(pool: Pool, *, named: bool) -> None:
    """Claim the model's tensors that are parts of a stored one; as :func:`joins`."""
    models = [Left(kin, (kin.path,)) for kin in pool.model]
    found = (w for left in pool.stored for w in _wholes(left, models, pool.joined))
    for whole in _best_first(w for w in found if w.named or not named):
        left, parts = whole.whole, [part.kin for part in whole.parts]
        if not pool.has_stored(left) or not all(map(pool.has_model, parts)):
            continue
        pool.joined.add((left.path, *(part.path for part in parts)))
        for node, part in zip(_cut(left.kin, parts, whole.dim), parts, strict=True):
            members = part.only(shared(part, left.kin))
            node = _selected(node, part)
            claim = Claim(members, node, whole.tier, "a part of what is stored", (), (left.kin,))
            pool.enter(claim, [left], part)


def _cut(whole: Kin, parts: Sequence[Kin], dim: int) -> Iterator[Node]:
    """Yield the recipes of the parts of *whole*, one after another along *dim*."""
    sizes = [_size(part, dim) for part in parts]
    begin = 0
    for number, size in enumerate(sizes):
        if len(set(sizes)) == 1:
            yield Chunk(source_of(whole), dim, len(parts), number)
        else:
            yield Slice(source_of(whole), dim, begin, begin + size)
        begin += size


def _selected(node: Node, kin: Kin) -> Node:
    return node if kin.over is None else Select(node, f"{{{STACKED}}}", 0)


def _best_first(found: Iterable[Whole]) -> list[Whole]:
    return sorted(found, key=lambda w: -w.score)


def _size(kin: Kin, dim: int) -> int:
    return _shape(next(iter(kin.types.values())))[dim]


def _shape(of: TensorType) -> tuple[int, ...]:
    return of.shape or ()


def _as_weights(found: Whole, joined: Collection[tuple[Path, ...]]) -> bool:
    """Tell whether the weights beside these biases are joined so: short sums come out by chance."""
    paths = (p.path for p in (found.whole, *found.parts))
    return tuple((*p[:-1], p[-1].replace("bias", "weight")) for p in paths) in joined


def _wholes(
    whole: Left, others: Sequence[Left], joined: Collection[tuple[Path, ...]]
) -> Iterator[Whole]:
    """Yield the ways to make *whole* of two to four of *others* whose names differ in a word."""
    mine = whole.kin
    rank = {len(of.shape or ()) for of in mine.types.values()}
    if len(rank) != 1:
        return
    flat = rank == {1}
    for dim in range(rank.pop()):
        fitting = [o for o in others if _could_be_part(o.kin, mine, dim)]
        groups: dict[tuple[int, Path], list[Left]] = {}
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
                    if _adds_up(mine, [p.kin for p in parts], dim):
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
        sizes = [_shape(p.types[index])[dim] for p in parts if index in p.types]
        if len(sizes) == len(parts) and sum(sizes) != _shape(of)[dim]:
            return False
    return any(all(i in p.types for p in parts) for i in whole.types)


def _ordered(whole: Left, parts: Sequence[Left], dim: int, at: int, rest: Path) -> Whole:
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
            score = near + (1.0 if labelled else 0.5) + 0.1 * len(parts)
            return Whole(
                whole, tuple(chosen), dim, score, labelled or number in (1, 3, 4), labelled or same
            )
    return Whole(whole, tuple(parts), dim, near, False, False)


def _word(text: str) -> tuple[str, ...]:
    return spelt(tuple(words_of(text)), True)
