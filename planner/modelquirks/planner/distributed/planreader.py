"""``PlanReader``: the checkpoint of a plan, as ``torch.distributed.checkpoint`` reads its own.

    dcp.load(state_dict, storage_reader=PlanReader(plan), planner=PartPlanner())

fills plain tensors and DTensors under the names that the model of the plan has, whatever the names,
files and packing in the checkpoint are. Each rank reads the regions that it asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from modelquirks.planner.distributed.agreement import Agreement, judge
from modelquirks.planner.distributed.shard import local_part
from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.evaluate import torch_shape
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.openfile import known_of
from modelquirks.planner.execution.perform import unchanged
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.planner.execution.stream import planned_items
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.registry import Registry

__all__ = ["PartPlanner", "PlanReader"]


class PlanReader(StorageReader):
    """Reads what a plan says, for ``torch.distributed.checkpoint.load``.

    Each name of the plan's model is one chunk of the dtype and shape that the plan gives it; tied
    names are there under each name. Several ranks need plans that say the same, which is
    compared before anything is read.
    """

    def __init__(self, plan: Plan, *, prefix: str = "") -> None:
        """Read what *plan* says; PlanError if it cannot be used or the files have changed.

        *prefix* stands before each name: ``"model."`` for a state dict ``{"model": {…}}``.
        """
        if not plan.ok:
            raise PlanError(plan.refusal())
        manifest = unchanged(plan)
        self._plan, self._prefix = plan, prefix
        self._schemes = (plan.registry or Registry.load()).schemes
        self._reader = Reader(manifest.root, manifest.readable, known=known_of(manifest.shards))
        self._items = {
            prefix + name: item
            for item in planned_items(plan, self._reader, self._schemes)
            for name in item.names
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of the stored tensors and regions that were asked for so far."""
        return self._reader.bytes_read

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the plan says what is read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return names, dtypes and shapes."""
        return Metadata({name: _described(item) for name, item in self._items.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the files are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Attach what the ranks have to agree on."""
        return replace(plan, storage_data=Agreement.of(self._plan, frozenset()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return *plans*; PlanError if the ranks read by different ones."""
        if (problem := judge(self._plan)([plan.storage_data for plan in plans])) is not None:
            raise PlanError(problem)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Make the regions that are asked for, each from what it needs of the files."""
        _whole_parts(plan, planner)
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._made(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _made(self, item: ReadItem) -> torch.Tensor:
        planned = self._items[item.storage_index.fqn]
        bounds = zip(item.storage_offsets, item.lengths, strict=True)
        region: Region = tuple((start, start + length) for start, length in bounds)
        if planned.dtype == "F4":  # two values in each element of the last dimension
            *outer, (start, stop) = region
            region = (*outer, (2 * start, 2 * stop))
        return planned.make(
            read=self._reader.read,
            types=self._reader.type_of,
            schemes=self._schemes,
            region=region,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader is made from a plan, not found by the name of a folder."""
        return False


def _described(item: LoadItem) -> TensorStorageMetadata:
    size = torch.Size(torch_shape(item.dtype, item.shape))
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(to_torch(item.dtype)), size, [chunk])


class PartPlanner(DefaultLoadPlanner):
    """The default planner, also right where the elements that a rank has lie apart.

    The one of torch 2.13 asks for one box from a DTensor's first element on, by
    ``compute_local_shape_and_global_offset``. In a projection that is packed of two and sharded
    in each (``packed_colwise`` of transformers) that is the wrong one.
    """

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        plan = super().create_local_plan()
        exact = [each for item in plan.items for each in self._exact(item)]
        return replace(plan, items=list(dict.fromkeys(exact)))

    def _exact(self, item: ReadItem) -> Iterator[ReadItem]:
        tensor = self.state_dict.get(item.dest_index.fqn)
        if not isinstance(tensor, DTensor) or item.type is not LoadItemType.TENSOR:
            yield item
            return
        fqn = item.dest_index.fqn
        for here, there in local_part(tensor).boxes():
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=item.dest_index,
                dest_offsets=torch.Size(start for start, _ in here),
                storage_index=MetadataIndex(fqn, torch.Size([0] * len(there))),
                storage_offsets=torch.Size(start for start, _ in there),
                lengths=torch.Size(stop - start for start, stop in there),
            )


def _whole_parts(plan: LoadPlan, planner: LoadPlanner) -> None:
    """Raise PlanError for a DTensor of which *plan* reads what this rank does not have."""
    tensors: Mapping[str, Any] = getattr(planner, "state_dict", {})
    for item in plan.items:
        tensor = tensors.get(item.dest_index.fqn)
        if not isinstance(tensor, DTensor):
            continue
        box = zip(item.storage_offsets, item.lengths, local_part(tensor).runs, strict=True)
        if not all(
            any(start <= first and first + length <= stop for start, stop in runs)
            for first, length, runs in box
        ):
            raise PlanError(
                f"{item.dest_index.fqn!r} is sharded so that a rank's elements lie apart, which "
                "torch's default planner does not know: give planner=PartPlanner() to load"
            )
