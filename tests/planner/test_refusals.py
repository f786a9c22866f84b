"""Packed weights that a module keeps: not on the devices on which it does not work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher


class HqqLinear(nn.Module):
    """A module that keeps what HQQ stores."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("W_q", torch.uint8), ("scale", torch.half), ("zero", torch.half)):
            self.register_buffer(name, torch.zeros(4, 8, dtype=dtype))


class Model(nn.Module):
    """One such module and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = HqqLinear()
        self.plain = nn.Linear(8, 4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Give a checkpoint of the model."""
    tensors = {name: torch.ones_like(t) for name, t in Model().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_packing_on_a_device_that_it_refuses_makes_the_plan_unusable(
    checkpoint: Path, device: str
) -> None:
    plan = Dispatcher().plan(checkpoint, model=Model(), device_map={"": device})
    (told,) = (f for f in plan.all_findings if f.code == "device-refused")
    assert told.severity == "error"
    assert "packed.W_q" in told.message
    assert repr(device) in told.message
    assert not plan.ok


def test_the_plain_part_of_the_model_may_be_there(checkpoint: Path) -> None:
    devices = {"packed": 0, "plain": "cpu"}
    plan = Dispatcher().plan(checkpoint, model=Model(), device_map=devices)
    assert not [f for f in plan.all_findings if f.code == "device-refused"]
