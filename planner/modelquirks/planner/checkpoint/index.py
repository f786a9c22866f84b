"""The index of a sharded checkpoint: ``*.index.json`` with ``weight_map`` and ``metadata``.

Indexes are written by many tools and edited by hand. Everything odd is a finding; a shard whose
path leaves the folder is named and never opened.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelquirks.planner.checkpoint.compact_index import WeightMap, compact_index
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.json_text import (
    JsonProblem,
    has_duplicates,
    parse_json,
    read_json,
)
from modelquirks.planner.checkpoint.manifest import Format
from modelquirks.planner.finding import Finding, shown

__all__ = ["Index", "format_of", "leaves_folder", "read_index"]

MAX_BELIEVABLE_BYTES = 10**16
"""Ten petabytes: a ``total_size`` above is a mistake. One real index has a number of 72 digits."""

_FORMATS: Mapping[str, Format] = {
    ".safetensors": "safetensors",
    ".bin": "torch",
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "torch",
    ".msgpack": "flax",
    ".gguf": "gguf",
}


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says, as far as it can be believed."""

    weight_map: Mapping[str, str]
    """Name of the tensor → file, relative to the folder, with ``/``; in the order of the index."""
    shards: tuple[str, ...] = ()
    """The files, in the order in which they are first named."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Files that must not be opened, and why."""
    format: Format = "unknown"
    declared_bytes: int | None = None
    findings: tuple[Finding, ...] = ()
    is_index: bool = True
    """Whether the file is, or may have been, an index: not if it is other JSON."""

    @property
    def inside(self) -> tuple[str, ...]:
        """The files that may be opened."""
        return tuple(shard for shard in self.shards if shard not in self.outside)


def format_of(name: str) -> Format:
    """Return the format that the name of a weight file promises."""
    return _FORMATS.get(posixpath.splitext(name)[1].lower(), "unknown")


def read_index(path: FilePath) -> Index:
    """Return the index in the file *path*; never raises for what is in it."""
    name = path.name
    document, raw = read_json(path, compact_index)
    if isinstance(document, JsonProblem):
        text = f"the index {name!r} {document.text}; a JSON object with 'weight_map' was expected."
        return Index({}, findings=(Finding(document.code, "error", text),))
    weight_map, metadata = _parts(document)
    if not isinstance(weight_map, Mapping):
        found = "no" if weight_map is None else f"a {type(weight_map).__name__} as"
        text = f"{name!r} has {found} 'weight_map'; an object of names to files was expected."
        missing = Finding("weight-map-missing", "error", text)
        return Index({}, findings=(missing,), is_index=False)
    weight_map, distinct, faults = _only_strings(name, weight_map)
    normal = {shard: posixpath.normpath(shard) for shard in distinct if shard}
    if any(shard != proper for shard, proper in normal.items()):
        weight_map = {key: normal.get(shard, shard) for key, shard in weight_map.items()}
    shards = tuple(dict.fromkeys(normal.get(shard, shard) for shard in distinct))
    outside = {shard: why for shard in shards if (why := leaves_folder(shard))}
    declared, about_size = _declared_bytes(name, metadata, n_names=len(weight_map))
    findings = (
        *faults,
        *_duplicate_findings(name, raw, document),
        *_outside_findings(name, outside),
        *about_size,
    )
    return Index(weight_map, shards, outside, _format(shards, name), declared, findings)


def _parts(document: Any) -> tuple[Any, Any]:
    """Return ``weight_map`` and ``metadata``, None for what is not there.

    An object without the former that maps names to weight files is one itself: accelerate 1.15
    reads such an index (``load_checkpoint_in_model`` in ``utils/modeling.py``).
    """
    if not isinstance(document, dict):
        return None, None
    if "weight_map" not in document and document and all(map(_is_weight_file, document.values())):
        return document, None
    return document.get("weight_map"), document.get("metadata")


def _is_weight_file(value: Any) -> bool:
    return isinstance(value, str) and format_of(value) != "unknown"


