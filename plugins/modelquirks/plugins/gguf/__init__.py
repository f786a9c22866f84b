"""GGUF, the format of llama.cpp: read without it, made plain by the package ``gguf``.

A header says everything: facts about the model, which become a config; tensors under llama.cpp's
names, mostly packed in blocks. Their types are a word of their names here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.plugins.gguf.records import RECORDS
from modelquirks.plugins.gguf.schemes import all_schemes
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.record import ModelQuirks

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.opened import Opened

__all__ = ["RECORDS", "modelquirks_open", "modelquirks_records", "modelquirks_schemes"]

_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


@hookimpl
def modelquirks_open(path: Path, names: Sequence[str]) -> Opened | None:
    """Open a GGUF file of any name, or a folder that holds such files and no other weights."""
    from modelquirks.planner.checkpoint.file_kind import look  # records need no planner
    from modelquirks.plugins.gguf.opening import open_file, open_folder

    if not path.is_dir():
        return open_file(path) if look(path).kind == "gguf" else None
    files = [name for name in names if name.lower().endswith(".gguf")]
    if not files or any(name.endswith(_OTHERS) for name in names):
        return None
    return open_folder(path, files)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of names, packed types and norms."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return a scheme for every packed type."""
    return all_schemes()
