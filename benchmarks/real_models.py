"""Models for real checkpoints whose config.json names code that comes with them, or that have none.

Each is the class of transformers that computes the same, of the size that the config says; and the
shapes of stored tensors that what is made of them does not tell, from the original code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

__all__ = ["MAKERS", "shape_of"]

Config = dict[str, Any]


def qwen2_of(config: Config) -> nn.Module:
    """Return a Qwen 2 of the sizes of *config*."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept = {name: config[name] for name in (*names, "vocab_size", "intermediate_size")}
    return Qwen2ForCausalLM(Qwen2Config.from_dict({**kept, "tie_word_embeddings": False}))


def qwen_1_of(config: Config) -> nn.Module:
    """Return a Qwen 2 for a Qwen 1, whose intermediate size counts gate and up."""
    changed = {
        "intermediate_size": config["intermediate_size"] // 2,
        "num_key_value_heads": config["num_attention_heads"],
    }
    return qwen2_of({**config, **changed})


def llama_of(config: Config) -> nn.Module:
    """Return a Llama for what has its layers under other names."""
    bias = bool(config.get("bias"))
    return LlamaForCausalLM(LlamaConfig.from_dict({**config, "attention_bias": bias}))


def glm_of(config: Config) -> nn.Module:
    """Return a GLM for a GLM-4 that brings its code."""
    return GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            attention_bias=config["add_qkv_bias"],
            pad_token_id=config["pad_token_id"],
        )
    )


def phi_of(config: Config) -> nn.Module:
    """Return a Phi for a Phi of numbered layers."""
    return PhiForCausalLM(
        PhiConfig(
            hidden_size=config["n_embd"],
            num_hidden_layers=config["n_layer"],
            num_attention_heads=config["n_head"],
            intermediate_size=4 * config["n_embd"],
            vocab_size=config["vocab_size"],
        )
    )


def falcon_of(config: Config) -> nn.Module:
    """Return a Falcon for a RefinedWeb model."""
    return FalconForCausalLM(
        FalconConfig(
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["n_layer"],
            num_attention_heads=config["n_head"],
            num_kv_heads=config["n_head_kv"],
            vocab_size=config["vocab_size"],
            new_decoder_architecture=True,
        )
    )


def minimax_of(config: Config) -> nn.Module:
    """Return a MiniMax for a MiniMax M1."""
    kinds = {0: "linear_attention", 1: "full_attention"}
    layer_types = [kinds[kind] for kind in config["attn_type_list"]]
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "num_local_experts", "vocab_size"),
    )
    kept = {name: config[name] for name in names}
    return MiniMaxForCausalLM(MiniMaxConfig.from_dict({**kept, "layer_types": layer_types}))


def gpt_j_of(_: Config) -> nn.Module:
    """Return a GPT-J of 6 billion parameters, which are the sizes of its class' own config."""
    return GPTJForCausalLM(GPTJConfig())


def qwen_3_5_text_of(config: Config) -> nn.Module:
    """Return the text model whose config stands under the name of the class for images."""
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig.from_dict(config))


MAKERS: Mapping[str, Callable[[Config], nn.Module]] = {
    "qwen-7b-chat-cantonese": qwen_1_of,
    "qwen-7b-chat-int4-gptq": qwen_1_of,
    "qwen-72b": qwen_1_of,
    "internlm2-7b-intermind": llama_of,
    "openpangu-embedded-7b": llama_of,
    "glm4-9b-legal": glm_of,
    "phi-2-mixformer": phi_of,
    "mimo-7b-kor": qwen2_of,
    "falcon-40b": falcon_of,
    "minimax-m1-456b": minimax_of,
    "gpt-j-6b": gpt_j_of,
    "qwen3.5-18b-reap-a3b": qwen_3_5_text_of,
    "qwen3.5-25b-reap-a3b-v2": qwen_3_5_text_of,
}
"""Name of the manifest → its model, from its config."""


def shape_of(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the shape of a stored tensor that no recipe tells, given those that one tells.

    Fused attention of InternLM 2 (its rows are those of a Linear, modeling_internlm2.py), layers of
    MiMo that predict further tokens (modeling_mimo.py), and buffers that no class has any more.
    None if nobody says.
    """
    hidden = config.get("hidden_size", 0)
    heads = config.get("num_attention_heads", 1)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "wqkv":
        return (heads + 2 * config["num_key_value_heads"]) * (hidden // heads), hidden
    if leaf == "inv_freq":
        rotated = config["kv_channels"] // 2 if "kv_channels" in config else hidden // heads
        return (rotated // 2,)
    if ".mtp_layers." in name:
        like = shapes.get(name.replace(".mtp_layers.", ".layers."))
        return like or ((hidden, 2 * hidden) if leaf == "input_proj" else (hidden,))
    if leaf == "position_ids":
        return 1, config["max_position_embeddings"]
    if leaf == "masked_bias":
        return ()
    return (1, 1, 2048, 2048) if name.endswith(".attn.bias") else None
