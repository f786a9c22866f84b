"""``ExportReport``: what an export wrote; ``ExportError``: why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelquirks.planner.finding import Finding

__all__ = ["ExportError", "ExportReport"]


class ExportError(RuntimeError):
    """The checkpoint cannot be exported, or not to this folder; nothing of it was left there."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written to a folder, and that it was read back as it was written."""

    out: Path
    n_tensors: int
    n_bytes: int
    """Of the tensors; the headers come on top."""
    files: Mapping[str, int]
    """Bytes of each weight file, by name."""
    ties: Mapping[str, str]
    """Names that are not stored, with the name under which their tensor is."""
    copied: tuple[str, ...]
    """Files beside the weights: the configuration, the tokenizer."""
    seconds_by_step: Mapping[str, float]
    """``plan``, ``write`` and ``read back``."""
    bytes_read: int
    """Bytes of the checkpoint that were asked for."""
    work_bytes: int
    """The most that making tensors took at a time, by estimate."""
    peak_bytes: int | None
    """The most memory that the process has had, pages of mapped files included; None where the
    system does not say."""
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """The ``checkpoint`` object of the reports."""
    notes: tuple[Finding, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds_by_step.values())

    def to_json(self) -> dict[str, Any]:
        """Return the ``export`` object of the JSON report."""
        return {
            "out": str(self.out),
            "tensors": self.n_tensors,
            "bytes": self.n_bytes,
            "files": dict(self.files),
            "ties": dict(self.ties),
            "copied": list(self.copied),
            "seconds": self.seconds,
            "seconds_by_step": dict(self.seconds_by_step),
            "bytes_read": self.bytes_read,
            "work_bytes": self.work_bytes,
            "peak_bytes": self.peak_bytes,
            "notes": [note.to_json() for note in self.notes],
        }
