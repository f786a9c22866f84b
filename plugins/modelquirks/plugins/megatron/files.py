"""Which folder of Megatron it is, and the files of its ranks.

Source: ``get_checkpoint_name`` and ``_get_checkpoint_format`` in Megatron-LM's
``megatron/training/checkpointing.py`` (d98e8a6).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.layouts import has_backend

__all__ = ["Located", "RankFolder", "located"]

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "model_optim_rng.pt"
_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


class RankFolder(NamedTuple):
    """The folder of one model-parallel rank; numbers that its name does not have are None."""

    name: str
    tensor: int
    second: int | None
    """Of the pipeline; with one pipeline stage and several expert ranks, of the experts."""
    third: int | None


class Located(NamedTuple):
    """The folder of one iteration."""

    below: str
    """Relative to the path that was given; empty: that itself."""
    ranks: tuple[RankFolder, ...] = ()
    is_dist: bool = False
    findings: tuple[Finding, ...] = ()


def located(path: Path, names: Sequence[str], tag: str | None = None) -> Located | None:
    """Return what *path*, with files and folders *names* in it, is of Megatron; None: nothing.

    Of several iterations that called *tag* is taken (``iter_0000010``), else that which the
    tracker names, without it the only one.
    """
    if found := _of(path, "", names):
        return found
    iterations = [name for name in names if _ITERATION.fullmatch(name) and _of_name(path, name)]
    if not iterations:
        return None
    if tag is not None:
        if tag in iterations:
            return _of_name(path, tag)
        text = f"there is no iteration {tag!r}; there are {shown(iterations)}."
        return Located("", (), False, (Finding("state-unknown", "error", text),))
    tag = _tracked(path) if TRACKER in names else ""
    if tag in iterations:
        others = [name for name in iterations if name != tag]
        text = f"{tag!r} was read, which {TRACKER!r} names; beside it are {shown(others)}."
        about = (Finding("several-iterations", "info", text),) if others else ()
        return _said(path, tag, about)
    if tag:
        text = f"{TRACKER!r} names {tag!r}, which is not there; {shown(iterations)} are."
        about = (Finding("tracker", "error", text),)
        return (
            _said(path, iterations[-1], about)
            if len(iterations) == 1
            else Located("", (), False, about)
        )
    if len(iterations) == 1:
        return _of_name(path, iterations[0])
    text = f"there is no {TRACKER!r}: choose an iteration by --tag, of {shown(iterations)}."
    return Located("", (), False, (Finding("several-iterations", "error", text),))


def _said(path: Path, name: str, about: tuple[Finding, ...]) -> Located | None:
    found = _of_name(path, name)
    return found._replace(findings=(*about, *found.findings)) if found else None


def _tracked(path: Path) -> str:
    text = look(path / TRACKER).head[:64].decode("utf-8", "replace").strip()
    return f"iter_{int(text):07d}" if text.isdecimal() else text


def _of_name(path: Path, name: str) -> Located | None:
    folder = path / name
    return _of(folder, name, sorted(os.listdir(folder))) if folder.is_dir() else None


def _of(folder: Path, below: str, names: Sequence[str]) -> Located | None:
    if has_backend(folder, names):
        return Located(below, is_dist=True)
    ranks = tuple(rank for rank in _ranks(names) if (folder / rank.name / STATE).is_file())
    if ranks:
        return Located(below, ranks)
    return None


def _ranks(names: Sequence[str]) -> Iterator[RankFolder]:
    for name in names:
        if found := _RANK.fullmatch(name):
            first, second, third = (None if part is None else int(part) for part in found.groups())
            yield RankFolder(name, first or 0, second, third)
