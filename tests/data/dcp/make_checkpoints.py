"""Write the checkpoints beside this file: ``python make_checkpoints.py`` (torch, 4 processes)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent


class Tiny(nn.Module):
    """Rows that no number of ranks divides, one row only, bf16, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 1)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x.bfloat16()).float())
        return logits


def trained(rank: int, *, optimizer: bool) -> dict[str, Any]:
    """Return the state of the model after one step on two ranks."""
    torch.manual_seed(0)
    model = Tiny()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.norm, mesh=mesh)  # a dtype of its own
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(13)).sum().backward()
    adam.step()
    weights: dict[str, Any] = get_model_state_dict(model)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in weights.items()}
    if rank == 0:
        save_file({n: t.detach().clone() for n, t in full.items()}, "truth.safetensors")
    if not optimizer:
        return {"model": weights}
    return {"model": weights, "optim": get_optimizer_state_dict(model, adam)}


def two_ranks(rank: int) -> None:
    """Write a plain DCP checkpoint with optimizer, one of accelerate's, one of Hugging Face's."""
    save(trained(rank, optimizer=True), checkpoint_id="fsdp2")
    weights = trained(rank, optimizer=False)
    save(weights, checkpoint_id="accelerate/pytorch_model_fsdp_0")
    floats = {n: t for n, t in weights["model"].items() if n != "count"}
    writer = HuggingFaceStorageWriter("hugging_face", save_distributed=True)
    save(floats, storage_writer=writer)


def four_ranks(rank: int) -> None:
    """Write tensors that are cut along both dimensions."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    names = {"layers.0.weight": (7, 5), "layers.1.weight": (7, 5), "head.weight": (4, 6)}
    full = {name: torch.randn(shape) for name, shape in names.items()}
    if rank == 0:
        save_file(full, "truth_grid.safetensors")
    cut = {n: distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for n, t in full.items()}
    save(cut, checkpoint_id="grid")


def run(rank: int, write: Callable[[int], None], size: int, port: int) -> None:
    """Be one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    write(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.chdir(HERE)  # '.metadata' holds the path that was given
    for name in ("fsdp2", "accelerate", "hugging_face", "grid"):
        shutil.rmtree(name, ignore_errors=True)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 29611
    start: Any = spawn
    start(run, (two_ranks, 2, port), nprocs=2)
    start(run, (four_ranks, 4, port + 1), nprocs=4)
