"""``filling``: a folder that has its name only when everything in it is there.

It is filled under another name beside its place, ``.NAME.0123456789abcdef.part``, and renamed when
it is done. Whoever fills one holds a lock on it (flock), which ends with the process, so that what
dead processes left is told from what others are filling right now.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelquirks.planner.export.exportreport import ExportError
from modelquirks.planner.export.sidefiles import is_ours
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.wholefile import sync_folder

if sys.platform != "win32":
    import fcntl

__all__ = ["check_out", "clear_stale", "existing_parent", "filling", "unfinished"]

_WAY_OUT = "name another folder, or replace it with --overwrite (in Python: overwrite=True)"


def check_out(out: Path, *, root: Path, overwrite: bool) -> None:
    """Raise :class:`ExportError` if *out* must not be written; *root* is that of the checkpoint.

    With *overwrite* a folder may be there that holds nothing but what an export writes.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ExportError(f"{str(out)!r} is a file; an export is a folder, name another")
    names = sorted(os.listdir(out))
    if not names:
        return
    if not overwrite:
        raise ExportError(f"{str(out)!r} is not empty: it holds {shown(names, 5)}; {_WAY_OUT}")
    if root.resolve().is_relative_to(out.resolve()):
        raise ExportError(f"{str(out)!r} holds the checkpoint itself; name another folder")
    if strange := [name for name in names if not is_ours(name) or (out / name).is_dir()]:
        raise ExportError(
            f"{str(out)!r} is not replaced: no export wrote {shown(strange, 5)}; name another "
            "folder, or remove that yourself"
        )


def clear_stale(out: Path) -> list[Finding]:
    """Remove what dead processes left of exports to *out*, and say what was done.

    A folder that one of them was about to replace gets its name back.
    """
    found: list[Finding] = []
    for path in _leftovers(out):
        descriptor = _locked(path)
        if descriptor is None:
            text = f"{str(path)!r} is being written by another process, or cannot be locked: left"
            found.append(Finding("export-unfinished", "warning", text))
            continue
        with _open_until_done(descriptor):
            if path.suffix == ".old" and not out.exists():
                os.rename(path, out)
                text = f"{str(out)!r} was about to be replaced when a process died: it is back"
                found.append(Finding("export-restored", "warning", text))
            else:
                shutil.rmtree(path)
                text = f"{str(path)!r}, which a process left that died, was removed"
                found.append(Finding("export-cleared", "info", text))
    return found


@contextmanager
def filling(out: Path) -> Generator[Path]:
    """Give a new folder, which is called *out* when the block is done; a failure leaves nothing.

    What is called so then is replaced: :func:`check_out` says whether it may be. Parents are made,
    and go again on a failure.
    """
    parents = [path for path in out.parents if not path.exists()]
    made: list[Path] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _open_until_done(_new(out, made)):
            yield made[-1]
            sync_folder(made[-1])
            _take_name(made[-1], out)
    except BaseException:
        for partial in made:
            with suppress(MemoryError):  # the next export removes it; what went wrong is to be told
                shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # another process has put something there
            for path in parents:
                path.rmdir()
        raise


def existing_parent(out: Path) -> Path:
    """Return the nearest folder above *out* that is there."""
    return next(path for path in out.parents if path.is_dir())


def unfinished(out: Path) -> list[Path]:
    """Return the folders of exports to *out* that are not done: of others, or left behind."""
    return [path for path in _leftovers(out) if path.suffix == ".part"]


def _leftovers(out: Path) -> Iterator[Path]:
    pattern = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{16}}\.(part|old)")
    with suppress(OSError):
        yield from sorted(p for p in out.parent.iterdir() if pattern.fullmatch(p.name))


def _new(out: Path, made: list[Path]) -> int | None:
    """Make a folder, the last of *made* then; return it open and locked, if that can be done."""
    while True:
        path = out.with_name(f".{out.name}.{secrets.token_hex(8)}.part")
        made.append(path)
        path.mkdir()
        descriptor = _locked(path, must_open=True)  # unlocked it would be taken for a dead one's
        if path.exists():
            return descriptor
        if descriptor is not None:  # taken for that of a dead process before it was locked
            os.close(descriptor)


def _take_name(partial: Path, out: Path) -> None:
    """Rename *partial*; between the two renames a folder that is replaced has a name of its own."""
    if not out.exists() or not any(out.iterdir()):
        _rename(partial, out)
        return
    old = out.with_name(f".{out.name}.{secrets.token_hex(8)}.old")
    with _open_until_done(_locked(out)):
        os.rename(out, old)
        try:
            _rename(partial, out)
        except BaseException:
            _give_back(old, out)
            raise
        # The export is there. What cannot be removed now goes with the next export to this place.
        shutil.rmtree(old, ignore_errors=True)


def _give_back(old: Path, out: Path) -> None:
    try:
        os.rename(old, out)
    except OSError as error:
        raise ExportError(
            f"{str(out)!r} was to be replaced, and could be neither replaced nor given its name "
            f"back ({error.strerror}): what was there is at {str(old)!r}. The next export to this "
            "place gives it back"
        ) from error


def _rename(partial: Path, out: Path) -> None:
    if sys.platform == "win32" and out.exists():
        out.rmdir()
    try:
        os.rename(partial, out)  # over an empty folder as well
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ExportError(
            f"{str(out)!r} was made by another process meanwhile ({error.strerror}); {_WAY_OUT}"
        ) from error
    sync_folder(out.parent)


def _locked(path: Path, *, must_open: bool = False) -> int | None:
    """Return the open folder, locked for this process; None if it is another's or has no locks."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:
        if must_open:
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _open_until_done(descriptor: int | None) -> Generator[None]:
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
