"""From the headers of GGUF files to places, names and a config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.gguf.config import architecture_of, config_of
from modelquirks.plugins.gguf.header import GgufHeader, GgufTensor, read_header
from modelquirks.plugins.gguf.records import ARCHITECTURES, PLUS_ONE_NORMS, container_of
from modelquirks.plugins.gguf.schemes import PLUS_ONE
from modelquirks.plugins.gguf.types import BlockType
from modelquirks.quirks.recipe import Source

__all__ = ["open_file", "open_folder"]

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = re.compile(r"mmproj.*\.gguf|.*[-_.]mmproj.*\.gguf", re.IGNORECASE)


def open_file(path: Path) -> Opened:
    """Return what one file holds; of a split model, all its files beside it."""
    return _opened(path.parent, _series(path.parent, path.name))


def open_folder(root: Path, names: Sequence[str]) -> Opened:
    """Return what the only model among the files *names* holds; several are an error."""
    models = {_key(name): name for name in reversed(names) if not _PROJECTOR.fullmatch(name)}
    aside = [name for name in names if _PROJECTOR.fullmatch(name)]
    if len(models) != 1:
        text = (
            f"there are {len(models)} models in GGUF files: {shown(names)}. Give the path of one."
        )
        return Opened("gguf", {}, {}, (), (Finding("several-models", "error", text),))
    (first,) = models.values()
    opened = _opened(root, _series(root, first))
    if not aside:
        return opened
    text = f"the projector of images is a model of its own, and not read: {shown(aside)}."
    about = Finding("other-copies", "info", text)
    return replace(opened, findings=(*opened.findings, about))


def _key(name: str) -> str:
    split = _SPLIT.fullmatch(name)
    return split["stem"] if split else name


def _series(root: Path, name: str) -> tuple[str, ...]:
    """Return the files of a split model by the name of any; those that are not there too."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return (name,)
    count = int(split["count"])
    numbers = range(1, count + 1)
    return tuple(f"{split['stem']}-{n:05d}-of-{split['count']}.gguf" for n in numbers)


def _opened(root: Path, names: Sequence[str]) -> Opened:
    present = {*os.listdir(root)} if len(names) > 1 else {*names}
    there = [name for name in names if name in present]
    absent = [] if len(there) == len(names) else sorted({*names} - {*there})
    headers = [read_header(root / name, shard=name) for name in there]
    facts = next((header.facts for header in headers if header.facts), {})
    architecture = architecture_of(facts)
    places: dict[str, StoredTensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    twice: list[str] = []
    for header in headers:
        for tensor in header.tensors:
            if tensor.type is None or (tensor.type.dtype is None and not tensor.shape):
                continue
            if tensor.name in shapes:
                twice.append(tensor.name)
                continue
            shapes[tensor.name] = tensor.shape
            stored = _stored(tensor, tensor.type, header, architecture)
            places[stored.name] = stored
    findings = [
        *_about_absent(absent, len(names)),
        *(finding for header in headers for finding in header.findings),
        *_about(headers, architecture, twice),
        *_about_split(headers, len(names)),
    ]
    return Opened(
        format="gguf",
        places=places,
        tensors={name: Source(name) for name in places},
        shards=(
            *(header.shard for header in headers),
            *(Shard(name, None, None, None) for name in absent),
        ),
        findings=tuple(findings),
        container=container_of(architecture),
        config=config_of(facts, shapes),
    )


def _stored(
    tensor: GgufTensor, type_: BlockType, header: GgufHeader, architecture: str
) -> StoredTensor:
    """Return the place of a tensor: blocks as bytes, with their type as the last word."""
    begin: int | None = tensor.begin
    end: int | None = tensor.end
    if tensor.end > (header.shard.size_bytes or 0):
        begin = end = None
    if type_.dtype is None:
        shape = (*tensor.shape[:-1], tensor.shape[-1] // type_.elements * type_.nbytes)
        name = f"{tensor.name}.{type_.name.lower()}"
        return StoredTensor(name, header.shard.name, "U8", shape, begin, end)
    name = tensor.name
    if architecture in PLUS_ONE_NORMS and name.endswith("norm.weight"):
        name = f"{name}.{PLUS_ONE}"
    return StoredTensor(name, header.shard.name, type_.dtype, tensor.shape, begin, end)


def _about(
    headers: Sequence[GgufHeader], architecture: str, twice: Sequence[str]
) -> Iterator[Finding]:
    kinds: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            kind = tensor.type.name if tensor.type else f"type {tensor.type_number}"
            kinds[kind] = kinds.get(kind, 0) + 1
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if kinds:
        yield Finding("gguf", "info", f"a model of the architecture {architecture!r}: {listed}.")
    if kinds and architecture not in ARCHITECTURES:
        text = (
            f"the names of the architecture {architecture!r} are not known here: its tensors keep "
            f"those of llama.cpp. Known are {shown(sorted(ARCHITECTURES), 20)}."
        )
        yield Finding("gguf-architecture", "warning", text)
    if twice:
        text = f"these tensors are in two files of the series: {shown(twice)}."
        yield Finding("duplicate-name", "error", text)


def _about_absent(absent: Sequence[str], count: int) -> Iterator[Finding]:
    if absent:
        text = f"{len(absent)} of the {count} files of the model are not there: {shown(absent)}."
        yield Finding("shard-missing", "error", text)


def _told(headers: Sequence[GgufHeader], key: str) -> set[int]:
    """Return the whole numbers that files have for a fact."""
    return {value for h in headers if type(value := h.facts.get(key)) is int}


def _about_split(headers: Sequence[GgufHeader], n_files: int) -> Iterator[Finding]:
    """Say if the files of a split model do not belong together."""
    counts = _told(headers, "split.count")
    if any(count != n_files and count > 1 for count in counts):
        text = f"the model was split into {sorted(counts)} files, and {n_files} are named so."
        yield Finding("series-incomplete", "error", text)
    totals = _told(headers, "split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(totals) == 1 and all(h.tensors or h.facts for h in headers) and found not in totals:
        text = f"the files hold {found} tensors, and there should be {next(iter(totals))}."
        yield Finding("series-incomplete", "error", text)
