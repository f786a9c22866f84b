"""One rank of a test of ``test_dcp.py``: ``dcp_ranks.py RANK RANKS FOLDER``.

Loads the checkpoint of two ranks into a model that is sharded over RANKS, and writes the bytes read.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modelquirks.planner import Dispatcher


def run(rank: int, ranks: int, folder: Path) -> None:
    """Load, compare, write."""
    known = runpy.run_path(str(Path(__file__).with_name("test_dcp.py")))
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
        assert full.equal(known["TRUTH"][name]), name
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(report.bytes_read))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
