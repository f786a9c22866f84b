"""Which elements a rank has: compared with what torch itself gives each rank."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from modelquirks.planner.distributed.part import Cut, Part, PartError, part_of
from modelquirks.planner.distributed.shard import local_part, local_tensor, sharded_like
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.execution.reader import Region
from modelquirks.quirks.recipe import Source, TensorType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def mesh_of(shape: Sequence[int], rank: int) -> Generator[DeviceMesh, None, None]:
    """Give a mesh as *rank* sees it; the other ranks do not exist.

    Its dimensions have names of the rank: torch keeps what it derives from a mesh, and would give
    one rank what it made for another, equal one.
    """
    size = 1
    for along in shape:
        size *= along
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        names = (f"dp{rank}", f"tp{rank}")[-len(shape) :]
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def taken(part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Return the elements of a part, by its boxes."""
    out = torch.full(part.shape, -1.0)
    for here, there in part.boxes():
        place = tuple(slice(*bounds) for bounds in here)
        out[place] = whole[tuple(slice(*bounds) for bounds in there)]
    return out


def made(part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Return the elements of a part, by its recipe, and see that no others are read."""

    def read(name: str, region: Region | None) -> torch.Tensor:
        assert region is not None
        seen.append(region)
        return whole[tuple(slice(*bounds) for bounds in region)]

    seen: list[Region] = []
    shape = tuple(whole.shape)
    node = part.recipe(Source("w"), shape)
    out = evaluate(node, {}, read=read, types=lambda _: TensorType("F32", shape), schemes={})
    assert sum(torch.Size(b - a for a, b in region).numel() for region in seen) <= out.numel()
    return out


def strided(dim: int, pieces: int) -> Placement:
    return _StridedShard(dim, split_factor=pieces)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[Placement]]:
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    rank = draw(st.integers(0, torch.Size(mesh).numel() - 1))
    shape = draw(st.lists(st.integers(1, 11), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    one = st.one_of(
        st.builds(Replicate),
        st.builds(Shard, dims),
        st.builds(strided, dims, st.integers(2, 3)),
    )
    return mesh, rank, shape, draw(st.lists(one, min_size=len(mesh), max_size=len(mesh)))


@given(shardings())
@settings(max_examples=100, deadline=None)
def test_a_rank_has_the_elements_that_distribute_tensor_gives_it(
    case: tuple[list[int], int, list[int], list[Placement]],
) -> None:
    mesh_shape, rank, shape, placements = case
    whole = counted(*shape)
    with mesh_of(mesh_shape, rank) as mesh:
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        try:
            part = local_part(tensor)
        except PartError as error:
            assume("fully_shard" not in str(error))
            raise
        own = local_tensor(tensor)
        assert torch.equal(taken(part, whole), own)
        assert torch.equal(made(part, whole), own)
        again = sharded_like(tensor, own.clone(), learns=False)
        assert isinstance(again, DTensor) and again.placements == tensor.placements
        assert again.shape == tensor.shape and torch.equal(again.to_local(), own)


class Pair(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(3, rows)
        self.down = nn.Linear(rows, 5, bias=False)
        for parameter in self.parameters():
            parameter.data = counted(*parameter.shape)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 14), st.data())
@settings(max_examples=60, deadline=None)
def test_fully_shard_over_tensor_parallel_is_right_or_refused(
    dp: int, tp: int, rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, dp * tp - 1))
    with mesh_of((dp, tp), rank) as mesh:
        model = Pair(rows)
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        styles: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh[f"tp{rank}"], styles, src_data_rank=None)
        fully_shard(model, mesh=mesh[f"dp{rank}"])
        for name, parameter in model.named_parameters():
            try:
                part = local_part(parameter)
            except PartError:
                assert rows % tp  # even cuts are never refused
            else:
                assert torch.equal(taken(part, whole[name]), local_tensor(parameter).detach())


def test_fully_shard_along_another_dimension() -> None:
    with mesh_of((2,), 1) as mesh:
        model = nn.Linear(6, 4, bias=False)
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        assert local_part(model.weight) == Part((((0, 4),), ((3, 6),)))
        assert torch.equal(taken(local_part(model.weight), whole), local_tensor(model.weight))


def test_sums_that_are_not_added_up_are_refused() -> None:
    with mesh_of((2,), 0) as mesh:
        tensor = DTensor.from_local(counted(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(PartError, match="not added up"):
            local_part(tensor)


def test_a_cut_of_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(PartError, match=r"shape \[4\] cannot be cut"):
        part_of((4,), [Cut(1, 2, 0)])


def test_f4_parts_count_two_values_an_element() -> None:
    part = part_of((4, 6), [Cut(1, 3, 1)])
    assert part.times(2) == Part((((0, 4),), ((4, 8),)))
