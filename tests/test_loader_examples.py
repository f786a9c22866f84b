"""``examples/loaders``: each does what it says, and its check can fail."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "loaders"
IN_PROCESS = ("plain_accelerate", "from_pretrained", "own_load_weights")


class Unequal:
    """torch, for which no two tensors are equal."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def equal(self, *_: Any) -> bool:
        return False


def main_of(name: str) -> FunctionType:
    """Return the function that the example runs; torch is imported only once."""
    main: FunctionType = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    return main


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*IN_PROCESS, "two_ranks"}


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_example_ends_well(name: str) -> None:
    assert main_of(name)() == 0


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_example_that_compares_unequal_says_so_by_its_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_of(name)
    monkeypatch.setitem(main.__globals__, "torch", Unequal())  # its own comparisons only
    assert main() == 1
    assert "False" in capsys.readouterr().out


def test_two_ranks_of_torchrun_read_each_its_share() -> None:
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, "-m", *words, str(FOLDER / "two_ranks.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("values right: True, read 1.00 of its share") == 2
