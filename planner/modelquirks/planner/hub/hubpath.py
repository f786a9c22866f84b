"""``HubPath``: a file or folder of a commit, read as if it were here."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Literal, NamedTuple

from modelquirks.planner.hub.repository import Repository

__all__ = ["HubPath"]


class _Status(NamedTuple):
    st_mode: int
    st_size: int
    st_mtime_ns: int


class HubPath:
    """What the readers of headers need of a path (``checkpoint.filepath.FilePath``).

    There are no links, and a file has no time: a commit does not change.
    """

    def __init__(self, repository: Repository, inside: str = "") -> None:
        """Take the path *inside* the repository, with ``/``; ``""`` is the whole."""
        self._repository, self._inside = repository, inside

    def __str__(self) -> str:
        """Return its name for people."""
        return self._repository.shown(self._inside)

    def __fspath__(self) -> str:
        """Return where the file is, or will be once it is downloaded."""
        return str(self._repository.folder / self._inside)

    @property
    def name(self) -> str:
        """The last part."""
        return self._inside.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return os.path.splitext(self._inside)[1]

    @property
    def parent(self) -> HubPath:
        """The folder that it is in."""
        return HubPath(self._repository, self._inside.rpartition("/")[0])

    def __truediv__(self, key: str, /) -> HubPath:
        """Return what is called *key* in this folder."""
        return HubPath(self._repository, f"{self._inside}/{key}".strip("/"))

    def iterdir(self) -> Iterator[HubPath]:
        """Yield what is in the folder."""
        return (self / name for name in self._repository.entries(self._inside))

    def exists(self) -> bool:
        """Tell whether it is there."""
        return self.is_file() or self.is_dir()

    def is_dir(self) -> bool:
        """Tell whether it is a folder."""
        return not self._inside or bool(self._repository.entries(self._inside))

    def is_file(self) -> bool:
        """Tell whether it is a file."""
        return self._inside in self._repository.files

    def is_symlink(self) -> bool:
        """Tell whether it is a link."""
        return False

    def resolve(self) -> HubPath:
        """Return it without links; OSError or RuntimeError for a loop."""
        return self

    def is_relative_to(self, other: HubPath, /) -> bool:
        """Tell whether it is *other* or below it."""
        return not other._inside or f"{self._inside}/".startswith(f"{other._inside}/")

    def stat(self) -> _Status:
        """Return what the file is; OSError if there is none."""
        if self.is_file():
            return _Status(stat.S_IFREG, self._repository.size(self._inside), 0)
        if self.is_dir():
            return _Status(stat.S_IFDIR, 0, 0)
        raise FileNotFoundError(f"no file or folder {str(self)!r}")

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """Open the file for reading; OSError if that cannot be."""
        return self._repository.open(self._inside)

    def read_bytes(self) -> bytes:
        """Return the whole file; OSError if that cannot be."""
        with self.open("rb") as file:
            return file.read()

    def expect(self, files: Mapping[str, int | None], /) -> None:
        """Fetch the headers of *files* of this folder, several at once."""
        at = f"{self._inside}/" if self._inside else ""
        self._repository.fetch_headers({f"{at}{name}": n for name, n in files.items()})
