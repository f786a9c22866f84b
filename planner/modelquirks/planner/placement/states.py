"""States whose size does not grow with the context: of convolutions, recurrences, state spaces.

Source: what ``update_conv_state`` and ``update_recurrent_state`` are given, or ``torch.zeros``, in
each modelling file of transformers 5.24. Recurrent states are float32 whatever the
model's dtype, but for MiniMax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from modelquirks.planner.placement.decoder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Config,
    Unknown,
    first_of,
    needed,
)

__all__ = ["State", "linear_state"]


class State(NamedTuple):
    """What one layer keeps."""

    n_bytes: int
    formula: str


def linear_state(config: Config, sequences: int, bits: int) -> State:
    """Return the states of a layer; *bits* are those of a number of the model.

    Unknown if there is no rule for the model type.
    """
    kind = str(config.get("model_type"))
    rule = next((rule for types, rule in _RULES if kind in types), None)
    if rule is None:
        raise Unknown(f"the states of {kind!r} are not known")
    channels, kernel, recurrent = rule(config)
    parts = [
        told
        for n, told in (
            (channels * kernel, f"{channels} channels x {kernel} x {bits / 8:g} bytes"),
            (recurrent, f"{recurrent} recurrent x 4 bytes"),
        )
        if n
    ]
    return State(
        sequences * (channels * kernel * bits // 8 + recurrent * 4),
        f"({' + '.join(parts)}) x {sequences} sequence{'s' * (sequences > 1)}",
    )


_Rule = Callable[[Config], tuple[int, int, int]]
"""Channels and width of a state in the model's dtype, mostly a convolution's; float32 numbers."""


def _mamba(config: Config) -> tuple[int, int, int]:
    inner = first_of(config, ("intermediate_size",)) or (
        needed(config, "expand") * needed(config, *HIDDEN)
    )
    return inner, needed(config, "conv_kernel"), inner * needed(config, "state_size")


def _mamba2(config: Config) -> tuple[int, int, int]:
    inner = needed(config, "expand") * needed(config, "hidden_size")
    state, heads = needed(config, "state_size"), needed(config, "num_heads")
    return (
        inner + 2 * needed(config, "n_groups") * state,
        needed(config, "conv_kernel"),
        heads * needed(config, "head_dim") * state,
    )


def _jamba(config: Config) -> tuple[int, int, int]:
    inner = needed(config, "mamba_expand") * needed(config, "hidden_size")
    return inner, needed(config, "mamba_d_conv"), inner * needed(config, "mamba_d_state")


def _zamba2(config: Config) -> tuple[int, int, int]:
    inner, kernel, recurrent = _jamba(config)
    groups = needed(config, "mamba_ngroups")
    return inner + 2 * groups * needed(config, "mamba_d_state"), kernel, recurrent


def _bamba(config: Config) -> tuple[int, int, int]:
    state, heads = needed(config, "mamba_d_state"), needed(config, "mamba_n_heads")
    inner = first_of(config, ("mamba_d_ssm",)) or (
        needed(config, "mamba_expand") * needed(config, "hidden_size")
    )
    size = first_of(config, ("mamba_d_head",)) or inner // heads
    groups = needed(config, "mamba_n_groups")
    return inner + 2 * groups * state, needed(config, "mamba_d_conv"), heads * size * state


def _nemotron(config: Config) -> tuple[int, int, int]:
    heads, size = needed(config, "mamba_num_heads"), needed(config, "mamba_head_dim")
    state = needed(config, "ssm_state_size")
    channels = heads * size + 2 * needed(config, "n_groups") * state
    return channels, needed(config, "conv_kernel"), heads * size * state


def _delta(config: Config) -> tuple[int, int, int]:
    if config.get("model_type") == "olmo_hybrid":
        config = _olmo(config)
    keys, values = needed(config, "linear_num_key_heads"), needed(config, "linear_num_value_heads")
    key, value = needed(config, "linear_key_head_dim"), needed(config, "linear_value_head_dim")
    channels = 2 * keys * key + values * value
    return channels, needed(config, "linear_conv_kernel_dim"), values * key * value


def _olmo(config: Config) -> Config:
    """Return a config with what ``OlmoHybridConfig`` derives."""
    heads = needed(config, *HEADS)
    keys = first_of(config, ("linear_num_key_heads",)) or heads
    size = needed(config, "hidden_size") * 3 // (4 * keys)
    key = first_of(config, ("linear_key_head_dim",)) or size
    return {
        **config,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": first_of(config, ("linear_num_value_heads",)) or heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": first_of(config, ("linear_value_head_dim",)) or 2 * key,
    }


def _short(config: Config) -> tuple[int, int, int]:
    return needed(config, "hidden_size"), needed(config, "conv_L_cache"), 0


def _kimi(config: Config) -> tuple[int, int, int]:
    inner = config.get("linear_attn_config")
    if isinstance(inner, Mapping):  # as released
        heads, size = needed(inner, "num_heads"), needed(inner, "head_dim")
        return 3 * heads * size, needed(inner, "short_conv_kernel_size"), heads * size * size
    heads, size = needed(config, "linear_num_heads"), needed(config, "linear_head_dim")
    return 3 * heads * size, needed(config, "linear_conv_kernel_dim"), heads * size * size


def _minimax(config: Config) -> tuple[int, int, int]:
    heads = needed(config, *HEADS)
    size = first_of(config, HEAD_DIM) or needed(config, *HIDDEN) // heads
    return heads * size, size, 0  # ``MiniMaxCache.linear_cache``: in the model's dtype


def _rwkv(config: Config) -> tuple[int, int, int]:
    hidden = needed(config, "hidden_size")
    return hidden, 2, 3 * (first_of(config, ("attention_hidden_size",)) or hidden)


_RULES: tuple[tuple[tuple[str, ...], _Rule], ...] = (
    (("mamba", "falcon_mamba"), _mamba),
    (("mamba2",), _mamba2),
    (("jamba", "zamba"), _jamba),
    (("zamba2",), _zamba2),
    (("bamba", "falcon_h1", "granitemoehybrid"), _bamba),
    (("nemotron_h",), _nemotron),
    (("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _delta),
    (("lfm2", "lfm2_moe"), _short),
    (("kimi_linear",), _kimi),
    (("minimax", "minimax_m1", "minimax_text_01"), _minimax),
    (("rwkv",), _rwkv),
)
