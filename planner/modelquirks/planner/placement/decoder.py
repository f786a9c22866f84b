"""The decoder of a config: what its attributes are called.

Names are those of transformers 5.24's configs, and of the older and remote code that released
config.json files are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "DECODER_LAYERS", "EXPERTS", "EXPERTS_TAKEN", "HEADS", "HEAD_DIM", "HIDDEN", "KV_HEADS",
    "LAYERS", "Config", "Unknown", "encoder_tokens", "first_of", "needed", "text_part", "window_of",
]  # fmt: skip

Config = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "num_decoder_attention_heads", "attention_heads",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads",
)  # fmt: skip
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "size_per_head")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "hidden_dim", "dim")
EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
    "n_experts", "moe_num_primary_experts",
)  # fmt: skip
EXPERTS_TAKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk",
    "top_k_experts", "moe_k", "num_selected_experts", "experts_per_tok", "top_k",
)  # fmt: skip
_TEXT = (
    "text_config", "llm_config", "language_config", "thinker_config", "text_model_config",
    "decoder",
)  # fmt: skip
"""Names of the same thing in configs of different models."""


class Unknown(Exception):
    """The config does not say; the message tells what."""


def text_part(config: Config) -> Config:
    """Return the part of *config* that describes what generates."""
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, Mapping) and any(key in inner for key in (*LAYERS, *_TEXT)):
            return text_part(
                {**inner, "is_encoder_decoder": config.get("is_encoder_decoder", False)}
            )
    return config


def first_of(config: Config, names: Sequence[str]) -> int | None:
    """Return the first of *names* that *config* has a positive number for."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def needed(config: Config, *names: str) -> int:
    """Return the same; Unknown if there is none."""
    found = first_of(config, names)
    if found is None:
        kind = config.get("model_type", "without model_type")
        raise Unknown(f"the config of {kind!r} has no {names[0]!r}")
    return found


def encoder_tokens(config: Config, context: int) -> int:
    """Return of how many tokens an encoder's keys and values are kept; 0 without an encoder."""
    if not config.get("is_encoder_decoder"):
        return 0
    if config.get("model_type") == "whisper":  # always fed 30 seconds
        return needed(config, "max_source_positions")
    return context


def window_of(config: Config) -> int | None:
    """Return how many tokens windowed layers look at; None without a window."""
    if config.get("use_sliding_window") is False:
        return None
    kind = config.get("model_type")
    if kind == "mimo_v2_flash" and (said := first_of(config, ("sliding_window_size",))):
        return said + 1
    window = first_of(config, ("sliding_window", "attention_chunk_size", "attention_window_size"))
    if window is None and kind in ("dots3_note", "dots3_note_text"):
        return first_of(config, ("sliding_window_size",)) or 512
    if window is None and kind == "modernbert-decoder":  # to both sides
        return needed(config, "local_attention") // 2
    return window
