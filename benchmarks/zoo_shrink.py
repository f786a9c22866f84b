"""``shrunk``: the config of a transformers model class, made so small that it builds in no time.

A table of regular expressions over attribute names says what each size becomes, the same in every
sub-config, so that what is joined (a projector and the model behind it) still fits. What makes an
architecture interesting stays: layers of every kind, several experts, fewer key-value heads than
heads, and sizes that differ, so that a transposed tensor shows.
"""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["STRATEGIES", "config_classes", "default_config", "shrunk"]

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, EXPERTS = 99, 32, 4, 8, 4

Rule = int | Callable[[int], int]


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _width(value: int) -> int:
    """Return a sixteenth of a number of channels, in multiples of eight; small ones as they are."""
    return value if value < 16 else max(8, value // 16 // 8 * 8)


_SIZES: tuple[tuple[str, Rule], ...] = (
    (r"type_vocab_size|modality_type_vocab_size|num_labels", _at_most(4)),
    (r"ngram_vocab_size_base|make_ngram_vocab_size_divisible_by", _at_most(8)),
    (r"(.*_)?vocab_size(_.*)?|num_embeds|(.*_)?group_vocab", VOCABULARY),
    (r"split_ngram_parts", _at_most(4)),
    (r"codebook_size", _at_most(32)),  # several want a power of two
    (r"num_codevectors_per_group|quantize_?dim|num_clusters", _at_most(24)),
    (r"codebook_dim", _at_most(8)),
    (r"num_codebooks|n_codebooks|num_quantizers|num_code_groups", _at_most(4)),
    (r"n_codes_total", _at_most(4)),
    # layers: 2 unless a list says more, see `_layers`
    (r"(num_|n_|.*_)*(hidden_)?layers?|.*_layers_count|(.*_)?depth|depths?", 0),
    # heads
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", HEADS),
    (r"linear_(key_|value_)?head_dim", HEAD_DIM),
    (r"(mamba|ssm)_(num|n)_heads|n_mamba_heads", lambda v: v if v <= 2 else 8),
    (r"(mamba|ssm)_(d_head|head_dim|headdim)|mamba_headdim", HEAD_DIM),
    (r"index_n_heads|indexer_n_heads", 2),
    (r"index_head_dim|indexer_head_dim", 16),
    (r"index_topk|index_block_size|index_topk_blocks", _at_most(8)),
    (r"(.*_)?(key_value|kv|kv_n)_(attention_)?heads|num_kv_heads|multi_query_heads", _at_most(2)),
    (r"(.*_)?num_query_groups", _at_most(2)),
    (r"(.*_)?(attention_|attn_|n_|num_)+heads?(_.*)?|n_heads?|attention_heads|resampler_heads",
     _at_most(HEADS)),
    (r"qk_rope_head_dim", _at_most(4)),
    (r"qk_head_dim", HEAD_DIM + 4),
    (r"qk_nope_head_dim|(.*_)?head_dim|d_kv|kv_channels|d_head|dim_head|attention_head_size"
     r"|.*_dim_head|global_pointer_head_size", _at_most(HEAD_DIM)),
    (r"rotary_dim", _at_most(4)),
    (r"q_lora_rank|o_lora_rank", _at_most(12)),
    (r"(.*_)?(lora_|low)?rank", _at_most(10)),
    # mixtures of experts
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts|moe_n_experts"
     r"|n_experts|expert_num", _at_most(EXPERTS)),
    (r"(.*_)?experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", _at_most(2)),
    (r"(.*_)?shared_experts", _at_most(2)),
    (r"n_group|num_expert_group", _at_most(2)),
    (r"topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers",
     _at_most(1)),
    (r"decoder_sparse_step|encoder_sparse_step|expert_capacity", _at_most(4)),
    # widths between
    (r"moe_(.*_)?intermediate_size|expert_ffn_hidden_size|moe_ffn.*|expert_intermediate_size", 24),
    (r"(.*_)?shared_expert.*_(size|dim)|share_expert_dim", _at_most(40)),
    (r"(.*_)?intermediate_(size|dim)(_.*)?|(.*_)?ffn_(dim|hidden_size|embed_dim)|d_ff|dim_ff|n_inner"
     r"|(.*_)?mlp_(dim|hidden_size)|(.*_)?linear_units|(.*_)?feed_?forward(_hidden)?_(size|dim)"
     r"|dim_feedforward|d_inner|mlp_intermediate_size|feed_forward_size|moe_hidden_size", 48),
    # positions, images, sound
    (r"(.*_)?(max|left_max|right_max)_.*positions?(_embeddings)?|n_positions|n_ctx|seq_len"
     r"|max_pos_emb|max_seq_len|context_length|(.*_)?max_length|model_max_length"
     r"|max_text_len|position_embedding_size|max_relative_positions", _at_most(64)),
    (r"(.*_)?sliding_window(_size)?|attention_window|local_attention|attention_chunk_size"
     r"|keep_window_size|local_attention_window_len", _at_most(8)),
    (r"num_position_embeddings", 16),
    (r"(.*_)?image_size|input_size|img_size|crop_size|max_img_size|max_image_size|resolution",
     _at_most(32)),
    (r"patch_size|spatial_patch_size", _at_most(8)),
    (r"window_size", _at_most(4)),
    (r"(.*_)?mel_bins|mel_dim|model_in_dim|num_freq|n_mels|mel_vocab_size", _at_most(16)),
    (r"num_queries|num_query_tokens|num_latents|(.*_)?n(um)?_latents|latent_query_num",
     _at_most(12)),
    (r"num_denoising", _at_most(10)),
    (r"num_register_tokens", _at_most(2)),
    (r"hash_byte_group_nb_functions", 1),
    (r"num_conv_pos_embeddings", _at_most(8)),
    (r"num_conv_pos_embedding_groups|upsample_groups", _at_most(4)),
    (r"num_buckets|relative_attention_num_buckets|(.*_)?num_buckets", _at_most(8)),
    (r"max_2d_position_embeddings|max_atomic_number|num_distogram_bins|distogram_bins|num_p.e_bins"
     r"|num_plddt_bins|fourier_dim|outer_hidden_size|posemb_grid_size|pos_emb_height|pos_emb_width",
     _at_most(32)),
    (r"coordinate_size|shape_size", _at_most(8)),
    (r"state_size|ssm_state_size|mamba_d_state|d_state", _at_most(8)),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"num_embeddings", _at_most(24)),
    (r"(.*_)?embedding_size", HIDDEN),
    (r"num_(qa|object|attr|character|bpe|wordpiece)_labels", _at_most(17)),
    (r"mamba_chunk_size|chunk_size", _at_most(8)),
    (r"num_landmarks|segment_means_seq_len|mask_feature_size|projector_hidden_size",
     _at_most(HIDDEN)),
    # everything that must fit something else
    (r"(.*_)?(hidden|model|embed|emb|proj|projection|output|out_hidden)_?(size|dim|dims)(_.*)?"
     r"|d_model|n_embd|dim|hidden|(.*_)?hidden_dim|projection_dim|project_dim|(.*_)?(in|out)put_dim"
     r"|(.*_)?pooler_output_size|(.*_)?embedding_dim(ension)?|(.*_)?hidden_channels|fpn_hidden_size"
     r"|word_embed_proj_dim|visual_feat_dim|hidden_size_global|(.*_)?output_channels"
     r"|projection_size|lru_width|base_channels|(.*_)?conv_channels|prediction_head_size"
     r"|adapter_(in|out)_dim|vit_dim|emb_size|entity_emb_size|latent_channels|codevector_dim",
     lambda v: v if v <= 4 else HIDDEN),
    (r"num_groups", _at_most(8)),
    (r"conv_dim|feature_size", lambda v: v if v <= 32 else HIDDEN),
    (r"d_latents", HIDDEN),
    (r"num_self_attends_per_block|num_res_blocks", _at_most(2)),
    (r"context_size", _at_most(16)),
    (r"num_filters|n_filters", _at_most(4)),
    (r"tdnn_dim|xvector_output_dim|upsample_initial_channel|classifier_proj_size"
     r"|(.*_)?channels|(.*_)?_units", _width),
)  # fmt: skip

