"""One weight file of any format, told by its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelquirks.planner.checkpoint.file_kind import Kind, look
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.header import Header, unread
from modelquirks.planner.checkpoint.index import format_of
from modelquirks.planner.checkpoint.manifest import Format
from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.finding import Finding

__all__ = ["is_whole", "read_weights"]

_BY_CONTENT: Mapping[Kind, Format] = {
    "safetensors": "safetensors",
    "zip": "torch",
    "legacy": "torch",
    "tar": "torch",
    "pickle": "torch",
    "gguf": "gguf",
}


def read_weights(path: FilePath, *, shard: str, expected: Format | None = None) -> Header:
    """Return the header of a weight file.

    *expected*: the format that it must have, as a shard among others; None: whatever it is. Never
    raises for what is in the file.
    """
    seen = look(path)
    named = format_of(shard)
    if seen.kind not in ("safetensors", "zip", "legacy") and named == "flax":
        text = f"{shard!r} is a Flax file, which is not read here; use a safetensors version."
        unsupported = Finding("flax-unsupported", "error", text)
        return replace(unread(shard, seen, unsupported), format=named)
    found = expected or _BY_CONTENT.get(seen.kind, named)
    if found == "torch":
        from modelquirks.planner.checkpoint.torch_zip import (
            read_torch,  # 10 ms that safetensors do without
        )

        header = read_torch(path, shard=shard)
    else:
        header = read_header(path, shard=shard)
    header = replace(header, format=found)
    if expected is None and header.entries and named not in (found, "unknown"):
        text = f"{shard!r} is a file of format {found}, whatever its name says; read as such."
        odd = Finding("wrong-extension", "warning", text)
        header = replace(header, findings=(*header.findings, odd))
    return header


def is_whole(path: FilePath) -> bool:
    """Tell whether *path* looks like a weight file, by its first bytes."""
    return look(path).kind in ("safetensors", "zip", "legacy", "tar")
