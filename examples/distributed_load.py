"""Load a checkpoint by several processes, each of which reads only its own part.

    torchrun --nproc-per-node 2 examples/distributed_load.py CHECKPOINT
    torchrun --nproc-per-node 4 examples/distributed_load.py CHECKPOINT --tp 2 --dequantize

Shards the model over all processes: by the tensor parallel plan of transformers over --tp of them,
by its expert parallel plan over --ep, and by fully_shard over the rest. Rank 0 says what each
read, and every rank has part in one forward pass. docs/distributed.md shows it on two nodes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from modelquirks.planner import Dispatcher, ExecutionError, PlanError
from modelquirks.planner.model.build import empty_weights


def divided(folder: Path, tp: int, ep: int) -> Any:
    """Return the model of *folder* without weights, sharded over all ranks."""
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)  # plain weights are made of packed ones
    kind = getattr(transformers, config.architectures[0])
    sizes = DistributedConfig(fsdp_size=dist.get_world_size() // tp, tp_size=tp, ep_size=ep)
    sizes, _, mesh = kind.prepare_distribute_model(sizes)
    with empty_weights():
        model = kind(config)
    return kind.maybe_distribute_model(model, sizes, mesh).eval()


def main() -> int:
    """Plan, load, say what was read, run once; 1 if the ranks could not load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dequantize", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else None)
    model = divided(args.checkpoint, args.tp, args.ep)
    try:
        plan = Dispatcher().plan(
            args.checkpoint,
            model=model,
            device_map=None,
            dtype="auto",
            dequantize=args.dequantize,
        )
        report = plan.load_into(model)
    except (PlanError, ExecutionError) as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (report.bytes_read, report.seconds))
    device = next(iter(model.parameters())).device
    with torch.no_grad():
        logits = model(torch.arange(8, device=device).reshape(1, 8)).logits
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    if dist.get_rank() == 0:
        for rank, (read, seconds) in enumerate(told):
            print(f"rank {rank}: {read / 2**20:.1f} MiB read in {seconds:.2f} s")
        print(f"next token: {whole[0, -1].argmax().item()}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
