"""The way back: a stacked checkpoint for a module that has a submodule per expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from modelquirks.planner import Dispatcher, Plan

QWEN = ("mlp.experts", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ("block_sparse_moe.experts", ("w1", "w3", "w2"))
HIDDEN, INNER = 4, 6


def model_of(naming: tuple[str, Sequence[str]], n_experts: int) -> nn.Module:
    """Two layers of experts, each a module of its own."""
    path, (gate, up, down) = naming
    outer, inner = path.split(".")

    def expert() -> nn.Module:
        linears = {gate: nn.Linear(HIDDEN, INNER, bias=False)}
        linears |= {up: nn.Linear(HIDDEN, INNER, bias=False)}
        linears |= {down: nn.Linear(INNER, HIDDEN, bias=False)}
        return nn.ModuleDict(linears)

    def layer() -> nn.Module:
        experts = nn.ModuleList(expert() for _ in range(n_experts))
        return nn.ModuleDict({outer: nn.ModuleDict({inner: experts})})

    layers = nn.ModuleList(layer() for _ in range(2))
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Three experts a layer, stacked as transformers 5 holds them."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = torch.randn(3, 2 * INNER, HIDDEN)
        tensors[f"{at}.down_proj"] = torch.randn(3, HIDDEN, INNER)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def planned(folder: Path, model: nn.Module, device: str = "cpu") -> Plan:
    return Dispatcher().plan(folder, model=model, device_map={"": device})


@pytest.mark.parametrize("naming", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_each_expert_gets_its_own_matrices(
    tmp_path: Path, stored: dict[str, torch.Tensor], naming: tuple[str, Sequence[str]]
) -> None:
    path, (gate, up, down) = naming
    model = model_of(naming, 3)
    plan = planned(tmp_path, model)
    assert plan.ok and plan.audit.by_class() == {"made": 18, "used": 4}
    plan.execute(model)
    at = "model.layers.1.mlp.experts"
    for expert in range(3):
        module = model.get_submodule(f"model.layers.1.{path}.{expert}")
        both = stored[f"{at}.gate_up_proj"][expert]
        assert torch.equal(module.get_parameter(f"{gate}.weight"), both[:INNER])
        assert torch.equal(module.get_parameter(f"{up}.weight"), both[INNER:])
        expected = stored[f"{at}.down_proj"][expert]
        assert torch.equal(module.get_parameter(f"{down}.weight"), expected)


def test_experts_that_would_be_lost_are_an_error(
    tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    plan = planned(tmp_path, model_of(QWEN, 2))
    assert not plan.ok and plan.audit.coverage == 1.0
    (first, *_) = plan.problems
    assert "'model.layers.0.mlp.experts.gate_up_proj' holds 3, the model takes 2" in first


def test_experts_that_are_not_in_the_stack_are_refused_by_name(
    tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    plan = planned(tmp_path, model_of(QWEN, 4))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in plan.audit.mismatched
    assert any("number 3 is wanted" in problem for problem in plan.problems)


def test_plan_with_selections_survives_its_file(
    tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    planned(tmp_path, model_of(QWEN, 3), "disk").save(tmp_path / "plan.json")
    model = model_of(QWEN, 3)
    Plan.load(tmp_path / "plan.json").execute(model)
    linear = model.get_submodule("model.layers.0.mlp.experts.2.down_proj")
    expected = stored["model.layers.0.mlp.experts.down_proj"][2]
    rows = torch.randn(5, INNER)
    assert torch.equal(linear(rows), rows @ expected.T)


def qwen3_vl(folder: Path, inner: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Save a tiny Qwen3-VL-MoE; return it and its tensors as they would have been released."""
    text = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": inner, "decoder_sparse_step": 1,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model: nn.Module = Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    released = {
        name: t.transpose(1, 2).contiguous() if ".experts." in name else t
        for name, t in tensors.items()
    }
    return model, released


@pytest.mark.parametrize("form", ["as released", "as transformers 5 saves"])
def test_qwen3_vl_experts_arrive_whichever_way_round_they_lie(tmp_path: Path, form: str) -> None:
    model, released = qwen3_vl(tmp_path, inner=4)
    if form == "as released":
        save_file(released, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dispatcher = Dispatcher()
    loaded = dispatcher.model(tmp_path)
    assert loaded is not None
    dispatcher.plan(tmp_path, model=loaded, device_map={"": "cpu"}).execute(loaded)
    found = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_qwen3_vl_experts_that_are_square_are_refused_not_guessed(tmp_path: Path) -> None:
    """2I equal to H: the header cannot tell which way round they lie."""
    qwen3_vl(tmp_path, inner=8)
    dispatcher = Dispatcher()
    plan = dispatcher.plan(tmp_path, model=dispatcher.model(tmp_path), device_map={"": "cpu"})
    assert plan.audit.mismatched == ("model.language_model.layers.0.mlp.experts.gate_up_proj",)
    assert any("--no-quirk moe.qwen3_vl" in problem for problem in plan.problems)
