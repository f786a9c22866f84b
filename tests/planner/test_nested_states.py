"""What people put around a state dict: which part is the weights, and what is said of the rest."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.torch_zip import read_torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def stepped(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state after a step, with all its moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


NET = Net()
STATE = NET.state_dict()
NAMES = [*STATE]
ADAM = stepped(torch.optim.Adam(Net().parameters(), amsgrad=True))
SGD = stepped(torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.9))


def read(folder: Path, value: Any, **options: Any) -> Header:
    torch.save(value, folder / "file.pt", **options)
    return read_torch(folder / "file.pt")


def said(header: Header) -> dict[str, str]:
    return {finding.code: finding.message for finding in header.findings}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("value", "container"),
    [
        (STATE, ""),
        ({"model": STATE, "optimizer": ADAM, "epoch": 3}, "model"),
        ({"theirs": STATE, "optimizer_state_dict": SGD}, "theirs"),
        ({"theirs": STATE, "trainer": {"state": {}, "param_groups": []}}, "theirs"),
        ({"state": {"model": {"state_dict": STATE}}}, "state.model.state_dict"),
        ({"state_dict": STATE, "rng": torch.get_rng_state()}, "state_dict"),
        ({"ema": NET, "model": None, "optimizer": ADAM}, "ema"),
    ],
    ids=["bare", "model", "theirs", "optimizer by form", "deep", "generator", "module"],
)
def test_the_weights_are_taken_and_nothing_else(
    value: Any, container: str, zipped: bool, tmp_path: Path
) -> None:
    header = read(tmp_path, value, _use_new_zipfile_serialization=zipped)

    assert [*header.entries] == NAMES
    assert header.container == container


@pytest.mark.parametrize(
    "value", [ADAM, SGD, {"optimizer_states": [ADAM]}], ids=["adam", "sgd", "listed"]
)
def test_the_state_of_an_optimizer_is_named_as_such(value: Any, tmp_path: Path) -> None:
    assert "optimizer-state" in said(read(tmp_path, value))


def test_weights_under_another_known_key_are_named(tmp_path: Path) -> None:
    found = said(read(tmp_path, {"model": STATE, "model_ema": STATE, "optimizer": ADAM}))

    assert "'model_ema'" in found["several-weights"]
    assert "'optimizer'" in found["container"]
    assert "optimizer" not in found["several-weights"]


def test_several_models_without_a_known_key_are_all_taken_and_said(tmp_path: Path) -> None:
    header = read(tmp_path, {"encoder": STATE, "decoder": STATE, "optimizer": ADAM})

    assert [*header.entries] == [f"{part}.{n}" for part in ("encoder", "decoder") for n in NAMES]
    assert "'encoder', 'decoder'" in said(header)["several-weights"]
    assert "'optimizer'" in said(header)["not-loaded"]


def test_a_single_model_gives_no_warning(tmp_path: Path) -> None:
    header = read(tmp_path, {"model": STATE, "epoch": 3})

    assert [finding.severity for finding in header.findings] == ["info"]


def test_a_tensor_beside_the_weights_is_no_reason_to_lose_it(tmp_path: Path) -> None:
    header = read(tmp_path, {"state_dict": STATE, "queue": torch.ones(5, 5)})

    assert [*header.entries] == [*(f"state_dict.{name}" for name in NAMES), "queue"]


def test_a_module_under_a_key_is_read_without_its_class(tmp_path: Path) -> None:
    found = said(read(tmp_path, {"model": NET}))

    assert "under 'model'" in found["whole-module"]
    assert "Net" in found["pickle-objects"]


# ------------------------------------------------------------------------------ before torch 0.2


def as_tar(path: Path, value: dict[str, torch.Tensor]) -> Path:
    """Write what torch 0.1 wrote, by the rules of the code that still reads it."""
    storages = io.BytesIO()
    tensors = io.BytesIO()
    pickle.dump(len(value), storages, protocol=2)
    pickle.dump(len(value), tensors, protocol=2)
    for number, tensor in enumerate(value.values()):
        kind = {torch.float32: torch.FloatStorage, torch.int64: torch.LongStorage}[tensor.dtype]
        flat = tensor.contiguous().view(-1)
        pickle.dump((number, "cpu", kind), storages, protocol=2)
        storages.write(struct.pack("<q", flat.numel()) + flat.numpy().tobytes())
        pickle.dump((100 + number, number, kind), tensors, protocol=2)
        tensors.write(struct.pack("<ii", tensor.dim(), 0))
        dims = (*tensor.shape, *tensor.contiguous().stride(), 0)
        tensors.write(struct.pack(f"<{len(dims)}q", *dims))
    pickle.dump([], storages, protocol=2)
    pickled = io.BytesIO()
    pickler = Pickler(pickled, protocol=2)
    pickler.keys = {id(tensor): str(100 + n) for n, tensor in enumerate(value.values())}
    pickler.dump(value)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, part in (("storages", storages), ("tensors", tensors), ("pickle", pickled)):
            info = tarfile.TarInfo(name)
            info.size = len(part.getvalue())
            archive.addfile(info, io.BytesIO(part.getvalue()))
    return path


class Pickler(pickle.Pickler):
    keys: dict[int, str]

    def persistent_id(self, obj: Any) -> str | None:
        return self.keys.get(id(obj))


OLD = {"lin.weight": torch.randn(3, 4), "lin.bias": torch.randn(3), "count": torch.tensor([7])}


def test_a_tar_file_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    path = as_tar(tmp_path / "old.pt", OLD)
    theirs = torch.load(path, weights_only=False)

    header = read_torch(path)

    assert not header.findings
    raw = path.read_bytes()
    for name, tensor in theirs.items():
        stored = header.entries[name]
        assert (stored.shape, raw[stored.begin : stored.end]) == (
            tuple(tensor.shape),
            tensor.numpy().tobytes(),
        )


def test_a_tar_file_loads_through_a_plan(tmp_path: Path) -> None:
    path = as_tar(tmp_path / "old.pt", {"weight": OLD["lin.weight"], "bias": OLD["lin.bias"]})
    model = nn.Linear(4, 3)

    plan = Dispatcher().plan(path, model=model, device_map=None)

    assert plan.ok, plan.problems
    assert torch.equal(plan.execute(model).state_dict()["weight"], OLD["lin.weight"])


def test_other_tar_files_and_cut_off_ones_are_told(tmp_path: Path) -> None:
    path = as_tar(tmp_path / "old.pt", OLD)
    path.write_bytes(path.read_bytes()[:700])
    assert "cut off" in said(read_torch(path))["pickle-invalid"]

    with tarfile.open(tmp_path / "model.nemo", "w:") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"))
    assert "tar archive" in said(read_torch(tmp_path / "model.nemo"))["pickle-invalid"]