_TABLE = tuple((re.compile(pattern), rule) for pattern, rule in _SIZES)
_LAYERS = _TABLE[[rule for _, rule in _SIZES].index(0)][0]
_NOT_LAYERS = re.compile(
    r"(num_)?(feature_|adapter_|kv_shared_|kv_sharing_|mlp_only_|nextn_predict_|lstm_|residual_"
    r"|feat_extract_|look_.*|cross_attention_|rope_scaling_|dense_|moe_|no_rope_|.*feature_)+layers?"
    r"|.*(vision|select|conditional|hidden|accept).*_layer|num_nextn_predict_layers|max_depth|min_depth"
    r"|iou_head_depth|num_kv_shared_layers|kv_source_layers|deep.*"
)
_WIDTHS = re.compile(
    r"hidden_sizes|.*_?channels|.*channel_list|embed_dims?|embed_dim_per_stage|conv_dim|tdnn_dim"
    r"|(.*_)?hidden_sizes|enc_channels|layer_channels|dims|(.*_)?dims|out_features|width(s)?"
    r"|keypoint_encoder_sizes|layer_list_out_channels|backbone_channel_list"
)
_TOKEN = re.compile(
    r"(.*_)?(token_)?(id|index|token)$|.*_(bos|eos|pad|unk|mask|sep|cls)(_.*)?id|.*_ids"
)
_KINDS = re.compile(
    r"layer_types|mlp_layer_types|layers_block_type|block_types|.*_layer_types|indexer_types"
    r"|no_rope_layers|moe_layers|sliding_windows|layer_rope_theta|activation_sparsity_pattern"
    r"|.*_per_layer|kv_source_layers|attn_layers"
)
"""Lists with one item a layer."""


