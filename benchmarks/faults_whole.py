"""Faults that last for a whole job: a small disk, limits, signals, two processes, odd folders.

Each has a few levels; the site may be prepared for it, and is freed of it before the next run.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from faults_calls import WRITES, Hit, Trap
from faults_jobs import Inspect, Job, Materialize, write_checkpoint
from faults_kinds import Kind, Place
from safetensors.torch import load_file, save_file

__all__ = ["WHOLE", "Disarm", "Level", "Whole", "can_mount", "prepared"]

Level = int | str
Disarm = Callable[[], list[str]]


def nothing(hit: Hit, place: Place) -> Any:
    """Let a call through."""
    return hit.proceed(*hit.args)


def everywhere(job: Job) -> bool:
    """Take every job that serves nothing itself."""
    return job.is_local


def writing(job: Job) -> bool:
    """Take the jobs that can write elsewhere."""
    return job.name in ("materialize", "export", "save a plan")


def storing(job: Job) -> bool:
    """Take the job that fills an offload folder."""
    return isinstance(job, Materialize)


class Whole(NamedTuple):
    """One such kind."""

    name: str
    levels: Sequence[Level]
    arm: Callable[[Trap, Job, Place, Level], Disarm]
    jobs: Callable[[Job], bool] = everywhere
    harmless: bool = False
    prepare: Callable[[Job, Place, Level], None] | None = None
    is_mounted: bool = False

    @property
    def kind(self) -> Kind:
        """The kind as the judge takes it."""
        return Kind(self.name, nothing, _anywhere, harmless=self.harmless, is_whole=True)


def _anywhere(_call: object, _place: object) -> bool:
    return True


def _inspecting(job: Job) -> bool:
    return isinstance(job, Inspect)


def can_mount() -> bool:
    """Tell whether this process may mount a file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def prepared(whole: Whole, job: Job, place: Place, level: Level) -> Generator[None]:
    """Have the site of a job as the fault needs it."""
    disk = place.root / "disk"
    if whole.is_mounted:
        disk.mkdir()
        _mount("size=64m", disk)
        job.home = "disk"
        if (place.root / "plan.json").exists():
            shutil.copy(place.root / "plan.json", disk)
        used = sum(path.stat().st_size + 4096 for path in disk.rglob("*"))
        _mount(f"remount,size={used + int(level) * 1024}", disk)
    try:
        if whole.prepare is not None:
            whole.prepare(job, place, level)
        yield
    finally:
        if whole.is_mounted:
            job.home = ""
            subprocess.run(["umount", str(disk)], check=True)


def _mount(options: str, disk: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)


