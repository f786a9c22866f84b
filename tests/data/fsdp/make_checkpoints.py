# type: ignore  # of libraries that are not installed where this is checked
"""Writes the files of this folder: torch 2.13, two gloo ranks on the CPU, as accelerate 1.15 does.

FSDP1 with each kind of state dict (``save_fsdp_model`` of accelerate: ``torch.save`` of
``model.state_dict()``, by rank where it is not the full one), FSDP2 by rank (``use_dcp=False``).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(13, 6)
        self.lin1 = torch.nn.Linear(6, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.lin2 = torch.nn.Linear(7, 5, bias=False)
        self.register_buffer("scale", torch.arange(5.0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rank(number: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    dist.init_process_group("gloo", rank=number, world_size=2)
    if number == 0:
        torch.save(net().state_dict(), out / "truth.pt")
    kinds = {
        "full": (StateDictType.FULL_STATE_DICT, True),
        "sharded": (StateDictType.SHARDED_STATE_DICT, True),
        "local": (StateDictType.LOCAL_STATE_DICT, True),
        "local_flat": (StateDictType.LOCAL_STATE_DICT, False),
    }
    for name, (kind, original) in kinds.items():
        try:
            model = FSDP(net(), use_orig_params=original, device_id=torch.device("cpu"))
            with FSDP.state_dict_type(model, kind):
                state = model.state_dict()
        except Exception as error:
            if number == 0:
                print(name, type(error), str(error)[:300])
            continue
        (out / name).mkdir(exist_ok=True)
        file = (
            "pytorch_model_fsdp.bin" if name == "full" else f"pytorch_model_fsdp_rank{number}.bin"
        )
        if name == "sharded":
            file = f"pytorch_model_fsdp_0_rank{number}.bin"
        if name != "full" or number == 0:
            torch.save(state, out / name / file)
        if number == 0:
            print(
                name,
                {
                    k: (type(v).__name__, tuple(v.shape) if hasattr(v, "shape") else v.size())
                    for k, v in state.items()
                },
            )
    for name, mesh in (
        ("fsdp2", init_device_mesh("cpu", (2,))),
        ("hsdp", init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))),
    ):
        model = net()
        fully_shard(model.lin1, mesh=mesh)
        fully_shard(model, mesh=mesh)
        (out / name).mkdir(exist_ok=True)
        torch.save(model.state_dict(), out / name / f"pytorch_model_fsdp_0_rank{number}.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (Path(sys.argv[1]),), nprocs=2)
