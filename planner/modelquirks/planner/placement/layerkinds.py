"""What the layers of a decoder are, as ``layer_types`` of transformers call them.

A config that transformers 5.24 wrote lists its layers. Many released config.json do not: there the
class of the config derives them (``__post_init__`` in each ``configuration_*.py``), and the tables
here say the same. A class that follows no table, of which nothing is known, is told.
"""

from __future__ import annotations

from typing import NamedTuple

from modelquirks.planner.placement.decoder import (
    DECODER_LAYERS,
    LAYERS,
    Config,
    Unknown,
    first_of,
    needed,
    window_of,
)

__all__ = ["DOTS", "FULL", "LINEAR", "NOTHING", "WINDOWED", "kinds_of"]

FULL = ("full_attention", "attention", "global_attention", "indexed_attention")
WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
LINEAR = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")
NOTHING = ("mlp", "moe")


class _Order(NamedTuple):
    """Of ``every`` layers the one of number ``at`` attends to everything."""

    every: int
    at: int
    others: str = "sliding_attention"
    full: str = "full_attention"
    first: int = 0
    """So many layers at the start do, too."""
    last: bool = False
    """The last one does, too."""


_INDEXED = _Order(1, 0, full="indexed_attention")
_LINEAR = _Order(4, 3, "linear_attention")
_ORDERS = {
    "afmoe": _Order(4, 3), "axk2": _INDEXED, "beam": _Order(6, 5, last=True),
    "cohere2": _Order(4, 3), "cohere2_moe": _Order(4, 3), "cwm": _Order(4, 0),
    "deepseek_v32": _INDEXED, "diffusion_gemma_text": _Order(6, 5, last=True),
    "dory": _Order(4, 3), "dots3_note": _Order(4, 1, full="indexed_attention", first=2),
    "dots3_note_text": _Order(4, 1, full="indexed_attention", first=2),
    "embedding_gemma2_text": _Order(6, 5, last=True), "exaone4": _Order(4, 3),
    "exaone_moe": _Order(4, 3), "flint": _Order(4, 1, first=2, last=True),
    "gemma2": _Order(2, 1), "gemma3_text": _Order(6, 5), "gemma3n_text": _Order(5, 4),
    "gemma4_text": _Order(6, 5, last=True), "gemma4_unified_text": _Order(6, 5, last=True),
    "glm_moe_dsa": _INDEXED, "gpt_oss": _Order(2, 1), "granite_swa": _Order(4, 0),
    "granitemoe_swa": _Order(4, 0),
    "granitemoehybrid": _Order(1, 1, "linear_attention"),  # all are
    "hy_v4": _INDEXED, "hy_v4_vl_text": _INDEXED,
    "kimi_linear": _Order(4, 0, "linear_attention"), "kolibri1": _Order(5, 4),
    "llama4_text": _Order(4, 3), "mimo_v2_flash": _Order(6, 5, first=1),
    "minimax": _Order(2, 0, "linear_attention"), "mistral_large4_text": _INDEXED,
    "modernbert-decoder": _Order(3, 0), "olmo3": _Order(4, 3),
    "olmo_hybrid": _LINEAR, "qwen3_5_moe_text": _LINEAR, "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR, "t5_gemma_module": _Order(2, 1), "vaultgemma": _Order(2, 1),
}  # fmt: skip
_FROM_LAST = ("muse_glimmer_text", "muse_spark_text")
"""The last layer and every fourth before it attend to everything."""
_EVERY = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
_UNIFORM = ("mistral", "mixtral", "ministral", "moshi", "phi3", "phimoe", "starcoder2")
"""All layers have the window."""
_UNTOLD = (
    "bailing_hybrid", "deepseek_v4", "glm5_next_text", "inkling2_loop_text", "inkling2_text",
    "inkling_text", "lara_mini", "lfm3", "mllama_text_model", "neomme", "qwen4_exp_text",
    "recurrent_gemma", "reformer", "unlimited_ocr_text", "xlstm", "zamba2", "zaya",
)  # fmt: skip
"""The defaults follow no rule, or the layers are of kinds that are not known here."""
_ALL_OF = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba", "rwkv": "recurrent",
           "falcon_h1": "hybrid"}  # fmt: skip
