"""One input under watch: what it takes of time and memory, what it opens, what it raises.

An input is a problem if the code raises anything but its own errors, takes longer than
:data:`SECONDS` of CPU time, grows by more than :data:`GROWTH_BYTES`, or touches what it must not.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

__all__ = [
    "GROWTH_BYTES",
    "SECONDS",
    "Nonsense",
    "Problem",
    "attempt",
    "clear",
    "limit_memory",
    "scratch",
]

SECONDS = 5.0
"""CPU time of one input."""
GROWTH_BYTES = 200 << 20
"""What the memory in use may rise above where it was, for an input of up to 1 MB."""
ADDRESS_BYTES = 4 << 30
"""What may be mapped beyond what the start has: more is refused by the system."""

_WATCHED = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
    *("pickle.find_class", "ctypes.dlopen", "socket.connect", "pty.spawn"),
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink")
_MADE = {"os.symlink": 1, "os.link": 1}
"""Which argument is changed, if not the first."""
_PACKAGE = re.compile(r".*/modelquirks/(.*\.py)")


class Nonsense(AssertionError):
    """Something was accepted that cannot be true, or told in a form that nobody can use."""


class Problem(NamedTuple):
    """What is wrong with the code, as an input shows it."""

    kind: str
    """``crash``, ``hang``, ``memory``, ``nonsense`` or ``reach``."""
    where: str
    """The same for inputs that show the same: error and place in the package."""
    text: str


class _Hang(BaseException):
    """Out of time; no ``except Exception`` may catch it."""


class _Watch:
    """What is looked at while an input runs."""

    def __init__(self) -> None:
        self.on = False
        self.reached: list[str] = []
        self.folder = str(scratch())

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Note what must not happen (an audit hook, which sees everything)."""
        if not self.on:
            return
        if event in _WATCHED:
            self.reached.append(f"{event} {str(args)[:200]}")
        elif event == "open" and isinstance(args[0], str) and _writes(args):
            self._inside(event, args[0])
        elif event in _CHANGES and args[-1] == -1 and not isinstance(args[0], int):
            self._inside(event, os.path.abspath(os.fsdecode(args[_MADE.get(event, 0)])))

    def _inside(self, event: str, path: str) -> None:
        if not path.startswith((self.folder, "/proc/self/", "/dev/null")):
            self.reached.append(f"{event} {path!r}")


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


_folders: list[Path] = []
_watches: list[_Watch] = []


def scratch() -> Path:
    """Return the folder that inputs are written to: in memory where there is such a disk."""
    if not _folders:
        memory = Path("/dev/shm")
        root = memory if os.access(memory, os.W_OK) else None
        _folders.append(Path(tempfile.mkdtemp(prefix="modelquirks-fuzz-", dir=root)))
        atexit.register(clear)
    return _folders[0]


def clear() -> None:
    """Remove that folder."""
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def limit_memory() -> None:
    """Have the system refuse what a bomb would take; for the rest of the process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_BYTES, hard))


def attempt(
    run: Callable[[bytes], str], data: bytes, allowed: tuple[type[BaseException], ...]
) -> tuple[str, Problem | None]:
    """Run one input; return how the code behaved, and what is wrong with that, if anything."""
    watch = _watched()
    before, began = _peak(reset=True), time.process_time()
    behaviour, problem = "", None
    try:
        with _timed(), _listening(watch):
            behaviour = _outcome(run, data, allowed)
    except _Hang as error:
        problem = Problem("hang", _where(error), _told(error))
    except MemoryError as error:
        problem = Problem("memory", _where(error), _told(error))
    except Nonsense as error:
        problem = Problem("nonsense", str(error)[:80], _told(error))
    except (Exception, SystemExit) as error:
        problem = Problem("crash", _where(error), _told(error))
    took, grown = time.process_time() - began, _peak() - before
    if problem is None and watch.reached:
        problem = Problem("reach", watch.reached[0][:80], "\n".join(watch.reached))
    if problem is None and grown > GROWTH_BYTES:
        problem = Problem("memory", behaviour[:80], f"grew by {grown:,} bytes: {behaviour}")
    if problem is None and took > SECONDS:
        problem = Problem("hang", behaviour[:80], f"took {took:.1f} s: {behaviour}")
    return behaviour, problem


def _outcome(
    run: Callable[[bytes], str], data: bytes, allowed: tuple[type[BaseException], ...]
) -> str:
    try:
        return run(data)
    except allowed as error:
        text = str(error)
        if not any(mark in text for mark in ("'", '"', "://")):
            raise Nonsense(f"{type(error).__name__} names nothing: {text[:200]}") from error
        if len(text) > 100_000 + 30 * len(data):
            raise Nonsense(f"{type(error).__name__} has {len(text):,} characters") from None
        return f"{type(error).__name__}: {re.sub(r'[0-9]+', '0', text)[-60:]}"


def _watched() -> _Watch:
    if not _watches:
        _watches.append(_Watch())
        sys.addaudithook(_watches[0].hear)
    return _watches[0]


@contextmanager
def _listening(watch: _Watch) -> Generator[None]:
    watch.reached.clear()
    watch.on = True
    try:
        yield
    finally:
        watch.on = False


@contextmanager
def _timed() -> Generator[None]:
    """Stop by an exception what takes too much CPU time."""

    def stop(_: int, frame: FrameType | None) -> None:
        raise _Hang(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _peak(*, reset: bool = False) -> int:
    """Return the most memory that was in use since the last *reset*; 0 where nobody tells."""
    with suppress(OSError):
        if reset:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        with open("/proc/self/status", encoding="ascii") as file:
            found = re.search(r"VmHWM:\s*([0-9]+) kB", file.read())
        return int(found[1]) << 10 if found else 0
    return 0


def _where(error: BaseException) -> str:
    """Return the error and the innermost place in the package, of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [(found[1], f.name, f.lineno) for f in frames if (found := _PACKAGE.match(f.filename))]
    place = "{}:{}:{}".format(*ours[-1]) if ours else f"{frames[-1].name}:{frames[-1].lineno}"
    return f"{type(error).__name__} {place}"


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-12))[-4000:]
