"""``Agreement``: what ranks must have in common before any of them reads a weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from modelquirks.planner.distributed.ranks import ranks_told
from modelquirks.planner.finding import shown
from modelquirks.planner.plan import Plan

__all__ = ["Agreement", "fingerprint", "judge"]

_SUBJECTS = {
    "files": "the files of the checkpoint",
    "recipes": "what the tensors are made from",
    "ties": "which tensors are tied",
    "quirks": "the quirks that apply, or the versions of the plugins",
}


def fingerprint(plan: Plan) -> dict[str, str]:
    """Return digests of what *plan* says, by subject; equal for plans that load the same.

    Of the files names, sizes, headers and layout count, not folders and times: nodes may have
    copies of them. Equal headers do not prove that the weights in two copies are equal.
    """
    files = sorted((s.name, s.size_bytes, s.digest) for s in plan.shards)
    recipes = [recipe.to_json() for recipe in plan.recipes]
    return {
        "files": _digest([files, plan.layout]),
        "recipes": _digest(sorted(recipes, key=json.dumps)),
        "ties": _digest([sorted(plan.aliases.items()), sorted(map(list, plan.compare))]),
        "quirks": _digest(sorted(map(list, plan.quirks))),
    }


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Agreement(NamedTuple):
    """What one rank tells the others of its plan and of its model."""

    fingerprint: Mapping[str, str]
    lacking: str
    """The planned tensors that its model does not have, as bits in hexadecimal, the first planned
    name lowest."""

    @classmethod
    def of(cls, plan: Plan, lacking: frozenset[str]) -> Agreement:
        """Return it for a rank whose model lacks these tensors of the plan."""
        names = _planned(plan) if lacking else ()
        bits = "".join("01"[name in lacking] for name in reversed(names))
        return cls(fingerprint(plan), f"{int(bits or '0', 2):x}")


def judge(plan: Plan) -> Callable[[Sequence[Any]], str | None]:
    """Return what finds whether ranks agree with *plan* and together have all its tensors."""

    def find(told: Sequence[Any]) -> str | None:
        answers = [Agreement(*each) for each in told]
        return _disagreement(answers) or _nowhere(plan, answers)

    return find


def _disagreement(answers: Sequence[Agreement]) -> str | None:
    groups: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        groups.setdefault(_digest(dict(answer.fingerprint)), []).append(rank)
    if len(groups) == 1:
        return None
    listed = "; ".join(f"{ranks_told(ranks)} has {key}" for key, ranks in groups.items())
    differ = [
        text for key, text in _SUBJECTS.items() if len({a.fingerprint[key] for a in answers}) > 1
    ]
    return (
        f"the ranks have different plans ({listed}). They differ in {' and in '.join(differ)}. "
        "Make the plan from the whole model, save it with Plan.save, and have every rank load it "
        "with Plan.load"
    )


def _nowhere(plan: Plan, answers: Sequence[Agreement]) -> str | None:
    bits = -1
    for answer in answers:
        bits &= int(answer.lacking, 16)
    if not bits:
        return None
    names = [name for number, name in enumerate(_planned(plan)) if bits >> number & 1]
    return f"no rank has a place for {len(names)} planned tensors: {shown(names)}"


def _planned(plan: Plan) -> list[str]:
    return sorted({name for entry in plan.audit.model for name in entry.names})
