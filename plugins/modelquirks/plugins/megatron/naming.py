"""From names on one rank to names in the whole model: layers of stages, experts of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Offsets", "is_expert", "layer_counts", "numbered", "offsets_of"]

_LAYER = re.compile(r"(?P<stack>(?:[a-z_]\w*\.)*?layers)\.(?P<number>\d+)\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?P<before>.*\.local_experts)\.(?P<number>\d+)\.(?P<rest>.*)")
_GROUPED = re.compile(r"(?P<before>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>\d+)")

Counts = Mapping[str, int]
"""Layers by the stack that they are in (``decoder.layers``)."""


class Offsets(NamedTuple):
    """What to add to numbers on a rank."""

    layers: Counts
    experts: int = 0


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers in each stack.

    >>> layer_counts(["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.a.weight"])
    {'decoder.layers': 2}
    """
    found: dict[str, int] = {}
    for name in names:
        if hit := _LAYER.fullmatch(name):
            found[hit["stack"]] = max(found.get(hit["stack"], 0), int(hit["number"]) + 1)
    return found


def offsets_of(
    stages: Sequence[Sequence[Counts]],
) -> tuple[list[list[dict[str, int]]], dict[str, int]]:
    """Return the number of the first layer of each chunk of each stage, and how many there are.

    *stages* has the counts by stage and chunk. With several chunks a stage (virtual pipeline) the
    first chunks of all stages come before the second ones.

    >>> offsets_of([[{"d": 1}, {"d": 1}], [{"d": 1}, {"d": 1}]])[0]
    [[{'d': 0}, {'d': 2}], [{'d': 1}, {'d': 3}]]
    """
    reached: dict[str, int] = {}
    offsets: list[list[dict[str, int]]] = [[] for _ in stages]
    for chunk in range(max((len(stage) for stage in stages), default=0)):
        for number, stage in enumerate(stages):
            if chunk < len(stage):
                offsets[number].append({stack: reached.get(stack, 0) for stack in stage[chunk]})
                for stack, count in stage[chunk].items():
                    reached[stack] = reached.get(stack, 0) + count
    return offsets, reached


def is_expert(name: str) -> bool:
    """Tell whether a parameter is that of a routed expert, of which each rank has its own."""
    return ".experts." in name


def expert_count(names: Iterable[str]) -> int:
    """Return how many experts a rank has in a layer."""
    hits = (_EXPERT.fullmatch(name) or _GROUPED.fullmatch(name) for name in names)
    return max((int(hit["number"]) + 1 for hit in hits if hit), default=0)


def numbered(name: str, offsets: Offsets) -> str:
    """Return the name that *name* of a rank has in the whole model.

    >>> numbered("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
    ...          Offsets({"decoder.layers": 2}, 4))
    'decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight'
    """
    if hit := _LAYER.fullmatch(name):
        number = int(hit["number"]) + offsets.layers.get(hit["stack"], 0)
        name = f"{hit['stack']}.{number}.{hit['rest']}"
    if hit := _EXPERT.fullmatch(name):
        return f"{hit['before']}.{int(hit['number']) + offsets.experts}.{hit['rest']}"
    if hit := _GROUPED.fullmatch(name):
        return f"{hit['before']}{int(hit['number']) + offsets.experts}"
    return name
