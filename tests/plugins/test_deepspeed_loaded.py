"""Real DeepSpeed checkpoints, planned and loaded like any other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.plugins import deepspeed
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
CASES = sorted(
    path.parent.name
    for path in DATA.glob("*/truth.json")
    if path.parent.name != "universal_from_round_robin"  # has wrong values, and is refused
)


def registry() -> Registry:
    found = Registry()
    found.register(deepspeed, name="deepspeed")
    return found


def model_of(truth: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model that has just these tensors, all zero."""
    model = nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if tensor.is_floating_point():
            owner.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor)))
        else:
            owner.register_buffer(leaf, torch.zeros_like(tensor))
    return model


def planned(path: Path, model: nn.Module) -> Plan:
    return Dispatcher(registry()).plan(path, model=model, device_map=None)


@pytest.mark.parametrize("case", CASES)
def test_a_real_checkpoint_loads_bit_for_bit(case: str, tmp_path: Path) -> None:
    truth = load_file(DATA / case / "truth.safetensors")
    model = model_of(truth)
    plan = planned(DATA / case, model)
    assert plan.ok, plan.problems
    assert plan.checkpoint["format"] == "deepspeed"
    plan.save(tmp_path / "plan.json")
    loaded = replace(Plan.load(tmp_path / "plan.json"), registry=registry())
    report = loaded.load_into(model)
    assert report.verification.ok
    state = model.state_dict()
    assert {*state} == {*truth}
    assert [n for n, t in truth.items() if not torch.equal(state[n], t)] == []


def test_a_missing_rank_is_refused_by_the_names_of_its_files(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "zero3_fp32", tmp_path / "copy"))
    lost = next(folder.rglob("*_rank_1_mp_rank_00_optim_states.pt"))
    lost.unlink()
    plan = planned(folder, model_of(load_file(folder / "truth.safetensors")))
    assert not plan.ok
    assert lost.name in plan.refusal()


def test_several_states_without_latest_are_listed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "zero2_fp32", tmp_path / "copy"))
    (folder / "latest").unlink()
    shutil.copytree(folder / "global_step3", folder / "global_step9")
    (finding,) = [f for f in open_manifest(folder, registry).findings if f.severity == "error"]
    assert finding.code == "state-unknown"
    assert "'global_step3', 'global_step9'" in finding.message


def test_without_the_plugin_the_folder_is_named_for_what_it_is(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "zero2_fp32", tmp_path / "copy"))
    (folder / "truth.safetensors").unlink()
    with pytest.raises(CheckpointError, match="DeepSpeed checkpoint, and no plugin"):
        open_manifest(folder, Registry)


def test_states_of_an_optimizer_beside_other_weights_do_not_hide_them(tmp_path: Path) -> None:
    state = next((DATA / "zero2_fp32").rglob("*optim_states.pt"))
    shutil.copy(state, tmp_path)
    torch.save({"t": torch.ones(1)}, tmp_path / "x.pt")
    manifest = open_manifest(tmp_path, registry)
    assert [shard.name for shard in manifest.shards] == ["x.pt"]
    (tmp_path / "x.pt").unlink()
    assert open_manifest(tmp_path, registry).format == "deepspeed"


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32"])
def test_a_layer_that_is_bigger_or_renamed_is_refused_by_name(case: str) -> None:
    # "The size of tensor a (80) must match the size of tensor b (75)" in ZeRO 3 of DeepSpeed.
    truth = load_file(DATA / case / "truth.safetensors")
    truth["lin2.weight"] = torch.zeros(8, 5)
    truth["last.bias"] = truth.pop("lin2.bias")
    plan = planned(DATA / case, model_of(truth))
    assert "1 mismatched: 'lin2.weight'" in plan.refusal()
    assert "1 missing: 'last.bias'" in plan.refusal()
