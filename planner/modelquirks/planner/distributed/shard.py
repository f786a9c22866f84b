"""What a rank has of a ``DTensor``, and a ``DTensor`` of what it has.

Written for torch 2.13, whose ``compute_local_shape_and_global_offset`` gives one offset for each
dimension. That is all there is to know of a parameter of ``fully_shard`` or ``parallelize_module``,
also of both, but not of one whose elements lie apart, as those of packed projections do
(``packed_colwise`` of transformers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from modelquirks.planner.distributed.part import Cut, Part, PartError, part_of

__all__ = ["local_part", "local_tensor", "resharded", "sharded_like", "take_notice"]


def local_part(tensor: torch.Tensor) -> Part:
    """Return what this rank has of *tensor*: all of it, unless it is a DTensor.

    PartError where that is not certain: for partial sums, of which no rank has a value, for a
    rank outside of the mesh, and for placements that do not give the local tensor's shape.
    """
    if not isinstance(tensor, DTensor):
        return part_of(tensor.shape, ())
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise PartError(
            f"this rank is not in its mesh {tensor.device_mesh}: leave the module out of the "
            "model here, or shard it over all ranks that have it"
        )
    along = zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
    cuts = [cut for each in along if (cut := _cut(*each)) is not None]
    part = part_of(tensor.shape, cuts)
    if part.shape != (found := tuple(local_tensor(tensor).shape)):
        raise PartError(
            f"its placements {tensor.placements} on {tensor.device_mesh} give this rank "
            f"{list(part.shape)} of {list(tensor.shape)}, but it has {list(found)}"
        )
    return part


def _cut(placement: Any, ranks: int, rank: int) -> Cut | None:
    """Return how one dimension of a mesh cuts; None if each of its ranks has everything."""
    if placement.is_replicate():
        return None
    dim, stride = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
    if placement.is_partial() or dim is None:
        raise PartError(
            f"its placement {placement} is of sums that are not added up yet, or unknown: only "
            "Replicate and Shard can be loaded"
        )
    return Cut(dim, ranks, rank, int(stride))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of *tensor*, sharing its memory; no other rank is asked."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(old: DTensor, local: torch.Tensor, *, learns: bool) -> torch.Tensor:
    """Return *local* as this rank's part of a tensor that is sharded as *old* is.

    A parameter if that is one, with the attributes that were set on it. No other rank is asked.
    """
    new: torch.Tensor
    with torch.no_grad():
        new = DTensor.from_local(
            local.contiguous().to(_device_of(old)),
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=_contiguous(old.shape),
        )
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=learns)
    vars(new).update(vars(old))
    return new


def _device_of(tensor: DTensor) -> torch.device:
    if not tensor.is_meta:
        return tensor.device
    kind = tensor.device_mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def resharded(model: nn.Module) -> None:
    """Have ``fully_shard`` give back what it gathered for the last forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def take_notice(model: nn.Module) -> None:
    """Tell ``fully_shard`` that parameters of *model* are other objects now.

    It keeps references to the sharded parameters, pads uneven ones for its collectives, and does
    so before the first forward pass and in a hook after ``load_state_dict``
    (``FSDPParam.reset_sharded_param``); loading nothing calls the hook.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for module in model.modules():
        own = module._parameters.values()
        if any(isinstance(parameter, DTensor) for parameter in own):
            nn.Module.load_state_dict(module, {}, strict=False)
