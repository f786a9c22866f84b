"""``Spans``: the parts of a file that are known, and their form on disk."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

__all__ = ["Spans"]

_HEAD = {"size", "begins", "lengths", "sha256"}


class Spans:
    """Byte ranges of one file that do not overlap."""

    def __init__(self, size: int | None = None) -> None:
        """Know nothing yet but, perhaps, the *size* of the file."""
        self.size = size
        self._begins: list[int] = []
        self._parts: list[bytes] = []

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return self.size is not None

    def at(self, begin: int) -> bytes:
        """Return what is known from *begin* on, up to the first byte that is not."""
        index = bisect_right(self._begins, begin) - 1
        return self._parts[index][begin - self._begins[index] :] if index >= 0 else b""

    def next_after(self, begin: int) -> int | None:
        """Return where the first part behind *begin* begins."""
        index = bisect_right(self._begins, begin)
        return self._begins[index] if index < len(self._begins) else None

    def add(self, begin: int, content: bytes) -> None:
        """Take note of bytes that were not known; what touches the part before it joins it."""
        if not content:
            return
        index = bisect_right(self._begins, begin)
        if index and self._begins[index - 1] + len(self._parts[index - 1]) == begin:
            self._parts[index - 1] += content
            return
        self._begins.insert(index, begin)
        self._parts.insert(index, content)

    def dump(self) -> Iterator[bytes]:
        """Yield a line of JSON that says what follows, and the bytes."""
        lengths = [*map(len, self._parts)]
        head: dict[str, Any] = {"size": self.size, "begins": self._begins, "lengths": lengths}
        head["sha256"] = hashlib.sha256(b"".join(self._parts)).hexdigest()
        yield json.dumps(head).encode() + b"\n"
        yield from self._parts

    @classmethod
    def parse(cls, raw: bytes) -> Spans:
        """Return what :meth:`dump` gave; ValueError if that is damaged."""
        line, _, content = raw.partition(b"\n")
        head = json.loads(line)
        if not isinstance(head, dict) or head.keys() != _HEAD:
            raise ValueError("no line that says what follows")
        if sum(head["lengths"]) != len(content):
            raise ValueError(f"{len(content)} bytes where {sum(head['lengths'])} should be")
        if hashlib.sha256(content).hexdigest() != head["sha256"]:  # the machine went down, say
            raise ValueError("other bytes than were written")
        found, position = cls(int(head["size"])), 0
        for begin, length in zip(head["begins"], head["lengths"], strict=True):
            found.add(begin, content[position : position + length])
            position += length
        return found
