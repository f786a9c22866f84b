"""``Trap``: the file calls of a process, counted, and one of them or all from one on made to fail.

It stands where Python asks the operating system (``os``, ``io``, ``mmap``), in a process that was
forked for that. Calls for other files than those of the site go through unseen.
"""

from __future__ import annotations

import builtins
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["READS", "STAGES", "WRITES", "Call", "Hit", "Trap"]

READS = frozenset(
    ("open to read", "read", "pread", "preadv", "mmap", "listdir", "scandir", "stat", "lstat")
)
WRITES = frozenset(
    (
        *("open to write", "write", "pwrite", "ftruncate", "fsync", "mkdir"),
        *("rename", "replace", "unlink", "remove", "rmdir"),
    )
)
STAGES = frozenset(("planned", "loaded"))
"""Moments between two steps of a job, which count as calls."""

_BY_DESCRIPTOR = ("write", "pwrite", "pread", "preadv", "ftruncate", "fsync")
_BY_PATH = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "listdir", "scandir", "stat")
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Call(NamedTuple):
    """One call of the process for a file of the site."""

    name: str
    path: str


class Hit(NamedTuple):
    """A call that is to fail, before it is made."""

    call: Call
    args: tuple[Any, ...]
    proceed: Callable[..., Any]
    """Makes the call, with these or other arguments."""


Fault = Callable[[Hit], Any]
Hits = Callable[[Call], bool]


class Trap:
    """What is counted, and what happens to whom."""

    def __init__(self, roots: Iterable[Path]) -> None:
        """Look at calls for what lies below *roots*; nothing happens to any of them yet."""
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._fault: Fault | None = None
        self._hits: Hits = lambda call: True
        self._at, self._lasting, self._n_hits = 0, False, 0
        self.calls: list[Call] = []
        self.fired: list[Call] = []
        self.stages_before: list[str] = []
        """Those that were over when the first fault happened."""

    def arm(self, fault: Fault, hits: Hits, *, at: int, lasting: bool) -> None:
        """Have *fault* befall call number *at* of those that it *hits*, or all from there on."""
        self._fault, self._hits, self._at, self._lasting = fault, hits, at, lasting

    def disarm(self) -> list[str]:
        """Let all calls through."""
        self._fault = None
        return []

    def install(self) -> None:
        """Stand before the calls of this process; there is no way back."""
        for name in _BY_DESCRIPTOR + _BY_PATH + ("lstat", "open"):
            setattr(os, name, self._before(name, getattr(os, name)))
        mapped = mmap.mmap
        setattr(mmap, "mmap", self._before("mmap", mapped))  # noqa: B010
        setattr(io, "open", self._opened)  # noqa: B010
        setattr(builtins, "open", self._opened)  # noqa: B010

    def stage(self, name: str) -> None:
        """Take note of the end of a step."""
        self._passed(Call(name, ""), (), lambda: None)

    def passed(self, name: str, path: Any, args: tuple[Any, ...], proceed: Any) -> Any:
        """Make a call, or what is to become of it."""
        if getattr(self._inside, "busy", False):  # of this class, or of a fault
            return proceed(*args)
        self._inside.busy = True
        try:
            place = self._place(path)
        finally:
            self._inside.busy = False
        return proceed(*args) if place is None else self._passed(Call(name, place), args, proceed)

    def _passed(self, call: Call, args: tuple[Any, ...], proceed: Any) -> Any:
        self._inside.busy = True
        try:
            fault = self._due(call)
            if fault is not None:
                return fault(Hit(call, args, proceed))
        finally:
            self._inside.busy = False
        return proceed(*args)

    def _due(self, call: Call) -> Fault | None:
        """Count a call; return what is to befall it."""
        with self._lock:
            self.calls.append(call)
            fault = self._fault
            if fault is None or not self._hits(call):
                return None
            number, self._n_hits = self._n_hits, self._n_hits + 1
            if number != self._at and not (self._lasting and number > self._at):
                return None
            if not self.fired:
                self.stages_before = [one.name for one in self.calls if one.name in STAGES]
            self.fired.append(call)
            return fault

    def _place(self, path: Any) -> str | None:
        """Return the path of a call if it is below the roots."""
        try:
            found = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        except OSError:
            return None
        if isinstance(path, bytes | os.PathLike):
            found = os.fsdecode(path)
        found = os.path.abspath(found)
        below = any(f"{found}/".startswith(f"{root}/") for root in self._roots)
        return found if below else None

    def _before(self, name: str, inner: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            shown = name
            if name == "open":
                flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
                shown = "open to write" if flags & _FOR_WRITING else "open to read"
            path = args[0] if args else "."
            directory = kwargs.get("dir_fd")
            if directory is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path))
            return self.passed(shown, path, args, partial(inner, **kwargs))

        return call

    def _opened(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open as ``io.open`` does, with a file below that can fail."""
        name = "open to write" if set(mode) & set("wax+") else "open to read"
        plain = mode.replace("b", "").replace("t", "").replace("U", "")
        raw: Any = self.passed(
            name, file, (), lambda: _Raw(self, file, plain or "r", closefd=closefd, opener=opener)
        )
        if "b" in mode and buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
        whole: Any = kind(raw, size) if name == "open to write" else io.BufferedReader(raw, size)
        if "b" in mode:
            return whole
        text = io.TextIOWrapper(whole, encoding, errors, newline, line_buffering=buffering == 1)
        setattr(text, "mode", mode)  # noqa: B010
        return text


class _Raw(io.FileIO):
    """A file whose reads and writes can fail."""

    def __init__(self, trap: Trap, file: Any, mode: str, **rest: Any) -> None:
        self._trap = trap
        super().__init__(file, mode, **rest)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count: int = self._trap.passed("read", self.name, (view,), super().readinto)
        return count

    def readall(self) -> bytes:
        parts: list[bytes] = []
        while part := self.read(1 << 16):
            parts.append(part)
        return b"".join(parts)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        count: int = self._trap.passed("write", self.name, (view,), super().write)
        return count
