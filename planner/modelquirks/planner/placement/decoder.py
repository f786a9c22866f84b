"""The decoder of a config: what its attributes are called, and what its layers are.

Names are those of transformers 5.24's configs, and of the older and remote code that released
config.json files are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "FULL", "HEADS", "HEAD_DIM", "HIDDEN", "KV_HEADS", "LINEAR", "NOTHING", "WINDOWED", "Config",
    "Unknown", "encoder_tokens", "first_of", "kinds_of", "needed", "text_part", "window_of",
]  # fmt: skip

Config = Mapping[str, Any]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "num_decoder_attention_heads", "attention_heads",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads",
)  # fmt: skip
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "size_per_head")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "hidden_dim", "dim")
_TEXT = (
    "text_config", "llm_config", "language_config", "thinker_config", "text_model_config",
    "decoder",
)  # fmt: skip
"""Names of the same thing in configs of different models."""

FULL = ("full_attention", "attention", "global_attention", "indexed_attention")
WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
LINEAR = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")
NOTHING = ("mlp", "moe")

_PATTERNS = {
    "afmoe": (4, 3), "beam": (6, 5), "cohere2": (4, 3), "cohere2_moe": (4, 3), "cwm": (4, 0),
    "dory": (4, 3), "exaone4": (4, 3), "exaone_moe": (4, 3), "gemma2": (2, 1),
    "gemma3_text": (6, 5), "gemma3n_text": (5, 4), "gemma4_text": (6, 5),
    "gemma4_unified_text": (6, 5), "gpt_oss": (2, 1), "granite_swa": (4, 0),
    "granitemoe_swa": (4, 0), "kolibri1": (5, 4), "llama4_text": (4, 3),
    "modernbert-decoder": (3, 0), "olmo3": (4, 3), "vaultgemma": (2, 1),
}  # fmt: skip
"""Of so many layers the one of that number attends to everything, where none are listed."""
_EVERY = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
_UNIFORM = ("mistral", "mixtral", "ministral", "moshi", "phi3", "phimoe", "starcoder2")
"""All layers have the window."""
_UNTOLD = (
    "flint", "kimi_linear", "mimo_v2_flash", "nemotron_h", "recurrent_gemma", "reformer", "xlstm",
    "zamba", "zamba2",
)  # fmt: skip
"""The defaults follow no rule, or no config lists layers."""
_ALL_OF = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba", "rwkv": "recurrent",
           "falcon_h1": "hybrid"}  # fmt: skip


class Unknown(Exception):
    """The config does not say; the message tells what."""


def text_part(config: Config) -> Config:
    """Return the part of *config* that describes what generates."""
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, Mapping) and any(key in inner for key in (*_LAYERS, *_TEXT)):
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
    return first_of(config, ("sliding_window", "attention_chunk_size", "attention_window_size"))


def kinds_of(config: Config) -> list[str]:
    """Return the kind of each layer, as ``layer_types`` of transformers call them.

    Unknown if the config does not tell them.
    """
    names = _DECODER_LAYERS if config.get("is_encoder_decoder") else ()
    given = config.get("layer_types") or config.get("layers_block_type")
    n = first_of(config, (*names, *_LAYERS)) or (len(given) if isinstance(given, list) else 0)
    n = n or needed(config, *_LAYERS)
    if config.get("cross_attention_layers"):
        raise Unknown("how many tokens of images its cross attention keeps is not known")
    kind = str(config.get("model_type"))
    if kind in _ALL_OF:
        kinds = [_ALL_OF[kind]] * n
    elif isinstance(given, list) and all(isinstance(each, str) for each in given):
        kinds = [str(each) for each in given[:n]]
    else:
        kinds = _derived(config, kind, n)
    for number in range(n - (first_of(config, ("num_kv_shared_layers",)) or 0), n):
        kinds[number] = "moe"  # keeps nothing of its own
    shares = config.get("indexer_types")
    if isinstance(shares, list) and len(shares) >= n:  # the others use an index of a layer before
        kinds = [
            "full_attention" if each == "indexed_attention" and share != "full" else each
            for each, share in zip(kinds, shares[:n], strict=True)
        ]
    known = (*FULL, *WINDOWED, *LINEAR, *NOTHING)
    if strange := [each for each in dict.fromkeys(kinds) if each not in known]:
        raise Unknown(f"layers of type {strange[0]!r} are not known")
    return kinds


def _derived(config: Config, kind: str, n: int) -> list[str]:
    """Return the kinds of layers of a config that does not list them."""
    if kind == "jamba":
        period, offset = needed(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        return ["attention" if i % period == offset else "mamba" for i in range(n)]
    if kind == "bamba":
        places = config.get("attn_layer_indices") or ()
        return ["attention" if i in places else "mamba" for i in range(n)]
    if kind == "qwen3_next":
        every = first_of(config, ("full_attention_interval",)) or 4
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    choices = config.get("attn_type_list")
    if isinstance(choices, list) and len(choices) >= n:  # MiniMax-Text-01 and M1
        return ["full_attention" if choice else "linear_attention" for choice in choices[:n]]
    if kind == "minimax" or kind in _UNTOLD:
        raise Unknown(f"the config of {kind!r} does not list its layers")
    return _windowed(config, kind, n)


def _windowed(config: Config, kind: str, n: int) -> list[str]:
    """Return the kinds of layers of which some may have a window."""
    if window_of(config) is None:
        return ["full_attention"] * n
    every, at = _PATTERNS.get(kind, (0, 0))
    if told := first_of(config, _EVERY):
        every, at = told, at if at < told and every and at == 0 else told - 1
    letters = config.get("sliding_window_pattern")
    if isinstance(letters, str) and letters:  # "LLLG" of EXAONE 4
        return [
            "sliding_attention" if letters[i % len(letters)] == "L" else "full_attention"
            for i in range(n)
        ]
    if every:
        return ["full_attention" if i % every == at else "sliding_attention" for i in range(n)]
    first = config.get("max_window_layers")
    if isinstance(first, int):  # Qwen 2 and 3: the layers from that number on
        return ["full_attention" if i < first else "sliding_attention" for i in range(n)]
    return ["sliding_attention" if kind in _UNIFORM else "full_attention"] * n
