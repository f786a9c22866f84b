"""``OpenFile``: a file of a checkpoint that tensors are read from, by a mapping or by copies.

A file is mapped once and stays mapped, privately: what a program writes into a tensor that is a
view of the file never reaches the file. The mapping reserves no memory, so that a file larger than
memory and swap can be mapped too; ``mmap.ACCESS_COPY`` alone fails there with ENOMEM under Linux'
default ``vm.overcommit_memory=0``.

Touching a mapping behind the end of its file kills the process (SIGBUS), and between a look at
the file and the touch somebody may cut it off. Where that is to be feared, bytes are copied by
``pread`` instead, which gives an error.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, NamedTuple

import torch

from modelquirks.planner.checkpoint.manifest import MARK, Shard, StoredTensor

__all__ = [
    "READING",
    "CopiedFile",
    "FileState",
    "Known",
    "MappedFile",
    "ReadError",
    "elsewhere",
    "is_another",
    "known_of",
    "long_enough",
]

_GENERIC = frozenset({"x86_64", "i686", "aarch64", "armv7l", "riscv64", "loongarch64", "s390x"})
"""Machines whose ``MAP_NORESERVE`` is that of asm-generic/mman.h."""

READING = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""Not waiting: a named pipe in place of a file is an error, not a standstill."""


class ReadError(RuntimeError):
    """A tensor that its file does not hold as the plan says; names tensor and file."""


class FileState(NamedTuple):
    """What a file was when its header was read; None is not known."""

    size_bytes: int | None
    mtime_ns: int | None
    identity: tuple[int, int] | None = None
    """Device and inode, once it was opened."""


Known = dict[str, FileState]
"""By the name of the file. Readers that share one agree on what the files are: one that is replaced
while another is read is found out when it is opened."""


def is_another(path: str | os.PathLike[str], state: FileState | None) -> bool:
    """Tell whether another file has the name of one that was opened."""
    if state is None or state.identity is None:
        return False
    try:
        status = os.stat(path)
    except OSError:
        return True
    return (status.st_dev, status.st_ino) != state.identity


def elsewhere(known: Known) -> Known:
    """Return what is known, as a copy of a reader may find it: it opens the files anew."""
    return {name: state._replace(identity=None) for name, state in known.items()}


def known_of(shards: Iterable[Shard]) -> Known:
    """Return what the headers' readers saw; of a commit on the hub there is no time."""
    return {shard.name: FileState(shard.size_bytes, shard.mtime_ns) for shard in shards}


class _OpenFile:
    """A file as it was when it was opened."""

    def __init__(self, path: str, status: os.stat_result) -> None:
        self._path, self._size = path, status.st_size
        self._identity, self._mtime_ns = (status.st_dev, status.st_ino), status.st_mtime_ns

    @property
    def size(self) -> int:
        """The bytes that can be read: fewer than there were if it was truncated since."""
        return min(self._size, self._now())

    @property
    def is_cut(self) -> bool:
        """Whether it is shorter than it was."""
        return self._now() < self._size

    @property
    def is_rewritten(self) -> bool:
        """Whether the very file that is open was written to.

        One that was deleted or replaced by another is as good as ever: the old one is kept.
        """
        try:
            now = os.stat(self._path)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._identity and now.st_mtime_ns != self._mtime_ns

    def _now(self) -> int:
        raise NotImplementedError


