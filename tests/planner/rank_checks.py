"""One rank of ``test_distributed.py``: ``python rank_checks.py RANK SIZE FOLDER``.

Runs each function ``check_…`` and writes, as JSON, which of them failed and how. All ranks run
them in one order.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from modelquirks.planner import Dispatcher, Plan
from modelquirks.planner.distributed.planreader import PartPlanner, PlanReader
from modelquirks.planner.distributed.shard import resharded
from modelquirks.planner.distributed.shell import Shell
from modelquirks.planner.execution.execute import ExecutionReport
from modelquirks.planner.execution.loaditem import ExecutionError
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.model.build import empty_weights
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Concat, Source, Stack
from modelquirks.quirks.record import Convert, Match, ModelQuirks
from modelquirks.quirks.registry import Registry

WORDS, WIDTH, INNER, LAYERS, EXPERTS = 13, 8, 12, 2, 4
"""13 words are no multiple of the ranks."""


class Experts(nn.Module):
    """Gated MLPs, all of which see each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale
        made: torch.Tensor = x + scale * self.down(self.up(self.norm(x)).relu())
        return made


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if experts:
            self.experts = Experts()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(x)
        return made


def stack(name: str) -> Stack:
    return Stack(Source(f"experts.{{expert}}.{name}.weight"), "expert")


RECORD = ModelQuirks(
    name="test.moe",
    role="architecture",
    match=Match(any_of=("experts.{expert}.**",)),
    conversions=(
        Convert("experts.gate_up", Concat((stack("gate"), stack("up")), 1)),
        Convert("experts.down", stack("down")),
    ),
    why="experts one by one",
)


class Plugin:
    @staticmethod
    @hookimpl
    def modelquirks_records() -> tuple[ModelQuirks, ...]:
        return (RECORD,)


class World(NamedTuple):
    """What a check is given."""

    rank: int
    size: int
    folder: Path
    mesh: DeviceMesh

    def path(self, name: str) -> Path:
        """Return where the checkpoint of that name is."""
        return self.folder / name


