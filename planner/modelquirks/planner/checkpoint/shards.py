"""From an index or a set of files to tensors: which file each comes from, and what disagrees.

The index decides: a tensor is taken from the file that the index gives for it and from no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from modelquirks.planner.checkpoint.compact_index import Run, blocks_of, runs_of
from modelquirks.planner.checkpoint.confined import leads_out
from modelquirks.planner.checkpoint.content_findings import about_content, about_size, merged
from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.filepath import FilePath, announce
from modelquirks.planner.checkpoint.folder import Folder, series_of
from modelquirks.planner.checkpoint.header import Header, stored_tensors, unread
from modelquirks.planner.checkpoint.index import Index, format_of
from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors, StoredType, joined
from modelquirks.planner.checkpoint.manifest import Format, Shard, StoredTensor
from modelquirks.planner.checkpoint.names_only import NamesOnly
from modelquirks.planner.checkpoint.weight_file import read_weights
from modelquirks.planner.finding import Finding, shown
from modelquirks.quirks.block import all_different
from modelquirks.quirks.recipe import Node

__all__ = ["Content", "beside", "read_files", "read_indexed"]

_ENTRY = '"":{"dtype":"BF16","shape":[12288,49152],"data_offsets":[,]},'
_ENTRY_BYTES = len(_ENTRY) + 2 * len("1234567890")
_START_BYTES = len('12345678{"__metadata__":{"format":"pt"},}       ')


@dataclass(frozen=True, slots=True)
class Content:
    """What the weight files of a checkpoint hold."""

    format: str
    tensors: Mapping[str, StoredTensor]
    shards: tuple[Shard, ...]
    findings: tuple[Finding, ...]
    declared_bytes: int | None = None
    container: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    assembled: Mapping[str, Node] = field(default_factory=dict)
    """As in a :class:`~modelquirks.planner.checkpoint.manifest.Manifest`, like ``places``."""
    places: Mapping[str, StoredTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the files say in the words of config.json."""


def read_files(root: FilePath, names: Sequence[str], *, follow_links: bool = False) -> Content:
    """Return the content of files without an index: each tensor may be in one of them only.

    *follow_links*: the user named the file, so that it may be a link out of the folder.
    """
    expected = format_of(names[0]) if len(names) > 1 else None
    announce(root, lambda: dict.fromkeys(names))
    headers = [_header(root, name, expected, follow_links=follow_links) for name in names]
    tensors, twice = _together(headers)
    findings = [*merged(headers), *about_content(tensors, headers)]
    if len(names) > 1:
        findings += _about_several(names, twice, format=expected)
    return _content(headers, tensors, findings, format=expected or headers[0].format)


def read_indexed(folder: Folder, index: Index) -> Content:
    """Return the content of the files of an index, as far as they are in its folder."""
    present = [shard for shard in index.inside if folder.has(shard)]
    announce(folder.root, lambda: _header_bytes(index, present))
    headers = [_header(folder.root, shard, index.format) for shard in present]
    findings = [*index.findings, *_about_format(index), *merged(headers)]
    findings += _about_missing(index, present, beside(folder, index))
    tensors: Mapping[str, StoredTensor] = NamesOnly(index.weight_map)
    if headers:
        tensors, about_names = _placed(headers, index)
        findings += about_names
        findings += about_content(tensors, headers)
        findings += about_size(tensors, headers, index.declared_bytes)
    found = {header.shard.name: header.shard for header in headers}
    shards = tuple(found.get(shard, Shard(shard, None, None, None)) for shard in index.shards)
    content = _content(headers, tensors, findings, format=index.format)
    return replace(content, shards=shards, declared_bytes=index.declared_bytes)


def _header_bytes(index: Index, present: Iterable[str]) -> dict[str, int | None]:
    """Return about how long the headers of the files *present* are, by the names in them.

    For each of the 14 real sharded checkpoints whose headers' sizes were at hand, this is 2 to 8 %
    more than all its headers.
    """
    if index.format != "safetensors":
        return dict.fromkeys(present)
    found: dict[str, int | None] = dict.fromkeys(present, _START_BYTES)
    for name, shard in index.weight_map.items():
        if (known := found.get(shard)) is not None:
            found[shard] = known + len(name.encode("utf-8", "surrogatepass")) + _ENTRY_BYTES
    return found


