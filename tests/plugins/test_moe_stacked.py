"""The way back: a stacked checkpoint for a module that has a submodule per expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

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
