"""What one step reads of a tensor, and what it moves of an offloaded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner import Dispatcher
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.touched import Experts, experts_of, takes_all_experts, touched
from modelquirks.planner.placement.workload import Workload

SHAPES = {
    "embed_tokens.weight": (100, 10),
    "layers.0.mlp.experts.gate_up_proj": (8, 20, 10),
    "layers.0.mlp.experts.0.w1.weight": (20, 10),
    "layers.1.mlp.experts.3.w1.weight": (20, 10),
    "layers.0.mlp.shared_experts.up_proj.weight": (20, 10),
    "layers.0.moe.input_linear.weight": (8, 20, 10),
    "layers.0.attn.weight": (10, 10),
    "lm_head.weight": (100, 10),
}


def of(
    experts: Experts | None,
    batch: int = 1,
    aliases: dict[str, str] | None = None,
    *,
    by_expert: bool = False,
) -> ModuleTree:
    tied = aliases or {}
    sizes = {name: 1000 for name in SHAPES if name not in tied}
    return touched(
        ModuleTree(sizes, ("",), aliases=tied),
        [((name,), shape) for name, shape in SHAPES.items()],
        SHAPES.__getitem__,
        {},
        experts,
        batch=batch,
        by_expert=by_expert,
    )


def test_of_experts_a_token_reads_its_share_and_of_a_table_a_row() -> None:
    tree = of(Experts(8, 2))
    assert tree.read == {
        "embed_tokens.weight": 10.0,
        "layers.0.mlp.experts.gate_up_proj": 250.0,
        "layers.0.mlp.experts.0.w1.weight": 250.0,
        "layers.1.mlp.experts.3.w1.weight": 250.0,
        "layers.0.moe.input_linear.weight": 250.0,
    }


def test_only_experts_with_a_module_each_are_moved_in_part() -> None:
    assert of(Experts(8, 2)).streamed == {
        "layers.0.mlp.experts.0.w1.weight": 250.0,
        "layers.1.mlp.experts.3.w1.weight": 250.0,
    }


def test_stacked_experts_are_moved_in_part_where_they_are_offloaded_one_by_one() -> None:
    moved = of(Experts(8, 2), by_expert=True).streamed
    assert moved["layers.0.mlp.experts.gate_up_proj"] == 250.0
    assert "layers.0.moe.input_linear.weight" not in moved  # its module indexes all of them
    assert "layers.0.mlp.shared_experts.up_proj.weight" not in moved


def test_a_model_that_computes_with_all_experts_is_known() -> None:
    assert takes_all_experts({"text_config": {"model_type": "llama4_text"}})
    assert not takes_all_experts({"model_type": "mixtral"})


def test_a_batch_touches_more_experts() -> None:
    read = of(Experts(128, 8), batch=8).read["layers.0.mlp.experts.gate_up_proj"]
    assert read == pytest.approx(1000 * 0.403, abs=1)  # facts: N=128, k=8, B=8: 0.40
    assert of(None, batch=1000).read == {}


def test_a_tie_of_a_table_and_a_head_is_read_whole_and_moved_twice() -> None:
    tree = of(None, aliases={"lm_head.weight": "embed_tokens.weight"})
    assert tree.read["embed_tokens.weight"] == 1000
    assert tree.streamed["embed_tokens.weight"] == 2000


def test_measured_frequencies_say_what_each_expert_is_read() -> None:
    experts = Experts(4, 1, {"0": [1.0, 0.0, 0.0, 0.0], "1": [0.1, 0.1, 0.1, 0.7]})
    tree = of(experts)
    assert tree.read.get("layers.0.mlp.experts.0.w1.weight", 1000) == 1000
    assert tree.read["layers.1.mlp.experts.3.w1.weight"] == pytest.approx(700)
    assert tree.read["layers.0.mlp.experts.gate_up_proj"] == pytest.approx(250)


def test_frequencies_of_another_number_of_experts_are_refused() -> None:
    config = {"num_local_experts": 4, "num_experts_per_tok": 1}
    assert experts_of(config, {"0": [0.25] * 4}) is not None
    with pytest.raises(ValueError, match=r"has 4 experts a layer, but there are 3 for layer '7'"):
        experts_of(config, {"0": [0.25] * 4, "7": [0.3] * 3})


def test_frequencies_for_a_model_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="the config tells of no experts"):
        experts_of({"num_hidden_layers": 2}, {"0": [0.25] * 4})


def test_a_dry_run_without_a_model_reads_of_stored_experts_their_share(tmp_path: Path) -> None:
    """But moves them whole, as the model may stack them."""
    names = [f"model.layers.{i}.mlp.experts.{e}.w1.weight" for i in range(2) for e in range(8)]
    names += [f"model.layers.{i}.mlp.shared_experts.w1.weight" for i in range(2)]
    save_file({name: torch.zeros(100) for name in names}, tmp_path / "model.safetensors")
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory: dict[Any, Any] = {"cpu": 100_000, "disk": 100_000}

    def seconds(device: str, **options: Any) -> float:
        plan = Dispatcher().plan(tmp_path, device_map={"": device}, max_memory=memory, **options)
        assert plan.placement.prediction is not None
        return plan.placement.prediction.seconds * 50e9  # bytes at the rate of the cpu

    assert seconds("cpu") == pytest.approx(2 * 400 * (8 / 4 + 1))
    assert seconds("cpu", workload=Workload(batch=2)) == pytest.approx(2 * 400 * (8 * 7 / 16 + 1))
    assert seconds("disk") == pytest.approx(2 * 400 * (3 + 9 * 10))
    auto = Dispatcher().plan(tmp_path, max_memory=memory).placement.prediction
    assert auto is not None and auto.seconds * 50e9 == pytest.approx(2400)
    with pytest.raises(ValueError, match="has 8 experts a layer"):
        seconds("cpu", expert_frequencies={"0": [0.5] * 3})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}, (16, 4)),
        ({"num_experts": 8}, None),
        ({"num_experts": 2, "num_experts_per_tok": 4}, None),
        ({}, None),
    ],
)
def test_configs_call_the_two_numbers_differently(
    config: dict[str, object], found: tuple[int, int] | None
) -> None:
    experts = experts_of(config)
    assert (None if experts is None else (experts.n, experts.k)) == found
