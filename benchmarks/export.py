"""Exports of DeepSpeed checkpoints beside DeepSpeed's zero_to_fp32: memory, time, the same bits.

    python benchmarks/export.py [--folder DIR] [--stages 2,3] [--gigabytes 1] [--rounds 2]
                                [--deepspeed PYTHON] [--json FILE]

Two processes (gloo, CPU) train a model of that size in fp32 for one step in bf16 and save it with
DeepSpeed 0.19.8, which PYTHON must have (``DS_BUILD_OPS=0 pip install deepspeed==0.19.8``); in DIR
that is done once. Then each checkpoint becomes safetensors files, in turn by our export of the fp32
masters and by ``zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict`` with the usual files of
5 GB and with files of 50 MB, each in a process of its own; the best of the rounds counts.

*Over base* is the peak of the process (VmHWM: pages of mapped files count) less what it had when
everything was imported; the time is that of the call. Ours includes the wait for the disk and the
reading back of every byte; *without* is the time less the latter. Exits 1 if a weight differs or
ours takes more than 300 MB over base.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

MB = 1e6
MOST = 300.0
"""MB over base that an export may take."""
WIDTH = 4096
WAYS = ("ours", "zero_to_fp32", "zero_to_fp32 50MB")


class Result(NamedTuple):
    """One call."""

    over_base: float
    """MB."""
    seconds: float
    without: float
    """Seconds of planning and writing alone; the disk may still be busy."""


def memory(which: str) -> float:
    """Return what the process has (VmRSS) or had at most (VmHWM), in MB."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"this system does not say {which}")
    return int(found[1]) * 1024 / MB


# In processes of their own


def train(stage: int, folder: Path, gigabytes: float, rank: int, port: int) -> None:
    """Train for a step as one of two ranks, and save."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import torch
    from torch import nn

    deepspeed = import_module("deepspeed")
    vars(deepspeed.ops)["__compatible_ops__"] = {}  # else it compiles one, for shared memory
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    n_layers = round(gigabytes * 1e9 / 4 / WIDTH / WIDTH)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.randn(1, WIDTH).bfloat16()).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(folder))


def convert(way: str, checkpoint: Path, out: Path) -> Result:
    """Make safetensors files of *checkpoint*."""
    if way == "ours":
        from modelquirks.planner import Dispatcher
        from modelquirks.quirks.registry import Registry

        import_module("modelquirks.planner.export.perform")
        dispatcher = Dispatcher(Registry.load())
        base, started = memory("VmRSS"), time.perf_counter()
        report = dispatcher.export(checkpoint, out, weights="master")
        seconds = time.perf_counter() - started
        without = sum(report.seconds_by_step[step] for step in ("plan", "write"))
        return Result(memory("VmHWM") - base, seconds, without)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("safetensors.torch")  # which it imports itself when it is called
    zero_to_fp32 = import_module("deepspeed.utils.zero_to_fp32")
    base, started = memory("VmRSS"), time.perf_counter()
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        str(checkpoint),
        str(out),
        max_shard_size="50MB" if way.endswith("50MB") else "5GB",
        safe_serialization=True,
    )
    seconds = time.perf_counter() - started
    return Result(memory("VmHWM") - base, seconds, seconds)


def worker(words: list[str]) -> None:
    """Do one job; print its result as the last line."""
    if words[0] == "train":
        stage, folder, gigabytes, rank, port = words[1:]
        train(int(stage), Path(folder), float(gigabytes), int(rank), int(port))
    else:
        print(json.dumps(convert(words[1], Path(words[2]), Path(words[3]))))


# Here


def run(python: str, *words: object) -> subprocess.Popen[str]:
    """Start this file with *words*."""
    command = [python, __file__, "worker", *map(str, words)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    """Return the last line that it prints; RuntimeError if it fails."""
    said = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {said}")
    return said.strip().splitlines()[-1] if said.strip() else ""


def checkpoint_of(stage: int, folder: Path, gigabytes: float, python: str) -> Path:
    """Return a checkpoint of that stage, made if it is not there."""
    path = folder / f"zero{stage}-{gigabytes:g}gb"
    if not (path / "latest").exists():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = [run(python, "train", stage, path, gigabytes, rank, port) for rank in (0, 1)]
        for rank in ranks:
            output(rank)
    return path


def measured(
    checkpoint: Path, folder: Path, *, rounds: int, python: str
) -> Iterator[tuple[str, Result]]:
    """Yield what each way takes, in turn; the results of the last round stay in *folder*."""
    for _ in range(rounds):
        for way in WAYS:
            out = folder / way.replace(" ", "-")
            shutil.rmtree(out, ignore_errors=True)
            started_with = sys.executable if way == "ours" else python
            found = Result(*json.loads(output(run(started_with, "convert", way, checkpoint, out))))
            print(checkpoint.name, way, *(f"{number:.1f}" for number in found), flush=True)
            yield way, found


def weights(folder: Path) -> Mapping[str, Any]:
    """Return every tensor in the files of *folder*, as views of them."""
    from safetensors.torch import load_file

    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def differences(folder: Path) -> list[str]:
    """Return the names of the weights that the ways do not agree on."""
    import torch

    ours = weights(folder / "ours")
    wrong: set[str] = set()
    for way in WAYS[1:]:
        theirs = weights(folder / way.replace(" ", "-"))
        wrong |= {*ours} ^ {*theirs}
        wrong |= {n for n in {*ours} & {*theirs} if not torch.equal(ours[n], theirs[n])}
    return sorted(wrong)


def show(found: Mapping[int, Mapping[str, Result]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("ZeRO", "by", "MB over base", "seconds", "without reading back")
    for stage, ways in found.items():
        for way, (over, seconds, without) in ways.items():
            table.add_row(str(stage), way, f"{over:.0f}", f"{seconds:.1f}", f"{without:.1f}")
    Console().print(table)


def main() -> int:
    """Run it."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made and kept")
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deepspeed", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    found: dict[int, dict[str, Result]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        for stage in map(int, arguments.stages.split(",")):
            place = arguments.folder or Path(scratch)
            path = checkpoint_of(stage, place, arguments.gigabytes, arguments.deepspeed)
            best = found.setdefault(stage, {})
            for way, result in measured(
                path, Path(scratch), rounds=arguments.rounds, python=arguments.deepspeed
            ):
                best[way] = Result(*map(min, zip(best.get(way, result), result, strict=True)))
            wrong += differences(Path(scratch))
    show(found)
    print("weights that differ:", ", ".join(wrong) or "none")
    if arguments.json:
        named = {s: {w: r._asdict() for w, r in ways.items()} for s, ways in found.items()}
        arguments.json.write_text(json.dumps(named, indent=1))
    return int(bool(wrong) or any(ways["ours"].over_base > MOST for ways in found.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2:])
    else:
        sys.exit(main())
