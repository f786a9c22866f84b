"""Sides: names and types of a checkpoint and of what a model is known by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.recipe import TensorType

__all__ = ["Side", "side_of", "types_of"]


class Side(NamedTuple):
    """What a model wants: names, types, and which names share one tensor."""

    tensors: Mapping[str, TensorType]
    ties: tuple[tuple[str, ...], ...] = ()


def types_of(manifest: Manifest) -> dict[str, TensorType]:
    """Return dtype and shape of every stored tensor."""
    return {name: TensorType(t.dtype, t.shape) for name, t in manifest.tensors.items()}


def side_of(model: Skeleton | Manifest) -> Side:
    """Return what *model* wants; a checkpoint of the same model stands for it as well."""
    if isinstance(model, Manifest):
        return Side(types_of(model), model.shared)
    wanted = model.wanted.items()
    return Side({name: TensorType(t.dtype, t.shape) for name, t in wanted}, model.ties)
