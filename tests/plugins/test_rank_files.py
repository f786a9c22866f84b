"""FSDP's state dicts as files of ``torch.save``, and Lightning's: real ones, and damaged ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.plugins import dcp, deepspeed, fsdp, wrappers
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data"
TRUTH = load_file(DATA / "fsdp" / "truth.safetensors")
Make = Callable[[Mapping[str, torch.Tensor]], nn.Module]


def registry() -> Registry:
    found = Registry()
    for plugin in (dcp, deepspeed, fsdp, wrappers):
        found.register(plugin, name=plugin.__name__.rpartition(".")[2])
    return found


def planned(path: Path, model: nn.Module) -> Plan:
    return Dispatcher(registry()).plan(path, model=model, device_map=None)


def errors(manifest: Manifest) -> dict[str, str]:
    return {one.code: one.message for one in manifest.findings if one.severity == "error"}


def same(model: nn.Module, truth: Mapping[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == truth.keys() and all(torch.equal(state[k], truth[k]) for k in truth)


@pytest.mark.parametrize("case", ["full", "sharded", "fsdp2", "hsdp"])
def test_a_state_dict_of_ranks_loads_bit_for_bit(case: str, model_of: Make) -> None:
    plan = planned(DATA / "fsdp" / case, model_of(TRUTH))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(TRUTH)), TRUTH)


@pytest.mark.parametrize("case", ["sharded", "fsdp2"])
def test_a_missing_rank_is_named_with_what_it_alone_has(
    case: str, model_of: Make, tmp_path: Path
) -> None:
    shutil.copytree(DATA / "fsdp" / case, tmp_path / case)
    (tmp_path / case / "pytorch_model_fsdp_0_rank1.bin").unlink()

    manifest = open_manifest(tmp_path / case, registry)
    plan = planned(tmp_path / case, model_of(TRUTH))

    assert "'pytorch_model_fsdp_0_rank1.bin'" in errors(manifest)["shard-missing"]
    assert "'lin1.weight'" in errors(manifest)["chunk-missing"]
    assert "lin1.weight" in plan.audit.missing
    assert not plan.ok


def test_one_of_two_copies_is_enough_under_hybrid_sharding(model_of: Make, tmp_path: Path) -> None:
    """The mesh is of two copies: what is lost is the buffers of a rank, which are on all."""
    shutil.copytree(DATA / "fsdp" / "hsdp", tmp_path / "hsdp")
    (tmp_path / "hsdp" / "pytorch_model_fsdp_0_rank0.bin").unlink()

    manifest = open_manifest(tmp_path / "hsdp", registry)

    assert {*errors(manifest)} == {"shard-missing"}
    assert manifest.tensors.keys() == TRUTH.keys()


@pytest.mark.parametrize("case", ["local", "local_flat"])
def test_a_local_state_dict_is_refused_with_the_reason_and_the_way_out(case: str) -> None:
    manifest = open_manifest(DATA / "fsdp" / case, registry)

    assert not manifest.tensors
    assert "'_flat_param'" in errors(manifest)["flat-parameters"]
    assert "FULL_STATE_DICT" in errors(manifest)["flat-parameters"]


def test_the_file_of_one_rank_says_that_the_others_are_needed() -> None:
    path = DATA / "fsdp" / "sharded" / "pytorch_model_fsdp_0_rank0.bin"

    manifest = open_manifest(path, registry)

    assert {*errors(manifest)} == {"tensor-sharded"}
    assert "'lin1.weight'" in errors(manifest)["tensor-sharded"]


def test_ranks_of_two_saves_are_told_by_their_shapes(tmp_path: Path) -> None:
    shutil.copytree(DATA / "fsdp" / "sharded", tmp_path / "mixed")
    other = DATA / "fsdp" / "fsdp2" / "pytorch_model_fsdp_0_rank1.bin"
    shutil.copy(other, tmp_path / "mixed" / "pytorch_model_fsdp_0_rank2.bin")

    manifest = open_manifest(tmp_path / "mixed", registry)

    found = {one.code: one.message for one in manifest.findings}
    assert "'pytorch_model_fsdp_0_rank2.bin'" in found["extra-shards"]


def test_states_of_optimizers_beside_the_ranks_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        source = DATA / "fsdp" / "fsdp2" / f"pytorch_model_fsdp_0_rank{rank}.bin"
        shutil.copy(source, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        shutil.copy(source, tmp_path / f"optim_world_size_2_rank_{rank}.pt")

    manifest = open_manifest(tmp_path, registry)

    found = {one.code: one.message for one in manifest.findings}
    assert not errors(manifest)
    assert "'optim_world_size_2_rank_0.pt'" in found["not-loaded"]
    assert len(manifest.shards) == 2


# ----------------------------------------------------------------------------------- Lightning

LIGHTNING = DATA / "lightning"
NET = load_file(LIGHTNING / "truth.safetensors")


def test_a_checkpoint_of_lightning_loads_into_the_model_inside(model_of: Make) -> None:
    plan = planned(LIGHTNING / "task.ckpt", model_of(NET))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(NET)), NET)


def test_hyperparameters_are_never_made(model_of: Make) -> None:
    found = {one.code: one.message for one in open_manifest(LIGHTNING / "task.ckpt").findings}

    assert "'pathlib.PosixPath'" in found["pickle-objects"]
    assert "'optimizer_states'" in found["container"]


def test_a_second_model_in_a_lightning_module_is_left_over_by_name(model_of: Make) -> None:
    plan = planned(LIGHTNING / "two.ckpt", model_of(NET))

    assert not plan.audit.missing
    assert "teacher.lin.weight" in plan.audit.unexpected


def test_a_folder_of_lightnings_fsdp_has_the_names_of_its_module(
    model_of: Make, tmp_path: Path
) -> None:
    """What ``FSDPStrategy.save_checkpoint`` does, on one rank."""
    state = {f"model.{name}": tensor for name, tensor in NET.items()}
    with pytest.warns(UserWarning):  # that no process group is there
        save({"model": state}, checkpoint_id=tmp_path)
    torch.save({"pytorch-lightning_version": "2.6.6", "epoch": 1}, tmp_path / "meta.pt")

    plan = planned(tmp_path, model_of(NET))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(NET)), NET)


def test_a_folder_of_lightnings_deepspeed_has_the_names_of_its_module(
    model_of: Make, tmp_path: Path
) -> None:
    """Its state is client state, beside the module of the engine, in a folder ``checkpoint``."""
    state = {f"model.{name}": tensor for name, tensor in NET.items()}
    folder = tmp_path / "last.ckpt" / "checkpoint"
    folder.mkdir(parents=True)
    (tmp_path / "last.ckpt" / "latest").write_text("checkpoint")
    told = {"ds_version": "0.19.8", "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}}
    value = {"module": state, "pytorch-lightning_version": "2.6.6", "global_steps": 1, **told}
    torch.save(value, folder / "mp_rank_00_model_states.pt")

    plan = planned(tmp_path / "last.ckpt", model_of(NET))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(NET)), NET)


def test_a_rank_that_is_a_copy_of_another_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "fsdp" / "sharded", tmp_path / "copy"))
    one, other = (folder / f"pytorch_model_fsdp_0_rank{n}.bin" for n in (0, 1))
    shutil.copy(one, other)
    found = {f.code: f.message for f in open_manifest(folder, registry).findings}
    assert repr(one.name) in found["rank-copied"] and repr(other.name) in found["rank-copied"]
