"""Models of transformers on two processes, through the example that the documentation names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from modelquirks.planner import Dispatcher

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(*words: str) -> str:
    """Run the example on two ranks and return what it says."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLES / "distributed_load.py"), *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mxfp4_made_plain_into_shards_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    folder: Path = import_module("tiny_gpt_oss").make(tmp_path / "gpt-oss")
    said = torchrun(str(folder), "--tp", "2", "--ep", "2", "--dequantize")
    dispatcher = Dispatcher()
    model: Any = dispatcher.model(folder)
    plan = dispatcher.plan(folder, model=model, device_map=None, dtype="auto", dequantize=True)
    report = plan.load_into(model)
    with torch.no_grad():
        token = model.eval()(torch.arange(8).reshape(1, 8)).logits[0, -1].argmax().item()
    assert f"next token: {token}\n" in said
    read = [float(text) * 2**20 for text in re.findall(r"([\d.]+) MiB read", said)]
    assert len(read) == 2
    # Experts and the two tables are halved, all else is on both ranks.
    experts = sum(t.numel() for n, t in model.state_dict().items() if "experts" in n)
    assert experts and all(each < 0.85 * report.bytes_read for each in read)
