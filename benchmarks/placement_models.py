"""Models for the placement benchmark: real sizes, built on the meta device from their configs.

The numbers are those of the released config.json files; what is not named is the default of the
model type in transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["MODELS", "PLAIN", "Model", "built"]

PLAIN = "plain"
"""Model type of those that are no library's."""


class Model(NamedTuple):
    """A name for people, the model type, and what its config says."""

    name: str
    model_type: str
    config: dict[str, Any]


def _dense(
    layers: int, hidden: int, inner: int, heads: int, kv: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        **more,
    }


MODELS: tuple[Model, ...] = (
    Model("SmolLM-135M", "llama", _dense(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True)),
    Model(
        "GPT-2 XL", "gpt2",
        {"n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_positions": 1024},
    ),
    Model("Llama-3-8B", "llama", _dense(32, 4096, 14336, 32, 8, 128256)),
    Model("Mistral-7B", "mistral", _dense(32, 4096, 14336, 32, 8, 32000)),
    Model(
        "Gemma-2-9B", "gemma2",
        _dense(42, 3584, 14336, 16, 8, 256000, head_dim=256, tie_word_embeddings=True),
    ),
    Model("Qwen2.5-32B", "qwen2", _dense(64, 5120, 27648, 40, 8, 152064)),
    Model("Llama-3-70B", "llama", _dense(80, 8192, 28672, 64, 8, 128256)),
    Model(
        "Qwen3-30B-A3B", "qwen3_moe",
        _dense(48, 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128,
               num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    Model(
        "Mixtral-8x7B", "mixtral",
        _dense(32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    Model(
        "gpt-oss-120b (bf16)", "gpt_oss",
        _dense(36, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=128,
               num_experts_per_tok=4),
    ),
    Model(
        "plain MoE 8x7B", PLAIN,
        _dense(32, 4096, 14336, 32, 8, 32000, head_dim=128, num_local_experts=8,
               num_experts_per_tok=2),
    ),
    Model(
        "plain MoE 30B-A3B", PLAIN,
        _dense(48, 2048, 768, 32, 4, 151936, head_dim=128, num_local_experts=128,
               num_experts_per_tok=8),
    ),
    Model(
        "DeepSeek-V3", "deepseek_v3",
        _dense(61, 7168, 18432, 128, 128, 129280, moe_intermediate_size=2048,
               n_routed_experts=256, num_experts_per_tok=8, first_k_dense_replace=3,
               q_lora_rank=1536, kv_lora_rank=512),
    ),
    Model(
        "Kimi-K2", "deepseek_v3",
        _dense(61, 7168, 18432, 64, 64, 163840, moe_intermediate_size=2048,
               n_routed_experts=384, num_experts_per_tok=8, first_k_dense_replace=1,
               q_lora_rank=1536, kv_lora_rank=512),
    ),
)  # fmt: skip


class _Config:
    """As much of a config as the planner asks for."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": PLAIN, **self.values}


def _plain(**config: Any) -> Any:
    """Return a model as people write it themselves: a module an expert, nothing kept whole."""
    import torch
    from torch import nn

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["head_dim"]

    def linear(into: int, out: int) -> nn.Linear:
        return nn.Linear(into, out, bias=False, dtype=torch.bfloat16)

    def expert() -> nn.ModuleDict:
        shapes = {"w1": (hidden, inner), "w2": (inner, hidden), "w3": (hidden, inner)}
        return nn.ModuleDict({name: linear(*shape) for name, shape in shapes.items()})

    def layer() -> nn.ModuleDict:
        shapes = {"q": heads * size, "k": kv * size, "v": kv * size}
        attention = nn.ModuleDict({name: linear(hidden, out) for name, out in shapes.items()})
        attention["o"] = linear(heads * size, hidden)
        experts = nn.ModuleList([expert() for _ in range(config["num_local_experts"])])
        return nn.ModuleDict(
            {
                "attn": attention,
                "gate": linear(hidden, config["num_local_experts"]),
                "experts": experts,
            }
        )

    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config["vocab_size"], hidden, dtype=torch.bfloat16),
                "layers": nn.ModuleList([layer() for _ in range(config["num_hidden_layers"])]),
                "lm_head": linear(hidden, config["vocab_size"]),
            }
        )
    model.config = _Config(**config)  # type: ignore[assignment]
    return model


def built(model: Model) -> Any:
    """Return the model on the meta device, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.model_type == PLAIN:
        return _plain(**model.config)
    config = AutoConfig.for_model(model.model_type, **model.config)
    with torch.device("meta"):
        model_class: Any = AutoModelForCausalLM
        return model_class.from_config(config, dtype=torch.bfloat16)
