"""Language models that came with code of their own, to the class that transformers has for them.

Their configs name a class of that code (``QWenLMHeadModel``), which is never run here. Where a
class of transformers computes the same, the names and fused matrices are turned into those that it
wants; build it yourself and give it as the model. The rules go by stored names, so that a module
with the original names finds them as they are.

No class of transformers computes the same as ChatGLM-6B (prefix attention), Baichuan-13B (ALiBi),
Baichuan 2 (a normalised head), TeleChat, moondream, CodeT5+ and InternLM-XComposer2 (adapters that
act on images only): for these there are no rules, and the missing names are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from modelquirks.plugins import moe
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Chunk, Node, Source, Split, View
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Tie

__all__ = ["RECORDS", "internlm2_aliases", "internlm2_qkv", "modelquirks_records"]

_MODELS = "https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models"
_TIES = (Tie(("model.embed_tokens.weight", "lm_head.weight")),)
_LAYER = "model.layers.{layer}"
_FREQUENCIES = (
    Expected("**.rotary_emb.inv_freq", "the frequencies follow from the config"),
    Expected("**.rotary_pos_emb.inv_freq", "the frequencies follow from the config"),
)


def _chunks(fused: str, kinds: Iterable[str] = ("weight",)) -> Iterator[Convert]:
    """Yield q, k and v out of a matrix that has one below the other."""
    for kind in kinds:
        for part, proj in enumerate("qkv"):
            node = Chunk(Source(f"{fused}.{kind}"), 0, 3, part)
            yield Convert(f"{_LAYER}.self_attn.{proj}_proj.{kind}", node)


_QWEN_LAYER = "transformer.h.{layer}"
_QWEN = ModelQuirks(
    name="remote.qwen",
    role="architecture",
    match=Match(all_of=(f"{_QWEN_LAYER}.attn.c_attn.*", f"{_QWEN_LAYER}.mlp.w2.*")),
    aliases=(
        Alias("transformer.wte.*", "model.embed_tokens.*"),
        Alias("transformer.ln_f.*", "model.norm.*"),
        Alias(f"{_QWEN_LAYER}.ln_1.*", f"{_LAYER}.input_layernorm.*"),
        Alias(f"{_QWEN_LAYER}.ln_2.*", f"{_LAYER}.post_attention_layernorm.*"),
        Alias(f"{_QWEN_LAYER}.attn.c_proj.*", f"{_LAYER}.self_attn.o_proj.*"),
        Alias(f"{_QWEN_LAYER}.mlp.w1.*", f"{_LAYER}.mlp.up_proj.*"),
        Alias(f"{_QWEN_LAYER}.mlp.w2.*", f"{_LAYER}.mlp.gate_proj.*"),
        Alias(f"{_QWEN_LAYER}.mlp.c_proj.*", f"{_LAYER}.mlp.down_proj.*"),
    ),
    conversions=tuple(_chunks(f"{_QWEN_LAYER}.attn.c_attn", ("weight", "bias"))),
    ties=_TIES,
    extra=_FREQUENCIES,
    no_split=("Qwen2DecoderLayer", "QWenBlock"),
    why=(
        "Qwen 1 is Qwen2ForCausalLM (with half its intermediate_size) under the names of GPT-2; "
        "w2, not w1, is the gate"
    ),
    url="https://huggingface.co/Qwen/Qwen-7B/blob/main/modeling_qwen.py",
)

_INTERNLM = ModelQuirks(
    name="remote.llama_names",
    role="architecture",
    match=Match(model_types=("internlm", "PanguEmbedded")),
    ties=_TIES,
    extra=_FREQUENCIES,
    no_split=("LlamaDecoderLayer",),
    why=(
        "InternLM 1 and openPangu Embedded have the names of LlamaForCausalLM with "
        "attention_bias=True; only the frequencies are stored besides"
    ),
    url="https://huggingface.co/internlm/internlm-7b/blob/main/modeling_internlm.py",
)

_MIMO = ModelQuirks(
    name="remote.mimo",
    role="architecture",
    match=Match(model_types=("mimo",)),
    ties=_TIES,
    extra=(
        Expected("model.mtp_layers.**", "Qwen2ForCausalLM does not predict several tokens at once"),
    ),
    no_split=("Qwen2DecoderLayer",),
    why="MiMo is Qwen2ForCausalLM with layers for multi-token prediction beside it",
    url="https://huggingface.co/XiaomiMiMo/MiMo-7B-Base/blob/main/modeling_mimo.py",
)

_MINIMAX_M1 = replace(
    next(record for record in moe.RECORDS if record.name == "moe.mixtral"),
    name="remote.minimax_m1",
    match=Match(model_types=("minimax_m1",)),
    absent=tuple(
        Expected(f"{_LAYER}.self_attn.{name}", "follows from the number of heads and layers")
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ),
    no_split=("MiniMaxDecoderLayer",),
    why=(
        "MiniMax-M1 is MiniMaxForCausalLM, which keeps the decays of its linear attention as "
        "buffers; they are not stored"
    ),
    url="https://huggingface.co/MiniMaxAI/MiniMax-M1-80k/blob/main/modeling_minimax_m1.py",
)


def internlm2_aliases(stored: str, model: str) -> tuple[Alias, ...]:
    """Return the renames of a layer of InternLM2, from the name *stored* to that of *model*."""
    names = {
        "attention.wo": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    return tuple(Alias(f"{stored}.{old}.*", f"{model}.{new}.*") for old, new in names.items())


def internlm2_qkv(stored: str, model: str) -> Iterator[Convert]:
    """Yield q, k and v of a layer of InternLM2.

    The rows of wqkv go by key-value head: the query heads that share it, the key, the value.
    """
    head = "hidden_size/num_attention_heads"
    sizes = ("hidden_size/num_key_value_heads", head, head)
    for kind, columns in (("weight", ("hidden_size",)), ("bias", ())):
        groups = View(
            Source(f"{stored}.attention.wqkv.{kind}"), ("num_key_value_heads", -1, *columns)
        )
        for part, proj in enumerate("qkv"):
            rows: Node = View(Split(groups, 1, sizes, part), (-1, *columns))
            yield Convert(f"{model}.self_attn.{proj}_proj.{kind}", rows)


_INTERNLM2 = ModelQuirks(
    name="remote.internlm2",
    role="architecture",
    match=Match(
        all_of=("model.layers.{layer}.attention.wqkv.*", "model.tok_embeddings.*"),
        none_of=("**.Plora_A.*",),
    ),
    aliases=(
        Alias("model.tok_embeddings.*", "model.embed_tokens.*"),
        Alias("output.*", "lm_head.*"),
        *internlm2_aliases(_LAYER, _LAYER),
    ),
    conversions=tuple(internlm2_qkv(_LAYER, _LAYER)),
    ties=_TIES,
    extra=_FREQUENCIES,
    no_split=("LlamaDecoderLayer", "InternLM2DecoderLayer"),
    why=(
        "InternLM2 is LlamaForCausalLM under Meta's names, with q, k and v in one matrix, by "
        "key-value head"
    ),
    url=f"{_MODELS}/internvl/convert_internvl_weights_to_hf.py",
)

_GLM_LAYER = "transformer.encoder.layers.{layer}"


def _glm_qkv() -> Iterator[Convert]:
    kv = "multi_query_group_num*kv_channels"
    sizes = ("num_attention_heads*kv_channels", kv, kv)
    for part, proj in enumerate("qkv"):
        for kind in ("weight", "bias"):
            fused = Source(f"{_GLM_LAYER}.self_attention.query_key_value.{kind}")
            target = f"{_LAYER}.self_attn.{proj}_proj.{kind}"
            yield Convert(target, Split(fused, 0, sizes, part))


_GLM = ModelQuirks(
    name="remote.glm",
    role="architecture",
    match=Match(
        all_of=(
            f"{_GLM_LAYER}.self_attention.query_key_value.*",
            "transformer.embedding.word_embeddings.*",
            "transformer.output_layer.*",
        ),
    ),
    aliases=(
        Alias("transformer.embedding.word_embeddings.*", "model.embed_tokens.*"),
        Alias("transformer.encoder.final_layernorm.*", "model.norm.*"),
        Alias("transformer.output_layer.*", "lm_head.*"),
        Alias(f"{_GLM_LAYER}.self_attention.dense.*", f"{_LAYER}.self_attn.o_proj.*"),
        Alias(f"{_GLM_LAYER}.mlp.dense_h_to_4h.*", f"{_LAYER}.mlp.gate_up_proj.*"),
        Alias(f"{_GLM_LAYER}.mlp.dense_4h_to_h.*", f"{_LAYER}.mlp.down_proj.*"),
        Alias(f"{_GLM_LAYER}.input_layernorm.*", f"{_LAYER}.input_layernorm.*"),
        Alias(f"{_GLM_LAYER}.post_attention_layernorm.*", f"{_LAYER}.post_attention_layernorm.*"),
    ),
    conversions=tuple(_glm_qkv()),
    ties=_TIES,
    extra=_FREQUENCIES,
    no_split=("GlmDecoderLayer", "GLMBlock"),
    why="GLM-4 9B (and ChatGLM2 and 3, its predecessors) is GlmForCausalLM with q, k and v fused",
    url=f"{_MODELS}/glm/convert_glm_weights_to_hf.py",
)

_BAICHUAN = ModelQuirks(
    name="remote.baichuan",
    role="architecture",
    # Baichuan-13B and Baichuan 2 write BaichuanForCausalLM and compute something else.
    match=Match(architectures=("BaiChuanForCausalLM",), any_of=(f"{_LAYER}.self_attn.W_pack.*",)),
    conversions=tuple(_chunks(f"{_LAYER}.self_attn.W_pack")),
    ties=_TIES,
    extra=_FREQUENCIES,
    no_split=("LlamaDecoderLayer", "DecoderLayer"),
    why="Baichuan-7B is LlamaForCausalLM with q, k and v one below the other in W_pack",
    url="https://huggingface.co/baichuan-inc/Baichuan-7B/blob/main/modeling_baichuan.py",
)


def _phi_layer(stored: str, model: str) -> tuple[Alias, ...]:
    names = {"ln": "input_layernorm", "mixer.out_proj": "self_attn.dense", "mlp": "mlp"}
    return tuple(
        Alias(f"{stored}.{old}.{rest}", f"{model}.{new}.{rest}")
        for old, new in names.items()
        for rest in (("**",) if old == "mlp" else ("*",))
    )


def _phi_qkv(stored: str, model: str) -> Iterator[Convert]:
    for kind in ("weight", "bias"):
        for part, proj in enumerate("qkv"):
            node = Chunk(Source(f"{stored}.mixer.Wqkv.{kind}"), 0, 3, part)
            yield Convert(f"{model}.self_attn.{proj}_proj.{kind}", node)


_PHI_NO_SPLIT = ("PhiDecoderLayer", "ParallelBlock")
_PHI_EXTRA = (
    Expected("**.mixer.rotary_emb.inv_freq", "the frequencies follow from the config"),
    Expected("**.mixer.rotary_emb.scale", "the frequencies follow from the config"),
)
_PHI = ModelQuirks(
    name="remote.phi",
    role="architecture",
    match=Match(all_of=("transformer.h.{layer}.mixer.Wqkv.*", "transformer.embd.wte.*")),
    aliases=(
        Alias("transformer.embd.wte.*", "model.embed_tokens.*"),
        Alias("lm_head.ln.*", "model.final_layernorm.*"),
        Alias("lm_head.linear.*", "lm_head.*"),
        *_phi_layer("transformer.h.{layer}", _LAYER),
    ),
    conversions=tuple(_phi_qkv("transformer.h.{layer}", _LAYER)),
    ties=_TIES,
    extra=_PHI_EXTRA,
    no_split=_PHI_NO_SPLIT,
    why="Phi 1, 1.5 and 2 as PhiForCausalLM of Microsoft's own code, with q, k and v fused",
    url=f"{_MODELS}/phi/convert_phi_weights_to_hf.py",
)


def _mixformer(n_layers: int) -> ModelQuirks:
    """Return the record of the sequential Phi with so many layers.

    Embedding and head are the first and last of its numbered layers, so that every number is one
    higher than in the model. A pattern cannot count: each layer has rules of its own.
    """
    head = n_layers + 1
    numbers = [(f"layers.{n + 1}", f"model.layers.{n}") for n in range(n_layers)]
    return ModelQuirks(
        name=f"remote.phi_sequential_{n_layers}",
        role="architecture",
        match=Match(all_of=("layers.0.wte.*", "layers.1.mixer.Wqkv.*", f"layers.{head}.linear.*")),
        aliases=(
            Alias("layers.0.wte.*", "model.embed_tokens.*"),
            Alias(f"layers.{head}.ln.*", "model.final_layernorm.*"),
            Alias(f"layers.{head}.linear.*", "lm_head.*"),
            *(alias for old, new in numbers for alias in _phi_layer(old, new)),
        ),
        conversions=tuple(rule for old, new in numbers for rule in _phi_qkv(old, new)),
        ties=_TIES,
        extra=_PHI_EXTRA,
        no_split=_PHI_NO_SPLIT,
        why=(
            f"Phi of {n_layers} layers as MixFormerSequentialForCausalLM: embedding and head are "
            "numbered layers"
        ),
        # By the prefix alone the library takes layer 1 for its own, which is layer 0 of the model.
        overrides=frozenset({"transformers"}),
        url=f"{_MODELS}/phi/convert_phi_weights_to_hf.py",
    )


RECORDS = (
    _QWEN,
    _INTERNLM,
    _MIMO,
    _MINIMAX_M1,
    _INTERNLM2,
    _GLM,
    _BAICHUAN,
    _PHI,
    _mixformer(24),  # Phi 1 and 1.5
    _mixformer(32),  # Phi 2
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of language models with code of their own."""
    return RECORDS
