"""Which layout of torch.distributed.checkpoint a folder or file is of, opened as that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.hugging_face import open_shards, shard_files
from modelquirks.plugins.dcp.opening import open_folder

__all__ = ["open_layout"]

_METADATA = ".metadata"
_ACCELERATE = re.compile(r"pytorch_model_fsdp_(\d+)")
"""A folder of accelerate's ``save_state`` for model number so and so."""


def open_layout(path: Path, names: Sequence[str]) -> Opened | None:
    """Open a folder of DCP, one of accelerate with such a folder below it, or a file of either."""
    if not path.is_dir():
        is_ours = path.name == _METADATA or path.name.endswith(".distcp")
        return open_folder(path.parent) if is_ours and _is_ours(path.parent) else None
    if _is_ours(path, names):
        return open_folder(path)
    if shards := shard_files(path, names):
        return open_shards(path, shards, names)
    return _of_accelerate(path, names)


def _is_ours(folder: Path, names: Sequence[str] = ()) -> bool:
    if any(name.endswith(".distcp") for name in names):
        return True
    return look(folder / _METADATA).kind == "pickle"


def _of_accelerate(path: Path, names: Sequence[str]) -> Opened | None:
    """Open what ``Accelerator.save_state`` wrote with ``SHARDED_STATE_DICT``."""
    below = [name for name in names if _ACCELERATE.fullmatch(name) and _is_ours(path / name)]
    if not below:
        return None
    first, *others = sorted(below, key=lambda name: int(name.rpartition("_")[2]))
    opened = open_folder(path, below=first)
    if not others:
        return opened
    text = f"{first!r} was read, the first model; not taken: {shown(others)}. Give one's path."
    return replace(opened, findings=(*opened.findings, Finding("several-models", "warning", text)))
