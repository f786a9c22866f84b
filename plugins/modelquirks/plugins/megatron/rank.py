"""``Rank``: what one model-parallel rank wrote, as plain data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.pickle_machine import Opaque
from modelquirks.planner.checkpoint.pickle_names import about_names
from modelquirks.planner.checkpoint.torch_content import TorchContent
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.checkpoint.torch_zip import read_content
from modelquirks.planner.finding import Finding
from modelquirks.plugins.megatron.files import STATE, RankFolder

__all__ = ["Grid", "Position", "Rank", "grid_of", "position_of", "read_rank"]

_CHUNK = re.compile(r"model(\d*)")
_MAX_DEPTH = 16
MAX_RANKS = 1 << 16
"""A file that speaks of more is not believed, nor is the name of one."""
_REST = ("optimizer", "optimizer_state_dict")
_OURS = ("argparse.Namespace", "megatron.", "transformer_engine.", "_io.BytesIO")


class Position(NamedTuple):
    """Where a rank is in the grid."""

    tensor: int
    pipeline: int
    expert: int


class Grid(NamedTuple):
    """Over how many ranks the model was cut."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, eq=False)
class Rank:
    """One file of a rank. ``chunks``: its tensors by name, one mapping a chunk of the pipeline."""

    folder: RankFolder
    content: TorchContent
    args: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the run."""
    iteration: int | None = None
    chunks: tuple[Mapping[str, TensorRecord], ...] = ()
    rest: tuple[str, ...] = ()
    """Keys and files of what is not the model: the optimizer…"""
    findings: tuple[Finding, ...] = ()

    def number(self, key: str) -> int | None:
        """Return a whole number of the arguments, None if it is not there."""
        value = self.args.get(key)
        return value if type(value) is int and 0 < value <= MAX_RANKS else None


def read_rank(root: Path, below: str, folder: RankFolder) -> Rank:
    """Return what the file in *folder*, which is *below* the *root*, says. Executes nothing."""
    shard = "/".join(part for part in (below, folder.name, STATE) if part)
    content = read_content(root / shard, shard=shard)
    if content.saved is None:
        return Rank(folder, content, findings=content.findings)
    strange = [name for name in content.saved.globals if not str(name).startswith(_OURS)]
    findings = (*content.findings, *about_names(shard, strange))
    value = content.saved.value
    if not isinstance(value, dict):
        text = f"{shard!r} holds {type(value).__name__}, not the dictionary of a run of Megatron."
        return Rank(folder, content, findings=(*findings, Finding("state-invalid", "error", text)))
    keys = [key for key in value if isinstance(key, str) and _CHUNK.fullmatch(key)]
    iteration = value.get("iteration")
    return Rank(
        folder=folder,
        content=content,
        args=_arguments(value.get("args")),
        iteration=iteration if type(iteration) is int else None,
        chunks=tuple(dict(_tensors(value[key])) for key in sorted(keys, key=lambda k: (len(k), k))),
        rest=(*(key for key in _REST if value.get(key)), *_files_beside(root / shard)),
        findings=findings,
    )


def _files_beside(path: Path) -> tuple[str, ...]:
    """Return the files of the distributed optimizer, which has its own."""
    names = sorted(os.listdir(path.parent))
    return tuple(name for name in names if name.endswith(".pt") and name != path.name)


def _arguments(value: Any) -> Mapping[str, Any]:
    state = value.state if isinstance(value, Opaque) else value
    return state if isinstance(state, dict) else {}


def _tensors(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRecord]]:
    """Yield tensors with their dotted names: flat in megatron-core, nested before it."""
    if isinstance(value, TensorRecord):
        yield prefix, value
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from _tensors(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def grid_of(ranks: tuple[Rank, ...]) -> Grid:
    """Return the sizes of the grid by the arguments of the run, else by the names of folders."""
    told = next((rank for rank in ranks if rank.args), ranks[0])
    seconds = [rank.folder.second for rank in ranks if rank.folder.second is not None]
    thirds = [rank.folder.third for rank in ranks if rank.folder.third is not None]
    expert = told.number("expert_model_parallel_size") or max(thirds, default=0) + 1
    pipeline = told.number("pipeline_model_parallel_size")
    if pipeline is None:
        pipeline = 1 if expert > 1 and not thirds else max(seconds, default=0) + 1
    most = max(rank.folder.tensor for rank in ranks) + 1
    tensor = told.number("tensor_model_parallel_size") or most
    if tensor * pipeline * expert <= MAX_RANKS:
        return Grid(tensor, pipeline, expert)
    by_names = Grid(most, max(seconds, default=0) + 1, max(thirds, default=0) + 1)
    return by_names if math.prod(by_names) <= MAX_RANKS else Grid(1, 1, 1)


def position_of(folder: RankFolder, grid: Grid) -> Position:
    """Return the ranks that the name of a folder stands for.

    >>> position_of(RankFolder("mp_rank_01_003", 1, 3, None), Grid(2, 1, 4))
    Position(tensor=1, pipeline=0, expert=3)
    """
    if folder.third is not None:
        return Position(folder.tensor, folder.second or 0, folder.third)
    if folder.second is not None and grid.pipeline == 1 and grid.expert > 1:
        return Position(folder.tensor, 0, folder.second)
    return Position(folder.tensor, folder.second or 0, 0)
