"""The judge: a job in a process of its own, under a fault, and what is left of everything."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from faults_calls import Call, Trap
from faults_jobs import CommandFailed, Job
from faults_kinds import Kind, Place
from torch import nn

__all__ = ["LIMIT_S", "Found", "State", "Told", "clear", "counted", "digest", "judged", "listed"]

LIMIT_S = 60.0
"""Seconds after which a process counts as hanging."""
_REMOVING = ("unlink", "remove", "rmdir", "scandir", "listdir", "open to read", "lstat")
_HOOKS = ("_hf_hook", "_old_forward", "forward", "hf_device_map")
_FOREIGN = ("Traceback", "Error: [Errno", "hint: set MODELQUIRKS_DEBUG")


class Told(NamedTuple):
    """What a process says of its job before it ends."""

    outcome: str
    """``right``, ``refused``, ``interrupted`` or ``wrong``."""
    error: str = ""
    faults: tuple[str, ...] = ()
    fired: bool = True
    messages: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """What it tried to remove, or to look into for that, and was not let."""


class Found(NamedTuple):
    """One injection, and what came of it."""

    kind: str
    job: str
    at: str
    outcome: str
    """``right``, ``refused``, ``interrupted``, ``killed``, ``hangs``, ``not reached``."""
    error: str
    faults: tuple[str, ...]


class State:
    """A model as it is before a job."""

    def __init__(self, model: nn.Module | None) -> None:
        """Look at *model*, and keep copies of its values."""
        self._model = model
        self._held = [] if model is None else [*self._tensors(model)]

    @staticmethod
    def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{path}.{leaf}", tensor, tensor.detach().clone()

    def faults(self) -> Iterator[str]:
        """Yield what is not as it was."""
        if self._model is None:
            return
        now = {name: tensor for name, tensor, _ in self._tensors(self._model)}
        for name, tensor, values in self._held:
            found = now.get(name)
            if found is None or found is not tensor:
                yield f"the model: {name} is another tensor than before"
            elif found.is_meta != values.is_meta:
                yield f"the model: {name} is on {found.device} now"
            elif not found.is_meta and not torch.equal(found, values):
                yield f"the model: {name} has other values than before"
        for path, module in self._model.named_modules():
            if left := [key for key in _HOOKS if key in vars(module)]:
                yield f"the model: {path or 'it'} has {left} left"


def digest(folder: Path) -> dict[str, str]:
    """Return what is in a folder, by the names of the files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def listed(root: Path) -> set[str]:
    """Return everything below *root*, by name."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def clear(
    error: BaseException, place: Place, calls: list[Call], stages: list[str]
) -> Iterator[str]:
    """Yield why *error* is not one that says what is wrong with what."""
    text = str(error)
    if isinstance(error, CommandFailed):
        if error.code not in (1, 2):
            yield f"exit code {error.code}"
        yield from (f"it says {word!r}: {text[:300]}" for word in _FOREIGN if word in text)
    else:
        kind = type(error)
        is_file = isinstance(error, OSError) and error.filename is not None
        if not kind.__module__.startswith("modelquirks.") and not is_file:
            if isinstance(error, MemoryError) and stages in ([], ["planned", "loaded"]):
                return  # while nothing is touched yet, or in a pass, Python's own is clear enough
            where = traceback.extract_tb(error.__traceback__)[-1]
            place_of = f"{Path(where.filename).name}:{where.lineno}"
            yield f"a foreign {kind.__name__}: {text[:200]} ({place_of})"
    names = {Path(call.path).name for call in calls} | {str(place.root)}
    names |= {path.name for path in place.input.rglob("*")} | {
        "lm_head",
        "model.",
        "tensor",
        "org/name",
    }
    if "not enough memory" in text or "standard output" in text:
        return
    if not any(name in text for name in names if name):
        yield f"the error names no file and no tensor: {text[:200]!r}"


def child(work: Callable[[], Told], *, quiet: bool = True) -> tuple[int | None, Told | None]:
    """Do *work* in a forked process; return how it ended (None: it hangs) and what it told."""
    reading, writing = os.pipe()
    where = tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if not pid:
        faulthandler.register(signal.SIGUSR1, file=where)
        _in_child(work, writing, quiet=quiet)
    os.close(writing)
    parts: list[bytes] = []
    deadline = time.monotonic() + LIMIT_S
    os.set_blocking(reading, False)
    code: int | None = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        with suppress(BlockingIOError):
            while part := os.read(reading, 1 << 16):
                parts.append(part)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.002)
    else:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        where.seek(0)
        parts = [json.dumps(Told("hangs", where.read().decode())._asdict()).encode()]
    where.close()
    os.close(reading)
    told = json.loads(b"".join(parts)) if parts else None
    return code, None if told is None else Told(**told)


def _in_child(work: Callable[[], Told], writing: int, *, quiet: bool) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        told = work()._asdict()
        os.write(writing, json.dumps(told).encode())
        code = 0
    except BaseException:
        os.write(writing, json.dumps(Told("wrong", traceback.format_exc())._asdict()).encode())
    finally:
        os._exit(code)


def attempted(
    job: Job, place: Place, trap: Trap, kind: Kind | None, disarm: Callable[[], list[str]]
) -> Told:
    """Do *job* under what is armed, judge it, and do it again without."""
    faults: list[str] = []
    log = _Log()
    logging.getLogger().addHandler(log)
    logging.getLogger("modelquirks").setLevel(logging.INFO)
    job.begin()
    state = State(job.model)
    stages: list[str] = []

    def stage(name: str) -> None:
        stages.append(name)
        trap.stage(name)

    outcome, text = "right", ""
    try:
        job.run(place.root, stage)
    except KeyboardInterrupt:
        outcome = "interrupted"
    except BaseException as error:
        outcome, text = "refused", f"{type(error).__name__}: {error}"
        faults += disarm()
        faults += clear(error, place, trap.fired, stages)
        error.__traceback__ = None
    faults += disarm()
    gc.collect()
    if outcome == "interrupted" and not (kind and kind.interrupts):
        faults.append("a KeyboardInterrupt out of nothing")
    if outcome != "right" and "loaded" not in stages:
        faults += state.faults()
    kept = tuple(call.path for call in trap.fired if call.name in _REMOVING)
    if outcome != "right" and not (kind and kind.is_whole):
        faults += _left(job, place, kept, text)
    may_go_on = not (kind and kind.changes)
    if outcome == "right":
        faults += _wrong(job, place, trap, kind, stages)
    elif may_go_on:
        faults += [f"once more in this process: {text}" for text in _again(job, place, stages)]
    messages = (*job.messages, *log.texts)
    fired = bool(trap.fired) or kind is None or kind.is_whole
    return Told(outcome, text, tuple(faults), fired, messages, kept)


def _left(job: Job, place: Place, kept: Sequence[str], text: str) -> list[str]:
    """Return what was left behind, but what nobody could remove."""

    def is_excused(name: str) -> bool:
        path = place.root / name
        if path.name in text:  # it says so
            return True
        near = {path, *path.parents}
        return any(Path(one) in near or path in Path(one).parents for one in kept)

    return [f"left behind: {name}" for name in job.left(place.root) if not is_excused(name)]


def _wrong(job: Job, place: Place, trap: Trap, kind: Kind | None, stages: list[str]) -> list[str]:
    """Return what is wrong after a success.

    Where the files were changed before anything was planned, or while it was, all of it may be new;
    never a part.
    """
    last = [call.name for call in trap.fired][-1:]
    if kind is not None and _may_be_cut(job, kind) and last == ["loaded"]:
        return []  # views of a file that was cut off when all was done
    old = [*job.wrong(place.root)]
    is_early = bool(kind and kind.changes and trap.fired and "planned" not in trap.stages_before)
    if old and is_early and not [*job.wrong(place.root, 2)]:
        return []
    return old


def _may_be_cut(job: Job, kind: Kind) -> bool:
    """Tell whether the job has a file mapped that the fault cuts off."""
    return kind.cuts and not job.options.get("copy", False)


def _again(job: Job, place: Place, stages: list[str]) -> Iterator[str]:
    """Do it once more on the same model; yield what is wrong then."""
    try:
        compute = getattr(job, "compute", None)
        if "loaded" in stages and compute is not None:
            compute(job.model)
        else:
            job.clear(place.root)
            job.run(place.root, lambda name: None)
        yield from job.wrong(place.root)
    except BaseException as error:
        yield f"{type(error).__name__}: {error}"


class _Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(record.getMessage())


def counted(job: Job, place: Place) -> list[Call]:
    """Return the calls of the job, done in a child."""

    def work() -> Told:
        trap = Trap(job.watched(place.root))
        trap.install()
        job.begin()
        job.run(place.root, trap.stage)
        trap.disarm()
        calls = tuple(f"{call.name}\0{call.path}" for call in trap.calls)
        return Told("right", messages=calls)

    _, told = child(work)
    if told is None or told.outcome != "right":
        raise RuntimeError(f"{job.name} fails without a fault: {told}")
    return [Call(*text.split("\0")) for text in told.messages]


def judged(
    job: Job,
    place: Place,
    *,
    kind: Kind,
    label: str,
    arm: Callable[[Trap], Callable[[], list[str]]],
) -> Found:
    """Do *job* in a child under what *arm* arms (which returns how to disarm), and judge it all."""
    before = digest(place.input)
    pristine = place.root.parent / "pristine"
    if not pristine.exists():
        shutil.copytree(place.input, pristine)

    def work() -> Told:
        trap = Trap(job.watched(place.root))
        trap.install()
        return attempted(job, place, trap, kind, arm(trap))

    code, told = child(work)
    faults: list[str] = []
    outcome, error = ("hangs", "") if told is None else (told.outcome, told.error)
    if code is None:
        faults.append(f"no end after {LIMIT_S:.0f} s: {error[-2000:]}")
    elif code < 0:
        outcome = "killed"
        if -code != kind.dies and not (_may_be_cut(job, kind) and -code == signal.SIGBUS):
            faults.append(f"killed by {signal.Signals(-code).name}")
    if told is not None:
        faults += told.faults
        if not told.fired:
            outcome = "not reached"
        elif told.outcome == "wrong":
            faults.append(f"the harness: {told.error[-350:]}")
        elif kind.harmless and told.outcome != "right":
            faults.append(f"refused what is harmless: {told.error}")
        elif told.outcome == "right" and kind.interrupts:
            outcome = "right"
    if kind.changes:
        shutil.rmtree(place.input, ignore_errors=True)
        shutil.copytree(pristine, place.input)
    elif digest(place.input) != before:
        faults.append("lost: the checkpoint was changed")
    was_killed = outcome in ("killed", "hangs") or label.startswith("killed")
    left = [*job.left(place.root)]
    if not was_killed:
        faults += _left(job, place, told.kept if told is not None else (), error)
    else:
        faults += [name for name in left if name.startswith("lost")]
    faults += _next_run(job, place, left if was_killed else [])
    faults = [fault.replace("\n", " ")[:2000] for fault in dict.fromkeys(faults)]
    return Found(kind.name, job.name, label, outcome, error, tuple(faults))


def _next_run(job: Job, place: Place, left: list[str]) -> Iterator[str]:
    """Yield what is wrong with a run after the fault, and with what it leaves."""
    if not any(name.startswith("lost") for name in left):
        job.clear(place.root)
    there = listed(place.root)

    def work() -> Told:
        trap = Trap(job.watched(place.root))
        return attempted(job, place, trap, None, list)

    _, told = child(work)
    if told is None:
        yield "the next run hangs"
        return
    if told.outcome != "right":
        yield f"the next run fails: {told.error}"
    yield from (f"the next run: {fault}" for fault in told.faults)
    yield from (f"left behind after the next run: {name}" for name in job.left(place.root))
    said = " ".join(told.messages)
    for name in left:
        gone = name in there and not (place.root / name).exists()
        told_of = any(part in said for part in Path(name).parts if part.startswith("."))
        if gone and Path(name).suffix in (".part", ".old") and not told_of:
            yield f"removed without a word: {name}"
