"""The header of a safetensors file, read by ``struct`` and ``json`` alone.

The format: eight bytes with the length N of the header (little-endian), N bytes of JSON, then
the data, covered by the tensors' ranges without gap or overlap. Every rule is checked that the
``safetensors`` library checks (0.8), and a few that it does not: a key that occurs twice, entries
written as lists and dtypes as objects are errors here and pass there.
"""

from __future__ import annotations

import re
import struct
from itertools import repeat
from operator import add, itemgetter
from typing import Any, BinaryIO

from modelquirks.planner.checkpoint.compact_header import Columns, compact_columns
from modelquirks.planner.checkpoint.digesting import digesting, hex_digest
from modelquirks.planner.checkpoint.file_kind import Look, look, not_weights
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.header import Header, stored_tensors, unread
from modelquirks.planner.checkpoint.header_rules import (
    Faults,
    Row,
    check_entry,
    check_layout,
)
from modelquirks.planner.checkpoint.json_text import JsonProblem, parse_json
from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.finding import Finding, brief

__all__ = ["MAX_HEADER_BYTES", "header_digest", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""

_MINUS_ZERO = re.compile(r"[\[,:\s]-0\s*[,\]}]")


def read_header(path: FilePath, *, shard: str = "") -> Header:
    """Return what the safetensors file *path* says it holds, and every rule that it breaks.

    *shard* is the name to use in the result and in messages, by default the file's own. Never
    raises for what is in the file, nor for a file that is not there.
    """
    shard = shard or path.name
    seen = look(path)
    if seen.kind == "absent":
        return unread(shard, seen, Finding("shard-missing", "error", f"{shard!r} is not there."))
    if wrong := _another_format(shard, seen):
        return unread(shard, seen, wrong)
    try:
        with path.open("rb") as file:
            raw = _header_bytes(file, seen.size_bytes, shard)
    except OSError as error:
        return unread(
            shard, seen, Finding("file-unreadable", "error", f"{shard!r}: {error.strerror}.")
        )
    return unread(shard, seen, raw) if isinstance(raw, Finding) else _parse(raw, seen, shard)


def header_digest(path: FilePath) -> str | None:
    """Return the sha256 of the header's JSON, or None if there is no whole header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = _header_bytes(file, size, path.name)
    return None if isinstance(raw, Finding) else hex_digest(raw)


def _another_format(shard: str, seen: Look) -> Finding | None:
    if seen.kind in ("zip", "legacy", "tar"):
        return Finding(
            "wrong-format",
            "error",
            f"{shard!r} is a file of torch.save, not safetensors; name it '.bin' or '.pt'.",
        )
    return not_weights(shard, seen)


def _header_bytes(file: BinaryIO, size: int, shard: str) -> bytes | Finding:
    """Return the bytes of the JSON, or why there are none: lengths are checked before reading."""
    start = file.read(8)
    if len(start) < 8:
        text = f"{shard!r} has {size} bytes, too few for the eight of a header length."
        return Finding("header-too-short", "error", text)
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        text = (
            f"{shard!r} begins with {start!r}, a header length of {length:,} bytes, above the "
            f"format's limit of {MAX_HEADER_BYTES:,}: it is not a safetensors file."
        )
        return Finding("header-too-long", "error", text)
    raw = file.read(length) if length <= size - 8 else b""
    if len(raw) != length or not length:
        text = (
            f"{shard!r} has {size:,} bytes and its header needs {length + 8:,}: the file is cut "
            "off, or is not a safetensors file."
        )
        return Finding("header-cut", "error", text)
    return raw


def _parse(raw: bytes, seen: Look, shard: str) -> Header:
    digest = digesting(raw)
    data_start = 8 + len(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return unread(shard, seen, _not_json(shard, f"is not UTF-8 text ({error.reason})"))
    columns = compact_columns(raw, text, data_bytes=seen.size_bytes - data_start)
    stored = Shard(shard, seen.size_bytes, seen.mtime_ns, digest())
    if columns is None:
        return _parse_by_entry(text, stored, seen)
    entries = _lazy(columns, stored, data_start)
    return Header(stored, "safetensors", entries, columns.metadata)


def _lazy(columns: Columns, shard: Shard, data_start: int) -> LazyTensors:
    """Return the tensors of a compact header, which are made when first asked for."""

    def made() -> dict[str, StoredTensor]:
        begins = [data_start + begin for begin in columns.begins]
        names = columns.block.names
        sizes, dtypes, shapes = (map(itemgetter(n), columns.types) for n in range(3))
        ends = map(add, begins, sizes)
        tensors = stored_tensors(names, repeat(shard.name), dtypes, shapes, begins, ends)
        return dict(zip(names, tensors, strict=True))

    layout = (f"{shard.name}\0{shard.digest}",)
    return LazyTensors((columns.block,), columns.types, columns.shapes, layout, made)


def _parse_by_entry(text: str, stored: Shard, seen: Look) -> Header:
    """Return a header that the library did not write, or in which something is wrong."""
    duplicates: dict[str, bool] = {}
    document = parse_json(text, strict=True, duplicates=duplicates)
    if not isinstance(document, JsonProblem) and not isinstance(document, dict):
        document = JsonProblem("not-json", f"is a JSON {type(document).__name__}, not an object")
    if isinstance(document, JsonProblem):
        return unread(stored.name, seen, _not_json(stored.name, document.text))
    faults = Faults(stored.name)
    for key in duplicates:
        faults.add("duplicate-name", key, "")
    if _MINUS_ZERO.search(text):
        faults.add("entry-invalid", "-0", "a number that the format does not allow")
    metadata = _metadata(document.pop("__metadata__", None), faults)
    data_start = 8 + len(text.encode())
    rows = {name: check_entry(name, entry, faults) for name, entry in document.items()}
    spans = [
        (begin, end, name)
        for name, (_, _, begin, end) in rows.items()
        if begin is not None and end is not None
    ]
    check_layout(spans, seen.size_bytes - data_start, faults)
    entries = {name: _tensor(name, stored.name, row, data_start) for name, row in rows.items()}
    return Header(stored, "safetensors", entries, metadata, faults.findings())


def _not_json(shard: str, problem: str) -> Finding:
    return Finding("header-not-json", "error", f"the header of {shard!r} {problem}.")


def _tensor(name: str, shard: str, row: Row, data_start: int) -> StoredTensor:
    dtype, shape, begin, end = row
    if begin is None or end is None:
        return StoredTensor(name, shard, dtype, shape)
    return StoredTensor(name, shard, dtype, shape, begin + data_start, end + data_start)


def _metadata(found: Any, faults: Faults) -> dict[str, str]:
    """Return the strings of ``__metadata__``; null is accepted, as by the library."""
    if found is None:
        return {}
    if not isinstance(found, dict):
        faults.add("metadata-invalid", "__metadata__", f"a {type(found).__name__}, not an object")
        return {}
    for key, value in found.items():
        if not isinstance(value, str):
            faults.add("metadata-invalid", key, f"{brief(value)}, not a string")
    return {key: value for key, value in found.items() if isinstance(value, str)}