class MappedFile(_OpenFile):
    """One that tensors are views of."""

    def __init__(self, path: str, descriptor: int) -> None:
        """Map the open file; OSError if that cannot be."""
        super().__init__(path, os.fstat(descriptor))
        self.mapping = _mapping(descriptor)

    @classmethod
    def open(cls, root: Path, stored: StoredTensor, known: Known) -> MappedFile:
        """Open the file of *stored*; ReadError if it is not what *known* says."""
        descriptor, path = _opened(root, stored, known)
        try:
            return cls(path, descriptor)
        except OSError as error:
            raise ReadError(
                f"tensor {stored.name!r}: cannot map {stored.shard!r}: {error}"
            ) from error
        finally:
            os.close(descriptor)

    def _now(self) -> int:
        return self.mapping.size()

    def values(self, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return so many values from byte *begin* on, read when they are touched."""
        return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=begin)


class CopiedFile(_OpenFile):
    """One that tensors are copied from; it stays open as long as this object lives."""

    def __init__(self, path: str, descriptor: int) -> None:
        """Keep the open file."""
        self._descriptor = descriptor
        super().__init__(path, os.fstat(descriptor))

    @classmethod
    def open(cls, root: Path, stored: StoredTensor, known: Known) -> CopiedFile:
        """Open the file of *stored*; ReadError if it is not what *known* says."""
        descriptor, path = _opened(root, stored, known)
        return cls(path, descriptor)

    def __del__(self) -> None:
        """Close it."""
        with suppress(OSError, AttributeError):
            os.close(self._descriptor)

    def _now(self) -> int:
        return os.fstat(self._descriptor).st_size

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of that part of the file; OSError, or fewer bytes where the file ends."""
        with torch.inference_mode(False):
            content = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        array: Any = content.numpy()
        rest = memoryview(array)
        while rest and (count := os.preadv(self._descriptor, [rest], end - len(rest))):
            rest = rest[count:]
        return content[: end - begin - len(rest)]


def long_enough(stored: StoredTensor, size: int) -> None:
    """Raise :class:`ReadError` if a file of *size* bytes ends before the tensor does."""
    if size < (stored.end or 0):
        raise ReadError(
            f"tensor {stored.name!r} should end at byte {stored.end} of {stored.shard!r}, "
            f"but the file has only {size}: it was truncated after the plan was made"
        )


def _opened(root: Path, stored: StoredTensor, known: Known) -> tuple[int, str]:
    """Return the open file of a tensor, which is what it should be, and its path."""
    relative = PurePosixPath(stored.shard)
    may_be_elsewhere = stored.name.startswith(MARK)
    if (relative.is_absolute() and not may_be_elsewhere) or ".." in relative.parts:
        raise ReadError(
            f"tensor {stored.name!r}: file {stored.shard!r} is outside of {str(root)!r}"
        )
    path = str(root / relative)
    try:
        descriptor = os.open(path, READING)
    except OSError as error:
        raise ReadError(f"tensor {stored.name!r}: cannot open {stored.shard!r}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if S_ISREG(status.st_mode) and status.st_size:
            long_enough(stored, status.st_size)
        if (fault := _fault(status, stored.shard, known)) is not None:
            raise ReadError(f"tensor {stored.name!r}: {stored.shard!r} {fault}")
    except OSError as error:
        os.close(descriptor)
        raise ReadError(f"tensor {stored.name!r}: cannot open {stored.shard!r}: {error}") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, path


def _fault(status: os.stat_result, shard: str, known: Known) -> str | None:
    """Return why an open file is not the one that is meant; take note of what it is if it is."""
    if not S_ISREG(status.st_mode):
        return "is not a file"
    if not status.st_size:
        return "is empty"
    now = FileState(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
    size_bytes, mtime_ns, identity = known.get(shard, now)
    if size_bytes is not None and size_bytes != now.size_bytes:
        return (
            f"had {size_bytes:,} bytes when its header was read and has {now.size_bytes:,}: it was "
            "truncated, replaced or written to since; make the plan again"
        )
    if mtime_ns not in (None, now.mtime_ns) or identity not in (None, now.identity):
        return (
            "was replaced or written to since its header was read; make the plan again, and load "
            "when nobody writes there"
        )
    known[shard] = now
    return None


def _mapping(descriptor: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # The constant is in the mmap module from Python 3.13 on.
    asm_generic = 0x4000 if sys.platform == "linux" and platform.machine() in _GENERIC else 0
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", asm_generic)
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
