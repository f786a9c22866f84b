"""Small checkpoints that do not load as they are, for the guides: each breaks in one way.

    python examples/broken_checkpoints.py FOLDER

Needs transformers. All are of one Llama of 4 layers with random weights, in two shards.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

INDEX = "model.safetensors.index.json"


def make_all(root: Path) -> None:
    """Make every checkpoint below *root*."""
    whole = root / "whole"
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(whole, max_shard_size="400KB")
    renamed(whole, root / "wrapped", lambda name: f"module.{name}")
    renamed(whole, root / "acme", acme)
    broken = Path(shutil.copytree(whole, root / "cut-off"))
    last = sorted(broken.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1000])
    lost = Path(shutil.copytree(whole, root / "shard-missing"))
    sorted(lost.glob("*.safetensors"))[-1].unlink()
    changed(whole, root / "other-head", {"lm_head.weight": "score.weight"})
    settings = json.loads((whole / "config.json").read_text()) | {"vocab_size": 322}
    grown = Path(shutil.copytree(whole, root / "other-vocabulary"))
    (grown / "config.json").write_text(json.dumps(settings))


def acme(name: str) -> str:
    """Return the name that a trainer of Acme's gives to a parameter."""
    words = {
        "model.embed_tokens.": "tok.",
        "model.layers.": "decoder.blocks.",
        ".self_attn.": ".attention.",
        ".mlp.gate_proj.": ".ffn.gate.",
        ".mlp.up_proj.": ".ffn.up.",
        ".mlp.down_proj.": ".ffn.down.",
        "model.norm.": "decoder.norm.",
        "lm_head.": "head.",
    }
    for ours, theirs in words.items():
        name = name.replace(ours, theirs)
    return name


def changed(source: Path, target: Path, names: dict[str, str]) -> None:
    """Copy a checkpoint with a few other names."""
    renamed(source, target, lambda name: names.get(name, name))


def renamed(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Copy a checkpoint with every tensor renamed, in the index too."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
        path.unlink()  # the tensors are still of the old file
        save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((target / INDEX).read_text())
    index["weight_map"] = {rename(name): file for name, file in index["weight_map"].items()}
    (target / INDEX).write_text(json.dumps(index))


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
