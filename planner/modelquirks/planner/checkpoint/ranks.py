"""Ranks: a model cut for tensor parallelism, a file a rank, as Meta releases Llama.

Each of ``consolidated.00.pth``, ``consolidated.01.pth``… holds its part of every tensor under the
same name: rows, columns or, of a norm, a copy. Which it is, no file says; that is for a quirk to
know. Here every part gets a name of its own, ``norm.weight/1`` for the one of rank 1.

Source: ``llama/generation.py`` of github.com/meta-llama/llama (Llama.build), which has one process
load the file of its rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.folder import rank_of
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.shards import Content, read_files
from modelquirks.planner.checkpoint.torch_zip import written_as
from modelquirks.planner.finding import Finding, shown

__all__ = ["read_ranks"]

_NUMBER = re.compile(r"(.*?)(\d+)")
_Parts = Mapping[int, Content]
"""What each rank holds, by number."""


def read_ranks(root: FilePath, names: Sequence[str]) -> Content:
    """Return the content of the files *names* of ranks: every part by its own name.

    Files of which no two have a name in common are no ranks and are read as any others.
    """
    parts = {rank_of(name): read_files(root, (name,)) for name in names}
    held = [name for part in parts.values() for name in part.tensors]
    if len({*held}) == len(held):
        return read_files(root, names)
    tensors = {
        f"{name}/{rank}": tensor._replace(name=f"{name}/{rank}")
        for rank, part in parts.items()
        for name, tensor in part.tensors.items()
    }
    first = next(iter(parts.values()))
    return replace(
        first,
        tensors=tensors,
        shards=tuple(chain.from_iterable(part.shards for part in parts.values())),
        findings=(
            *dict.fromkeys(chain.from_iterable(part.findings for part in parts.values())),
            *_about_ranks(parts),
            *_about_order(root, names),
        ),
        container=next((part.container for part in parts.values() if part.container), ""),
    )


def _about_ranks(parts: _Parts) -> Iterator[Finding]:
    text = (
        f"{len(parts)} files are the ranks of one model cut for tensor parallelism: each tensor "
        "is stored in parts, named by rank behind a slash."
    )
    yield Finding("ranks", "info", text)
    if missing := sorted({*range(max(parts) + 1)} - {*parts}):
        text = (
            f"the files of rank {', '.join(map(str, missing))} are not in the folder, though that "
            f"of rank {max(parts)} is: every tensor lacks a part. Fetch them."
        )
        yield Finding("rank-missing", "error", text)
    readable = {rank: part for rank, part in parts.items() if _is_readable(part)}
    yield from _about_names(readable)
    yield from _about_sizes(readable)


def _about_order(root: FilePath, names: Sequence[str]) -> Iterator[Finding]:
    """Say so if a file was written under the name of another rank, or is a copy of its file."""
    wrong = [
        f"{name!r} was written as {written!r}"
        for name in names
        if (written := written_as(root / name)) and _numbers_differ(name, written)
    ]
    if wrong:
        text = (
            f"files of ranks have changed names: {'; '.join(wrong[:10])}. Give them back the names "
            "they had: parts would be joined in a wrong order."
        )
        yield Finding("rank-swapped", "error", text)


def _numbers_differ(name: str, written: str) -> bool:
    """Tell whether both are names of a rank, of one series, and not of the same rank."""
    stem = name.rpartition(".")[0]
    one, other = _NUMBER.fullmatch(stem), _NUMBER.fullmatch(written)
    return one is not None and other is not None and one[1] == other[1] and one[2] != other[2]


def _is_readable(part: Content) -> bool:
    return all(shard.digest is not None for shard in part.shards)


def _about_names(parts: _Parts) -> Iterator[Finding]:
    every = dict.fromkeys(chain.from_iterable(part.tensors for part in parts.values()))
    lacking = [
        f"{name}/{rank}"
        for name in every
        for rank, part in parts.items()
        if name not in part.tensors
    ]
    if lacking:
        text = (
            f"{len(lacking)} parts are not stored, though other ranks have a tensor of that name: "
            f"{shown(lacking)}. The files are not the ranks of one model."
        )
        yield Finding("rank-lacks-tensor", "error", text)


def _about_sizes(parts: _Parts) -> Iterator[Finding]:
    """Say so if ranks differ: parts are equally large, and copies are equal."""
    odd: list[str] = []
    for name, tensors in _by_name(parts).items():
        types = {(tensor.dtype, tensor.shape) for tensor in tensors.values()}
        if len(types) > 1:
            told = ", ".join(
                f"{tensor.dtype} {list(tensor.shape or ())} in rank {rank}"
                for rank, tensor in tensors.items()
            )
            odd.append(f"{name!r} is {told}")
    if odd:
        more = f" … and {len(odd) - 3} more" if len(odd) > 3 else ""
        text = (
            f"{len(odd)} tensors differ in dtype or shape from rank to rank: "
            f"{'; '.join(odd[:3])}{more}. The files are not the ranks of one model."
        )
        yield Finding("ranks-differ", "error", text)


def _by_name(parts: _Parts) -> dict[str, dict[int, StoredTensor]]:
    found: dict[str, dict[int, StoredTensor]] = {}
    for rank, part in parts.items():
        for name, tensor in part.tensors.items():
            found.setdefault(name, {})[rank] = tensor
    return found
