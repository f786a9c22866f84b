"""Room for activations is enough for what really lives at once, and not much more."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

from modelquirks.planner.placement import activations
from modelquirks.planner.placement.activations import activations_of
from modelquirks.planner.placement.cache import cache_of
from modelquirks.planner.placement.workload import Workload

TOKENS, BATCH = 300, 2
WIDE = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 997, "max_position_embeddings": 512, "head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MHA = {k: v for k, v in WIDE.items() if k not in ("num_key_value_heads", "head_dim")}
OLD = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 997, "n_positions": 512}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": {**WIDE, "sliding_window": 64},
    "qwen2": WIDE,
    "qwen3": WIDE,
    "gemma2": {**WIDE, "sliding_window": 64},
    "gemma3_text": {**WIDE, "sliding_window": 64},
    "gemma3n_text": {
        **WIDE, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0] * 3,
    },
    "phi3": WIDE,
    "olmo2": WIDE,
    "cohere2": {**WIDE, "sliding_window": 64},
    "granite": WIDE,
    "stablelm": WIDE,
    "gpt2": OLD,
    "gptj": {**OLD, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_bigcode": {**OLD, "n_inner": 384, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": MHA,
    "opt": {**WIDE, "ffn_dim": 384, "word_embed_proj_dim": 128},
    "falcon": MHA,
    "bloom": {"vocab_size": 997, "hidden_size": 128, "n_layer": 3, "n_head": 4},
    "mpt": {"vocab_size": 997, "d_model": 128, "n_layers": 3, "n_heads": 4},
    "qwen3_moe": {**WIDE, **MOE},
    "mixtral": {**WIDE, **LOCAL},
    "gpt_oss": {**WIDE, **LOCAL, "sliding_window": 64},
    "llama4_text": {**WIDE, **LOCAL, "intermediate_size_mlp": 384, "attention_chunk_size": 64},
    "deepseek_v3": {
        **MHA, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
    },
    "mamba": {**MHA, "state_size": 16, "expand": 2, "conv_kernel": 4},
    "mamba2": {**MHA, "num_heads": 8, "head_dim": 32, "state_size": 64, "expand": 2, "n_groups": 2,
               "conv_kernel": 4, "chunk_size": 64},
    "jamba": {**WIDE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16,
              "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "num_experts": 2},
    "bamba": {**WIDE, **SSM, "attn_layer_indices": [1], "mamba_n_groups": 1},
    "falcon_h1": {**WIDE, **SSM, "mamba_d_ssm": 256, "mamba_n_groups": 1},
    "qwen3_next": {
        **WIDE, **MOE, "num_hidden_layers": 4, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": 96,
    },
    "lfm2": {**WIDE, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
}  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 3, "num_decoder_layers": 3,
           "num_heads": 4, "vocab_size": 97},
    "bart": {"d_model": 128, "encoder_layers": 3, "decoder_layers": 3,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 384,
             "decoder_ffn_dim": 384, "vocab_size": 97},
}  # fmt: skip


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self, model: torch.nn.Module, *inputs: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        there = (*model.parameters(), *model.buffers(), *inputs)
        self._known = {tensor.untyped_storage().data_ptr() for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage.data_ptr(), storage.nbytes()
        if not n_bytes or key in self._known:
            return
        self._known.add(key)
        self.now += n_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, n_bytes)

    def _gone(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.now -= n_bytes


def built(kind: str, settings: dict[str, Any], auto: Any = AutoModelForCausalLM) -> Any:
    config = AutoConfig.for_model(kind, **settings)
    return auto.from_config(config, dtype=torch.bfloat16).eval()


def beside_the_cache(model: Any, ids: torch.Tensor, **given: Any) -> int:
    """Return the most bytes that lived in one pass over a prompt, less what the cache is told."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    living = Living(model, ids, *(v for v in given.values() if isinstance(v, torch.Tensor)))
    with torch.no_grad(), living:
        model(ids, use_cache=True, **given)
    workload = Workload(ids.shape[1], ids.shape[0])
    return living.most - sum(cache_of(model.config.to_dict(), workload, dtype="BF16").prompt)


