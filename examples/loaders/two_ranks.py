"""A model sharded over the processes of torchrun, each of which reads only its own part.

    torchrun --standalone --nproc-per-node 2 examples/loaders/two_ranks.py

Each rank plans, the ranks compare their plans, and each fills its shards. Ends with 1 unless the
gathered parameters are those that were saved, and no rank read more than its share.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modelquirks.planner import Dispatcher
from modelquirks.planner.model.build import empty_weights

SIZE = 256


def saved(folder: Path) -> Path:
    """Save three layers, as everybody can make them again: number i holds i plus its index."""
    state = {
        f"_orig_mod.{i}.weight": i + torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) / SIZE**2
        for i in range(3)
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> int:
    """Load on all ranks together; every rank looks at all parameters."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as name:
        shared = [str(saved(Path(name))) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(shared)
        with empty_weights():
            model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

        plan = Dispatcher().plan(shared[0], model=model, device_map=None)
        report = plan.load_into(model)

        gathered = [parameter.full_tensor() for parameter in model.parameters()]
        dist.barrier()
    last = 1 - 1 / SIZE**2
    right = all(t[0, 0] == i and t[-1, -1] == i + last for i, t in enumerate(gathered))
    share = report.bytes_read * dist.get_world_size() / sum(tensor.nbytes for tensor in gathered)
    print(f"rank {dist.get_rank()}: values right: {right}, read {share:.2f} of its share")
    dist.destroy_process_group()
    return 0 if right and share <= 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