def config_classes(model_class: type) -> Iterator[type]:
    """Yield the config classes that *model_class* may be built from."""
    known: Any = getattr(model_class, "config_class", None)
    yield from [known] if isinstance(known, type) else typing.get_args(known)


def default_config(config_class: Any, model_name: str = "") -> Any:
    """Return a config with all defaults, and with parts where the class asks for some."""
    if model_name in _FOR_CLASS:
        return _complete(config_class(**_FOR_CLASS[model_name]))
    if config_class.__name__ in _PARTS:
        from transformers import AutoConfig

        parts = {
            key: AutoConfig.for_model(kind) if kind else None
            for key, kind in _PARTS[config_class.__name__].items()
        }
        return config_class(**{k: v.to_dict() if v is not None else v for k, v in parts.items()})
    return _complete(config_class())


_FOR_CLASS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]},
    "Data2VecVisionForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "ViltForImagesAndTextClassification": {"modality_type_vocab_size": 3, "num_images": 2},
}
"""What a class wants of its config beyond the defaults."""

_PARTS: dict[str, dict[str, str]] = {
    "EncoderDecoderConfig": {"encoder": "bert", "decoder": "bert"},
    "VisionEncoderDecoderConfig": {"encoder": "vit", "decoder": "gpt2"},
    "SpeechEncoderDecoderConfig": {"encoder": "wav2vec2", "decoder": "bert"},
    "VisionTextDualEncoderConfig": {"vision_config": "clip_vision_model", "text_config": "bert"},
    "RagConfig": {"question_encoder": "dpr", "generator": "bart"},
}


