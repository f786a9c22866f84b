"""Models divided among processes. The checks themselves are in ``rank_checks.py``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.execute import load
from modelquirks.planner.execution.execute import ExecutionError
from modelquirks.quirks.registry import Registry

SCRIPT = Path(__file__).with_name("rank_checks.py")
CHECKS = re.findall(r"^def (check_\w+)\(", SCRIPT.read_text(), re.MULTILINE)
RANKS = 2

Failed = dict[int, dict[str, str | None]]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """Run every check on two ranks, and return by rank which failed and how."""
    folder = tmp_path_factory.mktemp("ranks")
    loaded_script().write(folder)
    words = (sys.executable, str(SCRIPT))
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(RANKS), str(folder)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    told = {rank: process.communicate(timeout=400)[1] for rank, process in enumerate(ranks)}
    assert all(process.returncode == 0 for process in ranks), told
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)}


def loaded_script() -> ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("rank_checks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check: str, failed: Failed) -> None:
    for rank, results in failed.items():
        assert check in results, f"rank {rank} stopped before"
        assert results[check] is None, f"rank {rank}:\n{results[check]}"


def planned(folder: Path) -> tuple[Plan, nn.Module]:
    save_file({"weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    model = nn.Linear(2, 2, bias=False)
    return Dispatcher(Registry()).plan(folder, model=model, device_map=None), model


def test_the_command_does_not_load_whole_models_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model = planned(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CallError, match="each of the 2 processes of torchrun would load the whole"):
        load(plan, model, as_json=False, options={})
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert load(plan, model, as_json=True, options={}) is Exit.USABLE


def test_without_torch_distributed_the_way_out_is_said(tmp_path: Path) -> None:
    plan, model = planned(tmp_path)
    with pytest.raises(ExecutionError, match="start the program with torchrun"):
        plan.execute(model, together=True)
