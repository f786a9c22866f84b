"""The cache that a config promises is the cache that transformers fills, byte for byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from modelquirks.planner.placement.cache import CacheSizes, cache_of, module_states
from modelquirks.planner.placement.workload import Workload

# Models differ in what they call the argument; the old name works with all of 5.24.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

TOKENS, BATCH = 14, 2
TINY = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 97, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TINY, "num_key_value_heads": 2}
OLD = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 64, "n_layer": 4,
       "n_head": 4}  # fmt: skip
MLA = {
    **TINY, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
ZAMBA = {**TINY, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
         "mamba_d_state": 8}  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "qwen2": {**GROUPED, "sliding_window": 8, "use_sliding_window": False},
    "phi3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
    "cohere2": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "olmo3": {**GROUPED, "sliding_window": 8},
    "gemma3n_text": {
        **GROUPED, "head_dim": 16, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8, "sliding_window": 8, "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt2": OLD,
    "gptj": {**OLD, "rotary_dim": 8},
    "gpt_bigcode": {**OLD, "n_inner": 64},
    "falcon": TINY,
    "gpt_neox": TINY,
    "opt": {**TINY, "ffn_dim": 64, "word_embed_proj_dim": 64},
    "bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "mpt": {"vocab_size": 97, "d_model": 64, "n_layers": 4, "n_heads": 4},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": {**MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "glm_moe_dsa": {
        **MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
        "indexer_types": ["full", "shared"] * 2,
    },
    "kimi_linear": {
        **MLA, "linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 4, "head_dim": 8,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    },
    "mimo_v2_flash": {
        **GROUPED, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 1, "topk_group": 1, "head_dim": 16, "v_head_dim": 8, "sliding_window": 8,
        "num_key_value_heads": 1,
    },
    "cwm": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "exaone4": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "gemma4_text": {
        **GROUPED, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    },
    "gpt_oss": {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 8},
    "llama4_text": {**GROUPED, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64,
                    "attention_chunk_size": 8},
    "mamba": {**TINY, "state_size": 8, "expand": 2, "conv_kernel": 4},
    "mamba2": {**TINY, "num_heads": 8, "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 2,
               "conv_kernel": 4, "chunk_size": 8},
    "jamba": {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
              "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "num_experts": 2,
              "use_mamba_kernels": False},
    "bamba": {**GROUPED, **SSM, "attn_layer_indices": [1], "mamba_n_groups": 1},
    "granitemoehybrid": {**GROUPED, **SSM, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {**GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
                  "mamba_d_state": 8, "mamba_n_groups": 1},
    "qwen3_next": {
        **GROUPED, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "falcon_mamba": {**TINY, "state_size": 8, "expand": 2, "conv_kernel": 4},
    "nemotron_h": {
        **GROUPED, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    },
    "olmo_hybrid": {
        **TINY, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    },
    "zamba": {**ZAMBA, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {**ZAMBA, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8, "adapter_rank": 4},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 97},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "axk2": {**MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "hy_v4": {**MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "beam": {**GROUPED, "n_group": 1, "topk_group": 1, "head_dim": 16, "sliding_window": 8,
             "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "flint": {**GROUPED, "head_dim": 16, "sliding_window": 8, "num_experts": 4,
              "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "dots3_note_text": {
        **MLA, "num_hidden_layers": 6, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
        "sliding_window": 8, "n_group": 1, "head_dim": 16, "swa_kv_lora_rank": 24,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 8,
        "swa_q_lora_rank": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
    },
    "qwen3_5_text": {
        **GROUPED, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "jetmoe": {**GROUPED, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3,
           "num_heads": 4, "vocab_size": 97},
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
             "vocab_size": 97},
}  # fmt: skip


def held(cache: Any) -> list[int]:
    """Return the bytes of the storages that each layer of a cache keeps alive."""
    found: list[int] = []
    for layer in cache.layers:
        tensors: list[torch.Tensor] = []
        for value in vars(layer).values():
            values = value.values() if isinstance(value, dict) else [value]
            tensors += [v for v in values if isinstance(v, torch.Tensor) and v.numel() > 1]
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    return found


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_keeps_what_its_config_says(kind: str) -> None:
    config = AutoConfig.for_model(kind, **DECODERS[kind])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    ids = torch.randint(3, 97, (BATCH, TOKENS))
    with torch.no_grad():
        first = model(ids[:, :-1], use_cache=True)
        after_prompt = held(first.past_key_values)
        cache = model(ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    prompt = cache_of(config.to_dict(), Workload(TOKENS - 1, BATCH), dtype="BF16").prompt
    assert list(prompt) == after_prompt
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    assert list(told.layers) == held(cache.past_key_values), told
    states, problem = module_states([name for name, _ in model.named_modules()], told)
    assert problem == "" and sum(states.values()) == sum(told.layers)


def test_what_a_windowed_layer_holds_after_a_prompt_is_all_of_it() -> None:
    config = {**GROUPED, "model_type": "mistral", "sliding_window": 8}
    told = cache_of(config, Workload(1000), dtype="BF16")
    assert told.layers == (2 * 2 * 16 * 8 * 2,) * 4
    assert told.prompt == (2 * 2 * 16 * 1000 * 2,) * 4
    modules = [f"model.layers.{i}" for i in range(4)]
    assert sum(module_states(modules, told)[0].values()) == sum(told.layers)
    assert sum(module_states(modules, told, after_prompt=True)[0].values()) == sum(told.prompt)


def test_two_attentions_of_one_module_are_counted_together() -> None:
    small = {k: v for k, v in MLA.items() if k != "num_hidden_layers"}
    config = AutoConfig.for_model("longcat_flash", **{
        **small, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
        "moe_topk": 2, "zero_expert_num": 0, "head_dim": 8, "n_routed_experts": 4,
    })  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        cache = model(torch.randint(3, 97, (BATCH, TOKENS)), use_cache=True).past_key_values
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    each = held(cache)
    assert list(told.layers) == [each[0] + each[1], each[2] + each[3]]
    assert len(module_states([name for name, _ in model.named_modules()], told)[0]) == 2


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_layers_that_run_several_times_keep_a_cache_for_each(mode: str) -> None:
    config = AutoConfig.for_model("dory", **{
        **GROUPED, "num_hidden_layers": 8, "head_dim": 16, "sliding_window": 8,
        "n_input_layers": 2, "n_output_layers": 2, "recurrent_kv_cache_mode": mode,
    })  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        cache = model(torch.randint(3, 97, (BATCH, TOKENS)), use_cache=True).past_key_values
    each = held(cache)
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    again = each[8:] or [0] * 4
    loops = [n + again[i - 2] if 2 <= i < 6 else n for i, n in enumerate(each[:8])]
    assert list(told.prompt) == loops
    assert len(module_states([name for name, _ in model.named_modules()], told)[0]) == 8


def test_states_that_no_cache_layer_holds_are_counted() -> None:
    config = AutoConfig.for_model("rwkv", hidden_size=64, num_hidden_layers=4, vocab_size=97)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        state = model(torch.randint(3, 97, (BATCH, TOKENS)), use_cache=True).state
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    assert sum(told.layers) == sum(tensor.untyped_storage().nbytes() for tensor in state)


def test_minimax_keeps_its_linear_states_in_the_dtype_of_the_model() -> None:
    config = AutoConfig.for_model(
        "minimax", **{**GROUPED, "head_dim": 16, "num_local_experts": 2, "block_size": 8}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        cache = model(torch.randint(3, 97, (BATCH, TOKENS)), use_cache=True).past_key_values
    full = held(cache) + [0] * len(cache.linear_cache)
    linear = [
        state.nbytes if isinstance(state, torch.Tensor) else 0 for state in cache.linear_cache
    ]
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    assert list(told.layers) == [one + other for one, other in zip(full, linear, strict=False)]


def test_whisper_keeps_its_thirty_seconds_and_not_the_context_again() -> None:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = AutoConfig.for_model(
        "whisper", d_model=64, vocab_size=97, max_source_positions=20, num_mel_bins=8,
        max_target_positions=64, pad_token_id=0, **sides,
    )  # fmt: skip
    model: Any = AutoModelForSpeechSeq2Seq.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    sound = torch.rand(BATCH, 8, 40, dtype=torch.bfloat16)
    ids = torch.randint(3, 97, (BATCH, TOKENS))
    with torch.no_grad():
        cache = model(sound, decoder_input_ids=ids, use_cache=True).past_key_values
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    both = zip(held(cache.self_attention_cache), held(cache.cross_attention_cache), strict=True)
    assert list(told.layers) == [one + other for one, other in both], told


@pytest.mark.parametrize("kind", PAIRS)
def test_a_decoder_beside_an_encoder_keeps_the_encoder_s_tokens_too(kind: str) -> None:
    config = AutoConfig.for_model(kind, **PAIRS[kind])
    model: Any = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    ids = torch.randint(3, 97, (BATCH, TOKENS))
    with torch.no_grad():
        cache = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
    told = cache_of(config.to_dict(), Workload(TOKENS, BATCH), dtype="BF16")
    both = zip(held(cache.self_attention_cache), held(cache.cross_attention_cache), strict=True)
    assert list(told.layers) == [one + other for one, other in both], told
    states, _ = module_states([name for name, _ in model.named_modules()], told)
    assert all(name.startswith(("decoder.", "model.decoder.")) for name in states)
    assert len(states) == 3


def test_the_dtype_of_the_cache_counts_and_the_formula_says_how() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    told = cache_of(config, Workload(1000, 3, kv_dtype="float8_e4m3fn"), dtype="BF16")
    assert told.layers == (2 * 2 * 16 * 1000 * 3,) * 2
    assert told.formula == (
        "2 x full attention layers of 2 x 2 KV heads x 16 x 1,000 tokens x 3 sequences x 1 bytes"
    )


def test_the_text_part_of_a_config_decides() -> None:
    text = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
            "num_attention_heads": 4}  # fmt: skip
    config = {"model_type": "llava", "text_config": text, "vision_config": {"num_hidden_layers": 9}}
    told = cache_of(config, Workload(10), dtype="F16")
    assert told.layers == (2 * 64 * 10 * 2,) * 2
    modules = [f"vision_tower.encoder.layers.{i}" for i in range(2)]
    modules += [f"language_model.model.layers.{i}" for i in range(2)]
    assert list(module_states(modules, told)[0]) == modules[2:]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "lfm3", "num_hidden_layers": 2}, "does not list its layers"),
        ({"model_type": "zamba2", "num_hidden_layers": 2}, "does not list its layers"),
        ({"model_type": "lfm3", "num_hidden_layers": 1, "layer_types": ["conv"]}, "'lfm3'"),
        ({"num_hidden_layers": 9, "cross_attention_layers": [3]}, "tokens of images"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "no 'num_attention_heads'"),
        ({"model_type": "new"}, "no 'num_hidden_layers'"),
        ({"num_hidden_layers": 1, "layer_types": ["odd"]}, "layers of type 'odd' are not known"),
    ],
)
def test_what_a_config_does_not_say_is_told_and_not_taken_for_nothing(
    config: dict[str, Any], why: str
) -> None:
    told = cache_of(config, Workload(10), dtype="BF16")
    assert told.layers == () and why in told.problem


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "xlm-roberta", "num_hidden_layers": 2, "hidden_size": 8},
        {"model_type": "openai-gpt", "n_layer": 2, "n_embd": 8, "n_head": 2},
        {"model_type": "t5", "architectures": ["T5EncoderModel"], "num_layers": 2},
        {"_class_name": "FluxTransformer2DModel", "num_layers": 19, "num_attention_heads": 24},
    ],
)
def test_models_that_keep_nothing_are_told_and_are_no_problem(config: dict[str, Any]) -> None:
    told = cache_of(config, Workload(10), dtype="BF16")
    assert told.layers == () and told.problem == "" and told.formula
    assert cache_of(
        {**config, "is_decoder": True, "num_attention_heads": 2}, Workload(10), dtype="BF16"
    ).layers == ((2 * 8 * 10 * 2,) * 2 if config.get("model_type") == "xlm-roberta" else ())


@pytest.mark.parametrize("kind", ["cwm", "exaone4", "gemma2", "gemma3_text", "gemma4_text",
                                  "cohere2", "gpt_oss", "llama4_text", "olmo3"])  # fmt: skip
def test_a_config_that_does_not_list_its_layers_means_the_default_order(kind: str) -> None:
    full = AutoConfig.for_model(kind, **DECODERS[kind]).to_dict()
    bare = {key: value for key, value in full.items() if key != "layer_types"}
    workload = Workload(TOKENS, BATCH)
    assert "layer_types" in full
    told, expected = (cache_of(each, workload, dtype="BF16") for each in (bare, full))
    assert (told.layers, told.prompt) == (expected.layers, expected.prompt)


DERIVED = (
    "afmoe", "axk2", "beam", "cohere2", "cwm", "deepseek_v32", "diffusion_gemma_text", "dory",
    "dots3_note_text", "embedding_gemma2_text", "exaone4", "flint", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "glm_moe_dsa", "gpt_oss", "granite_swa", "granitemoehybrid",
    "hrm_text", "hy_v4", "jetmoe", "kimi_linear", "kolibri1", "llama4_text", "mimo_v2_flash",
    "minimax", "mistral_large4_text", "modernbert-decoder", "muse_spark_text", "olmo3",
    "olmo_hybrid", "qwen2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "vaultgemma",
    "zamba",
)  # fmt: skip
"""Types whose classes in transformers derive what each layer is."""


def as_written(kind: str, **given: Any) -> dict[str, Any]:
    """Return what a config.json says in which nothing is derived yet: plain fields of the class."""
    fields = dataclasses.fields(type(AutoConfig.for_model(kind)))
    plain = {f.name: f.default for f in fields if isinstance(f.default, int | float | str)}
    return {**plain, "model_type": kind, **given}


@pytest.mark.parametrize("kind", DERIVED)
def test_a_config_as_it_was_released_means_what_its_class_derives(kind: str) -> None:
    workload = Workload(100_000)
    full = cache_of(AutoConfig.for_model(kind).to_dict(), workload, dtype="BF16")
    bare = cache_of(as_written(kind), workload, dtype="BF16")
    assert full.layers and (bare.layers, bare.prompt) == (full.layers, full.prompt), bare


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("glm_moe_dsa", {"index_topk_pattern": "FSSF" * 20}),
        ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ("qwen3_5_text", {"full_attention_interval": 8}),
        ("kimi_linear", {"linear_attn_config": {
            "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 64,
            "num_heads": 8, "short_conv_kernel_size": 4}, "num_hidden_layers": 8}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*E*", "num_hidden_layers": 6}),
        ("dory", {"layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 4,
                  "num_hidden_layers": 16, "n_input_layers": 4, "n_output_layers": 4}),
        ("dots3_note_text", {"use_dsa": False}),
        ("dots3_note_text", {"use_sliding_window": False}),
        ("dots3_note_text", {"layer_types": ["full_attention", "sliding_attention"] * 23}),
        ("mimo_v2_flash", {"sliding_window_size": 127}),
        ("gemma4_text", {"num_hidden_layers": 8, "global_head_dim": 128}),
        ("dbrx", {"attn_config": {"kv_n_heads": 8}}),
        ("olmo_hybrid", {"num_hidden_layers": 3}),
    ],
)  # fmt: skip
def test_what_a_released_config_says_in_its_own_way_is_understood(
    kind: str, given: dict[str, Any]
) -> None:
    workload = Workload(100_000)
    full = cache_of(AutoConfig.for_model(kind, **given).to_dict(), workload, dtype="BF16")
    bare = cache_of(as_written(kind, **given), workload, dtype="BF16")
    assert full.layers and (bare.layers, bare.prompt) == (full.layers, full.prompt), bare


@pytest.mark.parametrize("kind", ["bailing_hybrid", "deepseek_v4", "inkling2_text", "lfm3",
                                  "mllama_text_model", "qwen4_exp_text", "zaya"])  # fmt: skip
def test_layers_that_are_not_known_are_told_also_where_none_are_listed(kind: str) -> None:
    for config in (AutoConfig.for_model(kind).to_dict(), as_written(kind)):
        assert cache_of(config, Workload(10), dtype="BF16").problem


@pytest.mark.parametrize(
    ("more", "windowed"),
    [
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, [0, 1, 2, 4, 5, 6]),
        ({"model_type": "qwen2", "max_window_layers": 6, "use_sliding_window": True}, [6, 7]),
        ({"model_type": "qwen2", "max_window_layers": 6, "use_sliding_window": False}, []),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, [0, 1, 2, 4, 5, 6]),
        ({"model_type": "nobody-knows"}, []),
    ],
)
def test_what_old_configs_call_windows_is_understood(
    more: dict[str, Any], windowed: list[int]
) -> None:
    config = {**GROUPED, "num_hidden_layers": 8, "sliding_window": 8, **more}
    told = cache_of(config, Workload(100), dtype="BF16")
    assert [i for i, n in enumerate(told.layers) if n < max(told.prompt)] == windowed


def test_layers_that_are_not_found_among_the_modules_are_told() -> None:
    sizes = CacheSizes((1, 2), "")
    assert module_states(["a.layers.0"], sizes) == ({}, "of 2 decoder layers there is none among "
                                                    "the modules")  # fmt: skip
    twice = [f"{top}.layers.{i}" for top in "ab" for i in range(2)]
    assert "are 2 among" in module_states(twice, sizes)[1]
