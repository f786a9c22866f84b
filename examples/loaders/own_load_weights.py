"""A server whose model has a ``load_weights`` of its own, as vLLM's models do.

Its attention keeps q, k and v in one parameter and its MLP gate and up, and it knows the names of
transformers. The checkpoint has others: it was saved under torch.compile, in bfloat16. The plan
puts the names right; the server gets one tensor after another. Ends with 1 unless every parameter
of the server is filled and holds the rows it should.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from modelquirks.planner import Dispatcher

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)


class Merged(nn.Module):
    """Several projections in one parameter; each part knows its rows."""

    def __init__(self, columns: int, rows: dict[str | int, int]) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(sum(rows.values()), columns, dtype=torch.bfloat16))

    def load(self, loaded: torch.Tensor, part: str | int) -> None:
        """Copy one part to its place. A rank would take its own rows of *loaded* here."""
        parts = list(self.rows)
        start = sum(self.rows[p] for p in parts[: parts.index(part)])
        self.weight.data.narrow(0, start, self.rows[part]).copy_(loaded)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)


class Layer(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        size, inner = c.hidden_size, c.intermediate_size
        kv = size // c.num_attention_heads * c.num_key_value_heads
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Merged(size, {"q": size, "k": kv, "v": kv})
        self.self_attn.o_proj = linear(size, size)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = Merged(size, {0: inner, 1: inner})
        self.mlp.down_proj = linear(size, inner)
        self.input_layernorm = nn.RMSNorm(size, dtype=torch.bfloat16)
        self.post_attention_layernorm = nn.RMSNorm(size, dtype=torch.bfloat16)


class Server(nn.Module):
    """The parameters of a Llama as a server keeps them."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = linear(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.model.norm = nn.RMSNorm(c.hidden_size, dtype=torch.bfloat16)
        self.lm_head = linear(c.vocab_size, c.hidden_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from names as transformers has them; return those that were."""
        stacked_params_mapping = [  # (parameter of ours, name in the stream, part)
            ("qkv_proj", "q_proj", "q"),
            ("qkv_proj", "k_proj", "k"),
            ("qkv_proj", "v_proj", "v"),
            ("gate_up_proj", "gate_proj", 0),
            ("gate_up_proj", "up_proj", 1),
        ]
        params = dict(self.named_parameters())
        filled: set[str] = set()
        for name, loaded in weights:
            for ours, theirs, part in stacked_params_mapping:
                if f".{theirs}." in name:
                    name = name.replace(theirs, ours)
                    module = self.get_submodule(name.removesuffix(".weight"))
                    module.load(loaded, part)
                    break
            else:
                params[name].data.copy_(loaded)
            filled.add(name)
        return filled


def saved(model: LlamaForCausalLM, folder: Path) -> Path:
    """Save *model* as torch.compile names it."""
    CONFIG.save_pretrained(folder)
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> int:
    """Fill a server from a plan and look at its parameters."""
    trained = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    server = Server(CONFIG)
    with tempfile.TemporaryDirectory() as name:
        folder = saved(trained, Path(name))
        dispatcher = Dispatcher()
        plan = dispatcher.plan(folder, model=dispatcher.model(folder), device_map=None)
        weights = plan.weights()  # refused here already, if the plan cannot be used
        filled = server.load_weights(weights)
    print(f"{len(weights)} tensors, {weights.nbytes} bytes, into {len(filled)} parameters")

    theirs, ours = trained.state_dict(), dict(server.named_parameters())
    layer = "model.layers.1"
    qkv = torch.cat([theirs[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([theirs[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    right = (
        torch.equal(ours[f"{layer}.self_attn.qkv_proj.weight"], qkv)
        and torch.equal(ours[f"{layer}.mlp.gate_up_proj.weight"], gate_up)
        and all(torch.equal(ours[name], theirs[name]) for name in ours if name in theirs)
    )
    print(f"every parameter filled: {filled == ours.keys()}, with the right rows: {right}")
    return 0 if right and filled == ours.keys() else 1


if __name__ == "__main__":
    raise SystemExit(main())
