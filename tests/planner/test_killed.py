"""A process that fills an offload folder is killed: nothing half-written is ever used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")


def test_after_a_kill_the_next_run_succeeds_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    """Ten random moments; ``benchmarks/kill.py`` has more, and every call in turn."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--runs", "10", "--json", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 10
    assert any(one["was_killed"] for one in found)
