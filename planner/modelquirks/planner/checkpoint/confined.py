"""``confined``: while a checkpoint is looked into, no link leads out of its folder.

Whoever makes a folder can put a link into it, to a key or a private file of whoever opens it; its
content would then be shown, copied by an export, or loaded as weights. So links within the folder
are followed, and of those that leave it only the ones of a hub cache.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from modelquirks.planner.checkpoint.filepath import FilePath

__all__ = ["confined", "is_outside", "leads_out"]

_FOLDERS: ContextVar[tuple[Path, ...]] = ContextVar("_FOLDERS", default=())
"""The folder that may be looked into, and a file that was named; none: anything may."""


@contextmanager
def confined(path: Path) -> Generator[None, None, None]:
    """Have files looked into only below *path*, or in the folder of the file *path*.

    A link that was named by itself is followed: what it leads to may be read, too.
    """
    folder = path if path.is_dir() else path.parent
    named = () if path == folder else (path,)
    token = _FOLDERS.set((folder, *named))
    try:
        yield
    finally:
        _FOLDERS.reset(token)


def is_outside(path: FilePath) -> bool:
    """Tell whether *path* leads out of what may be looked into now."""
    folders = _FOLDERS.get()
    if not folders or not isinstance(path, Path):
        return False
    return all(leads_out(folder, path) for folder in folders)


def leads_out(root: FilePath, path: FilePath) -> bool:
    """Tell whether links lead from *path* out of *root*, other than to the blobs of a hub cache."""
    if isinstance(path, Path) and _lies_in(root, path):
        return False
    try:
        folder, target = root.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL in the name
        return True
    if target.is_relative_to(folder):
        return False
    return not _in_hub_cache(folder, target)


def _lies_in(root: FilePath, path: Path) -> bool:
    """Tell whether *path* is right in *root* and no link: nearly all are, and that is quick."""
    name = path.name
    return path.parent == root and name != ".." and "\0" not in name and not path.is_symlink()


def _in_hub_cache(folder: FilePath, target: FilePath) -> bool:
    """Tell whether *target* is where the cache of huggingface_hub keeps files of *folder*.

    Its ``<repository>/snapshots/<revision>/<file>`` are links to ``<repository>/blobs/<hash>``.
    Since 2.4 those may be links in turn, to ``blobs/<2 digits>/<hash>`` beside the repositories
    (``utils/_shared_blobs.py``).
    """
    blobs = target.parent
    if blobs.name == "blobs":
        return folder.is_relative_to(blobs.parent / "snapshots")
    shared, above = blobs.parent, folder
    while above.parent != above:
        if above.name == "snapshots":
            return shared.name == "blobs" and above.parent.parent == shared.parent
        above = above.parent
    return False