def stored(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: bfloat16, and experts one by one."""
    random = torch.Generator().manual_seed(seed)
    shapes = {name: t.shape for name, t in Model().state_dict().items()}
    for number in range(EXPERTS):
        shapes[f"experts.{number}.gate.weight"] = torch.Size([INNER, WIDTH])
        shapes[f"experts.{number}.up.weight"] = torch.Size([INNER, WIDTH])
        shapes[f"experts.{number}.down.weight"] = torch.Size([WIDTH, INNER])
    return {name: torch.randn(s, generator=random).bfloat16() for name, s in shapes.items()}


def write(folder: Path) -> None:
    """Write the checkpoints, before the ranks start."""
    first, second = stored(1), stored(2)
    tied = {name: t for name, t in first.items() if name != "head.weight"}
    plain = {name: t for name, t in first.items() if "experts" not in name}
    for name, tensors in {
        "plain": plain,
        "second": {name: second[name] for name in plain},
        "experts": first,
        "tied": {name: t for name, t in tied.items() if "experts" not in name},
    }.items():
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")


def dispatcher() -> Dispatcher:
    registry = Registry()
    registry.register(Plugin(), name="test", distribution="test-quirks", version="1.0")
    return Dispatcher(registry)


def planned(folder: Path, model: nn.Module, **options: Any) -> Plan:
    options.setdefault("device_map", None)
    plan = dispatcher().plan(folder, model=model, **options)
    assert plan.ok, plan.problems
    return plan


def empty(**options: bool) -> Model:
    with empty_weights():
        return Model(**options)


def alone(folder: Path, **options: bool) -> Model:
    """The whole model, loaded by this process alone."""
    model = empty(**options)
    planned(folder, model).execute(model)
    return model


def sharded(world: World, **options: bool) -> Model:
    model = empty(**options)
    for layer in model.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, gathered."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def differing(model: nn.Module, reference: nn.Module) -> list[str]:
    expected, found = reference.state_dict(), whole(model)
    assert expected.keys() == found.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


def share(model: nn.Module) -> int:
    """Bytes that this rank's parts take in the checkpoint, in which all is bfloat16."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    return sum(2 * (t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def loaded(plan: Plan, model: nn.Module, **options: Any) -> ExecutionReport:
    report = plan.load_into(model, timeout=120, **options)
    assert report.verification.ok and report.verification.sampled_bytes > 0
    return report


def answers(model: nn.Module) -> torch.Tensor:
    made: torch.Tensor = model(torch.arange(WORDS).reshape(1, -1))
    return made


@contextmanager
def refused(*parts: str) -> Generator[None, None, None]:
    """Expect an ExecutionError that says all of *parts*."""
    try:
        yield
    except ExecutionError as error:
        absent = [part for part in parts if not re.search(part, str(error))]
        assert not absent, f"{error!s} does not say {absent}"
    else:
        raise AssertionError("nothing was raised")


def untouched(model: nn.Module, before: Mapping[str, nn.Parameter]) -> bool:
    """Tell whether *model* holds the very parameters that it had."""
    after = dict(model.named_parameters())
    return after.keys() == before.keys() and all(after[n] is before[n] for n in before)


def check_fully_shard_reads_its_share_and_computes(world: World) -> None:
    folder, model = world.path("plain"), sharded(world)
    report = loaded(planned(folder, model), model)
    reference = alone(folder)
    assert report.bytes_read == share(model)
    assert share(model) < 0.6 * sum(2 * t.numel() for t in reference.state_dict().values())
    assert not differing(model, reference)
    assert torch.equal(answers(model), answers(reference))
    for each in (model, reference):
        loss: Any = answers(each).sum()
        loss.backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        ours, expected = parameter.grad, theirs[name].grad
        assert isinstance(ours, DTensor) and expected is not None, name
        assert torch.allclose(ours.full_tensor(), expected, atol=1e-5), name


def check_a_model_in_use_can_be_loaded_anew(world: World) -> None:
    model = sharded(world)
    loaded(planned(world.path("plain"), model), model)
    answers(model)
    loaded(planned(world.path("second"), model), model)
    reference = alone(world.path("second"))
    assert torch.equal(answers(model), answers(reference))
    assert not differing(model, reference)


def check_ties_of_a_sharded_model_stay(world: World) -> None:
    model = sharded(world, tied=True)
    report = loaded(planned(world.path("tied"), model), model)
    assert model.head.weight is model.embed.weight and report.bytes_read == share(model)
    reference = alone(world.path("tied"), tied=True)
    assert torch.equal(answers(model), answers(reference))


def check_what_was_sharded_untied_is_loaded_twice_and_said(world: World) -> None:
    model = sharded(world)
    plan = planned(world.path("tied"), model, ties=["embed.weight=head.weight"])
    report = loaded(plan, model)
    assert [note.code for note in report.notes] == ["not-tied"]
    reference = alone(world.path("tied"), tied=True)
    assert torch.equal(answers(model), answers(reference))


def check_different_values_for_one_sharded_tensor_are_refused(world: World) -> None:
    model = sharded(world, tied=True)
    before = dict(model.named_parameters())
    plan = planned(world.path("plain"), model)
    with refused("different values", "'embed.weight', 'head.weight'"):
        loaded(plan, model)
    assert untouched(model, before) and model.head.weight is model.embed.weight


def check_tensor_parallel(world: World) -> None:
    folder, model = world.path("plain"), empty()
    styles: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, world.mesh, dict(styles))
    report = loaded(planned(folder, model), model)
    reference = alone(folder)
    assert report.bytes_read == share(model)
    assert not differing(model, reference)
    # The partial sums of `down` are added in another order.
    assert torch.allclose(answers(model), answers(reference), atol=1e-5)


def check_experts_stored_one_by_one_into_shards_of_a_stack(world: World) -> None:
    folder, model = world.path("experts"), empty(experts=True)
    split(model.experts, world.mesh, {"gate_up": Shard(0), "down": Shard(0)})
    report = loaded(planned(folder, model), model)
    assert report.bytes_read == share(model)
    assert not differing(model, alone(folder, experts=True))


def split(module: nn.Module, mesh: DeviceMesh, how: Mapping[str, Placement]) -> None:
    for name, placement in how.items():
        old = module.get_parameter(name)
        new = distribute_tensor(old, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(new))


def packed(world: World) -> Model:
    """A model of which each rank has rows of the gates and the like rows of the ups."""
    model = empty(experts=True)
    how = {"gate_up": _StridedShard(1, split_factor=2), "down": Shard(2)}
    split(model.experts, world.mesh, how)
    return model


