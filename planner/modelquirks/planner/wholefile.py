"""Files that are there whole or not at all, and a folder that one process at a time fills."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from modelquirks.planner.finding import Finding
from modelquirks.planner.tell import tell

if sys.platform != "win32":
    import fcntl

__all__ = ["clear_partials", "exclusive", "partials", "sync_folder", "write_whole"]

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.part")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
"""O_EXCL: what is there already, be it a link to elsewhere, is an error and is not followed."""
_LOCK = ".lock"
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
"""To be locked a file must be open for writing on NFS."""


def write_whole(
    path: Path, chunks: Iterable[bytes | memoryview], *, durable: bool = True
) -> os.stat_result:
    """Write *chunks* to the file *path* in one step, and return its status.

    They go to a new file beside it, which takes the name when it is safely on the disk (if it has
    to be *durable*). A link at *path* is replaced, not followed. On a failure, also one of
    *chunks*, nothing is left. While it is written the new file is locked, where the file system has
    locks, so that what dead processes left is told from it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = _begun(partial)
        try:
            for chunk in chunks:
                _write_all(descriptor, memoryview(chunk))
            if durable:
                os.fsync(descriptor)
            status = os.fstat(descriptor)
            os.replace(partial, path)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(OSError):  # what went wrong is what is told
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)
    return status


def clear_partials(path: Path) -> list[Path]:
    """Remove what dead processes left of writing *path*, and return it."""
    removed: list[Path] = []
    own = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.part")
    for partial in (one for one in partials(path.parent) if own.fullmatch(one.name)):
        with suppress(OSError):  # it is gone meanwhile, or may not be touched
            descriptor = os.open(partial, _OPEN & ~os.O_CREAT)
            try:
                if _is_locked(descriptor):
                    partial.unlink()
                    removed.append(partial)
            finally:
                os.close(descriptor)
    return removed


def _begun(partial: Path) -> int:
    """Return a new file, open and locked."""
    while True:
        descriptor = os.open(partial, _CREATE, 0o666)
        try:
            # Before it was locked it may have been taken for that of a dead process.
            if not _is_locked(descriptor) or _is_there(partial, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_locked(descriptor: int) -> bool:
    """Lock a file for this process, if that can be done at once; tell whether it was."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def partials(folder: Path) -> list[Path]:
    """Return the files below *folder* that :func:`write_whole` has begun and not finished."""
    try:
        return [path for path in folder.iterdir() if _PARTIAL.fullmatch(path.name)]
    except OSError:
        return []


@contextmanager
def exclusive(folder: Path) -> Generator[bool]:
    """Have *folder*, which is made if need be, for this process and thread alone.

    Waits for others. The lock is the operating system's, on the file ``.lock`` in the folder, and
    ends with its process, however that ends. Gives False where there are no such locks: others
    may then write at the same time. If the block fails, the folders that were made for it go
    again, unless there is something in them.
    """
    made: list[Path] = []
    descriptor: int | None = None
    try:
        descriptor, alone = _taken(folder, made)
        yield alone
    except BaseException:
        with suppress(OSError):  # not empty, or another process was faster
            if folder in made and [path.name for path in folder.iterdir()] == [_LOCK]:
                (folder / _LOCK).unlink()
            for path in made:
                path.rmdir()
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _taken(folder: Path, made: list[Path]) -> tuple[int, bool]:
    """Return the open lock file and whether it is locked; add to *made*, deepest first."""
    while True:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        made[:0] = [path for path in new if path not in made]
        with suppress(FileNotFoundError):  # another process failed, and took the folder away
            descriptor = os.open(folder / _LOCK, _OPEN, 0o666)
            try:
                try:
                    _lock(descriptor, folder)
                except OSError:  # no such locks here
                    return descriptor, False
                if _is_there(folder / _LOCK, descriptor):
                    return descriptor, True
            except BaseException:  # or this process would wait for itself the next time
                os.close(descriptor)
                raise
            os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        raise OSError("no locks of this kind")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"another process writes to {str(folder)!r}: waiting until it is done"
        tell([Finding("materialize-waiting", "warning", text)])
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def sync_folder(folder: Path) -> None:
    """Have the new name on the disk as well, where folders can be synchronised."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
