"""What people put around a state dict: which part is the weights, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
