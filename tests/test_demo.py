"""``make demo``, without making an environment first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_the_demo_shows_equal_logits_and_a_refusal_by_name() -> None:
    """It judges itself by its exit code; what it prints is looked at too."""
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, str(DEMO)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "equal bit for bit: True" in done.stdout
    assert "nothing written: True" in done.stdout
    _, _, refusal = done.stdout.rpartition("failing well")
    assert "model.layers.2.mlp.experts.down_proj_scales" in refusal
    assert "The plan cannot be used" in refusal and "exit code 1" in refusal