_MISSING: tuple[tuple[str, dict[str, Any]], ...] = (
    (r".*", {"vocab_size": VOCABULARY, "prediction_length": 4}),
    (r"Esm.*", {"pad_token_id": 1, "mask_token_id": 4}),
    (r"HunYuan.*|Ministral.*|Nemotron.*|DiffusionGemma.*|Qwen4Exp.*", {"head_dim": HEAD_DIM}),
    (r"Nemotron.*|Qwen4Exp.*", {"num_key_value_heads": HEADS}),
    (r"Dots1.*", {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    (r"DeepseekOcr2Text.*", {
        "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2,
    }),
    (r"Lfm2Moe.*", {"layer_types": ["conv", "full_attention"]}),
    (r"Chameleon.*|Emu3.*", {"vocabulary_map": {"<image>": 8, "IMGIMGAZ": 9}}),
    (r"Hiera.*", {"decoder_hidden_size": HIDDEN, "decoder_depth": 2, "decoder_num_heads": HEADS}),
    (r"BayesianDetector.*", {"watermarking_depth": 3}),
)  # fmt: skip
"""What some classes need and have no default for: by pattern of the config class, if it is None."""

_OVERRIDES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"GPTNeoConfig", {
        "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
    }),
    (r"MuseSparkAudioConfig", {"num_hidden_layers": 4}),
    (r"Dac.*", {"encoder_hidden_size": 4, "decoder_hidden_size": HIDDEN, "hidden_size": 64}),
    (r"Reformer.*", {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8]}),
    (r"Zamba.*Config", {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    }),
    (r"Gemma3n.*|Gemma4.*", {"num_kv_shared_layers": 0}),
    (r"CohereCompassText.*", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }}),
    (r"EfficientLoFTR.*", {"out_features": [8, 8, 16, 32], "stage_num_blocks": [1, 1, 1, 1]}),
    (r"Mamba2Config", {"num_heads": 8, "head_dim": HEAD_DIM}),
    (r"WavTokenizer.*", {"codebook_dim": HIDDEN}),
    (r"Perceiver.*", {"num_self_attention_heads": 1, "num_cross_attention_heads": 1}),
    (r"BridgeTower.*", {
        "hidden_size": 64, "num_attention_heads": 1, "contrastive_hidden_size": 64,
    }),
    (r"Detr.*|ConditionalDetr.*", {"encoder_attention_heads": 8, "decoder_attention_heads": 8}),
    (r"Esmc.*", {"num_key_value_heads": HEADS}),
    (r"Gemma4Assistant.*", {"hidden_size_per_layer_input": 0}),
)  # fmt: skip
"""What the table cannot say, by pattern of the config class."""


def _parts(config: Any) -> Iterator[Any]:
    """Yield *config* and every config in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _complete(config: Any) -> Any:
    """Give *config* what it needs to build and has no default for."""
    for part in _parts(config):
        for pattern, values in _MISSING:
            if re.fullmatch(pattern, type(part).__name__):
                for name, value in values.items():
                    if name in vars(part) and vars(part)[name] is None:
                        _set(part, name, copy.deepcopy(value))
        backbone = vars(part).get("backbone_config")
        if getattr(backbone, "model_type", "") == "timm_backbone":
            _set(part, "backbone_config", _plain_backbone())
            _set(part, "use_timm_backbone", False)
    return config


def _plain_backbone() -> Any:
    """Return a backbone that needs no other package; timm's are not installed everywhere."""
    from transformers import ResNetConfig

    kind: Any = ResNetConfig
    return kind(out_features=["stage2", "stage3", "stage4"])


def _override(config: Any) -> None:
    for part in _parts(config):
        for pattern, values in _OVERRIDES:
            if re.fullmatch(pattern, type(part).__name__):
                for name, value in values.items():
                    if name in vars(part):
                        _set(part, name, copy.deepcopy(value))


def _constants(config: Any) -> None:
    """Give every size the value of the table."""
    _shrink(config, lambda name, value: _by_table(name, value))


def _proportional(config: Any) -> None:
    """Divide widths by sixteen instead, keeping their relations; everything else by the table."""

    def size(name: str, value: int) -> int:
        wide = re.search(r"hidden|dim|d_model|channel|embd|size$|d_ff|d_kv", name)
        other = re.search(r"vocab|image|patch|position|codebook|window|kernel", name)
        return _width(value) if value >= 64 and wide and not other else _by_table(name, value)

    _shrink(config, size)


def _shallow(config: Any) -> None:
    """Keep all widths; fewer layers, experts and words only."""

    def size(name: str, value: int) -> int:
        kept = re.search(r"vocab_size|experts?$|position", name) or _is_layers(name)
        return _by_table(name, value) if kept else value

    _shrink(config, size)


