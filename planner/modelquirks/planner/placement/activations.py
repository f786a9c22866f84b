"""Activations: bytes that live at once beside weights and cache while a prompt is read.

An upper bound for one forward pass of ``generate`` over a prompt of the whole context, as
transformers 5.24 runs it without other kernels than torch's: what lives through a layer (the
stream), beside it the widest thing that a layer does, and what grows with the square of the
context: masks, and scores where no fused kernel computes them. Of the logits only those of the last
token are made (``logits_to_keep=1``), where the model's ``forward`` can do that. The factors are
read off the tensors that live at the peak; tests/planner/test_activations.py measures them.

Images, sounds, and the work space of cuBLAS and of other libraries are not in it. Kernels from
elsewhere (flash-linear-attention, mamba-ssm) take less than the torch code does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
    text_part,
    window_of,
)
from modelquirks.planner.placement.layerkinds import LINEAR, NOTHING, WINDOWED, kinds_of
from modelquirks.planner.placement.touched import experts_of, takes_all_experts
from modelquirks.planner.placement.workload import Reserve, Workload

__all__ = ["activations_of"]

_INNER = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size",
    "intermediate_size_mlp", "block_ff_dim",
)  # fmt: skip
_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")

_UNFUSED = (
    "big_bird", "bigbird_pegasus", "bloom", "cpmant", "deepseek_v4", "falcon", "flint", "fsmt",
    "gemma2", "git", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "granite_swa",
    "granitemoe_swa", "hy_v4", "inkling2_loop_text", "inkling2_text", "led", "longt5",
    "megatron-bert", "mimo_v2_flash", "mpt", "mvp", "nllb-moe", "openai-gpt", "pegasus_x",
    "prophetnet", "reformer", "rembert", "roformer", "speech_to_text", "speecht5",
    "switch_transformers", "t5gemma", "trocr", "vaultgemma", "xglm", "xlm", "xlnet",
)  # fmt: skip
"""Classes with ``_supports_sdpa = False``; and falcon, whose one KV head no fused kernel takes."""
_BIASED = ("t5", "mt5", "umt5", "pop2piano", "udop")
"""Attention adds a bias by head and pair of tokens."""
_ALL_LOGITS = (
    "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody", "prophetnet",
    "trocr", "whisper", "xlstm",
)  # fmt: skip
"""Decoders whose ``forward`` has no ``logits_to_keep``; no model with an encoder has it."""
_STEPWISE = ("mamba", "falcon_mamba", "jamba", "zamba")
"""State spaces that compute a state for each token at once (``selective_scan_fn``)."""
_DELTA_CHUNK, _SCAN_CHUNK = 64, 256
"""Defaults of ``torch_chunk_gated_delta_rule`` and of ``chunk_size``."""


class _Width(NamedTuple):
    """Bytes of one token that something takes."""

    n_bytes: int
    what: str


class _Sizes(NamedTuple):
    """What all rules start from."""

    hidden: int
    size: int
    """Bytes of a number."""
    heads: int
    head: int
    kv: int
    head_v: int


def activations_of(
    config: Config, workload: Workload, *, dtype: str, on_cpu: bool = False
) -> tuple[Reserve | None, str]:
    """Return the room for activations of *workload*, or None and what the config does not say.

    *config* is a config.json with its defaults filled in; *dtype* that of the model, in
    safetensors' spelling. With *on_cpu* the model runs on the CPU, where torch has no fused kernel
    for keys and values of different sizes. Without a context no room is asked for.
    """
    if not workload.context:
        return Reserve("activations", "*", 0, "no context was given"), ""
    text = text_part(config)
    hidden = first_of(text, HIDDEN)
    if hidden is None:
        return None, "the config does not say how wide the hidden states are"
    try:
        kinds = frozenset(kinds_of(text))
    except Unknown as unknown:
        return None, str(unknown)
    sizes = _sizes(text, hidden, BITS[dtype] // 8)
    stream = _stream(text, sizes)
    widest = max(_widths(text, sizes, kinds))
    tokens = max(workload.context, encoder_tokens(text, workload.context)) * workload.batch
    if widest.what.startswith("scan"):  # the torch code fills up the last chunk
        tokens += -workload.context % _chunk(text) * workload.batch
    terms = [
        (
            tokens * (stream.n_bytes + widest.n_bytes),
            f"{tokens:,} tokens x ({stream.n_bytes:,} {stream.what} + {widest.n_bytes:,} "
            f"{widest.what}) bytes",
        ),
        *_squares(text, sizes, kinds, workload, on_cpu=on_cpu),
        _logits(text, sizes, workload),
    ]
    formula = " + ".join(told for n_bytes, told in terms if n_bytes)
    return Reserve("activations", "*", sum(n_bytes for n_bytes, _ in terms), formula), ""


def _sizes(text: Config, hidden: int, size: int) -> _Sizes:
    heads = first_of(text, HEADS) or 1
    latent = first_of(text, ("qk_nope_head_dim",))
    if latent is not None and first_of(text, ("kv_lora_rank",)) is not None:
        head, kv = latent + (first_of(text, ("qk_rope_head_dim",)) or 0), heads
    else:
        head = max(
            first_of(text, HEAD_DIM) or hidden // heads,
            first_of(text, ("global_head_dim", "attention_head_dim")) or 0,
        )
        kv = first_of(text, KV_HEADS) or heads
    return _Sizes(hidden, size, heads, head, kv, first_of(text, ("v_head_dim",)) or head)


def _stream(text: Config, sizes: _Sizes) -> _Width:
    """Return what lives through a layer: embedding, its input, the residual, the normed input."""
    copies = first_of(text, ("altup_num_inputs",))
    n = 4 + 7 * copies if copies else 4
    n_bytes = n * sizes.hidden * sizes.size
    told = f"stream of {n} x {sizes.hidden} hidden x {sizes.size}"
    if text.get("residual_in_fp32"):
        n_bytes += sizes.hidden * 8
        told += f" + 2 x {sizes.hidden} x 4"
    if text.get("is_encoder_decoder"):
        n_bytes += sizes.hidden * sizes.size
        told += f" + {sizes.hidden} of the encoder x {sizes.size}"
    layers = first_of(text, ("num_hidden_layers",)) or 0
    if each := first_of(text, ("hidden_size_per_layer_input",)):
        n_bytes += 2 * layers * each * sizes.size
        told += f" + 2 x {layers} x {each} x {sizes.size}"
    return _Width(n_bytes, told)


def _widths(text: Config, sizes: _Sizes, kinds: Collection[str]) -> Iterator[_Width]:
    """Yield what each thing that a layer does takes of one token, beside the stream."""
    size = sizes.size
    yield _Width(8 * sizes.hidden, f"norm of 2 x {sizes.hidden} x 4")
    if not set(kinds) <= {*LINEAR, *NOTHING} or "hybrid" in kinds:
        queries = sizes.heads * sizes.head
        keys = sizes.kv * max(sizes.head, sizes.head_v)
        numbers = 5 * queries + 3 * keys
        yield _Width(
            numbers * size, f"attention of (5 x {queries} queries + 3 x {keys} keys) x {size}"
        )
    inner = max((first_of(text, (name,)) or 0 for name in _INNER), default=0) or 4 * sizes.hidden
    yield _Width(5 * inner * size, f"MLP of 5 x {inner} x {size}")
    yield from _experts(text, sizes)
    if any(kind in LINEAR for kind in kinds):
        yield _recurrent(text, sizes)


def _experts(text: Config, sizes: _Sizes) -> Iterator[_Width]:
    """Yield what routed experts take (``grouped_mm_experts_forward``)."""
    experts = experts_of(text)
    if experts is None:
        return
    k = experts.n if takes_all_experts(text) else experts.k
    inner = first_of(text, _EXPERT) or 4 * sizes.hidden
    hidden, size = sizes.hidden, sizes.size
    gate = hidden * size + 9 * inner * size
    out = hidden * (3 * size + 8)
    yield _Width(
        k * max(gate, out),
        f"experts of {k} x ({hidden} x {size} + 9 x {inner} x {size})"
        if gate > out
        else f"experts of {k} x {hidden} x {3 * size + 8}",
    )


def _recurrent(text: Config, sizes: _Sizes) -> _Width:
    """Return what the torch code of a state space or linear attention takes of one token."""
    if "linear_num_value_heads" in text:
        return _delta(text, sizes)
    if "conv_L_cache" in text:
        return _Width(7 * sizes.hidden * sizes.size, f"convolution of 7 x {sizes.hidden} x 2")
    expand = first_of(text, ("expand", "mamba_expand")) or 2
    own = "intermediate_size" if text.get("model_type") in ("mamba", "falcon_mamba") else ""
    inner = first_of(text, ("mamba_d_ssm", own)) or expand * sizes.hidden
    state = first_of(text, ("state_size", "mamba_d_state", "ssm_state_size")) or 16
    if text.get("model_type") in _STEPWISE:
        each = 12 * state + 8 * sizes.size + 16
        return _Width(inner * each, f"states of {inner} x (12 x {state} + {8 * sizes.size + 16})")
    heads = first_of(
        text, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    ) or max(1, inner // 64)
    groups = first_of(text, ("mamba_n_groups", "mamba_ngroups", "n_groups")) or 1
    if size := first_of(text, ("mamba_head_dim",)):
        inner = heads * size
    chunk = _chunk(text)
    n_bytes = 12 * heads * chunk + 16 * heads * state + 36 * inner + 16 * inner * state // chunk
    n_bytes += 4 * sizes.size * (inner + groups * state)
    return _Width(n_bytes, f"scan by {chunk} of {heads} heads, {inner} channels and {state} states")


def _delta(text: Config, sizes: _Sizes) -> _Width:
    heads = first_of(text, ("linear_num_value_heads",)) or 1
    key = first_of(text, ("linear_key_head_dim",)) or 1
    value = first_of(text, ("linear_value_head_dim",)) or 1
    conv = 2 * (first_of(text, ("linear_num_key_heads",)) or heads) * key + heads * value
    n_bytes = 12 * heads * _DELTA_CHUNK + 24 * heads * (key + value) + 3 * conv * sizes.size
    n_bytes += 16 * heads * key * value // _DELTA_CHUNK
    return _Width(
        n_bytes, f"scan by {_DELTA_CHUNK} of {heads} heads x ({key} keys + {value} values)"
    )


def _chunk(text: Config) -> int:
    if "linear_num_value_heads" in text:
        return _DELTA_CHUNK
    return first_of(text, ("mamba_chunk_size", "chunk_size")) or _SCAN_CHUNK


def _squares(
    text: Config, sizes: _Sizes, kinds: Collection[str], workload: Workload, *, on_cpu: bool
) -> Iterator[tuple[int, str]]:
    """Yield what grows with the square of the context."""
    if set(kinds) <= {*LINEAR, *NOTHING} and "hybrid" not in kinds:
        return
    tokens, size, kind = workload.context, sizes.size, text.get("model_type")
    pairs = workload.batch * tokens**2
    if kind in _UNFUSED:
        what, each = "scores", 3 * size + 8
    elif kind in _BIASED:
        what, each = "biases", 3 * size
    elif on_cpu and sizes.head != sizes.head_v:
        what, each = "scores", 8 + size
        copies = tokens * workload.batch * sizes.heads * (3 * sizes.head + sizes.head_v)
        yield copies * 4, f"{copies:,} queries, keys and values x 4 bytes"
    else:
        what, each = "", 0
    told = f"{pairs * sizes.heads:,} {what} of {sizes.heads} heads x {each} bytes"
    yield pairs * sizes.heads * each, told
    window = window_of(text)
    windowed = any(kind in WINDOWED for kind in kinds) and window is not None and tokens >= window
    if windowed or workload.batch > 1 or kind in _UNFUSED:
        # Bool, and as numbers while a layer runs; sequences of one batch may need padding.
        yield pairs * (2 + size), f"{pairs:,} pairs in masks x {2 + size} bytes"


def _logits(text: Config, sizes: _Sizes, workload: Workload) -> tuple[int, str]:
    vocabulary = first_of(text, ("vocab_size",)) or 0
    n, each = workload.batch, sizes.size + 8
    if text.get("model_type") in _ALL_LOGITS or text.get("is_encoder_decoder"):
        n *= workload.context
    return n * vocabulary * each, f"{n:,} x {vocabulary:,} logits x {each} bytes"
