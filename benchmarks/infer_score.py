"""Scores of what is inferred: each tensor of the model, its tier, and whether it is right."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from infer_listings import Listing

from modelquirks.planner.infer.inference import infer
from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Node,
    Permute,
    RecipeError,
    Reshape,
    Select,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
    sources,
)  # fmt: skip

__all__ = ["Verdict", "dropped", "need_of", "scored", "state_of"]


class Verdict(NamedTuple):
    """Of one tensor of the model."""

    need: str
    """``same`` name, ``renamed``, ``converted``, or ``nothing`` is stored for it."""
    tier: str
    """As proposed; ``none`` without a proposal."""
    right: bool


def scored(listing: Listing, full: Mapping[str, TensorType]) -> dict[str, Verdict]:
    """Return the verdict on each tensor of the model; *full* are all stored tensors."""
    found = infer(listing.stored, listing.model, listing.ties)
    got = {name: (node, c.tier) for c in found.claims for name, node in c.items()}
    partners = {name: group for group in listing.ties for name in group}
    verdicts: dict[str, Verdict] = {}
    for name in listing.model:
        true = listing.truth[name]
        group = name, *partners.get(name, ())
        served = next((n for n in group if n in got), None)
        need = need_of(group, true)
        if served is None:
            verdicts[name] = Verdict(need, "none", False)
            continue
        node, tier = got[served]
        verdicts[name] = Verdict(need, tier, any(_equal(node, one, full) for one in true))
    return verdicts


def need_of(group: Sequence[str], true: Sequence[Node]) -> str:
    """Return what a tensor needs that has the names of *group*."""
    names = [node.name for node in true if isinstance(node, Source)]
    return (
        "same"
        if not {*group}.isdisjoint(names)
        else "renamed"
        if names
        else "converted"
        if true
        else "nothing"
    )


def state_of(verdicts: Mapping[str, Verdict]) -> tuple[str, str]:
    """Return what a class needs, and how its mapping as a whole was recovered."""
    needs = {v.need for v in verdicts.values()}
    need = next((n for n in ("converted", "renamed") if n in needs), "same")
    wrong = {v.tier for v in verdicts.values() if not v.right}
    if "certain" in wrong:
        return need, "certain and wrong"
    if "likely" in wrong:
        return need, "wrong"
    left = [v for v in verdicts.values() if v.need != "nothing" and v.tier in ("open", "none")]
    return need, "open" if left else "right"


def dropped(listing: Listing, share: float, seed: int) -> Listing:
    """Return *listing* without a share of the modules of each side, drawn independently."""

    def some(side: Mapping[str, TensorType], which: str) -> dict[str, TensorType]:
        chance = random.Random(f"{seed}/{which}/{listing.name}")
        modules = sorted({name.rpartition(".")[0] for name in side})
        gone = {module for module in modules if chance.random() < share}
        return {n: t for n, t in side.items() if n.rpartition(".")[0] not in gone}

    if not share:
        return listing
    return Listing(
        listing.name, some(listing.stored, "stored"), some(listing.model, "model"),
        listing.ties, listing.truth,
    )  # fmt: skip


def _equal(one: Node, other: Node, full: Mapping[str, TensorType]) -> bool:
    """Tell whether two recipes make the same of stored tensors, whatever these hold."""
    if one == other:
        return True
    if isinstance(one, Source) and isinstance(other, Source):
        return False
    try:
        first, second = _made(one, full, {}), _made(other, full, {})
    except (KeyError, ValueError, RecipeError):
        return False
    return first.shape == second.shape and bool((first == second).all())


def _made(node: Node, full: Mapping[str, TensorType], env: Mapping[str, int]) -> Any:
    """Return what *node* makes of tensors in which every element is another number."""
    match node:
        case Source(name):
            return _numbered(_put(name, env), full)
        case Concat(parts, dim):
            return np.concatenate([_made(part, full, env) for part in parts], dim)
        case Stack(of, over, count):
            n = _counted(of, over, full, env) if count is None else count
            return np.stack([_made(of, full, {**env, over: i}) for i in range(n)])
        case Chunk(of, dim, count, part):
            return np.split(_made(of, full, env), count, dim)[part]
        case Slice(of, dim, start, stop):
            return _made(of, full, env)[(slice(None),) * dim + (slice(start, stop),)]
        case Transpose(of, dim0, dim1):
            return np.swapaxes(_made(of, full, env), dim0, dim1)
        case Permute(of, dims):
            return np.transpose(_made(of, full, env), dims)
        case Reshape(of, shape):
            return _made(of, full, env).reshape(shape)
        case Select(of, index, dim):
            return np.take(_made(of, full, env), int(index), dim)
        case Cast(of, _):
            return _made(of, full, env)
        case _:
            raise ValueError(f"no way to compare a {type(node).__name__}")


def _numbered(name: str, full: Mapping[str, TensorType]) -> Any:
    shape = full[name].shape or ()
    first = zlib.crc32(name.encode()) << 24
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) + first


def _put(name: str, env: Mapping[str, int]) -> str:
    for key, value in env.items():
        name = name.replace(f"{{{key}}}", str(value))
    return name


def _counted(of: Node, over: str, full: Mapping[str, TensorType], env: Mapping[str, int]) -> int:
    first = next(sources(of)).name
    n = 0
    while _put(first, {**env, over: n}) in full:
        n += 1
    return n
