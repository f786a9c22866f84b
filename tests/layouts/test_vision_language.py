"""LLaVA, InternVL and MiniCPM-V as their own code saves them, into the classes of transformers.

The layouts are made by undoing the scripts that transformers converted the releases with.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modelquirks.planner import Dispatcher

Tensors = dict[str, torch.Tensor]
Arrives = Callable[..., None]
Randomized = Callable[[nn.Module], nn.Module]

DIM, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8
TEXT: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def renamed(tensors: Mapping[str, torch.Tensor], rules: Mapping[str, str]) -> Tensors:
    """Return the tensors with each name changed by the first rule that fits."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, new in rules.items():
            changed, count = re.subn(f"^{pattern}", new, name)
            if count:
                name = changed
                break
        found[name] = tensor
    return found


LLAVA = {
    r"model\.vision_tower\.(vision_model\.)?": "model.vision_tower.vision_tower.vision_model.",
    r"model\.multi_modal_projector\.linear_1": "model.mm_projector.0",
    r"model\.multi_modal_projector\.linear_2": "model.mm_projector.2",
    r"model\.language_model\.": "model.",
}


def llava() -> nn.Module:
    vision = {**VISION, "image_size": 28, "model_type": "clip_vision_model"}
    text = {**TEXT, "model_type": "llama"}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


def llava_next() -> nn.Module:
    vision = {**VISION, "image_size": 28, "model_type": "clip_vision_model"}
    text = {**TEXT, "model_type": "llama"}
    config = LlavaNextConfig(text_config=text, vision_config=vision)
    return LlavaNextForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, llava_next])
def test_llava(make: Callable[[], nn.Module], arrives: Arrives, randomized: Randomized) -> None:
    model = randomized(make())
    stored = renamed(model.state_dict(), LLAVA)
    assert ("model.image_newline" in stored) == (make is llava_next)
    arrives(
        stored, {"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"]}, model, make
    )


def test_llava_without_its_vision_tower_is_told_by_name(
    dispatcher: Dispatcher, randomized: Randomized, tmp_path: Path
) -> None:
    """As LLaVA 1.5 was given away: the tower comes from a repository of its own."""
    stored = renamed(randomized(llava()).state_dict(), LLAVA)
    kept = {name: t for name, t in stored.items() if "vision_tower" not in name}
    torch.save(kept, tmp_path / "pytorch_model.bin")
    plan = dispatcher.plan(tmp_path, model=llava(), max_memory={"cpu": "1GiB"})
    assert not plan.ok
    assert plan.audit.missing and all("vision_tower" in name for name in plan.audit.missing)


def internvl(language: str, normalized: bool) -> InternVLForConditionalGeneration:
    vision = {
        **VISION,
        "image_size": [28, 28],
        "patch_size": [14, 14],
        "attention_bias": not normalized,
        "use_qk_norm": normalized,
    }
    text = {**TEXT, "model_type": language}
    config = InternVLConfig(text_config=text, vision_config=vision)
    return InternVLForConditionalGeneration(config)


INTERNVL = {
    r"model\.vision_tower\.embeddings\.cls_token": "vision_model.embeddings.class_embedding",
    r"model\.vision_tower\.embeddings\.position_embeddings": (
        "vision_model.embeddings.position_embedding"
    ),
    r"model\.vision_tower\.embeddings\.patch_embeddings\.projection": (
        "vision_model.embeddings.patch_embedding"
    ),
    r"model\.vision_tower\.encoder\.layer\.": "vision_model.encoder.layers.",
    r"model\.multi_modal_projector\.layer_norm": "mlp1.0",
    r"model\.multi_modal_projector\.linear_1": "mlp1.1",
    r"model\.multi_modal_projector\.linear_2": "mlp1.3",
    r"model\.language_model\.": "language_model.model.",
    r"lm_head": "language_model.lm_head",
}
IN_LAYER = {
    "lambda_": "ls",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "language_model.lm_head": "language_model.output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def replaced(tensors: Tensors, where: str, names: Mapping[str, str]) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new) if name.startswith(where) else name
        found[name] = tensor
    return found


def fused(tensors: Tensors, q: str, to: str, join: Callable[..., torch.Tensor]) -> Tensors:
    """Return the tensors with q, k and v in one."""
    rest = [q.replace("q_proj", proj) for proj in ("k_proj", "v_proj")]
    found: Tensors = {}
    for name, tensor in tensors.items():
        if q in name:
            others = [tensors[name.replace(q, other)] for other in rest]
            found[name.replace(q, to)] = join(tensor, *others)
        elif not any(other in name for other in rest):
            found[name] = tensor
    return found


def below(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def by_group(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([p.view(KV_HEADS, -1, HEAD, *p.shape[1:]) for p in parts], 1).flatten(0, 2)


@pytest.mark.parametrize(("language", "normalized"), [("qwen2", False), ("llama", True)])
def test_internvl(
    language: str, normalized: bool, arrives: Arrives, randomized: Randomized
) -> None:
    """With Qwen2, and with InternLM2, which transformers has as Llama."""

    def make() -> nn.Module:
        return internvl(language, normalized)

    model = randomized(make())
    stored = replaced(renamed(model.state_dict(), INTERNVL), "vision_model", IN_LAYER)
    vision = {name: t for name, t in stored.items() if name.startswith("vision_model")}
    others = {name: t for name, t in stored.items() if name not in vision}
    if language == "llama":
        others = fused(others, "self_attn.q_proj", "attention.wqkv", by_group)
        others = replaced(others, "language_model", INTERNLM2)
    stored = {**fused(vision, "attn.q_proj", "attn.qkv", below), **others}
    arrives(stored, {"model_type": "internvl_chat", "llm_config": TEXT}, model, make)


def test_minicpm_v_gives_its_language_model(
    dispatcher: Dispatcher, randomized: Randomized, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Qwen2ForCausalLM(Qwen2Config.from_dict(TEXT))

    stored = {f"llm.{name}": t for name, t in randomized(make()).state_dict().items()}
    stored |= {"vpm.post_layernorm.weight": torch.ones(2), "resampler.query": torch.ones(2)}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    plan = dispatcher.plan(tmp_path, model=make(), max_memory={"cpu": "1GiB"})
    assert plan.ok and plan.audit.coverage == 1.0
    assert set(plan.audit.unexpected) == {"vpm.post_layernorm.weight", "resampler.query"}
