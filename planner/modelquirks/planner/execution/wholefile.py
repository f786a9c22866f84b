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

__all__ = ["exclusive", "partials", "sync_folder", "write_whole"]

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.part")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
"""O_EXCL: what is there already, be it a link to elsewhere, is an error and is not followed."""
_LOCK = ".lock"
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
"""To be locked a file must be open for writing on NFS."""


def write_whole(path: Path, chunks: Iterable[bytes | memoryview]) -> os.stat_result:
    """Write *chunks* to the file *path* in one step, and return its status.

    They go to a new file beside it, which takes the name when it is safely on the disk. A link
    at *path* is replaced, not followed. On a failure, also one of *chunks*, nothing is left.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(partial, _CREATE, 0o666)
    try:
        try:
            for chunk in chunks:
                _write_all(descriptor, memoryview(chunk))
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return status


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
                _lock(descriptor, folder)
            except OSError:  # no such locks here
                return descriptor, False
            try:
                if os.path.samestat(os.fstat(descriptor), os.stat(folder / _LOCK)):
                    return descriptor, True
            except FileNotFoundError:
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
