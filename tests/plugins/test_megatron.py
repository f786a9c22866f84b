"""Checkpoints of Megatron: real ones of one rank and of several, and damaged ones."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.plugins import dcp, megatron
from modelquirks.plugins.megatron.cuts import cut_of
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data" / "megatron"
Make = Callable[[Mapping[str, torch.Tensor]], nn.Module]


def registry() -> Registry:
    found = Registry()
    found.register(dcp, name="dcp")
    found.register(megatron, name="megatron")
    return found


def planned(path: Path, model: nn.Module) -> Plan:
    return Dispatcher(registry()).plan(path, model=model, device_map=None)


def truth_of(case: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / f"{case}_truth.safetensors")


def errors(manifest: Manifest) -> dict[str, str]:
    return {one.code: one.message for one in manifest.findings if one.severity == "error"}


def same(model: nn.Module, truth: Mapping[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], truth[name]) for name in truth)


@pytest.mark.parametrize("case", ["plain", "tp2_pp2", "moe_ep2"])
def test_ranks_come_out_as_on_one_rank_bit_for_bit(case: str, model_of: Make) -> None:
    truth = truth_of(case)

    plan = planned(DATA / case, model_of(truth))

    assert plan.ok, plan.problems
    assert not plan.audit.unexpected
    assert same(plan.execute(model_of(truth)), truth)


def test_no_optimizer_is_loaded_and_the_grid_is_told() -> None:
    found = {one.code: one.message for one in open_manifest(DATA / "tp2_pp2", registry).findings}

    assert "2 tensor, 2 pipeline and 1 expert ranks, iteration 10" in found["grid"]
    assert "'optimizer'" in found["not-loaded"]


def test_the_file_of_one_rank_says_that_there_may_be_others() -> None:
    path = DATA / "tp2_pp2" / "iter_0000010" / "mp_rank_00_000" / "model_optim_rng.pt"

    manifest = open_manifest(path, registry)

    assert manifest.container == "megatron"
    assert "mp_rank_" in {one.code: one.message for one in manifest.findings}["one-of-several"]


def test_files_of_a_distributed_optimizer_are_named(tmp_path: Path) -> None:
    shutil.copytree(DATA / "plain", tmp_path / "run")
    rank = tmp_path / "run" / "iter_0000010" / "mp_rank_00"
    torch.save({"exp_avg": torch.ones(2)}, rank / "distrib_optim.pt")

    found = {one.code: one.message for one in open_manifest(tmp_path / "run", registry).findings}

    assert "'distrib_optim.pt'" in found["not-loaded"]


def test_a_missing_rank_is_named_with_its_layers(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tp2_pp2", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "iter_0000010" / "mp_rank_01_001")

    found = errors(open_manifest(tmp_path / "run", registry))

    assert "tensor 1, pipeline 1, expert 0" in found["shard-missing"]
    assert "'decoder.layers.2.self_attention.linear_qkv.weight'" in found["slices-unknown"]


def test_a_missing_stage_is_told_by_the_number_of_layers(tmp_path: Path) -> None:
    """Else the layers of a middle stage would be under the numbers of another."""
    shutil.copytree(DATA / "tp2_pp2", tmp_path / "run")
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        shutil.rmtree(tmp_path / "run" / "iter_0000010" / rank)

    assert "2 layers" in errors(open_manifest(tmp_path / "run", registry))["layers-differ"]


def test_ranks_of_two_iterations_are_told(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tp2_pp2", tmp_path / "run")
    path = tmp_path / "run" / "iter_0000010" / "mp_rank_01_000" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "iteration": 20}, path)

    assert "[10, 20]" in errors(open_manifest(tmp_path / "run", registry))["mixed-saves"]


def test_the_tracker_chooses_and_a_tag_chooses_otherwise(tmp_path: Path) -> None:
    shutil.copytree(DATA / "plain", tmp_path / "run")
    shutil.copytree(DATA / "plain" / "iter_0000010", tmp_path / "run" / "iter_0000020")

    usual = open_manifest(tmp_path / "run", registry)
    chosen = open_manifest(tmp_path / "run", registry, OpenOptions(tag="iter_0000020"))
    absent = open_manifest(tmp_path / "run", registry, OpenOptions(tag="iter_0000030"))

    assert {shard.name.split("/")[0] for shard in usual.shards} == {"iter_0000010"}
    assert {shard.name.split("/")[0] for shard in chosen.shards} == {"iter_0000020"}
    assert "'iter_0000020'" in errors(absent)["state-unknown"]


def test_a_tracker_that_names_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(DATA / "plain", tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("99")

    assert "'iter_0000099'" in errors(open_manifest(tmp_path / "run", registry))["tracker"]


def test_a_parameter_of_unknown_kind_is_left_out_by_name(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tp2_pp2", tmp_path / "run")
    for path in (tmp_path / "run").rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        content["model"]["decoder.strange.weight"] = torch.ones(2, 2)
        torch.save(content, path)

    manifest = open_manifest(tmp_path / "run", registry)

    assert "'decoder.strange.weight'" in errors(manifest)["slices-unknown"]
    assert "decoder.strange.weight" not in manifest.tensors


def test_nested_names_of_the_older_megatron_are_read(tmp_path: Path, model_of: Make) -> None:
    """Two slices of what Megatron-LM before megatron-core called its layers."""
    truth = {
        "language_model.embedding.word_embeddings.weight": torch.randn(8, 4),
        "language_model.encoder.layers.0.self_attention.query_key_value.weight": torch.randn(12, 4),
        "language_model.encoder.layers.0.self_attention.dense.weight": torch.randn(4, 4),
        "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": torch.randn(4, 16),
        "language_model.encoder.layers.0.input_norm.weight": torch.randn(4),
    }
    dims = (0, 0, 1, 1, None)
    for rank in range(2):
        nested: dict[str, Any] = {}
        for (name, whole), dim in zip(truth.items(), dims, strict=True):
            _, owner, *rest = name.split(".")
            part = whole if dim is None else whole.chunk(2, dim)[rank].clone()
            nested.setdefault(owner, {})[".".join(rest)] = part
        folder = tmp_path / "release" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = {"model": {"language_model": nested}, "checkpoint_version": 3.0}
        torch.save(state, folder / "model_optim_rng.pt")

    plan = planned(tmp_path, model_of(truth))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(truth)), truth)


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", (8,), "whole"),
        ("decoder.layers.0.self_attention.linear_proj.bias", (8,), "whole"),
        ("decoder.layers.0.mlp.linear_fc1.bias", (24,), "gated"),
        ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight", (8, 6), "columns"),
        ("decoder.layers.0.mlp.router.weight", (4, 8), "whole"),
        ("decoder.layers.0.mlp.strange.weight", (4, 8), None),
    ],
)
def test_the_cut_follows_from_the_name(name: str, shape: tuple[int, ...], cut: str | None) -> None:
    assert cut_of(name, shape, gated=True) == cut


# --------------------------------------------------------------------------- into transformers


def test_tensor_and_pipeline_ranks_load_into_a_class_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from accelerate import init_empty_weights

    truth = truth_of("tp2_pp2")
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        tie_word_embeddings=False,
    )
    with init_empty_weights(include_buffers=False):
        model = transformers.Qwen2ForCausalLM(config)

    plan = planned(DATA / "tp2_pp2", model)

    assert plan.ok, plan.problems
    loaded: Any = plan.execute(model)
    layer = loaded.model.layers[3]
    stored = "decoder.layers.3."
    groups = truth[f"{stored}self_attention.linear_qkv.weight"].view(2, 4, 2, 8)
    gate, up = truth[f"{stored}mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(layer.self_attn.q_proj.weight, groups[:, :2].reshape(8, 8))
    assert torch.equal(layer.self_attn.k_proj.weight, groups[:, 2].reshape(4, 8))
    assert torch.equal(layer.self_attn.v_proj.weight, groups[:, 3].reshape(4, 8))
    assert torch.equal(layer.mlp.gate_proj.weight, gate)
    assert torch.equal(layer.mlp.up_proj.weight, up)


# --------------------------------------------------------------------------------- torch_dist


def test_what_dist_checkpointing_wrote_loads_bit_for_bit(model_of: Make) -> None:
    """Its first norms are those of TransformerEngine, inside of the linear layers."""
    inside = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
    truth: dict[str, torch.Tensor] = {}
    for name, tensor in truth_of("tp2_pp2").items():
        for linear, norm in inside.items():
            name = name.replace(f".{norm}.weight", f".{linear}.layer_norm_weight")
        truth[name] = tensor

    plan = planned(DATA / "torch_dist", model_of(truth))

    assert plan.ok, plan.problems
    assert not plan.audit.unexpected
    assert same(plan.execute(model_of(truth)), truth)
    assert all(one["severity"] == "info" for one in plan.checkpoint["findings"])


def test_layers_that_torch_dist_stacks_are_taken_apart(tmp_path: Path, model_of: Make) -> None:
    """The layout of ``dist_checkpointing``, written by torch's own half of it."""
    truth = {
        "embedding.word_embeddings.weight": torch.randn(8, 4),
        **{f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.randn(4, 6) for n in range(3)},
    }
    layers = [truth[f"decoder.layers.{n}.mlp.linear_fc2.weight"] for n in range(3)]
    stacked = {
        "embedding.word_embeddings.weight": truth["embedding.word_embeddings.weight"],
        "decoder.layers.mlp.linear_fc2.weight": torch.stack(layers),
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_3": io.BytesIO(b"x"),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.zeros(3, 4, 6),
    }
    folder = tmp_path / "iter_0000010"
    with pytest.warns(UserWarning):  # that no process group is there
        save(stacked, checkpoint_id=folder)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")

    plan = planned(tmp_path, model_of(truth))

    assert plan.ok, plan.problems
    assert same(plan.execute(model_of(truth)), truth)
    found = {one["code"]: one["message"] for one in plan.checkpoint["findings"]}
    assert "optimizer" in found["not-loaded"]
    assert "'decoder.layers.mlp.linear_fc2.weight'" in found["layers-stacked"]


