"""The kinds of faults: which calls they befall, what happens there, and what may come of it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from faults_calls import READS, STAGES, WRITES, Call, Hit

__all__ = ["KINDS", "Kind", "Place"]


class Place(NamedTuple):
    """Where a fault happens, for those that do something to the files."""

    root: Path
    input: Path
    other: Path
    """The same checkpoint with other values."""


class Kind(NamedTuple):
    """One kind of fault."""

    name: str
    act: Callable[[Hit, Place], Any]
    hits: Callable[[Call, Place], bool]
    harmless: bool = False
    """The job has to succeed all the same."""
    dies: int = 0
    """The signal that ends the process."""
    interrupts: bool = False
    changes: bool = False
    """It changes the checkpoint, which a success must not show."""
    lasting: bool | None = None
    """Whether all later calls fail too; None: either."""
    is_whole: bool = False
    """It lasts for the whole job, whatever calls that makes."""
    cuts: bool = False
    """It truncates files, of which no program can rule out that they are mapped just then: what
    becomes of that is in docs/faults.md, and a load of copies must not know it."""


def failing(*numbers: int) -> Callable[[Hit, Place], Any]:
    """Return what fails with one of those error numbers."""

    def act(hit: Hit, place: Place) -> Any:
        number = numbers[len(hit.call.path) % len(numbers)]
        named = hit.call.name in ("write", "pwrite", "fsync", "read", "pread", "preadv", "mmap")
        if named:
            raise OSError(number, os.strerror(number))
        raise OSError(number, os.strerror(number), hit.call.path)

    return act


def halfway(number: int) -> Callable[[Hit, Place], Any]:
    """Return what writes half of what it is given, and then fails."""

    def act(hit: Hit, place: Place) -> Any:
        if hit.call.name in ("write", "pwrite"):
            hit.proceed(*_half(hit))
            raise OSError(number, os.strerror(number))
        raise OSError(number, os.strerror(number), hit.call.path)

    return act


def _half(hit: Hit) -> tuple[Any, ...]:
    """Return the arguments of a call that moves half of the bytes."""
    args = [*hit.args]
    if hit.call.name == "preadv":
        args[1] = [memoryview(args[1][0])[: max(1, len(args[1][0]) // 2)]]
    elif hit.call.name == "pread":
        args[1] = max(1, args[1] // 2)
    else:
        at = 0 if len(args) == 1 else 1
        whole = memoryview(args[at])
        args[at] = whole[: max(1, len(whole) // 2)]
    return tuple(args)


def short(hit: Hit, place: Place) -> Any:
    """Move half of the bytes, which any call may do."""
    return hit.proceed(*_half(hit))


def ended(hit: Hit, place: Place) -> Any:
    """Read nothing, as where a file ends."""
    return b"" if hit.call.name == "pread" else 0


def no_memory(hit: Hit, place: Place) -> Any:
    """Have no memory for what comes back."""
    raise MemoryError


def killing(number: int) -> Callable[[Hit, Place], Any]:
    """Return what sends this process a signal, halfway through a write."""

    def act(hit: Hit, place: Place) -> Any:
        if hit.call.name in ("write", "pwrite") and len(hit.call.path) % 2:
            hit.proceed(*_half(hit))
        os.kill(os.getpid(), number)
        return hit.proceed(*hit.args)

    return act


def changing(change: Callable[[Path, Path], None]) -> Callable[[Hit, Place], Any]:
    """Return what does *change* to a file of the checkpoint, and then makes the call."""

    def act(hit: Hit, place: Place) -> Any:
        called = Path(hit.call.path).name
        files = sorted(
            path for path in place.input.rglob("*") if _is_weights(path) and path.is_file()
        )
        chosen = next((path for path in files if path.name == called), files[-1])
        change(chosen, place.other / chosen.relative_to(place.input))
        return hit.proceed(*hit.args)

    return act


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".pt")


def replaced(path: Path, other: Path) -> None:
    """Put another file of that name there."""
    beside = path.with_name(f"{path.name}.new")
    shutil.copyfile(other, beside)
    beside.replace(path)


def all_replaced(path: Path, other: Path) -> None:
    """Replace every weight file of the folder, as saving anew does."""
    for one in sorted(path.parent.glob("*.safetensors")):
        replaced(one, other.with_name(one.name))


def rewritten(path: Path, other: Path) -> None:
    """Write other values of the same size into the file."""
    content = other.read_bytes()
    with path.open("r+b") as file:
        file.write(content)


def truncated(path: Path, other: Path) -> None:
    """Cut the file to a half, or to nothing."""
    os.truncate(path, path.stat().st_size // 2)


def removed(path: Path, other: Path) -> None:
    """Remove the file."""
    path.unlink(missing_ok=True)


def away(hit: Hit, place: Place) -> Any:
    """Remove the folder that is being written to, or that one was in."""
    folder = Path(hit.call.path).parent
    if place.root in folder.parents:
        shutil.rmtree(folder, ignore_errors=True)
    return hit.proceed(*hit.args)


def across(hit: Hit, place: Place) -> Any:
    """Find the other name on another file system."""
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), hit.call.path)


def reads(call: Call, place: Place) -> bool:
    """Tell whether a call reads."""
    return call.name in READS


def writes(call: Call, place: Place) -> bool:
    """Tell whether a call changes something."""
    return call.name in WRITES


def any_call(call: Call, place: Place) -> bool:
    """Take every call, and the moments between steps."""
    return True


def of(*names: str) -> Callable[[Call, Place], bool]:
    """Return what takes the calls of those names."""
    return lambda call, place: call.name in names


def in_written(call: Call, place: Place) -> bool:
    """Take what is written to in a folder that the job made."""
    folder = Path(call.path).parent
    is_made = place.root in folder.parents and not folder.is_relative_to(place.input)
    return call.name in WRITES and is_made


def at_reading(call: Call, place: Place) -> bool:
    """Take the moments between steps, and what is read of weights after the headers."""
    moments = ("mmap", "preadv", "pread")
    return call.name in STAGES or (call.name in moments and _is_weights(Path(call.path)))


_OPENS = ("open to read", "open to write", "scandir", "listdir")
_DISK_FULL = of("write", "pwrite", "ftruncate", "fsync", "mkdir", "open to write", "replace")
_OPEN_OR_NAME = of(*_OPENS, "mkdir", "rename", "replace", "unlink", "rmdir", "stat")

_ALL: tuple[Kind, ...] = (
    Kind("disk full (ENOSPC)", halfway(errno.ENOSPC), _DISK_FULL),
    Kind("quota (EDQUOT)", halfway(errno.EDQUOT), _DISK_FULL, lasting=True),
    Kind("read-only folder (EROFS)", failing(errno.EROFS), writes, lasting=True),
    Kind("no permission (EACCES)", failing(errno.EACCES, errno.EPERM), _OPEN_OR_NAME),
    Kind("reading fails (EIO)", failing(errno.EIO), reads),
    Kind("writing fails (EIO)", halfway(errno.EIO), writes),
    Kind("too many open files (EMFILE)", failing(errno.EMFILE), of(*_OPENS)),
    Kind("no locks (ENOLCK)", failing(errno.ENOLCK), of("flock"), harmless=True, lasting=True),
    Kind("another file system (EXDEV)", across, of("rename", "replace")),
    Kind("short read", short, of("read", "pread", "preadv"), harmless=True),
    Kind("short write", short, of("write", "pwrite"), harmless=True),
    Kind("a file ends early", ended, of("read", "pread", "preadv")),
    Kind("no memory (MemoryError)", no_memory, any_call),
    Kind("interrupt (SIGINT)", killing(signal.SIGINT), any_call, interrupts=True, lasting=False),
    Kind("SIGTERM", killing(signal.SIGTERM), any_call, dies=signal.SIGTERM),
    Kind("SIGKILL", killing(signal.SIGKILL), any_call, dies=signal.SIGKILL),
    Kind("folder removed", away, in_written, lasting=False),
    Kind("file replaced", changing(replaced), at_reading, changes=True, lasting=False),
    Kind("all files replaced", changing(all_replaced), at_reading, changes=True, lasting=False),
    Kind("file rewritten", changing(rewritten), at_reading, changes=True, lasting=False),
    Kind("file truncated", changing(truncated), at_reading, changes=True, lasting=False, cuts=True),
    Kind("file removed", changing(removed), at_reading, changes=True, lasting=False),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
"""Those that befall a call. Others are in ``faults_whole`` and ``faults_network``."""


def dice_of(seed: int, *words: object) -> random.Random:
    """Return dice that fall the same way for the same words."""
    return random.Random(f"{seed} {words}")
