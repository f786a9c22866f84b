"""The header of a GGUF file: facts about the model, and where each tensor lies.

``GGUF``, version, number of tensors, number of facts; the facts; a line a tensor (name, dimensions
with the innermost first, type, offset from the start of the data); padding; the data. Source:
``docs/gguf.md`` of ggml (d99724f).
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.fingerprint import digest_of
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.gguf.types import TYPES, BlockType

__all__ = ["Array", "GgufHeader", "GgufTensor", "read_header"]

_MAX_DIMS = 4
_MAX_KEPT = 4096
"""Longer lists of numbers, and all of texts, are skipped: they are the tokenizer's."""
_SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from


class Array(NamedTuple):
    """A list that was skipped."""

    length: int


class GgufTensor(NamedTuple):
    """A tensor as the header has it; ``shape`` has the outermost dimension first, as torch."""

    name: str
    type: BlockType | None
    """None: a type that is not known."""
    type_number: int
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufHeader(NamedTuple):
    """What one file says."""

    shard: Shard
    facts: Mapping[str, Any] = {}
    tensors: tuple[GgufTensor, ...] = ()
    findings: tuple[Finding, ...] = ()


class _Problem(ValueError):
    """The header cannot be read; the text goes after the name of the file."""


def read_header(path: Path, *, shard: str) -> GgufHeader:
    """Return the header of *path*; never raises for what is in it. OSError if it cannot be read."""
    seen = look(path)
    if seen.kind == "absent":
        text = f"{shard!r} is not there."
        return GgufHeader(Shard(shard, None, None, None), findings=(_error("shard-missing", text),))
    unread = Shard(shard, seen.size_bytes, seen.mtime_ns, None)
    if seen.kind != "gguf":
        text = f"{shard!r} is no GGUF file (it begins with {seen.head[:8]!r})."
        return GgufHeader(unread, findings=(_error("wrong-format", text),))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            facts, lines, end, repeated = _read(content)
        except _Problem as problem:
            text = f"{shard!r} {problem}."
            return GgufHeader(unread, findings=(_error("gguf-invalid", text),))
    alignment = facts.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        text = f"{shard!r} has the alignment {alignment!r}, a whole number from 1 was expected."
        return GgufHeader(unread, facts, findings=(_error("gguf-invalid", text),))
    start = -(-end // alignment) * alignment
    tensors = tuple(_placed(line, start) for line in lines)
    found = [*_faults(shard, tensors, size=seen.size_bytes, start=start)]
    if repeated:
        text = f"{shard!r} has these facts twice, the first is taken: {shown(repeated)}."
        found.append(Finding("gguf-invalid", "warning", text))
    stored = Shard(shard, seen.size_bytes, seen.mtime_ns, digest_of(path, seen.kind))
    return GgufHeader(stored, facts, tensors, tuple(found))


_Line = tuple[str, tuple[int, ...], int, int]


def _read(content: mmap.mmap) -> tuple[dict[str, Any], list[_Line], int, list[str]]:
    """Return the facts, a line a tensor, where the header ends, and facts that come twice."""
    reader = _Reader(content, 4)
    version = reader.number("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = " of a big-endian machine" if swapped in (1, 2, 3) else ""
        raise _Problem(f"is of version {version}{why}; 2 and 3 are read, little-endian")
    n_tensors, n_facts = reader.number("<Q"), reader.number("<Q")
    facts: dict[str, Any] = {}
    repeated: list[str] = []
    for _ in range(n_facts):
        key = reader.text()
        value = reader.value(reader.number("<I"))
        if key in facts:
            repeated.append(key)
        facts.setdefault(key, value)
    lines: list[_Line] = []
    for _ in range(n_tensors):
        name, n_dims = reader.text(), reader.number("<I")
        if n_dims > _MAX_DIMS:
            raise _Problem(f"has a tensor {name!r} of {n_dims} dimensions; {_MAX_DIMS} are allowed")
        shape = tuple(reader.number("<Q") for _ in range(n_dims))[::-1]
        lines.append((name, shape, reader.number("<I"), reader.number("<Q")))
    return facts, lines, reader.at, repeated


class _Reader:
    """Reads values one after another."""

    def __init__(self, content: mmap.mmap, at: int) -> None:
        self._content = content
        self.at = at

    def number(self, form: str) -> Any:
        """Return the next number of that struct format."""
        try:
            (value,) = struct.unpack_from(form, self._content, self.at)
        except struct.error:
            raise self._cut_off() from None
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        """Return the next text."""
        length = self.number("<Q")
        self._need(length)
        found = self._content[self.at : self.at + length]
        self.at += length
        return found.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the next value, of the type *kind*; of long lists, and of texts, their length."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _Problem(f"has a fact of unknown type {kind}")
        inner, length = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            return self._numbers(_SCALARS[inner], length)
        if inner != _STRING:
            raise _Problem(f"has a list of unknown type {inner}")
        self._need(8 * length)
        self._skip_texts(length)
        return Array(length)

    def _skip_texts(self, length: int) -> None:
        """Go behind so many texts: a tokenizer has some 400,000."""
        at, end, content = self.at, len(self._content), self._content
        for _ in range(length):
            if at + 8 > end:
                raise self._cut_off()
            at += 8 + _LENGTH(content, at)[0]
        self.at = at
        self._need(0)

    def _numbers(self, form: str, length: int) -> Any:
        size = struct.calcsize(form)
        self._need(size * length)
        begin, self.at = self.at, self.at + size * length
        if length > _MAX_KEPT:
            return Array(length)
        return list(struct.unpack_from(f"<{length}{form[1]}", self._content, begin))

    def _need(self, size: int) -> None:
        if self.at + size > len(self._content):
            raise self._cut_off()

    def _cut_off(self) -> _Problem:
        return _Problem(f"is cut off within its header, which goes beyond byte {self.at:,}")


def _placed(line: _Line, start: int) -> GgufTensor:
    name, shape, number, offset = line
    type_ = TYPES.get(number)
    size = 0
    if type_ is not None:
        rows = 1
        for length in shape[:-1]:
            rows *= length
        size = rows * ((shape[-1] if shape else 1) // type_.elements) * type_.nbytes
    return GgufTensor(name, type_, number, shape, start + offset, start + offset + size)


def _faults(
    shard: str, tensors: tuple[GgufTensor, ...], *, size: int, start: int
) -> Iterator[Finding]:
    """Say what is wrong with the tensors, by name."""
    unknown = [f"{t.name} ({t.type_number})" for t in tensors if t.type is None]
    if unknown:
        text = f"{shard!r} has tensors of types that are not known here: {shown(unknown)}."
        yield _error("dtype-unknown", text)
    uneven = [t.name for t in tensors if t.type and (t.shape or (1,))[-1] % t.type.elements]
    if uneven:
        text = f"{shard!r} has tensors whose rows are no whole number of blocks: {shown(uneven)}."
        yield _error("gguf-invalid", text)
    if huge := [t.name for t in tensors if any(length >> 63 for length in t.shape)]:
        text = f"{shard!r} has tensors of sizes that nobody can address: {shown(huge)}."
        yield _error("gguf-invalid", text)
    if cut := [t.name for t in tensors if t.end > size]:
        end = max(t.end for t in tensors)
        text = (
            f"{shard!r} is cut off: it has {size:,} bytes, and its tensors go up to byte {end:,}. "
            f"Lost are {len(cut)} tensors: {shown(cut)}."
        )
        yield _error("data-truncated", text)
    names = [t.name for t in tensors]
    if len(names) != len(set(names)):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        yield _error("duplicate-name", f"{shard!r} has tensors twice: {shown(twice)}.")
    ordered = sorted(tensors, key=lambda t: t.begin)
    pairs = pairwise(ordered)
    over = [
        f"{a.name} and {b.name}" for a, b in pairs if a.type and a.end > b.begin and b.end > b.begin
    ]
    if over:
        yield _error("data-overlap", f"{shard!r} has tensors that overlap: {shown(over)}.")


def _error(code: str, text: str) -> Finding:
    return Finding(code, "error", text)