def _untouched(config: Any) -> None:
    """Change nothing."""


STRATEGIES: tuple[Callable[[Any], None], ...] = (_constants, _proportional, _shallow, _untouched)
"""Ways to shrink, the first that builds is taken."""


def shrunk(config: Any, strategy: Callable[[Any], None]) -> Any:
    """Return a small copy of *config*, as it comes back from its own JSON."""
    small = copy.deepcopy(config)
    strategy(small)
    if strategy is not _untouched:
        _override(small)
    data = copy.deepcopy(small.to_dict())
    if strategy is not _untouched:
        _cut_per_layer(data, config.to_dict())
    return type(small).from_dict(data)


def _cut_per_layer(small: dict[str, Any], whole: Mapping[str, Any]) -> None:
    """Keep what ``per_layer_config`` says of the layers that are left, under their new numbers."""
    for key, value in small.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            _cut_per_layer(value, whole[key])
    said = small.get("per_layer_config")
    if said:
        of = {int(key): value for key, value in said.items()}
        small["per_layer_config"] = {
            new: {key: _other_size(key, value) for key, value in of[old].items()}
            for new, old in enumerate(_layers(SimpleNamespace(**whole)))
            if old in of
        }


def _other_size(name: str, value: Any) -> Any:
    """Return the size of a layer that is not like the others."""
    plain = isinstance(value, int) and not isinstance(value, bool)
    return 2 * HEAD_DIM if name == "head_dim" else _by_table(name, value) if plain else value


def _shrink(config: Any, size: Callable[[str, int], int]) -> None:
    layers = _layers(config)
    stages = _stages(config)
    if stages:
        layers = range(stages)
    for name, value in list(vars(config).items()):
        if name.startswith("_") or value is None or isinstance(value, (bool, str, float)):
            continue
        new = _shrunk_value(name, value, layers, size)
        if new is not value and new != value:
            _set(config, name, new)
    _mend(config)


def _stages(config: Any) -> int:
    """Cut a backbone that numbers its layers as stages; return how many are left, 0 if it does not.

    As many stay as features are asked for, two at least.
    """
    have = vars(config)
    names, depth = have.get("stage_names"), have.get("num_hidden_layers")
    if not names or depth is None or depth < 5 or len(names) != depth + 1:
        return 0
    wanted = max(2, len(have.get("_out_indices") or ()))
    _set(config, "stage_names", names[: wanted + 1])
    if have.get("_out_indices"):
        kept = list(range(wanted + 1 - len(have["_out_indices"]), wanted + 1))
        vars(config)["_out_indices"] = kept
        vars(config)["_out_features"] = [names[at] for at in kept]
    return wanted


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # strict configs refuse what they did not foresee
        vars(config)[name] = value


def _shrunk_value(
    name: str, value: Any, layers: Sequence[int], size: Callable[[str, int], int]
) -> Any:
    if hasattr(value, "to_dict"):
        _shrink(value, size)
        return value
    if isinstance(value, int):
        return len(layers) if _is_layers(name) and value > len(layers) else size(name, value)
    if isinstance(value, dict):
        return _shrunk_dict(name, value, layers, size)
    if isinstance(value, (list, tuple)):
        return _shrunk_list(name, value, layers, size)
    return value


def _shrunk_dict(
    name: str, value: dict[Any, Any], layers: Sequence[int], size: Callable[[str, int], int]
) -> Any:
    if name in ("id2label", "label2id"):
        return value
    if name == "per_layer_config":
        of = {int(key): item for key, item in value.items()}
        kept = {new: of[old] for new, old in enumerate(layers) if old in of}
        return {key: _shrunk_dict("", item, layers, size) for key, item in kept.items()}
    if "rope" in name:
        return {key: _rope(key, item) for key, item in value.items()}
    if not all(isinstance(key, str) for key in value):
        return value
    return {
        key: item
        if isinstance(item, (bool, str)) or item is None
        else _shrunk_value(key, item, layers, size)
        for key, item in value.items()
    }


