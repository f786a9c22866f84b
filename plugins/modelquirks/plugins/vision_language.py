"""Vision-language models in the layouts of their own code: LLaVA, InternVL, MiniCPM-V.

transformers holds the three parts of such a model as ``model.vision_tower``,
``model.multi_modal_projector`` and ``model.language_model``, with the head outside. A part that is
not stored stays missing: LLaVA 1.5 was given away without its vision tower, which is CLIP's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelquirks.plugins.remote_code import internlm2_aliases, internlm2_qkv
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Chunk, Source
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Tie

__all__ = ["RECORDS", "modelquirks_records"]

_MODELS = "https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models"
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_LANGUAGE = "model.language_model"
_TIES = (Tie((f"{_LANGUAGE}.embed_tokens.weight", "lm_head.weight")),)

_LLAVA = ModelQuirks(
    name="vlm.llava",
    role="architecture",
    match=Match(
        all_of=("model.mm_projector.0.*", "model.mm_projector.2.*", "model.layers.{layer}.**"),
        none_of=("**.vision_towers.**", "model.vision_encoder.**"),  # kin with other towers
    ),
    aliases=(
        Alias(f"{_TOWER}.vision_tower.vision_model.**", f"{_TOWER}.**"),
        Alias("model.mm_projector.0.*", f"{_PROJECTOR}.linear_1.*"),
        Alias("model.mm_projector.2.*", f"{_PROJECTOR}.linear_2.*"),
        Alias("model.embed_tokens.*", f"{_LANGUAGE}.embed_tokens.*"),
        Alias("model.layers.**", f"{_LANGUAGE}.layers.**"),
        Alias("model.norm.*", f"{_LANGUAGE}.norm.*"),
    ),
    # Some versions of transformers keep the prefix of CLIP's own class.
    conversions=(Convert(f"{_TOWER}.vision_model.**", Source(f"{_TOWER}.**")),),
    ties=_TIES,
    extra=(
        Expected("**.rotary_emb.inv_freq", "the frequencies follow from the config"),
        Expected("**.embeddings.position_ids", "counts from 0"),
    ),
    no_split=("LlamaDecoderLayer", "CLIPEncoderLayer"),
    why=(
        "LLaVA 1.5 and 1.6 as LlavaLlamaForCausalLM: the language model is the whole, with vision "
        "tower and projector inside"
    ),
    url=f"{_MODELS}/llava/convert_llava_weights_to_hf.py",
)

_VISION_LAYER, _TOWER_LAYER = (
    "vision_model.encoder.layers.{layer}",
    f"{_TOWER}.encoder.layer.{{layer}}",
)


def _internvl_aliases() -> Iterator[Alias]:
    yield Alias("vision_model.embeddings.class_embedding", f"{_TOWER}.embeddings.cls_token")
    embeddings = {"position_embedding": "position_embeddings"}
    for old, new in embeddings.items():
        yield Alias(f"vision_model.embeddings.{old}", f"{_TOWER}.embeddings.{new}")
    yield Alias(
        "vision_model.embeddings.patch_embedding.*",
        f"{_TOWER}.embeddings.patch_embeddings.projection.*",
    )
    layer = {
        "ls1": "lambda_1",
        "ls2": "lambda_2",
        "attn.proj.*": "attention.projection_layer.*",
        "attn.q_norm.*": "attention.q_norm.*",
        "attn.k_norm.*": "attention.k_norm.*",
        "norm1.*": "layernorm_before.*",
        "norm2.*": "layernorm_after.*",
        "mlp.**": "mlp.**",
    }
    for old, new in layer.items():
        yield Alias(f"{_VISION_LAYER}.{old}", f"{_TOWER_LAYER}.{new}")
    for old, new in (("0", "layer_norm"), ("1", "linear_1"), ("3", "linear_2")):
        yield Alias(f"mlp1.{old}.*", f"{_PROJECTOR}.{new}.*")
    # The language model is InternLM2, or one of transformers (Qwen2, Llama).
    yield Alias("language_model.output.*", "lm_head.*")
    yield Alias("language_model.lm_head.*", "lm_head.*")
    yield Alias("language_model.model.tok_embeddings.*", f"{_LANGUAGE}.embed_tokens.*")
    yield from internlm2_aliases(
        "language_model.model.layers.{layer}", f"{_LANGUAGE}.layers.{{layer}}"
    )
    yield Alias("language_model.model.**", f"{_LANGUAGE}.**")


def _internvl_qkv() -> Iterator[Convert]:
    for kind in ("weight", "bias"):
        for part, proj in enumerate("qkv"):
            node = Chunk(Source(f"{_VISION_LAYER}.attn.qkv.{kind}"), 0, 3, part)
            yield Convert(f"{_TOWER_LAYER}.attention.{proj}_proj.{kind}", node)
    yield from internlm2_qkv(f"{_LANGUAGE}.layers.{{layer}}", f"{_LANGUAGE}.layers.{{layer}}")


_INTERNVL = ModelQuirks(
    name="vlm.internvl",
    role="architecture",
    match=Match(
        all_of=(f"{_VISION_LAYER}.attn.qkv.*", "mlp1.1.*", "mlp1.3.*", "language_model.model.**")
    ),
    aliases=tuple(_internvl_aliases()),
    conversions=tuple(_internvl_qkv()),
    ties=_TIES,
    no_split=(
        "InternVLVisionLayer",
        "Qwen2DecoderLayer",
        "LlamaDecoderLayer",
        "InternLM2DecoderLayer",
    ),
    why=(
        "InternVL 2 to 3 as OpenGVLab's InternVLChatModel: mlp1 is the projector, q, k and v of "
        "the vision tower are one matrix, the language model may be InternLM2"
    ),
    url=f"{_MODELS}/internvl/convert_internvl_weights_to_hf.py",
)

_MINICPM_V = ModelQuirks(
    name="vlm.minicpm_v",
    role="architecture",
    match=Match(all_of=("llm.model.embed_tokens.*", "vpm.**", "resampler.**")),
    aliases=(Alias("llm.**", "**"),),
    ties=(Tie(("model.embed_tokens.weight", "lm_head.weight")),),
    why=(
        "the language model of MiniCPM-V 2.5 and 2.6 is one of transformers (Llama, Qwen2) below "
        "'llm'; for the whole with its resampler transformers has no class"
    ),
    url="https://huggingface.co/openbmb/MiniCPM-V-2_6/blob/main/modeling_minicpmv.py",
)

RECORDS = (_LLAVA, _INTERNVL, _MINICPM_V)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of vision-language models."""
    return RECORDS