def written_by(folder: Path, rank: int) -> None:
    """Say in the arguments which global rank wrote a file, as Megatron-LM does."""
    path = folder / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    saved["args"].rank = rank
    torch.save(saved, path)


def of_ranks(tmp_path: Path) -> Path:
    """Return a copy of two tensor by two pipeline ranks whose files say who wrote them."""
    folder = Path(shutil.copytree(DATA / "tp2_pp2", tmp_path / "copy"))
    for number, name in enumerate(("00_000", "01_000", "00_001", "01_001")):
        written_by(folder / "iter_0000010" / f"mp_rank_{name}", number)
    return folder


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def test_ranks_in_their_folders_are_not_talked_about(tmp_path: Path) -> None:
    assert errors(open_manifest(of_ranks(tmp_path), registry)) == {}


@pytest.mark.parametrize("pair", [("00_000", "01_000"), ("00_000", "00_001")])
def test_files_in_the_folders_of_other_ranks_are_named(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    folder = of_ranks(tmp_path) / "iter_0000010"
    exchange(*(folder / f"mp_rank_{name}" / "model_optim_rng.pt" for name in pair))
    told = errors(open_manifest(folder.parent, registry))["rank-swapped"]
    assert all(f"'mp_rank_{name}/model_optim_rng.pt' says rank" in told for name in pair)


def test_a_file_that_is_a_copy_of_another_ranks_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "tp2_pp2", tmp_path / "copy")) / "iter_0000010"
    one, other = (
        folder / f"mp_rank_{name}" / "model_optim_rng.pt" for name in ("00_001", "01_001")
    )
    shutil.copy(one, other)
    told = errors(open_manifest(folder.parent, registry))["rank-copied"]
    assert "mp_rank_00_001" in told and "mp_rank_01_001" in told
