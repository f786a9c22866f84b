"""Config groups of compressed-tensors: which of them says how a weight is quantised.

``quantization_config.config_groups`` maps labels to groups; ``targets`` of a group are names of
modules, regular expressions with ``re:`` before them, or names of classes (``Linear``). More
exact ones win. Source: ``match_targets`` in ``utils/match.py`` of compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from modelquirks.plugins.declared import Declared, module_of
from modelquirks.quirks.recipe import RecipeError

__all__ = ["group_weights"]

_EMBEDDINGS = ("embed", "wte", "wpe")


def group_weights(said: Declared, weight: str) -> Declared:
    """Return ``weights`` of the config group that *weight* (its name) belongs to.

    Empty if there are no groups. RecipeError if several groups differ and none names it.
    """
    groups = [
        (cast(Declared, group), cast(Declared, group["weights"]))
        for group in _values(said.get("config_groups"))
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    if len(groups) <= 1:
        return groups[0][1] if groups else {}
    module = module_of(weight)
    ranked = [(rank, weights) for group, weights in groups if (rank := _rank(group, module))]
    best = max((rank for rank, _ in ranked), default=0)
    found = [weights for rank, weights in ranked if rank == best]
    if not found or any(weights != found[0] for weights in found):
        count = f"{len(found)} of them are" if found else "none of them is"
        raise RecipeError(
            f"quantization_config of config.json has {len(groups)} config_groups, and {count} "
            f"for {module!r}: add a group with {module!r} among its targets"
        )
    return found[0]


def _values(groups: object) -> Iterator[object]:
    if isinstance(groups, Mapping):
        yield from groups.values()


def _rank(group: Declared, module: str) -> int:
    """Return 3 if a target is the name of *module*, 2 if an expression fits, 1 for its class."""
    targets = group.get("targets")
    listed = targets if isinstance(targets, Sequence) else ()
    return max((_fits(str(target), module) for target in listed), default=0)


def _fits(target: str, module: str) -> int:
    if target.startswith("re:"):
        return 2 if _expression(target).match(module) else 0
    if target == module:
        return 3
    if "." in target:  # the class that was quantised may have had another prefix
        ends = f".{module}".endswith(f".{target}") or f".{target}".endswith(f".{module}")
        return 3 if ends else 0
    word = module.rpartition(".")[2]
    is_embedding = any(part in word for part in _EMBEDDINGS)
    return 1 if target == ("Embedding" if is_embedding else "Linear") else 0


def _expression(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise RecipeError(
            f"target {target!r} in config_groups of config.json is no regular expression: {error}"
        ) from error
