"""Kill a process that fills an offload folder, again and again, and look at what it leaves.

    python benchmarks/kill.py [--runs 100] [--seed N] [--steps] [--json FILE]

A child process loads a small model whose weights must be cast, writes them to an offload folder
(``materialize=True``) and computes with them. It is killed (SIGKILL, which nothing can catch) after
a random time between 0 and 1.2 times what it takes unharmed; with ``--steps`` also at each of its
calls that change a file: before it, and halfway through it if it is a write. Half of the runs
begin where the killed one before left off.

After each kill a child must load from that folder, without help and with equal results, and then
every file in the folder must be whole, recorded, and hold the right values, with no temporary file
beside it. Exits 1 if any of that fails. The children are forked (Unix only).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution import materialize

N_LAYERS, SIZE = 12, 192
TIMEOUT = 60.0
"""Seconds after which a child that neither ends nor is killed counts as hanging."""


class Outcome(NamedTuple):
    """What one killed run left, and whether it was right."""

    at: str
    was_killed: bool
    left: str
    """What was there before the next run: nothing, partial files, or whole ones only."""
    faults: list[str]


class Site:
    """A checkpoint, an offload folder, and the results that are right."""

    def __init__(self, root: Path) -> None:
        """Write the checkpoint below *root*."""
        self.checkpoint, self.offload = root / "checkpoint", root / "offload"
        self.checkpoint.mkdir()
        torch.manual_seed(0)
        self.state = {name: torch.rand_like(t) for name, t in net("cpu").state_dict().items()}
        save_file(self.state, self.checkpoint / "model.safetensors", metadata={"format": "pt"})
        self.x = torch.linspace(-1, 1, 4 * SIZE).reshape(4, SIZE).bfloat16()
        with torch.no_grad():
            expected = net("cpu")
            expected.load_state_dict(self.state)
            self.wanted = expected.bfloat16()(self.x)

    def job(self) -> None:
        """Load, write what must be computed, and compute with it."""
        model = net("meta")
        plan = Dispatcher().plan(
            self.checkpoint, model=model, device_map={"": "disk"}, dtype="bfloat16"
        )
        plan.load_into(model, offload_folder=self.offload, materialize=True)
        with torch.no_grad():
            if not torch.equal(model(self.x), self.wanted):
                raise RuntimeError("the results differ")

    def partials(self) -> list[str]:
        """Return the files that nobody finished."""
        return [p.name for p in self.offload.rglob("*.part")] if self.offload.exists() else []

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the folder after a whole run."""
        (store,) = self.offload.iterdir()
        yield from (f"{name} was left" for name in self.partials())
        files = {path.name for path in store.glob("*.safetensors")}
        recorded = {r["name"] for r in json.loads((store / "manifest.json").read_text())["files"]}
        if files != recorded:
            yield f"there are {sorted(files)}, and recorded {sorted(recorded)}"
        if extra := {p.name for p in store.iterdir()} - files - {"manifest.json", ".lock"}:
            yield f"unknown files {sorted(extra)}"
        held = {
            name: t for path in store.glob("*.safetensors") for name, t in load_file(path).items()
        }
        for name, value in self.state.items():
            if name not in held or not torch.equal(held[name], value.bfloat16()):
                yield f"{name} is not what was stored"


def net(device: str) -> nn.Module:
    """Return the model."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(N_LAYERS))).eval()


def child(job: Callable[[], None]) -> int:
    """Return the process that does *job* and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        job()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"child: {error!r}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError("a child hangs")


def killed_after(site: Site, seconds: float) -> bool:
    """Kill a run after that time; return whether it was still running."""
    pid = child(site.job)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return ended(pid) == -signal.SIGKILL


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(site: Site, step: int, phase: str) -> bool:
    """Kill a run at its call number *step* that changes a file; return whether it came to that."""
    calls = 0

    def trap(name: str) -> None:
        inner: Any = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step and phase == "before":
                die()
            if calls == step and phase == "halfway" and name == "write":
                inner(args[0], memoryview(args[1])[: len(args[1]) // 2])
                die()
            return inner(*args, **kwargs)

        setattr(os, name, call)

    def job() -> None:
        for name in ("mkdir", "write", "fsync", "replace", "unlink"):
            trap(name)
        site.job()

    return ended(child(job)) == -signal.SIGKILL


def outcome(site: Site, at: str, kill: Callable[[], bool]) -> Outcome:
    """Kill a run, look at what is left, run once more, and look again."""
    was_killed = kill()
    left = "nothing"
    if site.partials():
        left = "partial files"
    elif site.offload.exists() and any(site.offload.rglob("*.safetensors")):
        left = "whole files"
    elif site.offload.exists():
        left = "a folder"
    code = ended(child(site.job))
    faults = [f"the next run ended with {code}"] if code else list(site.faults())
    return Outcome(at, was_killed, left, faults)


def random_runs(site: Site, runs: int, seed: int, usual: float) -> Iterator[Outcome]:
    """Yield what *runs* runs left that were killed at random times."""
    dice = random.Random(seed)
    for _ in range(runs):
        shutil.rmtree(site.offload, ignore_errors=True)
        at = dice.uniform(0, 1.2 * usual)
        if dice.random() < 0.5:
            killed_after(site, dice.uniform(0, usual))
        yield outcome(site, f"{at:.3f} s", partial(killed_after, site, at))


def step_runs(site: Site) -> Iterator[Outcome]:
    """Yield what runs left that were killed at each call in turn."""
    for step in count(1):
        for phase in ("before", "halfway"):
            shutil.rmtree(site.offload, ignore_errors=True)
            kill = partial(killed_at, site, step, phase)
            found = outcome(site, f"call {step}, {phase}", kill)
            if found.was_killed:
                yield found
            elif phase == "before":
                return  # there are no more calls


def show(outcomes: list[Outcome], usual: float) -> None:
    """Print what was found."""
    console = Console()
    table = Table("left by the killed run", "runs", "faults after the next run")
    total, bad = Counter(o.left for o in outcomes), Counter(o.left for o in outcomes if o.faults)
    for left, n_runs in total.most_common():
        table.add_row(left, str(n_runs), str(bad[left]))
    console.print(table)
    n_killed = sum(o.was_killed for o in outcomes)
    console.print(f"{len(outcomes)} runs, {n_killed} killed before their end (usual {usual:.2f} s)")
    for found in outcomes:
        for fault in found.faults:
            console.print(f"[red]killed at {found.at}: {fault}", markup=True)


def main() -> int:
    """Run it."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true", help="also at each call in turn")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    # Several files, written in several pieces each, as those of a large model are.
    materialize._FILE_BYTES, materialize._CHUNK_BYTES = 1 << 18, 1 << 15
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        times: list[float] = []
        for _ in range(3):
            shutil.rmtree(site.offload, ignore_errors=True)
            started = time.monotonic()
            if ended(child(site.job)):
                return 1
            times.append(time.monotonic() - started)
        usual = min(times)
        outcomes = list(random_runs(site, arguments.runs, arguments.seed, usual))
        if arguments.steps:
            outcomes += step_runs(site)
    show(outcomes, usual)
    if arguments.json:
        arguments.json.write_text(json.dumps([o._asdict() for o in outcomes], indent=1))
    return int(any(o.faults for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
