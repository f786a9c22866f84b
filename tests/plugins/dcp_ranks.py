"""The ranks of a test of ``test_dcp.py``: ``dcp_ranks.py RANKS FOLDER``.

They load the checkpoint of two ranks into a model that is sharded over RANKS, compare, and write
how many bytes each has read. They are forked: importing torch takes longer than all the rest.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from modelquirks.planner import Dispatcher


def run(rank: int, known: dict[str, Any], ranks: int, folder: Path) -> None:
    """Be one rank."""
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    model = known["Tiny"]()
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan = Dispatcher(known["registry"]()).plan(known["FSDP"], model=model, device_map=None)
    report = plan.load_into(model)
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if not full.equal(known["TRUTH"][name]):
            raise RuntimeError(f"{name!r} is not what was saved")
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(report.bytes_read))


if __name__ == "__main__":
    module = runpy.run_path(str(Path(__file__).with_name("test_dcp.py")))
    start: Any = start_processes
    n_ranks, target = int(sys.argv[1]), Path(sys.argv[2])
    start(run, (module, n_ranks, target), nprocs=n_ranks, start_method="fork")
