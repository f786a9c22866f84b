"""Names of the files of a checkpoint, and which folder it is.

Source: ``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_get_expert_ckpt_name`` and
``load_checkpoint`` in DeepSpeed 0.19.8's ``runtime/engine.py``, ``ckpt_layer_path`` in
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.folder import list_folder
from modelquirks.planner.checkpoint.index import leaves_folder
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.finding import Finding, brief, shown

__all__ = ["Folder", "Kind", "StateName", "has_states", "list_states", "locate", "parsed"]

Kind = Literal["model", "zero3-model", "optim", "layer", "expert", "expert-optim"]
"""``model``: weights and facts of one model-parallel rank; ``zero3-model``: the same with shares
only, one file a data-parallel rank; ``optim``: one rank's share of the fp32 masters;
``layer``: a pipeline layer; ``expert``: one expert; ``expert-optim``: no masters, ZeRO 0 only."""

_RANKS = r"zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{2,6})"
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("model", re.compile(r"mp_rank_(?P<mp>\d{2,6})_model_states\.pt")),
    (
        "zero3-model",
        re.compile(rf"{_RANKS}_model_states\.pt"),
    ),
    ("optim", re.compile(rf"(?P<half>(?:bf|fp)16_)?{_RANKS}_?optim_states\.pt")),
    ("layer", re.compile(r"layer_(?P<layer>\d{2,6})(?:-model_(?P<mp>\d{2,6}))?-model_states\.pt")),
    (
        "expert",
        re.compile(
            r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_model_states\.pt"
        ),
    ),
    (
        "expert-optim",
        re.compile(r"expp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_optim_states\.pt"),
    ),
)


class StateName(NamedTuple):
    """What the name of a file says. Ranks and numbers that it does not have are 0."""

    name: str
    kind: Kind
    dp: int = 0
    """Data-parallel rank, which DeepSpeed writes as ``pp_rank``."""
    mp: int = 0
    """Model-parallel rank: that of the pipeline stage times the tensor-parallel degree, plus that
    of the slice. Of a layer's file the rank of the slice alone."""
    layer: int = -1
    expert: int = -1
    half: str = ""
    """``bf16_``: the engine that saved it had bf16 enabled."""


def parsed(name: str) -> StateName | None:
    """Return what the base name of a file says, None if it is none of DeepSpeed's.

    >>> parsed("bf16_zero_pp_rank_11_mp_rank_03_optim_states.pt")[1:4]
    ('optim', 11, 3)
    >>> parsed("layer_03-model_01-model_states.pt").layer
    3
    """
    for kind, pattern in _NAMES:
        if found := pattern.fullmatch(name):
            parts = found.groupdict()
            numbers = {
                key: int(parts[key])
                for key in ("dp", "mp", "layer", "expert")
                if parts.get(key) is not None
            }
            return StateName(name, kind, **numbers, half=parts.get("half") or "")
    return None


def list_states(folder: Path) -> tuple[StateName, ...]:
    """Return DeepSpeed's files in *folder*, ranks in the order of numbers, not of letters."""
    found = (parsed(path.name) for path in folder.iterdir() if path.is_file())
    return tuple(sorted((name for name in found if name), key=lambda name: name[1:]))


class Folder(NamedTuple):
    """The folder with the files of one saved state."""

    path: Path
    tag: str
    universal: bool
    """Written by ``ds_to_universal``: one folder a parameter."""
    findings: tuple[Finding, ...] = ()


def locate(path: Path, tag: str | None = None) -> Folder:
    """Return the folder of the state called *tag* below *path*.

    Without a tag: *path* itself if it has the files; else the tag in the file ``latest``, then in
    ``latest_universal``; else the only subfolder that has such files. *path* may be the folder of
    the tag itself. Raises :class:`CheckpointError`, which names the tags there are, if none of
    these is to be had.
    """
    if tag is not None and not (path.name == tag and _holds_states(path)):
        return _tagged(path, tag, said="the tag given")
    if _holds_states(path):
        return Folder(path, path.name, _is_universal(path))
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            text = look(path / pointer).head.decode("utf-8", "replace").strip()
            return _tagged(path, text, said=f"{pointer!r}")
    tags = _tags(path)
    if len(tags) == 1:
        text = f"{str(path)!r} has no file 'latest'; its only saved state {tags[0]!r} is taken."
        found = Finding("tag-guessed", "info", text)
        return Folder(path / tags[0], tags[0], _is_universal(path / tags[0]), (found,))
    if not tags:
        raise CheckpointError(f"{str(path)!r} holds no checkpoint of DeepSpeed")
    raise CheckpointError(
        f"{str(path)!r} has no file 'latest' and {len(tags)} saved states; name one of "
        f"{shown(tags)}"
    )


def has_states(path: Path) -> bool:
    """Tell whether the folder is that of a saved state, or has such folders in it.

    States of the optimizer that lie beside weight files of another kind are no reason: the weights
    are what people mean there.
    """
    if next(_tag_names(path), None) is not None or _is_universal(path):
        return True
    states = list_states(path)
    if all(state.kind in ("optim", "expert-optim") for state in states):
        weights = set(list_folder(path).weights) - {state.name for state in states}
        return bool(states) and not weights
    return True


def _tagged(path: Path, tag: str, *, said: str) -> Folder:
    tags = _tags(path)
    folder = path / tag
    if leaves_folder(tag) or not os.path.isdir(folder) or not _holds_states(folder):
        there = f"there are {shown(tags)}" if tags else "there is no other"
        raise CheckpointError(
            f"{str(path)!r}: {said} names {brief(tag, 200)}, which is no folder with files of "
            f"DeepSpeed; {there}"
        )
    return Folder(folder, tag, _is_universal(folder))


def _tags(path: Path) -> list[str]:
    return sorted(_tag_names(path)) if path.is_dir() else []


def _tag_names(path: Path) -> Iterator[str]:
    return (below.name for below in path.iterdir() if below.is_dir() and _holds_states(below))


def _holds_states(path: Path) -> bool:
    return path.is_dir() and (bool(list_states(path)) or _is_universal(path))


def _is_universal(path: Path) -> bool:
    """Tell by what only ``ds_to_universal`` writes, be it one file of it."""
    zero = path / "zero"
    return (zero / "optimizer_state.pt").is_file() or any(zero.glob("*/fp32.pt"))
