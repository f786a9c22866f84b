"""``Seal``: the files whose bytes were compared with a digest, and whether they are still those."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Seal"]


class _State(NamedTuple):
    """What tells that a file was written to or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Files as they were before their bytes were compared."""

    files: Mapping[Path, _State | None]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Seal:
        """Take note of what the files are now; done before they are read."""
        return cls({path: _state(path) for path in paths})

    def broken(self) -> list[str]:
        """Return what has happened to the files since, a sentence each."""
        return [
            f"{str(path)!r} was written to or replaced after it was compared with the digest"
            for path, state in self.files.items()
            if _state(path) != state
        ]


def _state(path: Path) -> _State | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _State(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
