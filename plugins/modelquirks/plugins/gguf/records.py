"""From llama.cpp's names to those of transformers, and what its converter changed on the way.

``blk.0.attn_q.weight`` is ``model.layers.0.self_attn.q_proj.weight``; a packed tensor is stored
here with its type as the last word of its name (``blk.0.attn_q.weight.q4_k``), so that a file may
mix types. Source: ``gguf/tensor_mapping.py`` of gguf 0.19, and ``TENSOR_PROCESSORS`` in
transformers 5.24's ``modeling_gguf_pytorch_utils.py`` for the changes; the tests hold both against
transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from modelquirks.plugins.gguf.schemes import PLUS_ONE, scheme_name
from modelquirks.plugins.gguf.types import PACKED
from modelquirks.plugins.meta_llama import half_split
from modelquirks.quirks.recipe import Cast, Concat, Source, Transpose, View
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Pack, Tie

__all__ = ["ARCHITECTURES", "PLUS_ONE_NORMS", "RECORDS", "container_of"]

_MAPPING = "https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py"
_BLOCK, _LAYER = "blk.{layer}", "model.layers.{layer}"

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
ARCHITECTURES: Mapping[str, Mapping[str, str]] = {
    "llama": {**_DECODER, **_EXPERTS},
    "qwen2": _DECODER,
    "qwen2moe": {**_DECODER, **_EXPERTS},
    "qwen3": _DECODER,
    "qwen3moe": {**_DECODER, **_EXPERTS},
    "gemma": _DECODER,
    "gemma2": {**_DECODER, **_FOUR_NORMS},
    "gemma3": {**_DECODER, **_FOUR_NORMS},
    "phi3": {**_DECODER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {**_DECODER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "stablelm": _DECODER,
    "nemotron": _DECODER,
    "command-r": _DECODER,
    "gpt2": _GPT2,
}
"""By llama.cpp's name: the modules of a layer, and what they are called in transformers."""
PLUS_ONE_NORMS = frozenset({"gemma", "gemma2", "gemma3", "nemotron"})
"""Architectures whose norms are stored plus one."""


def container_of(architecture: str) -> str:
    """Return what a manifest says that the weights are in.

    >>> container_of("llama")
    'gguf.llama'
    """
    return f"gguf.{architecture}" if architecture else "gguf"


def _aliases(architecture: str) -> Iterator[Alias]:
    ends = _ENDS
    layer = _LAYER
    if architecture == "gpt2":
        layer = "transformer.h.{layer}"
        ends = {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f"}
        ends |= {"position_embd": "transformer.wpe", "output": "lm_head"}
    for old, new in ends.items():
        yield Alias(f"{old}.**", f"{new}.**")
    for old, new in ARCHITECTURES[architecture].items():
        yield Alias(f"{_BLOCK}.{old}.**", f"{layer}.{new}.**")


def _half_split() -> Iterator[Convert]:
    """Yield how rows of q and k are put back: the converter interleaves the halves of a head."""
    for proj, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        for kind in ("weight", "bias"):
            name = f"{_LAYER}.self_attn.{proj}_proj.{kind}"
            yield Convert(name, half_split(Source(name), heads, bias=kind == "bias"))


def _stacked_experts() -> Iterator[Convert]:
    experts = "**.mlp.experts"
    # One of the two may be packed, which makes F32, and the other not.
    parts = (Cast(Source(f"{experts}.{proj}_proj.weight"), "F32") for proj in ("gate", "up"))
    yield Convert(f"{experts}.gate_up_proj", Concat(tuple(parts), 1))
    yield Convert(f"{experts}.down_proj", Source(f"{experts}.down_proj.weight"))
    gate = "**.mlp.shared_expert_gate.weight"
    yield Convert(gate, View(Source(gate), (1, -1)))


def _transposed() -> Iterator[Convert]:
    for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.{{layer}}.{module}.weight"
        yield Convert(name, Transpose(Source(name)))


def _conversions(architecture: str) -> Iterator[Convert]:
    if architecture == "llama":
        yield from _half_split()
    if "ffn_gate_exps" in ARCHITECTURES[architecture]:
        yield from _stacked_experts()
    if architecture == "gpt2":
        yield from _transposed()


def _record(architecture: str) -> ModelQuirks:
    embedding = "transformer.wte" if architecture == "gpt2" else "model.embed_tokens"
    return ModelQuirks(
        name=f"gguf.{architecture.replace('-', '_')}",
        role="architecture",
        match=Match(containers=(container_of(architecture),)),
        aliases=tuple(_aliases(architecture)),
        conversions=tuple(_conversions(architecture)),
        ties=(Tie((f"{embedding}.weight", "lm_head.weight"), when=None),),
        extra=(
            Expected("rope_freqs.weight", "the frequencies follow from the config"),
            Expected("rope_factors_long.weight", "the factors are in the config (rope_scaling)"),
            Expected("rope_factors_short.weight", "the factors are in the config (rope_scaling)"),
        ),
        why=f"llama.cpp has names of its own, here those of {architecture}",
        url=_MAPPING,
    )


_PACKS = ModelQuirks(
    name="gguf.packed",
    role="quantization",
    match=Match(any_of=tuple(f"**.{type_.name.lower()}" for type_ in PACKED.values())),
    packs=tuple(
        Pack(scheme_name(t.name), "**", (("blocks", f"**.{t.name.lower()}"),))
        for t in PACKED.values()
    ),
    why="GGUF stores most matrices in blocks of a row with scales of their own",
    url="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
)

_NORMS = ModelQuirks(
    name="gguf.norms",
    role="quantization",
    match=Match(any_of=(f"**.{PLUS_ONE}",)),
    packs=(Pack(scheme_name(PLUS_ONE), "**", (("value", f"**.{PLUS_ONE}"),)),),
    why="llama.cpp's converter adds one to the norms of Gemma and Nemotron",
    url="https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py",
)

RECORDS: Iterable[ModelQuirks] = (*map(_record, ARCHITECTURES), _PACKS, _NORMS)
