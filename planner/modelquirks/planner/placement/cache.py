"""The cache: bytes that each decoder layer keeps of the tokens so far, from a config alone.

Truth is what the cache of transformers 5.24 holds after a step (``cache_utils.DynamicCache`` and
the models' own): keys and values of every token for full attention; of the last ``sliding_window``
tokens for sliding and chunked attention; the compressed latent and the rotary part for multi-head
latent attention; states of a fixed size for linear attention, state spaces and short convolutions,
of which the recurrent ones are float32 whatever the model's dtype; nothing for layers that share
another's. tests/planner/test_cache_sizes.py compares real caches with it, byte for byte.

Right after a prompt more is held: ``DynamicSlidingWindowLayer.update`` keeps a view of the last
tokens, and so the storage of the whole prompt, until the next token is there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from modelquirks.planner.dtypes import BITS
from modelquirks.planner.placement.decoder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Config,
    Unknown,
    encoder_tokens,
    first_of,
    needed,
    text_part,
    window_of,
)
from modelquirks.planner.placement.layerkinds import DOTS, FULL, LINEAR, NOTHING, WINDOWED, kinds_of
from modelquirks.planner.placement.states import State, linear_state
from modelquirks.planner.placement.workload import Workload

__all__ = ["CacheSizes", "cache_of", "module_states"]

_ENCODERS = (
    "albert", "bert", "bert-generation", "big_bird", "camembert", "clip", "clip_text_model",
    "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "layoutlm",
    "layoutlmv3", "megatron-bert", "modernbert", "mpnet", "nomic_bert", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "vit", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Keep nothing unless ``is_decoder``."""
_WITHOUT = ("openai-gpt", "xlm", "flaubert")
"""Generate, and compute everything anew for each token."""
_TIMES = "caches of each layer"
"""What :func:`_settings` adds: so many caches belong to one module of the decoder's list."""


class CacheSizes(NamedTuple):
    """What the layers keep."""

    layers: tuple[int, ...]
    """Bytes by decoder layer while tokens are generated; empty if that is not known."""
    formula: str
    """How that was worked out."""
    problem: str = ""
    """Why it is not known."""
    prompt: tuple[int, ...] = ()
    """Bytes by decoder layer right after a prompt of the whole context: never less."""


def cache_of(config: Config, workload: Workload, *, dtype: str) -> CacheSizes:
    """Return what each decoder layer of the model of *config* keeps for *workload*.

    *dtype* is that of the model, in safetensors' spelling.
    """
    text = text_part(config)
    if reason := _keeps_nothing(text):
        return CacheSizes((), reason)
    try:
        layers = [
            _Layer(kind, _settings(text, number, kind))
            for number, kind in enumerate(kinds_of(text))
        ]
        states = {layer.key: _state(layer, workload, dtype) for layer in layers}
        held = {layer.key: _state(layer, workload, dtype, prompt=True) for layer in layers}
    except Unknown as unknown:
        return CacheSizes((), "", str(unknown))
    counts: dict[_Key, int] = {}
    for layer in layers:
        counts[layer.key] = counts.get(layer.key, 0) + 1
    formula = "; ".join(
        f"{n} x {key[0].replace('_', ' ')} layers of {states[key].formula}"
        for key, n in sorted(counts.items())
        if states[key].n_bytes
    )
    return CacheSizes(
        tuple(states[layer.key].n_bytes for layer in layers),
        formula,
        prompt=tuple(held[layer.key].n_bytes for layer in layers),
    )


def _keeps_nothing(config: Config) -> str:
    """Return why a model keeps nothing; empty if it does."""
    kind = str(config.get("model_type", ""))
    if "_class_name" in config:  # diffusers
        return "a diffusion model keeps no tokens"
    if kind in _WITHOUT or (kind in _ENCODERS and not config.get("is_decoder")):
        return f"models of type {kind!r} keep nothing"
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if names and all(str(name).endswith("EncoderModel") for name in names):
        return "an encoder alone keeps nothing"
    return ""


_Key = tuple[str, tuple[tuple[str, int], ...]]


_LATENT = ("kv_lora_rank", "qk_rope_head_dim")