def room(model: Any, ids: torch.Tensor) -> int:
    workload = Workload(ids.shape[1], ids.shape[0])
    told, problem = activations_of(model.config.to_dict(), workload, dtype="BF16", on_cpu=True)
    assert told is not None and problem == ""
    return told.n_bytes


@pytest.mark.parametrize("kind", MODELS)
def test_what_lives_at_once_is_within_the_room_that_is_kept(kind: str) -> None:
    model = built(kind, MODELS[kind])
    ids = torch.randint(3, 97, (BATCH, TOKENS))
    padded = torch.ones_like(ids)
    padded[0, :20] = 0
    living = beside_the_cache(model, ids, attention_mask=padded)
    assert living <= room(model, ids) <= 3 * living


@pytest.mark.parametrize("kind", PAIRS)
def test_an_encoder_is_within_the_room_too(kind: str) -> None:
    model = built(kind, PAIRS[kind], AutoModelForSeq2SeqLM)
    ids = torch.randint(3, 97, (BATCH, TOKENS))
    living = beside_the_cache(model, ids, decoder_input_ids=ids)
    assert living <= room(model, ids) <= 3 * living


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss", "falcon", "bamba", "qwen3_next"])
@pytest.mark.parametrize("tokens", [17, 1000])
def test_the_room_grows_as_what_lives_does(kind: str, tokens: int) -> None:
    longer = {**MODELS[kind], "max_position_embeddings": 1024}
    model = built(kind, longer)
    ids = torch.randint(3, 97, (1, tokens))
    living = beside_the_cache(model, ids)
    assert living <= room(model, ids) <= 3 * living


def test_models_that_transformers_does_not_run_fused_are_those_that_are_listed() -> None:
    kinds: dict[str, str] = {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    kinds |= modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    without_attention = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
    found = {
        kind
        for kind, name in kinds.items()
        if not getattr(getattr(transformers, name), "_supports_sdpa", False)
    }
    listed = set(activations._UNFUSED)
    assert found - without_attention - listed == set()
    assert listed & kinds.keys() - found == {"falcon"}


def test_models_that_make_all_logits_are_those_that_are_listed() -> None:
    kinds: dict[str, str] = {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found = {
        kind
        for kind, name in kinds.items()
        if "logits_to_keep" not in inspect.signature(getattr(transformers, name).forward).parameters
    }
    assert found == set(activations._ALL_LOGITS)


def test_keys_and_values_of_different_sizes_cost_their_scores_on_a_cpu_only() -> None:
    config = AutoConfig.for_model("deepseek_v3", **MODELS["deepseek_v3"]).to_dict()
    near, cpu = (
        activations_of(config, Workload(TOKENS), dtype="BF16", on_cpu=on_cpu)[0]
        for on_cpu in (False, True)
    )
    assert near is not None and cpu is not None
    assert cpu.n_bytes - near.n_bytes == TOKENS**2 * 4 * 10 + TOKENS * 4 * (3 * 48 + 32) * 4
    assert "scores" in cpu.formula and "scores" not in near.formula


def test_the_formula_says_how_the_number_came_about() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    }  # fmt: skip
    told, _ = activations_of(config, Workload(1000), dtype="BF16")
    assert told is not None
    assert told.n_bytes == 1000 * (4 * 64 * 2 + 5 * 128 * 2) + 100 * 10
    assert told.formula == (
        "1,000 tokens x (512 stream of 4 x 64 hidden x 2 + 1,280 MLP of 5 x 128 x 2) bytes + "
        "1 x 100 logits x 10 bytes"
    )


def test_without_a_context_nothing_is_kept_and_the_formula_says_so() -> None:
    told, problem = activations_of({"hidden_size": 8}, Workload(), dtype="BF16")
    assert told is not None and problem == ""
    assert (told.n_bytes, told.formula) == (0, "no context was given")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "the config does not say how wide the hidden states are"),
        ({"hidden_size": 8}, "the config of 'without model_type' has no 'num_hidden_layers'"),
        ({"hidden_size": 8, "layer_types": ["odd"]}, "layers of type 'odd' are not known"),
    ],
)
def test_what_a_config_does_not_say_is_told(config: dict[str, Any], why: str) -> None:
    assert activations_of(config, Workload(8), dtype="BF16") == (None, why)
