"""Real architectures: transformers' own classes and files, shrunk."""

import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from modelquirks.planner import Dispatcher, PlanError, load_checkpoint_and_dispatch

Theirs = Callable[..., Any]

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU: dict[str, Any] = {"": "cpu"}
LAYER_ON_DISK: dict[str, Any] = {"": "cpu", "model.layers.1": "disk"}
META_ERROR = "Cannot copy out of meta tensor"

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS_OF_8 = {**TEXT, "head_dim": 8}
TIED: dict[str, Any] = {**TEXT, "tie_word_embeddings": True}
EXPERTS = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL_EXPERTS = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    **TEXT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

EXPERTS_ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "Mixtral": {**LOCAL_EXPERTS, "head_dim": 8},
    "DeepseekV3": {
        **ROUTED_EXPERTS,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "Olmoe": EXPERTS,
    "Phimoe": LOCAL_EXPERTS,
    "Glm4Moe": {**ROUTED_EXPERTS, "head_dim": 8},
    "Jamba": {
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
}
OTHER_PREFIX: dict[str, dict[str, Any]] = {
    "Llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
    },
    "Qwen2VL": {
        "text_config": {
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "num_heads": 2,
            "hidden_size": 16,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
    },
    "Gemma3": {
        "text_config": HEADS_OF_8,
        "vision_config": {**VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "PaliGemma": {
        "text_config": {**HEADS_OF_8, "model_type": "gemma"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 16},
        "projection_dim": 16,
    },
    "Mistral3": {
        "text_config": {**HEADS_OF_8, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
}
TIED_LMS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TIED,
    "Qwen3ForCausalLM": {**TIED, "head_dim": 8},
    "GPT2LMHeadModel": {
        "vocab_size": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "OPTForCausalLM": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "BloomForCausalLM": {**TEXT, "n_layer": 2, "n_head": 2},
    "Gemma2ForCausalLM": {**TIED, "head_dim": 8},
}
PLAIN: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {**LOCAL_EXPERTS, "intermediate_size_mlp": 32, "head_dim": 8},
    "T5ForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
    },
    "BartForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    },
    "BertForMaskedLM": TEXT,
    "GptOssForCausalLM": {**LOCAL_EXPERTS, "head_dim": 8},
}


class Saved(NamedTuple):
    """A model as transformers saved it."""

    model: nn.Module
    folder: Path
    logits: torch.Tensor

    def again(self, *, meta: bool) -> nn.Module:
        """Return the same model with other weights, or without any."""
        kind: Any = type(self.model)
        if not meta:
            return kind(self.model.config).eval()  # type: ignore[no-any-return]
        with init_empty_weights():
            model = kind(self.model.config).eval()
        model.tie_weights()
        return model  # type: ignore[no-any-return]


Saves = Callable[[str, dict[str, Any]], Saved]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    words = torch.tensor([[1, 4, 2, 8, 5, 7]])
    both = getattr(model, "config").is_encoder_decoder  # noqa: B009  # a Module may have anything
    more = {"decoder_input_ids": words} if both else {}
    result: torch.Tensor = model(input_ids=words, **more).logits
    return result


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Give the function that makes a model of transformers and saves it, each once."""
    known: dict[str, Saved] = {}

    def save(name: str, settings: dict[str, Any]) -> Saved:
        if name not in known:
            kind = getattr(transformers, name)
            torch.manual_seed(0)
            model = kind(kind.config_class(**settings)).eval()
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            known[name] = Saved(model, folder, logits(model))
        return known[name]

    return save


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("name", EXPERTS_ONE_BY_ONE)
def test_experts_stored_one_by_one_are_stacked(
    saved: Saves, theirs: Theirs, name: str, meta: bool
) -> None:
    """accelerate: 8 of 8 fail with the unnamed meta error; a real model gets a warning and wrong
    logits (case 3).
    """
    source = saved(f"{name}ForCausalLM", EXPERTS_ONE_BY_ONE[name])
    if meta:
        with pytest.raises(NotImplementedError, match=META_ERROR) as obscure:
            theirs(source.again(meta=True), str(source.folder), device_map=CPU)
        assert "experts" not in str(obscure.value)
    else:
        said = theirs(source.again(meta=False), str(source.folder), device_map=CPU)
        assert any("were not used" in text for text in said.warnings)
        assert not torch.equal(logits(said.model), source.logits)
    for device_map in (CPU, LAYER_ON_DISK):
        model = source.again(meta=meta)
        load_checkpoint_and_dispatch(model, source.folder, device_map=device_map)
        assert torch.equal(logits(model), source.logits)


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("name", TIED_LMS)
def test_tied_language_models_are_right(
    saved: Saves, theirs: Theirs, name: str, meta: bool
) -> None:
    """accelerate: right on meta; real, 6 of 6 give silently wrong logits (case 1)."""
    source = saved(name, TIED_LMS[name])
    said = theirs(source.again(meta=meta), str(source.folder), device_map=CPU)
    assert torch.equal(logits(said.model), source.logits) == meta
    assert said.warnings == []
    for device_map in (None, CPU):
        model: Any = source.again(meta=meta)
        load_checkpoint_and_dispatch(model, source.folder, device_map=device_map)
        assert torch.equal(logits(model), source.logits)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_right_with_accelerate_stays_right(saved: Saves, name: str, meta: bool) -> None:
    """accelerate: Llama 4, T5, BART, BERT and GPT-OSS in bf16 are right on meta."""
    source = saved(name, PLAIN[name])
    model = source.again(meta=meta)
    load_checkpoint_and_dispatch(model, source.folder, device_map=CPU)
    assert torch.equal(logits(model), source.logits)


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("name", OTHER_PREFIX)
def test_the_former_prefix_loads_as_transformers_loads_it(
    saved: Saves, theirs: Theirs, name: str, meta: bool
) -> None:
    """accelerate: 5 of 5 fail with the unnamed meta error, nearly all keys unmatched; a real model
    gets a warning and random weights (case 4).
    """
    source = saved(f"{name}ForConditionalGeneration", OTHER_PREFIX[name])
    if meta:
        with pytest.raises(NotImplementedError, match=META_ERROR):
            theirs(source.again(meta=True), str(source.folder), device_map=CPU)
    else:
        said = theirs(source.again(meta=False), str(source.folder), device_map=CPU)
        assert any("were not used" in text for text in said.warnings)
        assert not torch.equal(logits(said.model), source.logits)

    kind: Any = type(source.model)
    state = kind.from_pretrained(source.folder).state_dict()
    layer_on_disk = {"": "cpu", "model.language_model.layers.1": "disk"}
    for device_map in (CPU, layer_on_disk):
        model = source.again(meta=meta)
        load_checkpoint_and_dispatch(model, source.folder, device_map=device_map)
        assert torch.equal(logits(model), source.logits)
        here = {n: tensor for n, tensor in model.state_dict().items() if not tensor.is_meta}
        assert all(torch.equal(tensor, state[n]) for n, tensor in here.items())
        assert here.keys() == state.keys() or device_map is layer_on_disk


@pytest.mark.parametrize("name", OTHER_PREFIX)
def test_without_transformers_own_rules_the_former_prefix_is_refused_and_the_aliases_mend_it(
    saved: Saves, name: str
) -> None:
    source = saved(f"{name}ForConditionalGeneration", OTHER_PREFIX[name])
    model = source.again(meta=True)
    options: dict[str, Any] = {"device_map": CPU, "no_quirks": ["transformers"]}
    refusal = Dispatcher().plan(source.folder, model=model, **options).refusal()
    assert repr(next(name for name, _ in source.model.named_parameters())) in refusal
    with pytest.raises(PlanError, match=re.escape(refusal)):
        Dispatcher().plan(source.folder, model=model, **options).execute(model)
    aliases = re.findall(r"--alias '(\S+)'", refusal)
    plan = Dispatcher().plan(source.folder, model=model, aliases=aliases, **options)
    plan.execute(model)
    assert torch.equal(logits(model), source.logits)
    state = source.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="session")
def packed_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Give a tiny GPT-OSS in the layout of the release, and what transformers makes of it."""
    make: Callable[[Path], Path] = runpy.run_path(str(EXAMPLES / "tiny_gpt_oss.py"))["make"]
    folder = make(tmp_path_factory.mktemp("gpt_oss_mxfp4"))
    kind: Any = transformers
    model = kind.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=kind.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).eval()
    return Saved(model, folder, logits(model))


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
def test_packed_experts_of_gpt_oss_are_dequantised(
    packed_gpt_oss: Saved, theirs: Theirs, meta: bool
) -> None:
    """accelerate: with ``_blocks`` and ``_scales`` it fails on meta; a real model gets a warning,
    and its experts stay as they were (case 3).
    """
    source = packed_gpt_oss
    if meta:
        with pytest.raises(NotImplementedError, match=META_ERROR):
            theirs(source.again(meta=True), str(source.folder), device_map=CPU)
    else:
        said = theirs(source.again(meta=False), str(source.folder), device_map=CPU)
        assert any("_blocks" in text for text in said.warnings)
        assert not torch.equal(logits(said.model), source.logits)
    for device_map in (CPU, LAYER_ON_DISK):
        model = source.again(meta=meta)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_checkpoint_and_dispatch(
                model,
                source.folder,
                device_map=device_map,
                dtype=torch.bfloat16,
                dequantize=True,
            )
        assert torch.equal(logits(model), source.logits)
