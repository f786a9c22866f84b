"""Megatron's ``torch_dist`` format: torch.distributed.checkpoint, with layers stacked.

``metadata.json`` beside ``.metadata`` says so. A decoder whose layers are alike is stored without
their numbers, and with an axis of layers in front: ``decoder.layers.mlp.linear_fc2.weight``
``[layers, …]``; so are experts. Source: ``sharded_state_dict`` of ``megatron/core/transformer/
transformer_block.py`` and ``moe/experts.py`` (0.16).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.opening import open_folder
from modelquirks.plugins.megatron.files import Located
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import Node, RecipeError, Reshape, Slice, TensorType

__all__ = ["open_dist"]

_STACKED = re.compile(r"(?P<stack>(?:[a-z_]\w*\.)*?layers)\.(?!\d)(?P<rest>.*)")
_COMMON = "common.pt"
"""What all ranks have alike: arguments and the state of the run."""
_MAX_LAYERS = 10_000
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.|.*\.(exp_avg|exp_avg_sq|fp32_param)$")


def open_dist(root: Path, found: Located) -> Opened:
    """Return what a folder of ``torch_dist`` holds, each layer by itself."""
    opened = open_folder(root, below=found.below)
    ours = {n: node for n, node in opened.tensors.items() if not _OPTIMIZER.match(n)}
    moments = [name for name in opened.tensors if name not in ours]
    tensors: dict[str, Node] = {}
    for name, node in ours.items():
        tensors |= _layers(name, node, opened.places)
    findings = [*found.findings, *opened.findings]
    if moments:
        text = f"{len(moments)} tensors of the optimizer are not loaded: {shown(moments, 3)}."
        findings.append(Finding("not-loaded", "info", text))
    stacked = [name for name in ours if _STACKED.fullmatch(name)]
    if stacked:
        text = (
            f"{len(stacked)} tensors hold all layers along an axis in front, as torch_dist does; "
            f"each layer is a tensor here: {shown(stacked, 3)}."
        )
        findings.append(Finding("layers-stacked", "info", text))
    return replace(
        opened,
        format="megatron",
        tensors=tensors,
        findings=tuple(findings),
        without_weights=(f"{found.below}/{_COMMON}".lstrip("/"),),
    )


def _layers(name: str, node: Node, places: Mapping[str, StoredTensor]) -> dict[str, Node]:
    """Return the tensors of the layers in one that has them stacked; itself if it has none."""
    hit = _STACKED.fullmatch(name)
    if hit is None:
        return {name: node}
    try:
        shape = infer(node, lambda n: TensorType(places[n].dtype, places[n].shape), {}).shape
    except RecipeError:  # told where the recipe is evaluated
        shape = None
    if not shape or len(shape) < 2 or not 0 < shape[0] <= _MAX_LAYERS:
        return {name: node}
    return {
        f"{hit['stack']}.{number}.{hit['rest']}": Reshape(
            Slice(node, 0, number, number + 1), shape[1:]
        )
        for number in range(shape[0])
    }
