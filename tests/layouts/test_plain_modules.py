"""A user's own modules, in a process where transformers cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# The program under test: a module of the user's own, whose parameters have the names and shapes
# given on the command line, is loaded on CPU and on disk, and compared with the values beside it.
_PROGRAM = """
import sys
sys.modules["transformers"] = None  # importing it raises ImportError
import json, torch
from safetensors.torch import load_file
from torch import nn
from modelquirks.planner import Dispatcher

folder, wanted, device, dequantize = sys.argv[1], load_file(sys.argv[2]), sys.argv[3], sys.argv[4]

class Node(nn.Module):
    pass

def build():
    root = Node()
    for name, tensor in wanted.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Node())
            module = module._modules[part]
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        module.register_parameter(leaf, nn.Parameter(empty))
    return root

model = build()
plan = Dispatcher().plan(folder, model=model, device_map={"": device}, dequantize=bool(dequantize))
assert plan.ok, plan.refusal()
plan.execute(model)
for name, tensor in wanted.items():
    module = model.get_submodule(name.rpartition(".")[0])
    found = module._parameters[name.rpartition(".")[2]]
    if device == "disk":
        found = module._hf_hook.weights_map[name.rpartition(".")[2]]
    assert torch.equal(found, tensor), name
print(len(wanted))
"""

Tensors = dict[str, torch.Tensor]


def mixtral() -> tuple[Tensors, Tensors, dict[str, object], str]:
    """Experts one by one, for a module that stacks them."""
    e, h, i = 3, 8, 12
    stored: Tensors = {"norm.weight": torch.randn(h)}
    wanted: Tensors = {"norm.weight": stored["norm.weight"]}
    for layer in range(2):
        base = f"layers.{layer}.block_sparse_moe.experts"
        for expert in range(e):
            stored |= {
                f"{base}.{expert}.w1.weight": torch.randn(i, h),
                f"{base}.{expert}.w3.weight": torch.randn(i, h),
                f"{base}.{expert}.w2.weight": torch.randn(h, i),
            }
        gates = [
            torch.cat([stored[f"{base}.{x}.{w}.weight"] for w in ("w1", "w3")]) for x in range(e)
        ]
        downs = [stored[f"{base}.{x}.w2.weight"] for x in range(e)]
        wanted[f"layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(gates)
        wanted[f"layers.{layer}.mlp.experts.down_proj"] = torch.stack(downs)
    return stored, wanted, {}, ""


def gpt_oss_original() -> tuple[Tensors, Tensors, dict[str, object], str]:
    """OpenAI's names and packing, for modules that have plain weights under the same names."""
    e, out, n_in, hidden = 2, 6, 64, 32
    blocks = torch.randint(0, 256, (e, out, n_in // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (e, out, n_in // 32), dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1)
    plain = (pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
    other = {
        "block.0.attn.qkv.weight": torch.randn(12, hidden).bfloat16(),
        "block.0.attn.sinks": torch.randn(4).bfloat16(),
        "block.0.mlp.mlp1_bias": torch.randn(e, out).bfloat16(),
    }
    packed = {"block.0.mlp.mlp1_weight.blocks": blocks, "block.0.mlp.mlp1_weight.scales": scales}
    wanted = {**other, "block.0.mlp.mlp1_weight": plain.bfloat16()}
    config: dict[str, object] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2}
    return {**other, **packed}, wanted, config, "dequantize"


@pytest.mark.parametrize("device", ["cpu", "disk"])
@pytest.mark.parametrize("case", [mixtral, gpt_oss_original], ids=lambda case: case.__name__)
def test_a_module_of_ones_own_is_loaded_without_transformers(
    case: object, device: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stored, wanted, config, dequantize = case()  # type: ignore[operator]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in wanted.items()}, tmp_path / "wanted.safetensors")
    run = subprocess.run(
        [
            sys.executable, "-c", _PROGRAM,
            str(folder), str(tmp_path / "wanted.safetensors"), device, dequantize,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(wanted))]
