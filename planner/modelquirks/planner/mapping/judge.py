"""The judge: for each tensor that the model wants, whether what is offered fits, and its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.audit import ModelClass
from modelquirks.planner.mapping.fit import DtypeRule, Fit, Types, fit, is_made, leaf_types
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.offers import Offer
from modelquirks.planner.mapping.reads import StoredFamilies
from modelquirks.planner.mapping.recipes import concrete
from modelquirks.planner.model.skeleton import ModelTensor
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import (
    RecipeError,
    Scheme,
    TensorType,
)

__all__ = ["Judge", "Judged", "Verdict", "conflicts"]


class Verdict(NamedTuple):
    """The class of one model tensor."""

    kind: ModelClass
    reason: str = ""
    rule: str = ""
    quirk: str = ""


def _verdict(piece: Logical, fit: Fit) -> Verdict:
    kind: ModelClass = "mismatched"
    if fit.node is not None:
        kind = "made" if is_made(piece.node) else "matched"
    return Verdict(kind, fit.problem, piece.rule, ", ".join(piece.quirks))


class Judged(NamedTuple):
    """What is offered for one model tensor, and how it fits."""

    offer: Offer
    fit: Fit
    verdict: Verdict
    """The class that follows."""
    reads: tuple[str, ...]
    """The stored tensors that the offer is made from."""


def conflicts(
    judge: Judge, judged: Mapping[str, Judged], rivals: Mapping[str, Sequence[Offer]]
) -> Iterator[Finding]:
    """Yield the model tensors that several rules make differently, of the same stored tensors."""
    for name, offers in rivals.items():
        chosen = judged.get(name)
        if chosen is None or chosen.fit.node is None:
            continue
        for offer in offers:
            if set(offer.reads()) == set(chosen.reads) and _differ(offer, chosen.offer):
                text = (
                    f"{name!r} is made by {_told(chosen.offer)} and by {_told(offer)}, and nobody "
                    "can tell from headers which one is right; leave one out with --no-quirk"
                )
                if judge.serves(offer, chosen.fit.type):
                    yield Finding("rule-conflict", "error", text)


def _differ(one: Offer, other: Offer) -> bool:
    if one.logical.reforms != other.logical.reforms:
        return False  # the stored form of the name, which a rule says is not the model's
    first, second = (concrete(o.logical.bound.node, o.env) for o in (one, other))
    return first != second


def _told(offer: Offer) -> str:
    quirks = ", ".join(offer.logical.quirks)
    return f"{offer.logical.rule!r} of {quirks!r}" if quirks else "its own name"


@dataclass(frozen=True)
class Judge:
    """Judges offers by the headers of a checkpoint."""

    manifest: Manifest
    dtype: DtypeRule
    schemes: Mapping[str, Scheme]
    _known: dict[object, tuple[Fit, Verdict]] = field(default_factory=dict)
    """Fits that hold for every member of a family with the same types on both sides."""

    def type_of(self, stored: str) -> TensorType:
        """Return the type of a stored tensor."""
        return self.stored.types[stored]

    @cached_property
    def stored(self) -> StoredFamilies:
        """The stored tensors by family."""
        return StoredFamilies(self.manifest)

    def best_of(self, tensor: ModelTensor, offer: Offer, rivals: Sequence[Offer]) -> Judged:
        """Return how *offer*, or if it is not sure the stored one of its *rivals*, serves."""
        if offer.logical.either:
            return self.either(tensor, offer, rivals)
        return self.judged(tensor, offer)

    def judged(self, tensor: ModelTensor, offer: Offer) -> Judged:
        """Return how *offer* serves *tensor*."""
        reads = (tensor.name,) if offer.logical.is_stored_so else tuple(offer.reads())
        key = self._key(tensor, offer, reads)
        if (known := self._known.get(key)) is not None:
            return Judged(offer, *known, reads)
        found, verdict = self.fitted(tensor, offer, self.type_of)
        if not found.problem and not found.taken:  # else it speaks of this one member
            self._known[key] = found, verdict
        return Judged(offer, found, verdict, reads)

    def fitted(self, tensor: ModelTensor, offer: Offer, types: Types) -> tuple[Fit, Verdict]:
        """Return the fit of *offer*, whose sources have these *types*, and the class."""
        node = offer.logical.bound.node
        found = fit(tensor, node, offer.env, types=types, rule=self.dtype, schemes=self.schemes)
        return found, _verdict(offer.logical, found)

    def either(self, tensor: ModelTensor, offer: Offer, rivals: Sequence[Offer]) -> Judged:
        """Return how *offer* or the stored tensor as it lies serves *tensor*: its shape decides.

        Where both fit (a square matrix, to be transposed or not), neither is taken.
        """
        as_it_lies = next((rival for rival in rivals if not rival.logical.reforms), None)
        wanted = TensorType(tensor.dtype, tensor.shape)
        if as_it_lies is None or not self.serves(as_it_lies, wanted):
            return self.judged(tensor, offer)
        if not self.serves(offer, wanted):
            return self.judged(tensor, as_it_lies)
        found = self.judged(tensor, offer)
        if any(self.type_of(name).shape is None for name in found.reads):
            return found  # an index alone does not tell; the headers will
        problem = (
            f"{shown(found.reads, 2)} fits as it lies and as {offer.logical.rule!r} makes it, and "
            "nobody can tell from its header which one is right; choose with --no-quirk "
            f"{offer.logical.quirks[-1]} (as it lies)"
        )
        refused = replace(found.fit, node=None, problem=problem)
        return found._replace(fit=refused, verdict=_verdict(offer.logical, refused))

    def serves(self, offer: Offer, wanted: TensorType) -> bool:
        """Tell whether *offer*, by its shape, could make a tensor of the type *wanted*."""
        node = offer.logical.bound.node
        try:
            types = leaf_types(node, offer.env, self.type_of)
            made = infer(node, types.__getitem__, self.schemes)
        except RecipeError:
            return False
        return made.shape is None or made.shape == wanted.shape

    def _key(self, tensor: ModelTensor, offer: Offer, reads: tuple[str, ...]) -> object:
        """Return all that a fit depends on, beside the names in its texts."""
        free = self.dtype.asked is not None and not self.dtype.kept(tensor.name)
        return (
            id(offer.logical),
            tensor.dtype,
            tensor.shape,
            free and tensor.name not in self.dtype.companions,
            free,
            tuple(map(self.stored.types.__getitem__, reads)),
        )
