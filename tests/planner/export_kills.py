"""Kill a process that exports at each of its calls that change a file, and look at what it left.

Prints the number of kills. After each the folder must be absent, or be the one that was there, or
be whole; and the next export must succeed and leave nothing beside it. Once into a new folder, and
once in place of an export of other weights.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelquirks.planner import Dispatcher
from modelquirks.quirks.registry import Registry

CALLS = ("mkdir", "open", "ftruncate", "pwrite", "write", "fsync", "rename", "replace", "rmdir")
OLD = {"old": torch.ones(3)}
NEW = {f"layers.{n}.weight": torch.full((5, 4), float(n)) for n in range(3)}


def job(root: Path) -> None:
    Dispatcher(Registry()).export(root / "new", root / "out", shard_size=160, overwrite=True)


def killed_at(root: Path, step: int) -> bool:
    """Export in a child that is killed before its call number *step*, if it comes so far."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the child ended with {code}")
        return code == -signal.SIGKILL
    calls = count(1)

    def trap(name: str) -> None:
        inner: Any = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        trap(name)
    code = 1
    try:
        job(root)
        code = 0
    finally:
        os._exit(code)


def held(out: Path) -> dict[str, torch.Tensor] | None:
    """Return what is in *out*; None if it is not there."""
    if not out.exists():
        return None
    return {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {*one} == {*other} and all(torch.equal(one[name], other[name]) for name in one)


def look(root: Path, step: int, *, replaces: bool) -> None:
    out = root / "out"
    found = held(out)
    whole = found is None or equal(found, NEW) or (replaces and equal(found, OLD))
    if not whole:
        raise RuntimeError(f"killed at call {step}: there is {sorted(found or ())}")
    job(root)
    beside = sorted(path.name for path in root.iterdir())
    if not equal(held(out) or {}, NEW) or beside != ["new", "old", "out"]:
        raise RuntimeError(f"after a kill at call {step} the next run left {beside}")


def main() -> None:
    torch.set_num_threads(1)
    n_kills = 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk to wait for
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        root = Path(folder)
        for name, state in (("old", OLD), ("new", NEW)):
            (root / name).mkdir()
            save_file(state, root / name / "model.safetensors", metadata={"format": "pt"})
        for replaces in (False, True):
            for step in count(1):
                shutil.rmtree(root / "out", ignore_errors=True)
                if replaces:
                    shutil.copytree(root / "old", root / "out")
                if not killed_at(root, step):
                    break
                n_kills += 1
                look(root, step, replaces=replaces)
    print(n_kills, "kills")


if __name__ == "__main__":
    main()