class _Layer(NamedTuple):
    kind: str
    config: Config

    @property
    def key(self) -> _Key:
        """What makes two layers keep the same."""
        names = (*HEAD_DIM, *KV_HEADS, *_LATENT, _TIMES)
        own = {name: value for name in names if isinstance(value := self.config.get(name), int)}
        return self.kind, tuple(sorted(own.items()))


def _settings(config: Config, number: int, kind: str) -> Config:
    """Return the config of one layer: ``per_layer_config`` has what is its own."""
    config = {**config, _TIMES: _times(config, number)}
    given = config.get("per_layer_config")
    if not isinstance(given, Mapping):
        return {**config, **_own(config, kind)}
    own = next((v for k, v in given.items() if str(k).isdecimal() and int(k) == number), None)
    # Such configs have these already in what is the layer's own.
    rest = {k: v for k, v in config.items() if k not in _GLOBAL}
    return {**rest, **own} if isinstance(own, Mapping) else rest


_GLOBAL = ("global_head_dim", "num_global_key_value_heads")


def _times(config: Config, number: int) -> int:
    """Return how many caches belong to one layer."""
    model = config.get("model_type")
    if model == "longcat_flash":  # two attentions in one ``LongcatFlashDecoderLayer``
        return 2
    if model != "dory" or config.get("recurrent_kv_cache_mode") == "last_loop":
        return 1
    halved = 2 if "mlp" in (config.get("layer_types") or ()) else 1  # counts blocks, not layers
    first = (first_of(config, ("n_input_layers",)) or 0) // halved
    last = (first_of(config, ("n_output_layers",)) or 0) // halved
    n = (first_of(config, ("num_hidden_layers",)) or 0) // halved
    return (first_of(config, ("n_recurrent_loops",)) or 2) if first <= number < n - last else 1


def _own(config: Config, kind: str) -> Config:
    """Return what a class of transformers puts into ``per_layer_config`` if there is none."""
    model = str(config.get("model_type"))
    if model in _WIDE_GLOBAL and kind in FULL:
        return {"global_head_dim": first_of(config, ("global_head_dim",)) or 512}
    if model in DOTS and kind in WINDOWED:
        size = first_of(config, ("swa_head_dim",)) or 256
        plain = first_of(config, ("swa_qk_nope_head_dim",)) or 192
        return {
            "kv_lora_rank": first_of(config, ("swa_kv_lora_rank",)) or 1024,
            "qk_rope_head_dim": first_of(config, ("swa_qk_rope_head_dim",)) or size - plain,
        }
    return {}


_WIDE_GLOBAL = ("diffusion_gemma_text", "gemma4_text", "gemma4_unified_text")


def _state(layer: _Layer, workload: Workload, dtype: str, *, prompt: bool = False) -> State:
    """Return what one layer keeps; with *prompt* right after one of the whole context."""
    kind, config = layer
    n, bits = workload.batch, BITS[workload.kv_dtype or dtype]
    if kind in NOTHING:
        return State(0, "")
    if kind in LINEAR:
        linear = linear_state(config, n, BITS[dtype])
        if kind != "hybrid":
            return linear
        full = _state(_Layer("full_attention", config), workload, dtype)
        return State(linear.n_bytes + full.n_bytes, f"{linear.formula} + {full.formula}")
    tokens = workload.context
    if kind in WINDOWED:
        window = window_of(config)
        if window is None:
            raise Unknown("the config has windowed layers and no window")
        tokens = tokens if prompt else min(tokens, window)
    tokens += encoder_tokens(config, workload.context)
    each, told = _per_token(config, kind)
    if kind == "indexed_attention" and config.get("model_type") in DOTS:
        each += needed(config, "kv_lora_rank")  # the rotary part is a view of both
    if (times := config.get(_TIMES, 1)) > 1:
        each, told = times * each, f"{times} x {told}"
    return State(
        each * tokens * n * bits // 8,
        f"{told} x {tokens:,} tokens x {n} sequence{'s' * (n > 1)} x {bits / 8:g} bytes",
    )