def _rope(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rope(k, v) for k, v in value.items()}
    if key == "mrope_section" and isinstance(value, (list, tuple)):
        return [2, 1, 1][: len(value)]
    if key.endswith("_factor") and isinstance(value, (list, tuple)):
        return list(value)[: HEAD_DIM // 2]
    return value


def _shrunk_list(
    name: str, value: Any, layers: Sequence[int], size: Callable[[str, int], int]
) -> Any:
    kind = type(value)
    if name in ("intermediate_size",) and len(value) > 4:
        return kind(size(name, value[i]) for i in layers)
    depth = max(layers, default=0) + 1
    if _KINDS.fullmatch(name) and len(value) >= depth:
        kept = [value[i] for i in layers]
        if name == "kv_source_layers":
            kept = list(range(len(layers)))
        return kind(kept)
    flat = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if not flat or not value:
        return value
    if _TOKEN.fullmatch(name):
        return kind(v if v < VOCABULARY else 3 + v % 89 for v in value)
    if re.search(
        r"depths|num_blocks|layers_per|blocks_per|num_block_repeats|numb_of_layers|block_repeats",
        name,
    ):
        return kind(min(v, 2) for v in value)
    if re.search(r"index|indices|_layers?$|layer_ids", name) and "stage" not in name:
        return _indexes(value, len(layers))
    if re.fullmatch(r"num_(attention_)?heads.*|.*_heads", name):
        return kind(HEADS if v > 2 else v for v in value)
    if name == "channel_multiplier":
        return kind(1 for _ in value)
    if re.fullmatch(r"image_size|patch_size|img_size", name):
        return kind(size(name, v) for v in value)
    if _WIDTHS.fullmatch(name):
        return kind(_width(v) for v in value)
    return value


def _indexes(value: Any, n_layers: int) -> Any:
    """Return indexes of layers that are still there: the first and the last ones."""
    new: list[int] = []
    for position, index in enumerate(value):
        if index < 0:
            new.append(max(index, -n_layers))
        elif position < n_layers:
            new.append(min(index, position))
    return type(value)(dict.fromkeys(new)) if len(set(value)) == len(value) else type(value)(new)


def _is_layers(name: str) -> bool:
    return bool(_LAYERS.fullmatch(name)) and not _NOT_LAYERS.fullmatch(name)


def _layers(config: Any) -> Sequence[int]:
    """Return the positions of the layers to keep: one of every kind, two at least."""
    lists = [
        value
        for name, value in vars(config).items()
        if _KINDS.fullmatch(name) and isinstance(value, (list, tuple)) and len(value) > 2
        and name != "kv_source_layers"
    ]  # fmt: skip
    depth = getattr(config, "num_hidden_layers", None)
    lists = [value for value in lists if not isinstance(depth, int) or len(value) == depth]
    if not lists:
        return range(2)
    kept: dict[Any, int] = {}
    for at, row in enumerate(zip(*lists, strict=False)):
        kept.setdefault(repr(row), at)
    positions = sorted(kept.values())[:5]
    rest = (at for at in range(min(len(value) for value in lists)) if at not in positions)
    while len(positions) < 2:
        positions.append(next(rest))
    return sorted(positions)


def _by_table(name: str, value: int) -> int:
    if value < 0:
        return value
    if _TOKEN.fullmatch(name):
        return value if value < VOCABULARY else _token(name)
    for pattern, rule in _TABLE:
        if pattern.fullmatch(name):
            if rule == 0:
                return min(value, 2) if _is_layers(name) else value
            return rule(value) if callable(rule) else min(value, rule)
    return value


def _token(name: str) -> int:
    """Return a token of its own for each name, far from the low ones that are taken."""
    return 30 + sum(name.encode()) % 67


def _mend(config: Any) -> None:
    """Make what was independent of each other agree again."""
    have = vars(config)
    heads = have.get("num_attention_heads")
    for key in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(heads, int) and isinstance(have.get(key), int) and heads % max(1, have[key]):
            _set(config, key, heads)
