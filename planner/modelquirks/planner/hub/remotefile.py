"""``RemoteFile``: one file of a commit, of which as little is fetched as its reader asks for."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import RLock
from typing import BinaryIO, cast

from modelquirks.planner.hub.client import Piece
from modelquirks.planner.hub.spans import Spans

__all__ = ["AT_ONCE", "FIRST_BYTES", "RemoteFile"]

FIRST_BYTES = 64 << 10
"""What is asked for first where nobody knows how long the header is.

Of the real checkpoints at hand, files with up to 500 tensors have headers below this. (The
``get_safetensors_metadata`` of huggingface_hub asks for 100,000 bytes.)
"""
AT_ONCE = 8
"""Requests at a time."""
_LEAST_BYTES = 4 << 10
_CLOSE_BYTES = 16 << 10
_TAIL_BYTES = 64 << 10
"""Zip files have their directory at the end: it is fetched with the last bytes, which are read
first."""


class RemoteFile:
    """The known parts of a file, and the way to get more."""

    def __init__(self, fetch: Callable[[int, int], Piece], spans: Spans) -> None:
        """Take the function that gives the bytes from here to there, and what is known."""
        self._fetch = fetch
        self._lock = RLock()
        self.spans = spans
        self.is_new = False
        """Whether something was fetched that is not kept yet."""

    @property
    def size(self) -> int:
        """How many bytes the file has. The first part is fetched to find that out."""
        return self.begin(FIRST_BYTES)

    def begin(self, n_bytes: int) -> int:
        """Fetch the first *n_bytes* if nothing is known; return the size of the file."""
        with self._lock:
            if self.spans.size is None:
                self._get(0, n_bytes)
            return self.spans.size or 0

    def at(self, begin: int, length: int) -> bytes:
        """Return *length* bytes from *begin* on, fewer at the end of the file."""
        with self._lock:
            end = min(begin + length, self.size)
            found = bytearray()
            while (position := begin + len(found)) < end:
                known = self.spans.at(position)
                if not known:
                    self._get(*self._around(position, end))
                    known = self.spans.at(position)
                found += known[: end - position]
            return bytes(found)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch what is not known of *ranges*, several at once; what is close comes together."""
        with self._lock:
            size = self.size
            wanted: list[tuple[int, int]] = []
            for begin, end in sorted(ranges):
                begin = self._unknown_from(begin)
                following = self.spans.next_after(begin)
                end = min(end, size, size if following is None else following)
                if (
                    wanted
                    and begin - wanted[-1][1] <= _CLOSE_BYTES
                    and self._is_gap(wanted[-1], begin)
                ):
                    wanted[-1] = (wanted[-1][0], max(end, wanted[-1][1]))
                elif begin < end:
                    wanted.append((begin, end))
            with ThreadPoolExecutor(AT_ONCE) as pool:
                asked = [pool.submit(self._fetch, begin, end) for begin, end in wanted]
            for (begin, _), answer in zip(wanted, asked, strict=True):
                self.spans.add(begin, answer.result().content)
                self.is_new = True

    def _is_gap(self, before: tuple[int, int], begin: int) -> bool:
        """Tell whether nothing is known between a range and what begins behind it."""
        following = self.spans.next_after(before[0])
        return following is None or following >= begin

    def _around(self, position: int, end: int) -> tuple[int, int]:
        """Return what to fetch where the bytes from *position* to *end* are not known."""
        size = self.spans.size or 0
        if position >= size - _TAIL_BYTES and not self.spans.at(size - _TAIL_BYTES):
            return max(0, size - _TAIL_BYTES), size
        stop = max(end, position + _LEAST_BYTES)
        following = self.spans.next_after(position)
        return position, min(stop, size, size if following is None else following)

    def _get(self, begin: int, end: int) -> None:
        begin = self._unknown_from(begin)
        following = self.spans.next_after(begin)
        end = end if following is None else min(end, following)
        content, self.spans.size = self._fetch(begin, end)
        self.spans.add(begin, content)
        self.is_new = True

    def _unknown_from(self, position: int) -> int:
        """Return the first byte from *position* on that is not known: parts may touch."""
        while known := self.spans.at(position):
            position += len(known)
        return position

    def open(self) -> BinaryIO:
        """Return it as a file that is open for reading."""
        return cast(BinaryIO, _Handle(self))


class _Handle(io.RawIOBase):
    """A position in a remote file."""

    def __init__(self, remote: RemoteFile) -> None:
        super().__init__()
        self._remote, self._position = remote, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = 0 if whence == os.SEEK_SET else self._position
        start = self._remote.size if whence == os.SEEK_END else start
        if start + offset < 0:
            raise OSError(f"position {start + offset} is before the start")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        whole = size is None or size < 0
        length = max(0, self._remote.size - self._position) if whole else int(size or 0)
        found = self._remote.at(self._position, length)
        self._position += len(found)
        return found

    def expect_ranges(self, ranges: Sequence[tuple[int, int]], /) -> None:
        self._remote.expect(ranges)

    def readline(self, size: int | None = -1) -> bytes:
        limit = -1 if size is None else size
        line = bytearray()
        while not line.endswith(b"\n") and len(line) != limit:
            more = self._remote.at(
                self._position, 256 if limit < 0 else min(256, limit - len(line))
            )
            if not more:
                break
            more = more[: more.find(b"\n") + 1] or more
            line += more
            self._position += len(more)
        return bytes(line)
