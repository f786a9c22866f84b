"""``FilePath``: what the readers of headers need of a path, wherever its file is.

A ``pathlib.Path`` has all of it. So has a file of a repository on the hub, whose bytes come by
ranges over HTTP (``modelquirks.planner.hub``); nothing here knows of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Literal, Protocol, Self, runtime_checkable

__all__ = [
    "Distant",
    "DistantFile",
    "FilePath",
    "FileStatus",
    "announce",
    "announce_ranges",
]


class FileStatus(Protocol):
    """What ``stat`` says of a file."""

    @property
    def st_mode(self) -> int:
        """Kind and rights of the file."""
        ...

    @property
    def st_size(self) -> int:
        """Bytes in the file."""
        ...

    @property
    def st_mtime_ns(self) -> int:
        """When it was last written, in nanoseconds; 0: nobody knows."""
        ...


class FilePath(Protocol):
    """A file or folder. As a local path it is where the file is, or will be once it is fetched."""

    @property
    def name(self) -> str:
        """The last part."""
        ...

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        ...

    @property
    def parent(self) -> Self:
        """The folder that it is in."""
        ...

    def __fspath__(self) -> str:
        """Return where it is, or will be, on this machine."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """Return what is called *key* in this folder."""
        ...

    def iterdir(self) -> Iterator[Self]:
        """Yield what is in this folder; OSError if it is none."""
        ...

    def exists(self) -> bool:
        """Tell whether it is there."""
        ...

    def is_dir(self) -> bool:
        """Tell whether it is a folder."""
        ...

    def is_file(self) -> bool:
        """Tell whether it is a file."""
        ...

    def is_symlink(self) -> bool:
        """Tell whether it is a link."""
        ...

    def resolve(self) -> Self:
        """Return it without links; OSError or RuntimeError for a loop."""
        ...

    def is_relative_to(self, other: Self, /) -> bool:
        """Tell whether it is *other* or below it."""
        ...

    def stat(self) -> FileStatus:
        """Return what the file is; OSError if there is none."""
        ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """Open the file for reading; OSError if that cannot be."""
        ...

    def read_bytes(self) -> bytes:
        """Return the whole file; OSError if that cannot be."""
        ...


@runtime_checkable
class Distant(Protocol):
    """A folder that is far away, so that it pays to know early what will be read."""

    def expect(self, files: Mapping[str, int | None], /) -> None:
        """Take note that headers will be read, of about so many bytes; None: nobody knows."""
        ...


@runtime_checkable
class DistantFile(Protocol):
    """An open file that is far away."""

    def expect_ranges(self, ranges: Sequence[tuple[int, int]], /) -> None:
        """Take note that the bytes from here to before there will be read, of each pair."""
        ...


def announce_ranges(file: object, ranges: Iterable[tuple[int, int]]) -> None:
    """Tell *file*, if it is far away, which scattered bytes will be read."""
    if isinstance(file, DistantFile):
        file.expect_ranges([*ranges])


def announce(folder: FilePath, files: Callable[[], Mapping[str, int | None]]) -> None:
    """Tell *folder*, if it is far away, which headers will be read, as in :class:`Distant`.

    *files* is called only then: to foresee the headers of many tensors takes its time.
    """
    if isinstance(folder, Distant):
        folder.expect(files())