def _together(
    headers: Sequence[Header],
) -> tuple[Mapping[str, StoredTensor], Mapping[str, set[str]]]:
    """Return the tensors of all files, and the files of those that are in several."""
    parts = [header.entries for header in headers if isinstance(header.entries, LazyTensors)]
    if len(parts) == len(headers):
        blocks = [block for part in parts for block in part.blocks]
        if len(parts) == 1 or all_different(blocks):
            types = [*chain.from_iterable(part.types for part in parts)]
            return joined(parts, blocks, types) if len(parts) > 1 else parts[0], {}
    tensors: dict[str, StoredTensor] = {}
    twice: dict[str, set[str]] = {}
    for header in headers:
        for name, tensor in header.entries.items():
            if tensors.setdefault(name, tensor) is not tensor:
                twice.setdefault(name, {tensors[name].shard}).add(header.shard.name)
    return tensors, twice


def beside(folder: Folder, index: Index) -> list[str]:
    """Return the weight files of the index's format that it does not name."""
    named = {*index.shards}
    return [
        name for name in folder.weights if name not in named and format_of(name) == index.format
    ]


def _content(
    headers: Sequence[Header],
    tensors: Mapping[str, StoredTensor],
    findings: Sequence[Finding],
    *,
    format: Format,
) -> Content:
    metadata: dict[str, str] = {}
    for header in reversed(headers):  # the first file wins
        metadata |= header.metadata
    return Content(
        format=format,
        tensors=tensors,
        shards=tuple(header.shard for header in headers),
        findings=tuple(findings),
        container=next((header.container for header in headers if header.container), ""),
        metadata=metadata,
    )


def _header(
    root: FilePath, shard: str, expected: Format | None, *, follow_links: bool = False
) -> Header:
    path = root / shard
    if not follow_links and leads_out(root, path):
        text = f"{shard!r} is a link to a file outside the folder, and not opened; name that file."
        return unread(shard, look(path), Finding("shard-path", "error", text))
    return read_weights(path, shard=shard, expected=expected)


def _about_format(index: Index) -> Iterator[Finding]:
    if index.shards and index.format not in ("safetensors", "torch"):
        what = "of an unknown format" if index.format == "unknown" else f"{index.format} files"
        text = (
            f"the index names {what}, which are not read here: {shown(index.shards, 3)}. Use a "
            "safetensors version of the model."
        )
        yield Finding(f"{index.format}-unsupported", "error", text)


def _about_missing(
    index: Index, present: Sequence[str], others: Sequence[str]
) -> Iterator[Finding]:
    """Say which files are not there: an error if others are, for then the checkpoint is torn."""
    there = {*present}
    missing = [shard for shard in index.inside if shard not in there]
    if not missing:
        return
    if not present and not others:
        text = (
            f"only the index is here, without the files that it names ({shown(missing, 3)}): names "
            "are known, shapes and dtypes are not."
        )
        yield Finding("headers-absent", "info", text)
        return
    gone = {*missing}
    names = [name for name, shard in index.weight_map.items() if shard in gone]
    text = (
        f"{len(missing)} of the {len(index.shards)} files of the index are not in the folder: "
        f"{shown(missing)}. They should hold {len(names)} tensors: {shown(names, 5)}."
    )
    yield Finding("shard-missing", "error", text)


def _placed(
    headers: Sequence[Header], index: Index
) -> tuple[Mapping[str, StoredTensor], tuple[Finding, ...]]:
    """Return the tensors in the order of the index, each from the file that it names for them.

    A tensor whose file cannot be read has no shape; one that its file does not hold is none.
    """
    if (whole := _whole(headers, index)) is not None:
        return whole, ()
    wanted: dict[str, list[str]] = {shard: [] for shard in index.shards}
    for name, shard in index.weight_map.items():
        wanted[shard].append(name)
    located: dict[str, StoredTensor] = {}
    absent: list[tuple[str, str]] = []
    stray: list[tuple[str, str]] = []
    for header in headers:
        shard, entries = header.shard.name, header.entries
        names = wanted.pop(shard) if header.readable else []
        if header.readable and {*entries} != {*names}:
            absent += [(name, shard) for name in names if name not in entries]
            stray += [(name, shard) for name in entries.keys() - {*names}]
            entries = {name: entries[name] for name in names if name in entries}
        located.update(entries)
    for shard, names in wanted.items():
        located.update(zip(names, stored_tensors(names, repeat(shard)), strict=True))
    tensors = {name: located[name] for name in index.weight_map if name in located}
    return tensors, tuple(_about_names(absent, stray, index))


