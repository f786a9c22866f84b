"""Make a tiny GPT-OSS checkpoint as the release has it: mxfp4 experts, true names, three shards.

The values are random; names, dtypes, shapes, shard numbering (``00000`` to ``00002`` "of 00002")
and config.json are those of openai/gpt-oss-20b, shrunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initial_context_length": 64,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 256,
    "model_type": "gpt_oss",
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "sliding_window": 32,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}


def tensors(config: dict[str, Any] = CONFIG, *, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of the checkpoint, in the release's names, dtypes and layouts."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts, vocab = config["num_local_experts"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]

    def plain(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * 0.05).to(torch.bfloat16)

    def packed(name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        """32 values of a row: 16 bytes of two 4-bit floats each, and one byte of exponent."""
        groups = columns // 32
        codes = torch.randint(0, 256, (experts, rows, groups, 16), generator=random)
        exponents = torch.randint(120, 124, (experts, rows, groups), generator=random)
        yield f"{name}_blocks", codes.to(torch.uint8)
        yield f"{name}_scales", exponents.to(torch.uint8)
        yield f"{name}_bias", plain(experts, rows)

    yield "model.embed_tokens.weight", plain(vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", plain(hidden) + 1
        for which, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}.self_attn.{which}_proj.weight", plain(rows, hidden)
            yield f"{at}.self_attn.{which}_proj.bias", plain(rows)
        yield f"{at}.self_attn.o_proj.weight", plain(hidden, heads)
        yield f"{at}.self_attn.o_proj.bias", plain(hidden)
        yield f"{at}.self_attn.sinks", plain(config["num_attention_heads"])
        yield f"{at}.post_attention_layernorm.weight", plain(hidden) + 1
        yield f"{at}.mlp.router.weight", plain(experts, hidden)
        yield f"{at}.mlp.router.bias", plain(experts)
        yield from packed(f"{at}.mlp.experts.gate_up_proj", 2 * inner, hidden)
        yield from packed(f"{at}.mlp.experts.down_proj", hidden, inner)
    yield "model.norm.weight", plain(hidden) + 1
    yield "lm_head.weight", plain(vocab, hidden)


def make(folder: Path, *, without: str = "", n_shards: int = 3) -> Path:
    """Write the checkpoint into *folder*, leaving out the tensor *without*; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = [(name, tensor) for name, tensor in tensors() if name != without]
    per_shard = -(-len(everything) // n_shards)
    weight_map: dict[str, str] = {}
    for number in range(n_shards):
        shard = f"model-{number:05}-of-{n_shards - 1:05}.safetensors"
        chunk = dict(everything[number * per_shard : (number + 1) * per_shard])
        save_file(chunk, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chunk, shard)
    total = sum(tensor.nbytes for _, tensor in everything)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder
