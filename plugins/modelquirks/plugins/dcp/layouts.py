"""Which layout of torch.distributed.checkpoint a folder or file is of, opened as that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.json_text import read_json
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.checkpoint.torch_zip import read_content
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.hugging_face import open_shards, shard_files
from modelquirks.plugins.dcp.opening import open_folder

__all__ = ["has_backend", "open_layout"]

_METADATA = ".metadata"
_LIGHTNING = "meta.pt"
_BACKEND = "metadata.json"
_ACCELERATE = re.compile(r"pytorch_model_fsdp_(\d+)")
"""A folder of accelerate's ``save_state`` for model number so and so."""


def open_layout(path: Path, names: Sequence[str]) -> Opened | None:
    """Open a folder of DCP, one of accelerate with such a folder below it, or a file of either."""
    if not path.is_dir():
        is_ours = path.name == _METADATA or path.name.endswith(".distcp")
        return open_folder(path.parent) if is_ours and _is_ours(path.parent) else None
    if has_backend(path, names):  # Megatron's, whose plugin knows what it stacks
        return None
    if _is_ours(path, names):
        opened = open_folder(path)
        return replace(opened, container="lightning") if _of_lightning(path, names) else opened
    if shards := shard_files(path, names):
        return open_shards(path, shards, names)
    return _of_accelerate(path, names)


def has_backend(folder: Path, names: Sequence[str]) -> bool:
    """Tell whether Megatron's ``dist_checkpointing`` wrote the folder, as metadata.json says."""
    if _BACKEND not in names or _METADATA not in names:
        return False
    said, _ = read_json(folder / _BACKEND)
    return isinstance(said, dict) and "sharded_backend" in said


def _of_lightning(path: Path, names: Sequence[str]) -> bool:
    """Tell whether a strategy of Lightning wrote the folder: the rest of its state is beside it.

    Source: ``FSDPStrategy.save_checkpoint`` of lightning 2.6, which names the file ``meta.pt``.
    """
    if _LIGHTNING not in names:
        return False
    saved = read_content(path / _LIGHTNING).saved
    value = None if saved is None else saved.value
    return isinstance(value, dict) and "pytorch-lightning_version" in value


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