def _per_token(config: Config, kind: str) -> tuple[int, str]:
    """Return the numbers that one layer keeps of one token, and how they come about."""
    latent, rotary = (first_of(config, (name,)) for name in _LATENT)
    if latent is not None and rotary is not None:
        if kind == "indexed_attention":
            index = needed(config, "index_head_dim")
            return latent + rotary + index, f"({latent} latent + {rotary} rotary + {index} index)"
        return latent + rotary, f"({latent} latent + {rotary} rotary)"
    if kind == "indexed_attention":
        raise Unknown("indexed attention without a latent is not known")
    if config.get("model_type") == "xlnet":  # mems: hidden states
        hidden = needed(config, "d_model")
        return hidden, f"{hidden} hidden"
    kv = _kv_heads(config, kind)
    size = first_of(config, HEAD_DIM)
    if size is None:
        size = needed(config, *HIDDEN) // needed(config, *HEADS)
        size *= 2 if config.get("model_type") in ("zamba", "zamba2") else 1  # embeddings too
    if kind in FULL:
        size = first_of(config, ("global_head_dim",)) or size
    value = first_of(config, ("v_head_dim",)) or size
    heads = f"{kv} KV head{'s' * (kv > 1)}"
    if value != size:
        return kv * (size + value), f"{heads} x ({size} key + {value} value)"
    return 2 * kv * size, f"2 x {heads} x {size}"


def _kv_heads(config: Config, kind: str) -> int:
    model = config.get("model_type")
    inner = config.get("attn_config") if model == "dbrx" else None
    kv = first_of(inner if isinstance(inner, Mapping) else config, KV_HEADS)
    heads = needed(config, *HEADS) if kv is None else first_of(config, HEADS) or kv
    kv = kv or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return first_of(config, ("multi_query_group_num",)) or 1
    if model == "falcon" and not config.get("new_decoder_architecture"):
        return heads
    if kind in FULL and config.get("attention_k_eq_v", True):
        return first_of(config, ("num_global_key_value_heads",)) or kv
    if kind in WINDOWED:
        own = first_of(config, ("swa_num_key_value_heads",))
        return own or (2 * kv if model == "mimo_v2_flash" else kv)
    return kv


_NUMBERED = re.compile(r"(.*(?:^|\.))(\d+)$")
_LAYER_LISTS = ("layers", "h", "block", "blocks")
_ELSEWHERE = re.compile(r"(?:^|\.)(?:vision|visual|audio|encoder|image|vit)\w*\.")


def module_states(
    modules: Collection[str], sizes: CacheSizes, *, after_prompt: bool = False
) -> tuple[Mapping[str, int], str]:
    """Return the bytes by decoder layer module, and what is wrong; by their names.

    With *after_prompt* those right after a prompt of the whole context: the room that is needed,
    where the others are what each further token reads.

    The layers are the numbered modules, as many as the config says, of a list that is called
    ``layers``, ``h`` or ``block`` and is not an encoder's.

    >>> module_states(["model.layers.0", "model.layers.1"], CacheSizes((5, 7), ""))
    ({'model.layers.0': 5, 'model.layers.1': 7}, '')
    """
    if not sizes.layers:
        return {}, sizes.problem
    lists = [name for name, n in _lists(modules) if n == len(sizes.layers)]
    decoders = [name for name in lists if not _ELSEWHERE.search(f"{name}.")] or lists
    named = [n for n in decoders if n.rpartition(".")[2] in _LAYER_LISTS] or decoders
    if len(named) != 1:
        found = f"are {len(named)}" if named else "is none"
        return {}, f"of {len(sizes.layers)} decoder layers there {found} among the modules"
    each = sizes.prompt if after_prompt and sizes.prompt else sizes.layers
    return {f"{named[0]}.{i}": n for i, n in enumerate(each) if n}, ""


def _lists(modules: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the modules whose parts are numbered, with how many parts there are."""
    counts: dict[str, int] = {}
    for name in modules:
        if found := _NUMBERED.fullmatch(name):
            counts[found[1].rstrip(".")] = counts.get(found[1].rstrip("."), 0) + 1
    yield from counts.items()
