"""Experts one by one, to the values that transformers stacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.quantizers.base import SequentialLlama4TextExperts

from modelquirks.planner.mapping.offers import Offers
from modelquirks.plugins import moe
from modelquirks.quirks.resolve import Resolution

Tensors = dict[str, torch.Tensor]
Resolved = Callable[..., Resolution]
Loaded = Callable[..., Tensors]
Find = Callable[..., Offers]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"num_experts": 11, "moe_intermediate_size": 24}
DEEPSEEK = {
    "n_routed_experts": 11,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
JAMBA = {
    "num_experts": 4,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
LFM2 = {**QWEN, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
# Eleven experts: the tenth and eleventh come before the second in the order of names.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("moe.mixtral", {"num_local_experts": 11}),
    "minimax": ("moe.mixtral", {"num_local_experts": 4}),
    "minimax_m2": ("moe.mixtral", {"num_local_experts": 4}),
    "phimoe": ("moe.mixtral", {"num_local_experts": 4}),
    "lfm2_moe": ("moe.mixtral", LFM2),
    "qwen2_moe": ("moe.qwen", {**QWEN, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("moe.qwen", QWEN),
    "qwen3_next": ("moe.qwen", {**QWEN, "shared_expert_intermediate_size": 24}),
    "olmoe": ("moe.qwen", {"num_experts": 4}),
    "deepseek_v2": ("moe.qwen", DEEPSEEK),
    "deepseek_v3": ("moe.qwen", DEEPSEEK),
    "glm4_moe": ("moe.qwen", DEEPSEEK),
    "hunyuan_v1_moe": ("moe.qwen", {"num_experts": 4, "moe_topk": 2}),
    "ernie4_5_moe": ("moe.qwen", {"moe_num_experts": 4, "moe_intermediate_size": 24}),
    "jamba": ("moe.qwen", JAMBA),
    "granitemoe": ("moe.granite", {"num_local_experts": 4}),
}


def saved(model_type: str, folder: Path) -> tuple[Tensors, Tensors]:
    """Return what transformers stores of a tiny random model, and the model's own tensors."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **FAMILIES[model_type][1]})
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), dict(model.state_dict())


def applied(resolution: Resolution) -> set[str]:
    return {record.name for record in resolution.records()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_stores_becomes_what_its_model_holds(
    model_type: str, tmp_path: Path, resolved: Resolved, loaded: Loaded
) -> None:
    stored, wanted = saved(model_type, tmp_path)
    assert stored.keys() != wanted.keys()
    for config in ({"model_type": model_type}, {}):  # names suffice
        assert applied(resolved(stored, config, known=wanted)) == {FAMILIES[model_type][0]}
        made = loaded(stored, wanted, config)
        assert wanted.keys() == made.keys()
        assert not [name for name in wanted if not torch.equal(made[name], wanted[name])]


def test_a_model_with_one_module_per_expert_keeps_its_names(tmp_path: Path, loaded: Loaded) -> None:
    for model_type in ("mixtral", "qwen3_moe"):
        stored, _ = saved(model_type, tmp_path / model_type)
        made = loaded(stored, stored)
        assert stored.keys() == made.keys()
        assert not [name for name in stored if not torch.equal(made[name], stored[name])]


def test_a_missing_expert_is_named(tmp_path: Path, offers: Find) -> None:
    """transformers would take expert 10 for expert 9."""
    stored, wanted = saved("qwen3_moe", tmp_path)
    lost = "model.layers.1.mlp.experts.9.up_proj.weight"
    del stored[lost]
    found = offers(stored, known=wanted)
    assert lost in found.broken["model.layers.1.mlp.experts.gate_up_proj"].reason
    assert "model.layers.0.mlp.experts.gate_up_proj" in found.best


def test_llama4_experts_are_transposed(loaded: Loaded) -> None:
    """Against the module with which transformers itself holds them one by one."""
    torch.manual_seed(0)
    config = Llama4TextConfig(hidden_size=16, intermediate_size=24, num_local_experts=3)
    apart = SequentialLlama4TextExperts(config)  # type: ignore[no-untyped-call]
    base = "language_model.model.layers.1.feed_forward.experts"
    stored = {f"{base}.{name}": tensor for name, tensor in apart.state_dict().items()}
    wanted = (f"{base}.gate_up_proj", f"{base}.down_proj")
    made = loaded(stored, wanted, {"model_type": "llama4_text"})
    together = Llama4TextExperts(config)
    together.load_state_dict({name.removeprefix(f"{base}."): made[name] for name in wanted})
    x = torch.randn(3 * 5, 16)
    torch.testing.assert_close(together(x).view(3, 5, 16), apart(x).view(3, 5, 16))


def test_every_expert_of_a_real_mixtral_is_stacked(offers: Find, manifest: Manifest) -> None:
    names, config = manifest("wizardlm-2-8x22b")
    best = offers(names, config).best
    for layer in range(56):
        base = f"model.layers.{layer}.mlp"
        assert {f"{base}.experts.gate_up_proj", f"{base}.experts.down_proj"} <= best.keys()
        assert f"{base}.gate.weight" in best


def test_experts_under_a_vision_language_prefix_are_stacked(offers: Find) -> None:
    base = "model.language_model.layers"
    names = [
        f"{base}.{layer}.mlp.experts.{expert}.{proj}_proj.weight"
        for layer in range(3)
        for expert in range(4)
        for proj in ("gate", "up", "down")
    ]
    best = offers(names, {"model_type": "qwen3_5_moe"}).best
    assert f"{base}.2.mlp.experts.gate_up_proj" in best


def test_packed_experts_are_found_by_their_companions(offers: Find) -> None:
    """llm-compressor writes no ``.weight`` at all."""
    base = "model.layers.0.mlp.experts"
    names = [
        f"{base}.{expert}.{proj}_proj.{part}"
        for expert in range(2)
        for proj in ("gate", "up", "down")
        for part in ("weight_packed", "weight_scale", "weight_shape")
    ]
    found = offers(names)
    assert f"{base}.gate_up_proj" in found.best
    assert {pack.scheme for pack in found.packed} == {"ct_pack_quantized"}


def test_granite_needs_renames_only(offers: Find, manifest: Manifest) -> None:
    names, config = manifest("granite-3.1-1b-a400m")
    best = offers(names, config).best
    base = "model.layers.23.block_sparse_moe"
    for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight"):
        assert f"{base}.{name}" in best


def test_dense_models_get_no_record(resolved: Resolved, manifest: Manifest) -> None:
    names, config = manifest("mistral-7b-v0.1")
    assert applied(resolved(names, config)) == set()


def test_every_record_says_why_and_where_that_is_proven() -> None:
    for record in moe.RECORDS:
        assert record.why and record.url.startswith("https://"), record.name