def _small_disk(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    def disarm() -> list[str]:
        _mount("remount,size=64m", place.root / "disk")
        return []

    return disarm


def _limit(what: int, value: int) -> Disarm:
    """Set a soft limit; return what gives the old one back."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))

    def disarm() -> list[str]:
        resource.setrlimit(what, (soft, hard))
        return []

    return disarm


def _file_size(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    return _limit(resource.RLIMIT_FSIZE, int(level) * 1024)


def _open_files(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    return _limit(resource.RLIMIT_NOFILE, used + int(level))


def _memory(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    status = Path("/proc/self/statm").read_text().split()
    return _limit(resource.RLIMIT_AS, (int(status[0]) + 4) * 4096 + int(level) * 1024)


def _signals(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, int(level) / 1e6)

    def disarm() -> list[str]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return []

    return disarm


def _no_threads(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    threads: Any = threading
    start, left = threads._start_new_thread, [int(level)]

    def refused(*args: Any, **kwargs: Any) -> Any:
        if left[0] <= 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return start(*args, **kwargs)

    threads._start_new_thread = refused

    def disarm() -> list[str]:
        threads._start_new_thread = start
        return []

    return disarm


def _clock(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    now, n_calls = time.time(), [0]

    def back() -> float:
        n_calls[0] += 1
        return now - 3600.0 * n_calls[0]

    clock: Any = time
    before = clock.time, clock.time_ns
    clock.time, clock.time_ns = back, lambda: int(back() * 1e9)

    def disarm() -> list[str]:
        clock.time, clock.time_ns = before
        return []

    return disarm


def _in_future(job: Job, place: Place, level: Level) -> None:
    for path in place.input.rglob("*"):
        os.utime(path, (2_000_000_000, 2_000_000_000))


def _twin(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    """Have another process do the same at the same time, or with another checkpoint."""
    kills, other = str(level).startswith("killed"), str(level).startswith("another")
    pid = os.fork()
    if not pid:
        os._exit(_twin_code(trap, job, place, level, kills=kills, other=other))
    trap.arm(lambda hit: _slowly(hit), lambda call: call.name in WRITES, at=0, lasting=True)
    waited: list[int] = []

    def disarm() -> list[str]:
        trap.disarm()
        if waited:
            return []
        _, status = os.waitpid(pid, 0)
        waited.append(os.waitstatus_to_exitcode(status))
        fine = (0, 2) if not kills else (0, 2, -signal.SIGKILL)
        return [] if waited[0] in fine else [f"the other process ended with {waited[0]}"]

    return disarm


def _slowly(hit: Hit) -> Any:
    time.sleep(0.001)
    return hit.proceed(*hit.args)


def _twin_code(
    trap: Trap, job: Job, place: Place, level: Level, *, kills: bool, other: bool
) -> int:
    """Do the job; return 0 if it is right, 2 if it was refused in words of ours, else 1."""
    if kills:
        at = int(str(level).split()[-1])

        def die(hit: Hit) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        trap.arm(die, lambda call: call.name in WRITES, at=at, lasting=False)
    else:
        trap.arm(_slowly, lambda call: call.name in WRITES, at=0, lasting=True)
    root, seed = place.root, 1
    try:
        if other:
            job.input, seed = "second", 2
        job.begin()
        job.run(root, lambda name: None)
        trap.disarm()
        return int(any(True for _ in job.wrong(root, seed) if not other))
    except Exception as error:
        return 2 if type(error).__module__.startswith("modelquirks.") else 1


def _second(job: Job, place: Place, level: Level) -> None:
    if str(level).startswith("another"):
        write_checkpoint(place.root / "second", 2)


def _filled(job: Job, place: Place, level: Level) -> None:
    """Have an offload folder with a store in it, and something wrong with that."""
    folder = place.root / "offload"
    if level == "a file":
        folder.write_text("not a folder")
        return
    if os.fork() == 0:
        code = 1
        with suppress(Exception):
            if level == "of another model":
                write_checkpoint(place.root / "second", 2)
                job.input = "second"
            job.begin()
            job.run(place.root, lambda name: None)
            code = 0
        os._exit(code)
    if os.wait()[1]:
        raise RuntimeError("the offload folder cannot be filled")
    (store,) = folder.iterdir()
    _spoiled(store, str(level))


def _spoiled(store: Path, level: str) -> None:
    manifest = store / "manifest.json"
    weights = next(store.glob("weights-*"))
    match level:
        case "manifest is garbage":
            manifest.write_bytes(manifest.read_bytes()[:-40])
        case "manifest is a folder":
            manifest.unlink()
            manifest.mkdir()
        case "weights are cut":
            os.truncate(weights, weights.stat().st_size // 2)
        case "weights are gone":
            weights.unlink()
        case "weights are another's":
            tensors = {name: tensor + 1 for name, tensor in load_file(weights).items()}
            save_file(tensors, weights)
        case "weights are not recorded":
            data = json.loads(manifest.read_text())
            manifest.write_text(json.dumps(data | {"files": []}))
        case "a link":
            store.rename(store.parent.parent / "elsewhere")
            store.symlink_to(store.parent.parent / "elsewhere")
        case _:
            pass


def _freed(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    def disarm() -> list[str]:
        folder = place.root / "offload"
        if folder.is_file():
            folder.unlink()
        for path in folder.glob("*"):
            if path.is_symlink():
                path.unlink()
            elif (path / "manifest.json").is_dir():
                (path / "manifest.json").rmdir()
        return []

    return disarm


def _full_output(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    output = os.open("/dev/full", os.O_WRONLY)
    os.dup2(output, 1)
    raw = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    job.__dict__["stdout"] = io.TextIOWrapper(raw, encoding="utf-8")

    def disarm() -> list[str]:
        job.__dict__["stdout"] = None
        return []

    return disarm


_TWINS = ("together", "another model", "killed at call 3", "killed at call 12", "killed at call 25")
_FOLDERS = (
    *("a file", "of another model", "a link", "manifest is garbage", "manifest is a folder"),
    *("weights are cut", "weights are gone", "weights are another's", "weights are not recorded"),
)
_ALL: tuple[Whole, ...] = (
    Whole("a disk of so many KiB", (8, 40, 100, 240), _small_disk, writing, is_mounted=True),
    Whole("files of so many KiB (RLIMIT_FSIZE)", (0, 1, 40, 90), _file_size),
    Whole("so many open files (RLIMIT_NOFILE)", (0, 1, 2, 3, 5, 8), _open_files),
    Whole("so much memory, KiB (RLIMIT_AS)", (0, 300, 1000, 4000, 12000, 30000), _memory),
    Whole("a signal every so many µs (EINTR)", (200, 1000), _signals, harmless=True),
    Whole("so many threads more", (0, 1), _no_threads, harmless=True),
    Whole("a clock that goes back", (0,), _clock, harmless=True, prepare=_in_future),
    Whole("two processes at once", _TWINS, _twin, storing, prepare=_second, harmless=True),
    Whole("two processes, one place", _TWINS[::2], _twin, writing),
    Whole("offload folder that is", _FOLDERS, _freed, storing, prepare=_filled),
    Whole("standard output full", (0,), _full_output, _inspecting),
)
WHOLE = {whole.name: whole for whole in _ALL}
