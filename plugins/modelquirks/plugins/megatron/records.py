"""From the names of megatron-core's GPT to those of Llama, Qwen and Mixtral in transformers.

``linear_qkv`` has for every group of the key's heads its queries, then the key, then the value;
``linear_fc1`` of a gated MLP the gate over the up. A layer's first norm is stored by itself or, by
TransformerEngine, inside of the linear layer behind it. Source: ``megatron/core/transformer/
attention.py`` (``get_query_key_value_tensors``), ``mlp.py`` and ``models/gpt/gpt_layer_specs.py``
of megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelquirks.quirks.recipe import Chunk, Node, Source, Split, Stack, View
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Tie

__all__ = ["RECORDS"]

_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_QKV = f"{_LAYER}.self_attention.linear_qkv"
_EMBEDDING, _HF_EMBEDDING = "embedding.word_embeddings.weight", "model.embed_tokens.weight"
_ALIASES = {
    _EMBEDDING: _HF_EMBEDDING,
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    f"{_LAYER}.input_layernorm.weight": f"{_HF_LAYER}.input_layernorm.weight",
    f"{_QKV}.layer_norm_weight": f"{_HF_LAYER}.input_layernorm.weight",
    f"{_LAYER}.pre_mlp_layernorm.weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
    f"{_LAYER}.mlp.linear_fc1.layer_norm_weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
    f"{_LAYER}.self_attention.linear_proj.weight": f"{_HF_LAYER}.self_attn.o_proj.weight",
    f"{_LAYER}.self_attention.q_layernorm.weight": f"{_HF_LAYER}.self_attn.q_norm.weight",
    f"{_LAYER}.self_attention.k_layernorm.weight": f"{_HF_LAYER}.self_attn.k_norm.weight",
    f"{_LAYER}.mlp.linear_fc2.weight": f"{_HF_LAYER}.mlp.down_proj.weight",
    f"{_LAYER}.mlp.router.weight": f"{_HF_LAYER}.mlp.gate.weight",
}
_HEADS = "num_key_value_heads"
_SIZES = ("num_attention_heads/num_key_value_heads", 1, 1)


def _heads() -> Iterator[Convert]:
    """Yield q, k and v out of the groups."""
    for part, proj in enumerate("qkv"):
        for kind, rest in (("weight", ("hidden_size",)), ("bias", ())):
            groups: Node = View(Source(f"{_QKV}.{kind}"), (_HEADS, -1, "head_dim", *rest))
            target = f"{_HF_LAYER}.self_attn.{proj}_proj.{kind}"
            yield Convert(target, View(Split(groups, 1, _SIZES, part), (-1, *rest)))


def _mlp() -> Iterator[Convert]:
    fused = Source(f"{_LAYER}.mlp.linear_fc1.weight")
    for part, proj in enumerate(("gate", "up")):
        yield Convert(f"{_HF_LAYER}.mlp.{proj}_proj.weight", Chunk(fused, 0, 2, part))
    expert = f"{_LAYER}.mlp.experts.local_experts.{{expert}}"
    for old, new in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        stacked = Stack(Source(f"{expert}.{old}.weight"), "expert")
        yield Convert(f"{_HF_LAYER}.mlp.experts.{new}", stacked)


RECORDS = (
    ModelQuirks(
        name="megatron.gpt",
        role="architecture",
        match=Match(all_of=(_EMBEDDING, f"{_QKV}.weight")),
        aliases=tuple(Alias(old, new) for old, new in _ALIASES.items()),
        conversions=(*_heads(), *_mlp()),
        ties=(Tie((_HF_EMBEDDING, "lm_head.weight")),),
        extra=(
            Expected("**.inv_freq", "the frequencies follow from the config"),
            Expected("**._extra_state", "the state of FP8 training in TransformerEngine"),
        ),
        no_split=("TransformerLayer",),
        why=(
            "megatron-core has one matrix for q, k and v, by groups of heads, and one for gate and "
            "up"
        ),
        url=(
            "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.0/megatron/core/transformer/"
            "attention.py"
        ),
    ),
)