def _only_strings(
    name: str, weight_map: Mapping[str, Any]
) -> tuple[Mapping[str, str], Iterable[str], tuple[Finding, ...]]:
    """Return the entries whose value is a string, and the distinct values in order."""
    if not weight_map:
        text = f"the index {name!r} has an empty 'weight_map': it names no tensor."
        return {}, (), (Finding("weight-map-empty", "error", text),)
    if isinstance(weight_map, WeightMap):
        return weight_map, dict.fromkeys(run.file for run in weight_map.runs), ()
    try:
        distinct = dict.fromkeys(weight_map.values())
        if all(isinstance(shard, str) for shard in distinct):
            return weight_map, distinct, ()
    except TypeError:  # a list or an object is not hashable
        pass
    good = {key: shard for key, shard in weight_map.items() if isinstance(shard, str)}
    bad = [key for key in weight_map if key not in good]
    text = f"the index {name!r} maps names to something that is no file name: {shown(bad)}."
    return good, dict.fromkeys(good.values()), (Finding("weight-map-invalid", "error", text),)


def leaves_folder(shard: str) -> str:
    """Return why a path may not be followed, or ``""``."""
    if not shard or shard == "." or "\0" in shard:
        return "names no file"
    if "\\" in shard:
        return "has a backslash"
    if shard.startswith("/") or re.match(r"[A-Za-z]:", shard):
        return "is absolute"
    return "leads out of the folder" if ".." in shard.split("/") else ""


def _outside_findings(name: str, outside: Mapping[str, str]) -> Iterable[Finding]:
    if outside:
        listed = [f"{shard!r} {why}" for shard, why in list(outside.items())[:10]]
        text = (
            f"the index {name!r} names files outside its folder, which are not opened: "
            f"{', '.join(listed)}."
        )
        yield Finding("shard-path", "error", text)


def _duplicate_findings(name: str, raw: bytes, document: dict[str, Any]) -> Iterable[Finding]:
    """Report names that occur twice: a JSON parser keeps the last one and says nothing."""
    weight_map, metadata = _parts(document)
    if isinstance(weight_map, WeightMap):
        return
    keys = len(document) if weight_map is document else len(document) + len(weight_map)
    keys += len(metadata) if isinstance(metadata, dict) else 0
    if not has_duplicates(raw, n_keys=keys, strings=weight_map):
        return
    found: dict[str, bool] = {}
    parse_json(raw.decode("utf-8-sig"), duplicates=found)
    differing = [key for key, differs in found.items() if differs]
    if differing:
        text = f"the index {name!r} names tensors twice, with different files: {shown(differing)}."
        yield Finding("duplicate-name", "error", text)
    if same := [key for key, differs in found.items() if not differs]:
        text = f"the index {name!r} has the same entry twice: {shown(same)}."
        yield Finding("duplicate-entry", "warning", text)


def _format(shards: tuple[str, ...], name: str) -> Format:
    """Return the format of most shards, else what the name of the index promises."""
    formats: list[Format] = [format_of(shard) for shard in shards]
    if formats:
        return max(formats, key=formats.count)
    return format_of(name.removesuffix(".index.json"))


def _declared_bytes(
    name: str, metadata: Any, *, n_names: int
) -> tuple[int | None, tuple[Finding, ...]]:
    """Return ``metadata.total_size`` if it can be believed, and what is odd about it."""
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if size is None:
        text = f"the index {name!r} does not say the size of the checkpoint (no 'total_size')."
        return None, (Finding("total-size-absent", "info", text),)
    trouble = _why_not(size, n_names)
    if isinstance(size, float) and not trouble:
        text = f"the index {name!r} gives 'total_size' as the fraction {size!r}; taken as whole."
        return int(size), (Finding("total-size-invalid", "info", text),)
    if not trouble:
        return int(size) or None, ()
    text = f"the index {name!r} has a 'total_size' that {trouble}; it is not used."
    return None, (Finding("total-size-invalid", "warning", text),)


def _why_not(size: Any, n_names: int) -> str:
    """Return what is wrong with a ``total_size``, or ``""``."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        return f"is a {type(size).__name__}, not a number of bytes"
    if not math.isfinite(size) if isinstance(size, float) else False:
        return f"is {size}"
    if size < 0:
        return f"is negative ({_number(size)})"
    if size > MAX_BELIEVABLE_BYTES:
        return f"cannot be true ({_number(size)})"
    if isinstance(size, float) and not size.is_integer():
        return f"is not a whole number ({size!r})"
    return "is 0" if size == 0 and n_names else ""


def _number(size: float) -> str:
    digits = str(size)
    short = len(digits) <= 24
    return f"{digits} bytes" if short else f"{digits[:12]}…, a number of {len(digits)} digits"