DOTS = ("dots3_note", "dots3_note_text")
_LETTERS = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Of ``hybrid_override_pattern`` (Nemotron-H)."""


def kinds_of(config: Config) -> list[str]:
    """Return the kind of each layer, as ``layer_types`` of transformers call them.

    Unknown if the config does not tell them.
    """
    if config.get("cross_attention_layers"):
        raise Unknown("how many tokens of images its cross attention keeps is not known")
    kind, given = str(config.get("model_type")), _given(config)
    names = DECODER_LAYERS if config.get("is_encoder_decoder") else ()
    n = first_of(config, (*names, *LAYERS)) or len(given or ()) or needed(config, *LAYERS)
    if kind == "dory" and given and "mlp" in given:  # each attention and its MLP are one layer
        given, n = given[::2], n // 2
    if kind == "hrm_text" and not config.get("num_layers_per_stack"):  # runs each several times
        n *= needed(config, "H_cycles") * (needed(config, "L_cycles") + 1)
    if kind in _ALL_OF:
        kinds = [_ALL_OF[kind]] * n
    else:
        kinds = _derived(config, kind, n) if given is None else given[:n]
    for number in range(n - (first_of(config, ("num_kv_shared_layers",)) or 0), n):
        kinds[number] = "moe"  # keeps nothing of its own
    known = (*FULL, *WINDOWED, *LINEAR, *NOTHING)
    if strange := [each for each in dict.fromkeys(kinds) if each not in known]:
        raise Unknown(f"layers of type {strange[0]!r} are not known")
    return _indexed(config, kind, kinds)


def _given(config: Config) -> list[str] | None:
    """Return the layers that the config lists."""
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layer_types") or config.get("layers_block_type")
    if not listed and isinstance(pattern, str) and pattern:
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    if isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        return [str(each) for each in listed]
    return None


def _derived(config: Config, kind: str, n: int) -> list[str]:
    """Return the kinds of layers of a config that does not list them."""
    choices = config.get("attn_type_list")
    if isinstance(choices, list) and len(choices) >= n:  # MiniMax-Text-01 and M1
        return ["full_attention" if choice else "linear_attention" for choice in choices[:n]]
    if kind in _UNTOLD:
        raise Unknown(f"the config of {kind!r} does not list its layers")
    if (hybrid := _hybrid(config, kind, n)) is not None:
        return hybrid
    order = _ORDERS.get(kind)
    if order is None or order.others == "sliding_attention":
        return _windowed(config, kind, n)
    every = first_of(config, ("full_attention_interval",))
    if every is not None and order.at == order.every - 1:
        order = order._replace(every=every, at=every - 1)
    kinds = _ordered(order, n)
    if kind == "olmo_hybrid" and "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    return kinds


def _hybrid(config: Config, kind: str, n: int) -> list[str] | None:
    """Return the kinds of layers where other attributes of the config say which attend."""
    if kind == "jamba":
        period, offset = needed(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        return ["attention" if i % period == offset else "mamba" for i in range(n)]
    if kind == "bamba":
        places = config.get("attn_layer_indices") or ()
        return ["attention" if i in places else "mamba" for i in range(n)]
    if kind == "zamba":
        period, offset = needed(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        later = ["hybrid" if i % period == offset else "mamba" for i in range(n - 3)]
        return ["mamba", "mamba", "hybrid", *later][:n]
    if kind == "kimi_linear":
        settings = config.get("linear_attn_config") or {}
        if "kda_layers" in settings:  # numbered from 1
            places = [i - 1 for i in settings.get("full_attn_layers", ())]
            return ["full_attention" if i in places else "linear_attention" for i in range(n)]
        return ["linear_attention", *_ordered(_ORDERS[kind], n)[1:]]
    return None


def _windowed(config: Config, kind: str, n: int) -> list[str]:
    """Return the kinds of layers of which some may have a window."""
    order = _ORDERS.get(kind)
    full = "full_attention" if order is None else order.full
    if kind in DOTS and config.get("use_dsa") is False:
        full = "full_attention"
    if window_of(config) is None:
        return [full] * n
    letters = config.get("sliding_window_pattern")
    if isinstance(letters, str) and letters:  # "LLLG" of EXAONE 4
        return ["sliding_attention" if letters[i % len(letters)] == "L" else full for i in range(n)]
    if told := first_of(config, _EVERY):
        known = _Order(0, 0) if order is None else order
        at = known.at if known.at < told and known.every and known.at == 0 else told - 1
        order = known._replace(every=told, at=at)
    if kind in _FROM_LAST:
        order = _Order(4, (n - 1) % 4)
    if order is not None:
        return _ordered(order._replace(full=full), n)
    first = config.get("max_window_layers")
    if isinstance(first, int):  # Qwen 2 and 3: the layers from that number on
        return [full if i < first else "sliding_attention" for i in range(n)]
    return ["sliding_attention" if kind in _UNIFORM else full] * n


def _ordered(order: _Order, n: int) -> list[str]:
    return [
        order.full
        if i % order.every == order.at or i < order.first or (order.last and i == n - 1)
        else order.others
        for i in range(n)
    ]


def _indexed(config: Config, kind: str, kinds: list[str]) -> list[str]:
    """Return *kinds* with those that use the index of a layer before as layers of full attention.

    Old configs of dots3.note call those with an index ``full_attention``.
    """
    if kind in DOTS and config.get("use_dsa", "per_layer_config" not in config):
        kinds = ["indexed_attention" if each == "full_attention" else each for each in kinds]
    shares = config.get("indexer_types") or _indexers(config, kind, len(kinds))
    if not isinstance(shares, list) or len(shares) < len(kinds):
        return kinds
    return [
        "full_attention" if each == "indexed_attention" and share != "full" else each
        for each, share in zip(kinds, shares[: len(kinds)], strict=True)
    ]


def _indexers(config: Config, kind: str, n: int) -> list[str] | None:
    """Return the layers that have an index of their own (``full``); None if all have."""
    if kind in ("hy_v4", "hy_v4_vl_text"):
        return ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(n)]
    if kind not in ("glm_moe_dsa", "mistral_large4_text"):
        return None
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return ["full" if each in ("F", "full") else "shared" for each in pattern]
    every, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % max(every, 1) == 0 else "shared" for i in range(n)]
