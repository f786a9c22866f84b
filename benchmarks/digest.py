"""How long ``modelquirks digest`` takes beside ``sha256sum`` and hashlib on the same file.

    python benchmarks/digest.py [--gigabytes N] [--runs N] [--folder DIR]

Whole processes in turn, after one run of each that does not count, so that the file is in the page
cache. hashlib reads 16 MiB at a time. The file holds random bytes as 16-bit tensors of two sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HASHLIB = """
import hashlib, sys
total, block = hashlib.sha256(), memoryview(bytearray(1 << 24))
with open(sys.argv[1], "rb", buffering=0) as file:
    while n := file.readinto(block):
        total.update(block[:n])
"""
SHAPES = (4096, 4096), (4096, 14336)


def write(path: Path, n_bytes: int) -> int:
    """Write a file of about *n_bytes*; return how many tensors it has."""
    header: dict[str, object] = {}
    end = 0
    while end < n_bytes:
        shape = SHAPES[len(header) % 2]
        begin, end = end, end + 2 * shape[0] * shape[1]
        name = f"model.layers.{len(header)}.weight"
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(block)):
            file.write(block[: end - begin])
    return len(header)


class Took(NamedTuple):
    """Seconds of one run."""

    wall: float
    cpu: float


def took(command: Sequence[str]) -> Took:
    """Run *command* once."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system
    return Took(wall, cpu - before.children_user - before.children_system)


def measure(path: Path, small: Path, runs: int) -> None:
    """Print the best times of each and the median of their ratios to ours, round by round."""
    ours = [sys.executable, "-m", "modelquirks.planner", "digest"]
    commands = {
        "modelquirks digest": [*ours, str(path)],
        "hashlib": [sys.executable, "-c", HASHLIB, str(path)],
        "sha256sum": ["sha256sum", str(path)],
        "ours, one small file": [*ours, str(small)],
    }
    if not shutil.which("sha256sum"):
        del commands["sha256sum"]
    rounds = [{name: took(c) for name, c in commands.items()} for _ in range(runs + 1)][1:]
    for name in commands:
        wall, cpu = (min(one[name][which] for one in rounds) for which in (0, 1))
        ratio = statistics.median(one["modelquirks digest"].wall / one[name].wall for one in rounds)
        print(
            f"{name:20} {wall:6.2f} s wall  {cpu:6.2f} s CPU  ours takes {ratio:5.2f} times as long"
        )


def main() -> None:
    """Make the file and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the file is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "model.safetensors"
        n_tensors = write(path, int(args.gigabytes * 1e9))
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        print(f"{path.stat().st_size:,} bytes, {n_tensors} tensors, {cpus} CPUs")
        write(Path(folder) / "small.safetensors", 1)
        measure(path, Path(folder) / "small.safetensors", args.runs)


if __name__ == "__main__":
    main()
