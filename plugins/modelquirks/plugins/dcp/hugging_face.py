"""Chunks in safetensors files, as ``HuggingFaceStorageWriter(save_distributed=True)`` leaves them.

The header of each file says under ``DCP_SHARDING_INFO`` where its tensors begin in the whole ones.
Nothing says how large those are, nor how many ranks there were: if the last file of a save is
missing, a tensor just looks smaller, which the shapes of the model will show.

Source: ``torch/distributed/checkpoint/hf_storage.py`` and ``_hf_utils.py`` of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.json_text import JsonProblem, parse_json
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.grid import Chunk, assembled, shown_region
from modelquirks.plugins.dcp.opening import unassembled
from modelquirks.quirks.recipe import Node, RecipeError, Region

__all__ = ["open_shards", "shard_files"]

_NAME = re.compile(r"shard-(\d{5})-.+\.safetensors")
_KEY = "DCP_SHARDING_INFO"


class _Part(NamedTuple):
    """A chunk of a tensor as it lies in one file."""

    region: Region
    stored: StoredTensor


def shard_files(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the files of such a checkpoint among *names*; none if the first is of another kind."""
    files = tuple(name for name in names if _NAME.fullmatch(name))
    is_ours = bool(files) and _KEY in read_header(folder / files[0]).metadata
    return files if is_ours else ()


def open_shards(folder: Path, files: Sequence[str], names: Sequence[str]) -> Opened:
    """Return what the *files* in *folder* hold together; *names* is what is in the folder."""
    headers = [read_header(folder / file, shard=file) for file in files]
    parts: dict[str, list[_Part]] = {}
    findings = [*_about_files(files, names)]
    for header in headers:
        offsets, problems = _offsets(header)
        findings += [*header.findings, *problems]
        for name, stored in header.entries.items():
            if (region := _region(stored, offsets.get(name))) is not None:
                parts.setdefault(name, []).append(_Part(region, stored))
    places: dict[str, StoredTensor] = {}
    tensors: dict[str, Node] = {}
    faults: dict[str, str] = {}
    for name, several in parts.items():
        placed = _placed(name, several)
        places |= {place: stored for place, (_, stored) in placed.items()}
        chunks = [Chunk(place, region) for place, (region, _) in placed.items()]
        try:
            tensors[name] = assembled(chunks, _shape(several))
        except RecipeError as error:
            faults[name] = str(error)
    return Opened(
        format="dcp",
        places=places,
        tensors=tensors,
        shards=tuple(header.shard for header in headers),
        findings=(*findings, *unassembled(faults)),
    )


def _placed(name: str, parts: Sequence[_Part]) -> Mapping[str, _Part]:
    """Return the parts by the names of their places: the tensor's own if there is only one."""
    if len(parts) == 1 and all(start == 0 for start, _ in parts[0].region):
        return {name: parts[0]}
    found: dict[str, _Part] = {}
    for region, stored in parts:
        place = f"{name}{shown_region(region)}"
        if place in found:  # written by two ranks, or left from another save: not to be told apart
            place = f"{place} of {stored.shard}"
        found[place] = _Part(region, stored._replace(name=place))
    return found


def _shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    """Return the shape of the whole, as torch's reader has it: the farthest end of any part."""
    return tuple(
        max(ends) for ends in zip(*([stop for _, stop in p.region] for p in parts), strict=True)
    )


def _region(stored: StoredTensor, offsets: tuple[int, ...] | None) -> Region | None:
    if stored.shape is None:  # its entry is broken, which is a finding of the header
        return None
    begins = offsets if offsets is not None else (0,) * len(stored.shape)
    if len(begins) != len(stored.shape):
        return None
    return tuple((begin, begin + size) for begin, size in zip(begins, stored.shape, strict=True))


def _offsets(header: Header) -> tuple[Mapping[str, tuple[int, ...]], list[Finding]]:
    """Return where the tensors of a file begin in the whole ones, by name."""
    value = parse_json(header.metadata.get(_KEY, ""))
    found: dict[str, tuple[int, ...]] = {}
    odd: list[str] = []
    for name in header.entries:
        item = value.get(name) if isinstance(value, dict) else None
        begins = item.get("saved_offsets") if isinstance(item, dict) else None
        if isinstance(begins, list) and all(type(n) is int and n >= 0 for n in begins):
            found[name] = tuple(begins)
        else:
            odd.append(name)
    odd += [n for n, begins in found.items() if len(begins) != len(header.entries[n].shape or ())]
    if not odd:
        return found, []
    reason = f"it {value.text}" if isinstance(value, JsonProblem) else "no 'saved_offsets' fit them"
    text = (
        f"{header.shard.name!r}: {_KEY!r} does not say where these belong ({reason}): {shown(odd)}."
    )
    return found, [Finding("chunk-unplaced", "error", text)]


def _about_files(files: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    numbers = {int(found[1]) for file in files if (found := _NAME.fullmatch(file))}
    if gaps := sorted({*range(1, max(numbers) + 1)} - numbers):
        text = (
            f"the files of rank {', '.join(str(number - 1) for number in gaps[:10])} are not in "
            f"the folder, though that of rank {max(numbers) - 1} is. Fetch them."
        )
        yield Finding("shard-missing", "error", text)
    if others := [n for n in names if n.endswith(".safetensors") and n not in files]:
        text = f"not of this save by their names, and not read: {shown(others)}."
        yield Finding("extra-shards", "warning", text)
