"""Models with code of their own, into the classes of transformers that compute the same.

The original layouts are made here from the models, undoing what the public conversion scripts and
the original modules say; no rule of ours takes part.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modelquirks.planner import Plan

Tensors = dict[str, torch.Tensor]
Arrives = Callable[..., None]
Randomized = Callable[[nn.Module], nn.Module]
Makers = Mapping[str, Callable[[dict[str, Any]], nn.Module]]
Planned = Callable[[str, Callable[[dict[str, Any]], nn.Module]], Plan]

DIM, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8
BASE: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
QKV = ("q_proj", "k_proj", "v_proj")


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return the tensors with each text replaced, in order."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def fused(
    tensors: Mapping[str, torch.Tensor],
    to: str,
    join: Callable[..., torch.Tensor] = lambda *parts: torch.cat(parts),
) -> Tensors:
    """Return the tensors with q, k and v of each layer in one, called *to* in place of q_proj."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", proj)] for proj in QKV]
            found[name.replace("self_attn.q_proj", to)] = join(*parts)
        elif not any(proj in name for proj in QKV):
            found[name] = tensor
    return found


def test_qwen_1(arrives: Arrives, randomized: Randomized) -> None:
    def make() -> Qwen2ForCausalLM:
        return Qwen2ForCausalLM(Qwen2Config.from_dict({**BASE, "num_key_value_heads": HEADS}))

    model = randomized(make())
    stored = renamed(
        fused(model.state_dict(), "attn.c_attn"),
        {
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.w1",  # a1 * silu(a2) in modeling_qwen.py
            "mlp.gate_proj": "mlp.w2",
            "mlp.down_proj": "mlp.c_proj",
        },
    )
    assert "transformer.h.1.attn.c_attn.bias" in stored
    config = {"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "hidden_size": DIM}
    arrives(stored, config, model, make)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_internlm2(bias: bool, kv_heads: int, arrives: Arrives, randomized: Randomized) -> None:
    settings = {**BASE, "num_key_value_heads": kv_heads}

    def make() -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig.from_dict({**settings, "attention_bias": bias}))

    def by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Undo rearrange(qkv, "(h gs d) z -> h gs d z") and the cuts that follow it."""
        parts = [part.view(kv_heads, -1, HEAD, *part.shape[1:]) for part in (q, k, v)]
        return torch.cat(parts, 1).flatten(0, 2)

    model = randomized(make())
    stored = renamed(
        fused(model.state_dict(), "attention.wqkv", by_group),
        {
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.down_proj": "feed_forward.w2",
            "mlp.up_proj": "feed_forward.w3",
        },
    )
    arrives(stored, {"model_type": "internlm2", **settings}, model, make)


def test_glm_4(arrives: Arrives, randomized: Randomized) -> None:
    def make() -> GlmForCausalLM:
        sizes = {**BASE, "num_key_value_heads": KV_HEADS, "head_dim": 2 * HEAD}
        return GlmForCausalLM(GlmConfig.from_dict({**sizes, "attention_bias": True}))

    model = randomized(make())
    stored = renamed(
        fused(model.state_dict(), "self_attention.query_key_value"),
        {
            "lm_head": "transformer.output_layer",
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers": "transformer.encoder.layers",
            "self_attn.o_proj": "self_attention.dense",
            "gate_up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
        },
    )
    stored["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    config = {
        "model_type": "chatglm",
        "num_attention_heads": HEADS,
        "multi_query_group_num": KV_HEADS,
        "kv_channels": 2 * HEAD,
    }
    arrives(stored, config, model, make)


def test_baichuan_7b(arrives: Arrives, randomized: Randomized) -> None:
    def make() -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig.from_dict(BASE))

    model = randomized(make())
    stored = fused(model.state_dict(), "self_attn.W_pack")
    for layer in range(2):
        stored[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    arrives(stored, {"architectures": ["BaiChuanForCausalLM"]}, model, make)


def phi(layers: int) -> PhiForCausalLM:
    return PhiForCausalLM(PhiConfig.from_dict({**BASE, "num_hidden_layers": layers}))


PHI = {"input_layernorm": "ln", "self_attn.dense": "mixer.out_proj"}


def test_phi(arrives: Arrives, randomized: Randomized) -> None:
    model = randomized(phi(2))
    names = {
        "lm_head": "lm_head.linear",
        "model.embed_tokens": "transformer.embd.wte",
        "model.final_layernorm": "lm_head.ln",
        "model.layers": "transformer.h",
    }
    stored = renamed(fused(model.state_dict(), "mixer.Wqkv"), {**names, **PHI})
    arrives(stored, {"model_type": "phi-msft"}, model, lambda: phi(2))


@pytest.mark.parametrize("layers", [24, 32])
def test_phi_whose_embedding_and_head_are_numbered_layers(
    layers: int, arrives: Arrives, randomized: Randomized
) -> None:
    model = randomized(phi(layers))
    names = {
        "model.embed_tokens": "layers.0.wte",
        "lm_head": f"layers.{layers + 1}.linear",
        "model.final_layernorm": f"layers.{layers + 1}.ln",
        # from the last one on, so that none is counted up twice
        **{f"model.layers.{n}.": f"layers.{n + 1}." for n in reversed(range(layers))},
    }
    stored = renamed(fused(model.state_dict(), "mixer.Wqkv"), {**names, **PHI})
    assert len({name.split(".")[1] for name in stored}) == layers + 2
    arrives(stored, {"model_type": "mixformer-sequential"}, model, lambda: phi(layers))


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def makers() -> Iterator[Makers]:
    """Yield what makes the models for real checkpoints of this kind."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("real_models").MAKERS
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("slug", "quirk"),
    [
        ("qwen-7b-chat-cantonese", "remote.qwen"),
        ("qwen-72b", "remote.qwen"),
        ("internlm2-7b-intermind", "remote.internlm2"),
        ("openpangu-embedded-7b", "remote.llama_names"),
        ("glm4-9b-legal", "remote.glm"),
        ("phi-2-mixformer", "remote.phi_sequential_32"),
        ("mimo-7b-kor", "remote.mimo"),
        ("falcon-40b", None),
    ],
)
def test_every_name_of_a_real_checkpoint_has_its_place(
    slug: str, quirk: str | None, planned: Planned, makers: Makers
) -> None:
    plan = planned(slug, makers[slug])
    assert plan.audit.coverage == 1.0, plan.audit.missing[:5]
    assert plan.audit.unexpected == ()
    assert quirk in [q.name for q in plan.quirks] + [None]


def test_minimax_m1_lacks_only_what_the_model_works_out_itself(
    planned: Planned, makers: Makers
) -> None:
    plan = planned("minimax-m1-456b", makers["minimax-m1-456b"])
    assert plan.audit.missing == plan.audit.mismatched == plan.audit.unexpected == ()
    absent = {name.rpartition(".")[2] for name in plan.audit.names("absent")}
    assert absent == {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}


def test_packed_qwen_1_is_cut_into_q_k_and_v_once_it_is_plain(
    planned: Planned, makers: Makers
) -> None:
    """GPTQ gave every Linear a bias; of those the model has only the ones of q, k and v."""
    plan = planned("qwen-7b-chat-int4-gptq", makers["qwen-7b-chat-int4-gptq"])
    assert plan.audit.coverage == 1.0, plan.audit.missing[:5]
    assert {name.rpartition(".")[2] for name in plan.audit.unexpected} == {"bias"}
    assert not any("c_attn" in name for name in plan.audit.unexpected)
