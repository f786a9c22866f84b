"""``infer``: what maps the names of a checkpoint to those of a model, proposed and never applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelquirks.planner.infer.align import align
from modelquirks.planner.infer.claim import Claim, Tier
from modelquirks.planner.infer.rules import Rule, rules_of
from modelquirks.quirks.recipe import TensorType, sources
from modelquirks.quirks.record import Convert
from modelquirks.quirks.recipe_json import to_json

__all__ = ["Inference", "infer"]


@dataclass(frozen=True)
class Inference:
    """What is proposed. Nothing of it is applied by anybody unasked."""

    stored: Mapping[str, TensorType]
    model: Mapping[str, TensorType]
    ties: tuple[tuple[str, ...], ...]
    claims: tuple[Claim, ...]

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The fewest rules that say it, but what is left open."""
        return rules_of((c for c in self.claims if c.tier != "open"), self.unread)

    @cached_property
    def open(self) -> tuple[Rule, ...]:
        """The first guesses of what is left open."""
        return rules_of(c for c in self.claims if c.tier == "open")

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The tensors of the model for which nothing is proposed."""
        found = {name for claim in self.claims for name, _ in claim.items()}
        for group in self.ties:
            if not found.isdisjoint(group):
                found.update(group)
        return tuple(name for name in self.model if name not in found)

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """The stored tensors that no proposal reads."""
        read: set[str] = set()
        for claim in self.claims:
            for kin in claim.sources:
                for index in kin.types:
                    elements = range(kin.count) if kin.over is not None else range(1)
                    read.update(kin.name(index, str(element)) for element in elements)
        return tuple(name for name in self.stored if name not in read)

    def count(self, tier: Tier) -> int:
        """Return the number of the model's tensors whose reading is that sure."""
        return sum(len(c.model) * max(1, c.model.count) for c in self.claims if c.tier == tier)

    def to_json(self) -> dict[str, Any]:
        """Return the proposals as plain data."""
        return {
            "model_tensors": len(self.model),
            "stored_tensors": len(self.stored),
            "certain": self.count("certain"),
            "likely": self.count("likely"),
            "open": self.count("open"),
            "rules": [_rule_json(rule) for rule in self.rules],
            "open_rules": [_rule_json(rule) for rule in self.open],
            "missing": list(self.missing),
            "unread": list(self.unread),
        }


def infer(
    stored: Mapping[str, TensorType],
    model: Mapping[str, TensorType],
    ties: Iterable[Sequence[str]] = (),
) -> Inference:
    """Return how the tensors of *model* could be made of those *stored*, by names and types.

    *ties* are groups of names of the model that share one tensor. Shapes must be known on both
    sides; a tensor without one is matched by an equal name only.
    """
    groups = tuple(tuple(group) for group in ties)
    return Inference(stored, model, groups, tuple(align(stored, model, groups)))


def _rule_json(rule: Rule) -> dict[str, Any]:
    data: dict[str, Any] = {"tier": rule.tier, "tensors": rule.n_tensors, "why": rule.why}
    if isinstance(rule.rule, Convert):
        data |= {"target": rule.rule.target, "recipe": to_json(rule.rule.recipe)}
        data["sources"] = [leaf.name for leaf in sources(rule.rule.recipe)]
    else:
        data |= {"stored": rule.rule.stored, "model": rule.rule.model}
    others = [text for claim in rule.claims for text in claim.others]
    return {**data, "alternatives": list(dict.fromkeys(others))}