def check_parts_whose_elements_lie_apart(world: World) -> None:
    folder, model = world.path("experts"), packed(world)
    report = loaded(planned(folder, model), model)
    assert report.bytes_read == share(model)
    reference = alone(folder, experts=True).experts.gate_up.detach()
    rows = slice(world.rank * INNER // world.size, (world.rank + 1) * INNER // world.size)
    gate, up = reference[:, :INNER][:, rows], reference[:, INNER:][:, rows]
    own: Any = model.experts.gate_up
    assert torch.equal(own.to_local(), torch.cat((gate, up), 1))


def stage(world: World, *, tied: bool) -> Model:
    """A rank's modules: the first has the embedding, each some layers, the last the head."""
    model: Any = empty(tied=tied)
    for number in range(LAYERS):
        if number % world.size != world.rank:
            model.layers[number] = nn.Identity()
    if world.rank:
        model.embed = None
    if world.rank != world.size - 1:
        model.head = None
    made: Model = model
    return made


def check_pipeline_stages_read_what_they_have(world: World) -> None:
    plan = planned(world.path("tied"), empty(tied=True))
    model = stage(world, tied=True)
    report = loaded(plan, model, together=True)
    assert report.bytes_read == share(model)
    expected = alone(world.path("tied"), tied=True).state_dict()
    own = model.state_dict()
    assert own and all(torch.equal(expected[name], tensor) for name, tensor in own.items())


def check_a_tensor_without_a_place_is_an_error(world: World) -> None:
    plan = planned(world.path("tied"), empty(tied=True))
    model: Any = stage(world, tied=True)
    model.layers[1] = nn.Identity()
    with refused("no rank has a place for 6 planned tensors", r"'layers\.1\.down\.weight'"):
        loaded(plan, model, together=True)
    assert all(parameter.is_meta for parameter in model.parameters())


def check_what_may_be_missing_must_have_values_before_it_is_sharded(world: World) -> None:
    model = sharded(world)
    plan = planned(world.path("tied"), model, allow_missing=["head.weight"])
    with refused("'head.weight' are not in the checkpoint.*before the model is sharded"):
        loaded(plan, model)


def check_a_rank_with_another_plan_is_named(world: World) -> None:
    model = sharded(world)
    before = dict(model.named_parameters())
    plan = planned(world.path("second" if world.rank == 1 else "plain"), model)
    plan = replace(plan, shards=tuple(replace(s, digest=f"{world.rank}") for s in plan.shards))
    # The digest that is wrong is found first: each rank says so of its own file.
    with refused("ranks 0, 1: the checkpoint is not the one the plan was made for"):
        loaded(plan, model)
    plan = planned(world.path("plain"), model)
    if world.rank == 1:
        plan = planned(world.path("plain"), model, dtype="bfloat16")
    with refused("different plans", "rank 0 has [0-9a-f]{16}; rank 1 has", "what the tensors are"):
        loaded(plan, model)
    assert untouched(model, before)


def check_a_failure_of_one_rank_ends_all(world: World) -> None:
    model = sharded(world)
    before = dict(model.named_parameters())
    plan = planned(world.path("plain"), model)
    read = PassingReader.read

    def fails(self: PassingReader, name: str, region: Any = None) -> torch.Tensor:
        if name == "layers.1.up.weight":
            raise OSError("the disk of this node is gone")
        return read(self, name, region)

    if world.rank == 1:
        PassingReader.read = fails  # type: ignore[method-assign]
    try:
        with refused("rank 1: .*'layers.1.up.weight'.*the disk of this node is gone"):
            loaded(plan, model)
    finally:
        PassingReader.read = read  # type: ignore[method-assign]
    assert untouched(model, before)
    loaded(plan, model)
    assert not differing(model, alone(world.path("plain")))


def check_a_failure_at_the_end_gives_every_model_back(world: World) -> None:
    model = sharded(world)
    loaded(planned(world.path("plain"), model), model)
    answers(model)
    resharded(model)  # after a forward pass the outermost parameters are gathered ones
    before = dict(model.named_parameters())
    adopt = Shell.adopt

    def fails(self: Shell, items: Any) -> Any:
        adopt(self, items)
        raise MemoryError("no room on this device")

    if world.rank == 1:
        Shell.adopt = fails  # type: ignore[method-assign]
    try:
        with refused("^cannot put what was loaded into the model: rank 1: no room"):
            loaded(planned(world.path("second"), model), model)
    finally:
        Shell.adopt = adopt  # type: ignore[method-assign]
    assert untouched(model, before)
    assert torch.equal(answers(model), answers(alone(world.path("plain"))))


def check_options_of_accelerate_are_refused(world: World) -> None:
    model = sharded(world)
    try:
        planned(world.path("plain"), model).load_into(model, skip_keys="cache")
    except ValueError as error:
        assert "'skip_keys'" in str(error)
    else:
        raise AssertionError("skip_keys was taken")


def check_a_plan_with_a_device_map_is_taken_without_it(world: World) -> None:
    model = sharded(world)
    report = loaded(planned(world.path("plain"), model, device_map={"": "cpu"}), model)
    assert [note.code for note in report.notes] == ["device-map-unused"]
    assert not differing(model, alone(world.path("plain")))


def check_torch_reads_the_checkpoint_of_a_plan(world: World) -> None:
    folder = world.path("experts")
    reference = alone(folder, experts=True)
    model = empty(experts=True)
    split(model.experts, world.mesh, {"gate_up": Shard(0), "down": Shard(1)})
    plan = planned(folder, model)
    model.to_empty(device="cpu")
    state = {"model": model.state_dict()}
    reader = PlanReader(plan, prefix="model.")
    dcp_load(state, storage_reader=reader)
    assert reader.bytes_read == share(model)
    assert not differing(model, reference)


def check_torch_reads_parts_whose_elements_lie_apart(world: World) -> None:
    folder = world.path("experts")
    model = packed(world)
    plan = planned(folder, model)
    model.to_empty(device="cpu")
    state = model.state_dict()
    try:
        dcp_load(state, storage_reader=PlanReader(plan))
    except CheckpointException as error:
        assert "planner=PartPlanner()" in str(error)
    else:
        raise AssertionError("the wrong rows were read")
    dcp_load(state, storage_reader=PlanReader(plan), planner=PartPlanner())
    again = packed(world)
    loaded(planned(folder, again), again)
    ours: Any = again.experts.gate_up
    theirs: Any = model.experts.gate_up
    assert torch.equal(ours.to_local(), theirs.to_local())


def check_torch_is_told_of_different_plans(world: World) -> None:
    model = empty()
    name = "second" if world.rank else "tied"
    plan = planned(world.path(name), empty(tied=not world.rank))
    model.to_empty(device="cpu")
    try:
        dcp_load(model.state_dict(), storage_reader=PlanReader(plan))
    except CheckpointException as error:
        assert "different plans" in str(error)
    else:
        raise AssertionError("plans of two checkpoints were taken")


def check_z_a_rank_that_does_not_come_is_named(world: World) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    model = sharded(world)
    plan = planned(world.path("plain"), model)
    if world.rank == 0:
        with refused(r"rank 1: no answer within 1 s"):
            plan.load_into(model, group=group, timeout=1)
    dist.barrier()
    assert all(parameter.is_meta for parameter in model.parameters())


def check_zz_a_rank_that_dies_is_named(world: World) -> None:
    model = sharded(world)
    plan = planned(world.path("plain"), model)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    if world.rank == 1:
        results = world.folder / "1.json"
        done = json.loads(results.read_text()) | {"check_zz_a_rank_that_dies_is_named": None}
        results.write_text(json.dumps(done))
        os._exit(0)  # as if it were killed: nobody is told
    started = time.monotonic()
    with refused("rank 1: lost"):
        plan.load_into(model, group=group, timeout=60)
    assert time.monotonic() - started < 30
    assert all(parameter.is_meta for parameter in model.parameters())


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = FileStore(str(folder / "store"), size)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    world = World(rank, size, folder, init_device_mesh("cpu", (size,)))
    failed: dict[str, str | None] = {}
    checks: dict[str, Callable[[World], None]] = {
        name: check for name, check in globals().items() if name.startswith("check_")
    }
    for name, check in checks.items():
        try:
            check(world)
            failed[name] = None
        except Exception:
            failed[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(failed))
        if failed[name] is not None:
            break  # the ranks may not be at one place any more


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
