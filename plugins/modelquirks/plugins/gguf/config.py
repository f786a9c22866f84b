"""What the facts of a GGUF file say in the words of config.json.

Source: ``GGUF_CONFIG_MAPPING`` in transformers 5.24's ``integrations/ggml.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelquirks.plugins.gguf.header import Array

__all__ = ["architecture_of", "config_of"]

_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "command-r": "cohere",
}
"""``model_type`` where it is not the architecture's own name."""
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "llama": {"rope.dimension_count": "head_dim", "expert_count": "num_local_experts"},
    "qwen2moe": {"expert_count": "num_experts"},
    "qwen3moe": {"expert_count": "num_experts"},
    "gpt2": {
        **{"block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd"},
        **{"attention.head_count": "n_head", "feed_forward_length": "n_inner"},
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "stablelm": {"attention.layer_norm_epsilon": "layer_norm_eps"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
}


def architecture_of(facts: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the architecture, empty if the file has none."""
    found = facts.get("general.architecture")
    return found if isinstance(found, str) else ""


def config_of(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the config that *facts* and the *shapes* of the tensors, by name, tell of.

    Only what the file says: transformers' own defaults stand for the rest.
    """
    architecture = architecture_of(facts)
    if not architecture:
        return {}
    config: dict[str, Any] = {"model_type": _TYPES.get(architecture, architecture)}
    keys = {**_COMMON, **_OWN.get(architecture, {})}
    for key, name in keys.items():
        value = facts.get(f"{architecture}.{key}")
        if isinstance(value, int | float):
            config[name] = value
    config["tie_word_embeddings"] = "output.weight" not in shapes
    tokens = facts.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config:
        embedding = shapes.get("token_embd.weight")
        known = embedding[0] if embedding else tokens.length if isinstance(tokens, Array) else None
        config |= {} if known is None else {"vocab_size": known}
    if architecture == "stablelm":
        config["use_qkv_bias"] = "blk.0.attn_q.bias" in shapes
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in shapes
    return config
