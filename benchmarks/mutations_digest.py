"""Whether a digest of the right checkpoint tells what no header shows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mutations_copy import Copy
from mutations_files import is_weights, write_files
from mutations_subjects import Subject, subject_named, value_registry

__all__ = ["caught", "is_of_weights"]


def is_of_weights(subject: Subject, copy: Copy) -> bool:
    """Tell whether the damage is in files of weights: a digest covers tensors, not settings."""
    return any(
        raw != copy.files.get(name) for name, raw in subject.files.items() if is_weights(name)
    )


def caught(subject: Subject, folder: Path) -> bool:
    """Tell whether the digest of the right checkpoint names something in *folder*."""
    from modelquirks.planner.digest.comparison import compare

    return not compare(_manifest(subject, folder), _digest(subject.name)).is_same


@cache
def _digest(name: str) -> Any:
    from modelquirks.planner.digest.digest import Digest
    from modelquirks.planner.digest.hashing import hash_tensors

    subject = subject_named(name)
    with TemporaryDirectory() as folder:
        write_files(Path(folder), subject.files)
        return Digest(hash_tensors(_manifest(subject, Path(folder))).tensors)


def _manifest(subject: Subject, folder: Path) -> Any:
    """Return what is in *folder*, an adapter beside its base."""
    from modelquirks.planner import Dispatcher
    from modelquirks.planner.adapter.adapter import open_adapter
    from modelquirks.planner.adapter.beside import beside

    manifest = Dispatcher(value_registry()).manifest(folder / subject.path)
    if not subject.adapter:
        return manifest
    return beside(manifest, open_adapter(folder / subject.adapter, value_registry).manifest)
