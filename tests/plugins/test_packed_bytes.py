"""Bytes of packed weights: exactly those of the files, whoever wrote them.

The files are of the formats' own libraries (see the ABOUT.txt beside each); what they hold is
counted here from the offsets in their headers, which is the format's own account.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.placement.placement import Placement

DATA = Path(__file__).parents[1] / "data"
FILES = (
    "awq/gemm.safetensors",
    "awq/gemv.safetensors",
    "bitsandbytes/formats.safetensors",
    "compressed_tensors/sorted_stored.safetensors",
    "compressed_tensors/stored.safetensors",
    "gptq/v1.safetensors",
    "gptq/v2.safetensors",
    "mlx/modes.safetensors",
    "modelopt/nvfp4.safetensors",
)


def bytes_by_name(path: Path) -> dict[str, int]:
    """Return what the header says, read as the format's document describes it."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: t["data_offsets"][1] - t["data_offsets"][0] for name, t in header.items()}


def used(placement: Placement) -> int:
    return sum(memory.used_bytes for memory in placement.memory.values())


class Holder(nn.Module):
    """Holds every stored tensor as it is, as the module of a quantiser does."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, Holder({}))
                module = getattr(module, part)
            module.register_buffer(leaf, torch.empty_like(tensor))


@pytest.mark.parametrize("name", FILES)
def test_bytes_are_those_of_the_file_stored_planned_and_kept_packed(name: str) -> None:
    path = DATA / name
    sizes = bytes_by_name(path)
    manifest = open_manifest(path)
    assert manifest.total_bytes == sum(sizes.values())
    assert {n: t.nbytes for n, t in manifest.tensors.items()} == sizes
    plan = Dispatcher().plan(path, max_memory={"cpu": "1GiB"})
    assert used(plan.placement) == sum(sizes.values())


def test_block_fp8_as_deepseek_lays_it_out(tmp_path: Path) -> None:
    """Blocks of 128 by 128, the last ones partial: README of the DeepSeek-V3 weights."""
    tensors = {
        "proj.weight": torch.zeros(200, 300, dtype=torch.float8_e4m3fn),
        "proj.weight_scale_inv": torch.ones(2, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert open_manifest(tmp_path).total_bytes == 200 * 300 + 6 * 4
    model = nn.ModuleDict({"proj": nn.Linear(300, 200, bias=False, dtype=torch.bfloat16)})
    plan = Dispatcher().plan(tmp_path, model=model, max_memory={"cpu": "1GiB"}, dequantize=True)
    assert plan.ok, plan.refusal()
    assert used(plan.placement) == 200 * 300 * 2
    packed = Holder(tensors)
    kept = Dispatcher().plan(tmp_path, model=packed, max_memory={"cpu": "1GiB"})
    assert kept.ok, kept.refusal()
    assert used(kept.placement) == 200 * 300 + 6 * 4
    kept.execute(packed)
    assert torch.equal(packed.state_dict()["proj.weight_scale_inv"], torch.ones(2, 3))