def _whole(headers: Sequence[Header], index: Index) -> LazyTensors | None:
    """Return the tensors if every file is here and holds what the index says, and no more."""
    found = {h.shard.name: h.entries for h in headers if isinstance(h.entries, LazyTensors)}
    if found.keys() != {*index.shards}:
        return None
    if sum(map(len, found.values())) != len(index.weight_map):
        return None
    types: list[StoredType] = []
    known: dict[tuple[int, ...], Sequence[StoredType]] = {}
    runs = runs_of(index.weight_map)
    try:
        for run in runs:
            types += _types_of(run, found[run.file], known)
    except KeyError:
        return None
    return joined([*found.values()], blocks_of(runs), types)


def _types_of(
    run: Run, entries: LazyTensors, known: dict[tuple[int, ...], Sequence[StoredType]]
) -> Sequence[StoredType]:
    """Return the type of each tensor of *run*; KeyError if one is not among *entries*.

    *known*: those of blocks that are alike, in files that are.
    """
    block = run.block
    if block is None or any(part.head != block.head for part in entries.blocks):
        return [*map(entries.by_name.__getitem__, run.names)]
    key = (id(block.tails), *(id(part.tails) for part in entries.blocks), id(entries.types))
    if key not in known:
        known[key] = [*map(entries.by_name.__getitem__, run.names)]
    return known[key]


def _about_names(
    absent: Sequence[tuple[str, str]], stray: Sequence[tuple[str, str]], index: Index
) -> Iterator[Finding]:
    if absent:
        text = (
            f"{len(absent)} tensors are in the index and not in the file that it names: "
            f"{_listed(absent)}. The index and the files are not of one checkpoint."
        )
        yield Finding("tensor-missing", "error", text)
    copies = sorted(pair for pair in stray if pair[0] in index.weight_map)
    if copies:
        text = (
            f"{len(copies)} tensors are also in files from which the index does not take them: "
            f"{_listed(copies)}. Those copies are not read."
        )
        yield Finding("stale-duplicate", "warning", text)
    unnamed = sorted(pair for pair in stray if pair[0] not in index.weight_map)
    if unnamed:
        text = (
            f"{len(unnamed)} tensors are in the files and not in the index, and not read: "
            f"{_listed(unnamed)}."
        )
        yield Finding("unindexed-tensor", "warning", text)


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    listed = ", ".join(f"{name!r} in {shard!r}" for name, shard in pairs[:10])
    return f"{listed} … and {len(pairs) - 10} more" if len(pairs) > 10 else listed


def _about_several(
    names: Sequence[str], twice: Mapping[str, Iterable[str]], *, format: Format | None
) -> Iterator[Finding]:
    """Say on what ground files without an index are taken as one checkpoint, or cannot be."""
    if twice:
        files = sorted({shard for shards in twice.values() for shard in shards})
        text = (
            f"{len(twice)} tensors are in several files, and there is no index to decide between "
            f"them: {shown(twice, 5)} in {shown(files)}. Give the path of one file."
        )
        yield Finding("duplicate-name", "error", text)
        return
    if len({series_of(name) for name in names}) == 1:
        text = f"without an index, {len(names)} files of a series are taken as one checkpoint."
        yield Finding("no-index", "info", text)
        return
    text = f"there is no index, and {len(names)} files are of no series by name: {shown(names)}. "
    if format == "torch":  # files of torch.save may be anything, so that names count for more
        text += "Which of them are the checkpoint cannot be told; give the path of one."
        yield Finding("no-index", "error", text)
        return
    text += "They are taken as one checkpoint, as no tensor is in two of them."
    yield Finding("no-index", "warning", text)
