"""``Share``: what one rank has of a tensor that is cut over several, from its pickle alone.

``torch.save`` of a state dict that is sharded writes the rank's piece, and beside it where in the
whole it belongs: ``DTensor`` (FSDP2, ``fully_shard``) by mesh and placements, ``ShardedTensor``
(FSDP1, ``SHARDED_STATE_DICT``) by offsets. Neither class is imported here.

Source: ``torch/distributed/tensor/_api.py`` and ``placement_types.py``, ``torch/distributed/
_shard/sharded_tensor/api.py`` of torch 2.13, and files that it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelquirks.planner import dtypes
from modelquirks.planner.checkpoint.pickle_machine import Global, Opaque
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.dtypes import MAX_DIMS
from modelquirks.planner.finding import brief
from modelquirks.quirks.recipe import Region

__all__ = ["Share", "ShareProblem", "is_share", "share_of"]

_CLASSES = {
    "torch.distributed.tensor.DTensor": "DTensor",
    "torch.distributed._tensor.api.DTensor": "DTensor",
    "torch.distributed.tensor._api.DTensor": "DTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "ShardedTensor",
}
_MAX_RANKS = 1 << 16
"""A file that speaks of more is not believed."""
_REBUILT = "torch._tensor._rebuild_from_type_v2"


class ShareProblem(ValueError):
    """A share of which cannot be told where it belongs; the message is why."""


class Share(NamedTuple):
    """The pieces of one tensor that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    pieces: tuple[tuple[Region, TensorRecord], ...]
    """What lies where; those without elements are left out."""
    ranks: int
    """Over how many ranks it is cut, or copied."""


def is_share(value: Any) -> bool:
    """Tell whether *value* is a DTensor or ShardedTensor that was not made."""
    return bool(_class_of(value))


def share_of(value: Any) -> Share:
    """Return what *value*, for which :func:`is_share` holds, says; :class:`ShareProblem` if it
    cannot be told where its piece belongs."""
    try:
        state = _state_of(value)
        share = _of_mesh(state) if _class_of(value) == "DTensor" else _of_offsets(state)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ShareProblem):
            raise
        raise ShareProblem(
            f"is a {_class_of(value)} of an unknown form ({brief(error)})"
        ) from error
    if share.ranks > _MAX_RANKS:
        raise ShareProblem(f"is cut over {share.ranks:,} ranks, which nobody has")
    for region, record in share.pieces:
        if record.shape != tuple(stop - start for start, stop in region):
            raise ShareProblem(
                f"has a piece of {list(record.shape)} where {shown(region)} of "
                f"{list(share.shape)} belongs"
            )
    return share


def shown(region: Region) -> str:
    """Return a region as it is written in Python."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"


def _class_of(value: Any) -> str:
    if not isinstance(value, Opaque):
        return ""
    if value.kind == _REBUILT and isinstance(value.args, tuple) and len(value.args) > 1:
        return _CLASSES.get(str(value.args[1]), "")
    return _CLASSES.get(value.kind, "")


def _state_of(value: Opaque) -> Any:
    return value.args[3] if value.kind == _REBUILT else value.state


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that was not made, also of one with slots."""
    state = value.state if isinstance(value, Opaque) else value
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return {**(state[0] or {}), **state[1]}
    if not isinstance(state, dict):
        raise ShareProblem("has an object without attributes")
    return state


def _dtype(value: Any) -> str:
    if not isinstance(value, Global) or value.module != "torch":
        raise ShareProblem("has no dtype")
    return dtypes.from_torch(value.name)


def _numbers(values: Any) -> tuple[int, ...]:
    fits = isinstance(values, tuple | list) and len(values) <= MAX_DIMS
    if not fits or not all(type(number) is int and 0 <= number < 1 << 63 for number in values):
        raise ShareProblem(f"has {brief(values, 40)} where whole numbers from 0 belong")
    return tuple(values)


def _kept(pieces: Sequence[tuple[Region, Any]]) -> tuple[tuple[Region, TensorRecord], ...]:
    for _, record in pieces:
        if not isinstance(record, TensorRecord):
            raise ShareProblem("has a piece that is no plain tensor")
    return tuple(piece for piece in pieces if 0 not in piece[1].shape)


# ------------------------------------------------------------------------------- ShardedTensor


def _of_offsets(state: Any) -> Share:
    shards, metadata, *_ = state
    about = _attributes(metadata)
    pieces: list[tuple[Region, Any]] = []
    for shard in shards:
        held = _attributes(shard)
        where = _attributes(held["metadata"])
        offsets, sizes = _numbers(where["shard_offsets"]), _numbers(where["shard_sizes"])
        region = tuple((o, o + size) for o, size in zip(offsets, sizes, strict=True))
        pieces.append((region, held["tensor"]))
    dtype = _dtype(about["tensor_properties"].state[0])
    # A rank without elements has no entry: the number of ranks is known by the others' alone.
    return Share(dtype, _numbers(about["size"]), _kept(pieces), len(about["shards_metadata"]))


# ------------------------------------------------------------------------------------- DTensor


def _of_mesh(state: Any) -> Share:
    held = _attributes(state)
    spec = _attributes(held["_spec"])
    mesh = _attributes(spec["mesh"])
    sizes, coordinates = _mesh_sizes(mesh), _numbers(mesh["_coordinate_on_dim"])
    shape, _, dtype = spec["tensor_meta"].args
    shape = _numbers(shape)
    region = [(0, size) for size in shape]
    for dim, axis in _cuts(spec["placements"]):
        region[dim] = _chunk(region[dim], sizes[axis], coordinates[axis])
    piece = (tuple(region), held["_local_tensor"])
    return Share(_dtype(dtype), shape, _kept([piece]), math.prod(sizes))


def _mesh_sizes(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    if isinstance(known := mesh.get("mesh"), TensorRecord):  # before torch 2.10
        return known.shape
    layout = _attributes(mesh["_layout"])
    axes = layout.get("axes")
    if axes is None:
        return _numbers(layout["shape"])
    return tuple(math.prod(_numbers(_attributes(axis)["shape"])) for axis in axes)


def _cuts(placements: Any) -> list[tuple[int, int]]:
    """Return, in their order, which dimension of the tensor is cut over which of the mesh.

    Left to right; ``_StridedShard`` (FSDP over tensor parallelism) cuts what is right of it cut.
    """
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        kind = placement.kind.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ShareProblem(f"is placed as {kind}, of which no rank has the values")
        dim = _attributes(placement)["dim"] if placement.state else placement.args[0]
        (strided if kind == "_StridedShard" else plain).append((dim, axis))
    return plain + strided


def _chunk(bounds: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    """Return part *number* of *bounds* by the rule of ``torch.chunk``: the last may be smaller."""
    start, stop = bounds
    step = -(-(stop - start) // count)
    return min(start + number * step, stop), min(start + (number + 1) * step, stop)
