"""``Manifest``: what a checkpoint holds, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modelquirks.planner.finding import Finding
from modelquirks.quirks.family import Family, group

__all__ = ["Format", "Manifest", "Shard", "StoredTensor", "shared_groups"]

Format = Literal["safetensors", "torch", "flax", "gguf", "unknown"]


class StoredTensor(NamedTuple):
    """Where one tensor of the checkpoint is. ``None``: the index alone does not tell."""

    name: str
    shard: str
    """File, relative to the checkpoint folder, with ``/``."""
    dtype: str | None = None
    """As safetensors spells it."""
    shape: tuple[int, ...] | None = None
    begin: int | None = None
    """Offset of the first byte in the file."""
    end: int | None = None
    """Offset behind the last byte in the file."""
    stride: tuple[int, ...] | None = None
    """Elements between neighbours, by dimension; None: dense, row after row."""

    @property
    def nbytes(self) -> int | None:
        """Bytes stored, or None if only the name is known."""
        return None if self.begin is None or self.end is None else self.end - self.begin


def shared_groups(tensors: Iterable[StoredTensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names that share one place: same file, bytes, dtype, shape and stride.

    Files of ``torch.save`` tell by this that tensors are tied; safetensors files cannot.
    """
    places: dict[tuple[object, ...], list[str]] = {}
    for tensor in tensors:
        if tensor.nbytes:
            places.setdefault(tensor[1:], []).append(tensor.name)
    return tuple(tuple(names) for names in places.values() if len(names) > 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the checkpoint as it was when its header was read."""

    name: str
    """Relative to the checkpoint folder, with ``/``."""
    size_bytes: int | None
    """None: the file is not there."""
    mtime_ns: int | None
    digest: str | None
    """sha256 of the header: safetensors' JSON, or the records and the pickle of a zip file."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: names, dtypes, shapes, byte ranges, config, oddities found."""

    root: Path
    """Folder of the checkpoint."""
    path: Path
    """What the user named: the folder, a file or an index."""
    format: Format
    tensors: Mapping[str, StoredTensor]
    shards: tuple[Shard, ...]
    config: Mapping[str, Any]
    """Content of config.json, ``{}`` without one."""
    findings: tuple[Finding, ...] = ()
    declared_bytes: int | None = None
    """``metadata.total_size`` of the index where it is believable."""
    container: str = ""
    """What the weights were wrapped in: ``lightning``, ``state_dict``, ``deepspeed``…"""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """``__metadata__`` of the safetensors headers, first file wins."""

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """The tensors by family, in stored order."""
        return group(self.tensors)

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one place in a file, which is evidence of a tie."""
        return shared_groups(self.tensors.values())

    @cached_property
    def has_headers(self) -> bool:
        """Whether the shapes of all tensors are known."""
        return all(t.begin is not None for t in self.tensors.values())

    @cached_property
    def total_bytes(self) -> int | None:
        """Bytes of all tensors by their headers, else what the index declares, else None.

        Tensors in the same place count once.
        """
        if self.has_headers and self.tensors:
            places = {(t.shard, t.begin, t.end): t.nbytes or 0 for t in self.tensors.values()}
            return sum(places.values())
        return self.declared_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the ``checkpoint`` object of the reports."""
        return {
            "path": str(self.path),
            "format": self.format,
            "tensors": len(self.tensors),
            "families": len(self.families),
            "shards": len(self.shards),
            "total_bytes": self.total_bytes,
            "findings": [finding.to_json() for finding in self.findings],
        }
