"""Scores of what is inferred: each tensor of the model, its tier, and whether it is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from infer_equal import equal
from infer_listings import Listing

from modelquirks.planner.infer.inference import Inference
from modelquirks.quirks.recipe import Node, Source, TensorType

__all__ = ["Verdict", "dropped", "need_of", "scored", "state_of"]


class Verdict(NamedTuple):
    """Of one tensor of the model."""

    need: str
    """``same`` name, ``renamed``, ``converted``, or ``nothing`` is stored for it."""
    tier: str
    """As proposed; ``none`` without a proposal."""
    right: bool


def scored(
    listing: Listing, full: Mapping[str, TensorType], found: Inference
) -> dict[str, Verdict]:
    """Return the verdict on each tensor of the model; *full* are all stored tensors."""
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
        verdicts[name] = Verdict(need, tier, any(equal(node, one, full) for one in true))
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
