"""Faults injected into whole jobs: nothing lost, nothing half used, every error told clearly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.checkpoint.fingerprint import changed
from modelquirks.planner.execution.execute import ExecutionError
from modelquirks.planner.export.exportreport import ExportError

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script looks into /proc")


def test_each_kind_of_fault_leaves_everything_right_and_planted_ones_are_seen(
    tmp_path: Path,
) -> None:
    """Each kind once, in some job; ``benchmarks/faults.py`` has them in all jobs."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--self-test", "--json", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 faults planted; the judge does not see: none" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert len({one["kind"] for one in found}) >= 30
    assert {"right", "refused", "killed"} <= {one["outcome"] for one in found}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_a_full_standard_output_is_told_in_words_with_the_exit_code_of_a_bad_call(
    checkpoint: Path, json_option: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "modelquirks.planner", "inspect", checkpoint, *json_option],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "modelquirks: error: standard output cannot be written: No space left on device\n"
    )


def test_a_file_that_cannot_be_read_now_has_not_changed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = open_manifest(checkpoint)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    (told,) = changed(checkpoint, manifest.shards, same_place=True)
    assert told.message == "'model.safetensors' can no longer be read (Permission denied)."


def test_a_file_beside_the_weights_that_cannot_be_read_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def broken(self: Path) -> bytes:
        if self.name == "config.json":
            raise OSError(5, "Input/output error")
        return read(self)

    dispatcher, manifest = Dispatcher(), open_manifest(checkpoint)
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(ExportError, match=r"config\.json' belongs beside the weights and cannot"):
        dispatcher.export(manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_computed_before_is_not_removed_because_it_cannot_be_read_now(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many open files: the next run uses it."""

    def load() -> list[str]:
        model = nn.Linear(8, 8).to("meta")
        plan = Dispatcher().plan(checkpoint, model=model, device_map={"": "disk"}, dtype="float16")
        notes = plan.load_into(model, offload_folder=tmp_path / "off", materialize=True).notes
        return [note.message for note in notes if note.code == "materialized"]

    load()
    (store,) = (tmp_path / "off").iterdir()
    before = sorted(os.listdir(store))
    opened = Path.open

    def limited(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith("weights-"):
            raise OSError(24, "Too many open files", str(self))
        return opened(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", limited)
        with pytest.raises(ExecutionError, match="Too many open files"):
            load()
    assert sorted(os.listdir(store)) == before
    (told,) = load()
    assert "are read from" in told
