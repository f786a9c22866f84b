"""GPT-OSS: as released, in OpenAI's own layout, and as others have rewritten it.

The module is ``GptOssForCausalLM`` of transformers. Its experts are stacked in parameters without
``.weight``, ``gate_up_proj`` ``[E, H, 2I]`` with gate and up in alternating columns and
``down_proj`` ``[E, I, H]``; both are the transpose of what every checkpoint with a matrix per
expert, and every packed one, holds. Released checkpoints are **not** tied; see the record.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.plugins.mxfp4 import Mxfp4
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import (
    Interleave,
    Node,
    Scheme,
    Source,
    Split,
    Stack,
    Transpose,
)
from modelquirks.quirks.record import Alias, Convert, Match, ModelQuirks, Pack, Tie

__all__ = ["RECORDS", "modelquirks_records", "modelquirks_schemes"]

_TIE = Tie(("model.embed_tokens.weight", "lm_head.weight"))
_NO_SPLIT = ("GptOssDecoderLayer",)
_EXPERTS = "**.mlp.experts"
_ORIGINAL_PROJECTIONS = (("mlp1", "gate_up_proj"), ("mlp2", "down_proj"))
_ORIGINAL_QKV = "block.{layer}.attn.qkv.weight"


def _gate_and_up(base: str, kind: str, dim: int) -> Interleave:
    parts = (Source(f"{base}.gate_proj.{kind}"), Source(f"{base}.up_proj.{kind}"))
    return Interleave(parts, dim)


def _per_expert(weight: Node, bias: Node, down: str) -> tuple[Convert, ...]:
    """Return conversions from Linears per expert: gate and up together, and down."""
    return (
        Convert(f"{_EXPERTS}.gate_up_proj", Stack(Transpose(weight), "expert")),
        Convert(f"{_EXPERTS}.gate_up_proj_bias", Stack(bias, "expert")),
        Convert(f"{_EXPERTS}.down_proj", Stack(Transpose(Source(f"{down}.weight")), "expert")),
        Convert(f"{_EXPERTS}.down_proj_bias", Stack(Source(f"{down}.bias"), "expert")),
    )


def _three_linears() -> tuple[Convert, ...]:
    base = f"{_EXPERTS}.{{expert}}"
    weight, bias = (_gate_and_up(base, kind, 0) for kind in ("weight", "bias"))
    return _per_expert(weight, bias, f"{base}.down_proj")


def _two_linears(gate_up: str, down: str) -> tuple[Convert, ...]:
    base = f"{_EXPERTS}.{gate_up}.{{expert}}"
    return _per_expert(
        Source(f"{base}.weight"), Source(f"{base}.bias"), f"{_EXPERTS}.{down}.{{expert}}"
    )


def _stacked_apart() -> tuple[Convert, ...]:
    """Return conversions from stacked experts with gate and up apart (MLX)."""
    down = f"{_EXPERTS}.down_proj"
    return (
        Convert(f"{_EXPERTS}.gate_up_proj", Transpose(_gate_and_up(_EXPERTS, "weight", 1), 1, 2)),
        Convert(f"{_EXPERTS}.gate_up_proj_bias", _gate_and_up(_EXPERTS, "bias", 1)),
        Convert(down, Transpose(Source(f"{down}.weight"), 1, 2)),
        Convert(f"{down}_bias", Source(f"{down}.bias")),
    )


_RELEASED = ModelQuirks(
    name="gpt_oss",
    role="architecture",
    # A checkpoint in the original layout may lie beside the same config.json.
    match=Match(model_types=("gpt_oss",), none_of=(_ORIGINAL_QKV,)),
    aliases=(Alias("**.mlp.router.linear.*", "**.mlp.router.*"),),
    conversions=(
        *_three_linears(),  # llm-compressor; GPTQModel once it takes experts apart
        *_two_linears("gate_up_projs", "down_projs"),  # unsloth
        *_two_linears("gate_up", "down"),  # GPTQModel
        *_stacked_apart(),
    ),
    ties=(_TIE,),
    no_split=_NO_SPLIT,
    why=(
        "released checkpoints keep lm_head and embed_tokens apart: they are tied only where "
        "config.json says so; re-quantised versions store experts one by one (llm-compressor, "
        "GPTQModel, unsloth) or gate and up apart (MLX)"
    ),
    url=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_oss/"
        "modeling_gpt_oss.py"
    ),
)

_MXFP4 = ModelQuirks(
    name="gpt_oss.mxfp4",
    role="quantization",
    match=Match(
        any_of=("**.experts.gate_up_proj_blocks", "**.experts.down_proj_blocks"),
    ),
    packs=tuple(
        Pack(
            "mxfp4",
            f"**.experts.{proj}",
            (("blocks", f"**.experts.{proj}_blocks"), ("scales", f"**.experts.{proj}_scales")),
            transpose=(1, 2),
        )
        for proj in ("gate_up_proj", "down_proj")
    ),
    why=(
        "experts are stored as _blocks (two 4-bit values a byte) and _scales (one byte per 32 "
        "values), 17 bytes for 32 weights, transposed with respect to the module"
    ),
    url=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/"
        "mxfp4.py"
    ),
)


def _original_aliases() -> tuple[Alias, ...]:
    block, layer = "block.{layer}", "model.layers.{layer}"
    experts = f"{layer}.mlp.experts"
    parts = {"_weight.blocks": "_blocks", "_weight.scales": "_scales", "_bias": "_bias"}
    experts_aliases = (
        Alias(f"{block}.mlp.{mlp}{old}", f"{experts}.{proj}{new}")
        for mlp, proj in _ORIGINAL_PROJECTIONS
        for old, new in parts.items()
    )
    return (
        Alias("embedding.weight", "model.embed_tokens.weight"),
        Alias("unembedding.weight", "lm_head.weight"),
        Alias("norm.scale", "model.norm.weight"),
        Alias(f"{block}.attn.norm.scale", f"{layer}.input_layernorm.weight"),
        Alias(f"{block}.mlp.norm.scale", f"{layer}.post_attention_layernorm.weight"),
        Alias(f"{block}.attn.out.*", f"{layer}.self_attn.o_proj.*"),
        Alias(f"{block}.attn.sinks", f"{layer}.self_attn.sinks"),
        Alias(f"{block}.mlp.gate.*", f"{layer}.mlp.router.*"),
        *experts_aliases,
    )


def _original_conversions() -> tuple[Convert, ...]:
    kv = "num_key_value_heads*head_dim"
    sizes = ("num_attention_heads*head_dim", kv, kv)
    qkv = tuple(
        Convert(
            f"model.layers.{{layer}}.self_attn.{proj}_proj.{kind}",
            Split(Source(f"block.{{layer}}.attn.qkv.{kind}"), 0, sizes, part),
        )
        for part, proj in enumerate("qkv")
        for kind in ("weight", "bias")
    )
    # OpenAI's own class wants the plain weight under the original name, not transposed.
    own = tuple(
        Convert(
            f"block.{{layer}}.mlp.{mlp}_weight",
            Transpose(Source(f"model.layers.{{layer}}.mlp.experts.{proj}"), 1, 2),
        )
        for mlp, proj in _ORIGINAL_PROJECTIONS
    )
    return (*qkv, *own)


_ORIGINAL = ModelQuirks(
    name="gpt_oss.original",
    role="architecture",
    match=Match(
        # Its config.json has neither architectures nor model_type.
        all_of=(_ORIGINAL_QKV, "block.{layer}.attn.sinks", "block.{layer}.mlp.mlp1_bias"),
    ),
    aliases=_original_aliases(),
    conversions=_original_conversions(),
    ties=(_TIE,),
    no_split=(*_NO_SPLIT, "TransformerBlock"),
    why=(
        "the original/ folder of the release has OpenAI's names and one matrix for q, k and v, "
        "cut by rows; transformers itself cannot load it"
    ),
    url="https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/weights.py",
)

RECORDS = (_RELEASED, _MXFP4, _ORIGINAL)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of GPT-OSS."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the mxfp4 scheme."""
    return (Mxfp4(),)
