"""Real checkpoints of training runs, packed ones and those of transformers, exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution.copies import bits_equal
from modelquirks.planner.export.exportreport import ExportError, ExportReport

DATA = Path(__file__).parents[1] / "data"
WRONG = "universal_from_round_robin"
"""DeepSpeed put the values of parameters under wrong names when it converted that."""
DEEPSPEED = sorted(
    path.name for path in (DATA / "deepspeed").iterdir() if path.is_dir() and path.name != WRONG
)
DCP = {
    "fsdp2": "truth.safetensors",
    "accelerate/pytorch_model_fsdp_0": "truth.safetensors",
    "hugging_face": "truth.safetensors",
    "grid": "truth_grid.safetensors",
}

Tensors = Mapping[str, torch.Tensor]


def export(checkpoint: Path, out: Path, **options: Any) -> ExportReport:
    return Dispatcher().export(checkpoint, out, **options)


def content(report: ExportReport) -> dict[str, torch.Tensor]:
    """Return what was written, ties included."""
    found = {n: t for name in report.files for n, t in load_file(report.out / name).items()}
    return {**found, **{alias: found[name] for alias, name in report.ties.items()}}


def different(one: Tensors, other: Tensors) -> list[str]:
    lacking = sorted({*one} ^ {*other})
    return lacking + [n for n in one if n in other and not bits_equal(one[n], other[n])]


# Training checkpoints


@pytest.mark.parametrize("shard_size", ["5GB", 300])
@pytest.mark.parametrize("case", DEEPSPEED)
def test_a_deepspeed_checkpoint_comes_out_bit_for_bit(
    case: str, shard_size: int | str, tmp_path: Path
) -> None:
    truth = load_file(DATA / "deepspeed" / case / "truth.safetensors")
    report = export(DATA / "deepspeed" / case, tmp_path / "out", shard_size=shard_size)
    assert report.checkpoint["format"] == "deepspeed"
    found = content(report)
    if "bf16" in case:  # what has no master; the truth is all fp32
        found = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in found.items()}
    assert different(found, truth) == []
    assert (len(report.files) > 1) == (shard_size == 300)


def test_a_checkpoint_with_values_under_wrong_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="round_robin_gradients"):
        export(DATA / "deepspeed" / WRONG, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["zero1_bf16", "zero2_bf16"])
def test_the_weights_of_training_are_the_masters_rounded(case: str, tmp_path: Path) -> None:
    truth = load_file(DATA / "deepspeed" / case / "truth.safetensors")
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in truth.items()}
    folder = DATA / "deepspeed" / case
    training = content(export(folder, tmp_path / "training", weights="training"))
    assert training["scale"].dtype == torch.float32  # a buffer that was not trained in bf16
    assert different(training, {**rounded, "scale": truth["scale"]}) == []
    cast = content(export(folder, tmp_path / "cast", dtype="bf16"))
    assert different(cast, rounded) == []


def test_without_a_rank_masters_are_refused_and_the_way_out_works(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "deepspeed" / "zero2_fp32", tmp_path / "in"))
    lost = next(folder.rglob("*_rank_1_mp_rank_00_optim_states.pt"))
    lost.unlink()
    with pytest.raises(ExportError) as caught:
        export(folder, tmp_path / "out", weights="master")
    assert lost.name in str(caught.value)
    assert "What can be had: training weights: yes" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    truth = load_file(folder / "truth.safetensors")
    assert different(content(export(folder, tmp_path / "out", weights="training")), truth) == []


@pytest.mark.parametrize("case", DCP)
def test_a_dcp_checkpoint_comes_out_bit_for_bit(case: str, tmp_path: Path) -> None:
    truth = load_file(DATA / "dcp" / DCP[case])
    if case == "hugging_face":
        del truth["count"]  # its writer has no integers
    assert different(content(export(DATA / "dcp" / case, tmp_path / "out")), truth) == []


# With the model


def linears() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(300, 200, bias=False), "b": nn.Linear(4, 3)})


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """Give a checkpoint with one weight of FP8 in blocks of 128 × 128, as DeepSeek has them."""
    torch.manual_seed(0)
    folder = tmp_path / "fp8"
    folder.mkdir()
    tensors = {
        "a.weight": torch.randn(200, 300).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(2, 3),
        "b.weight": torch.randn(3, 4),
        "b.bias": torch.randn(3),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    packing = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "x", "dtype": "bfloat16", "quantization_config": packing}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_packed_weights_are_copied_as_they_are(fp8: Path, tmp_path: Path) -> None:
    report = export(fp8, tmp_path / "out", dtype="bf16")
    found, stored = content(report), load_file(fp8 / "model.safetensors")
    kept = ("a.weight", "a.weight_scale_inv")
    assert different({n: found[n] for n in kept}, {n: stored[n] for n in kept}) == []
    assert found["b.weight"].dtype == torch.bfloat16
    config = json.loads((report.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_packed_weights_are_made_plain_as_loading_makes_them(fp8: Path, tmp_path: Path) -> None:
    report = export(fp8, tmp_path / "out", model=linears(), dequantize=True)
    model = linears()
    plan = Dispatcher().plan(fp8, model=model, dequantize=True, dtype="auto", device_map=None)
    plan.execute(model)
    assert different(content(report), model.state_dict()) == []
    config = json.loads((report.out / "config.json").read_text())
    assert config == {"model_type": "x", "dtype": "bfloat16"}
    assert content(report)["a.weight"].dtype == torch.bfloat16


def test_packed_weights_are_refused_to_a_plain_model_unasked(fp8: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"a\.weight"):
        export(fp8, tmp_path / "out", model=linears())
    assert not (tmp_path / "out").exists()


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Load as people do, and refuse what transformers only warns of."""
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    model, info = found
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def test_a_tied_model_of_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    (tmp_path / "in").mkdir()
    model.config.save_pretrained(tmp_path / "in")
    torch.save(model.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    report = export(tmp_path / "in", tmp_path / "out", shard_size="20KB")
    assert report.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert len(report.files) > 1
    assert report.copied == ("config.json",)
    assert different(loaded(tmp_path / "out"), model.state_dict()) == []


@pytest.mark.parametrize("with_model", [False, True], ids=["as stored", "for the model"])
def test_experts_of_transformers_load_again(with_model: bool, tmp_path: Path) -> None:
    """Stored one by one, as released; or stacked, as the class has them."""
    torch.manual_seed(0)
    config = MixtralConfig(**TINY, num_local_experts=3, num_experts_per_tok=2)
    model = MixtralForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "in")
    target = Dispatcher().model(tmp_path / "in") if with_model else None
    report = export(tmp_path / "in", tmp_path / "out", model=target)
    stacked = "model.layers.0.mlp.experts.gate_up_proj" in content(report)
    assert stacked == with_model
    assert different(loaded(tmp_path / "out"), model.state_dict()) == []


def test_masters_of_a_bf16_run_are_loaded_as_fp32(tmp_path: Path) -> None:
    """transformers loads in the dtype that config.json names, so that has to follow."""
    folder = Path(shutil.copytree(DATA / "deepspeed" / "zero2_bf16", tmp_path / "in"))
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    report = export(folder, tmp_path / "out")
    assert json.loads((report.out / "config.json").read_text()) == {"torch_dtype": "float32"}
    assert "config-adapted" in {note.code for note in report.notes}
