"""``ExecutionReport``: what was loaded where, how fast, and how it was checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from modelquirks.planner.execution.experts import ExpertOffload
from modelquirks.planner.execution.verify import Verification
from modelquirks.planner.finding import Finding

__all__ = ["Clock", "ExecutionReport", "peak_memory"]


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What was loaded where."""

    seconds: float
    """From the call to the end of the verification."""
    bytes_by_device: Mapping[str, int]
    """Bytes by the device that keeps them; those of ``disk`` are in files, the checkpoint's
    own unless weights were materialized."""
    n_tensors: int
    """Tensors loaded; tied names count once."""
    bytes_read: int
    """Bytes of the stored tensors and regions that were asked for, verification not counted."""
    verification: Verification
    notes: tuple[Finding, ...] = ()
    bytes_written: int = 0
    """Bytes of the files that were written to the offload folder; 0 unless that was asked for."""
    bytes_made: int = 0
    """Bytes of the tensors that were made in memory; the others are views of the files."""
    work_bytes: int = 0
    """The most that making them took at a time beside themselves, by estimate."""
    peak_bytes: int | None = None
    """The most memory that the process has had so far, pages of mapped files included; None where
    the system does not say."""
    experts: ExpertOffload | None = None
    """Stacked experts that are offloaded and brought one by one: ``experts.report()`` tells how
    often, at any time."""
    seconds_by_step: Mapping[str, float] = field(default_factory=dict)
    """``check``, ``make``, ``dispatch`` and ``verify``."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "seconds": self.seconds,
            "seconds_by_step": dict(self.seconds_by_step),
            "bytes_by_device": dict(self.bytes_by_device),
            "tensors": self.n_tensors,
            "bytes_read": self.bytes_read,
            "bytes_made": self.bytes_made,
            "bytes_written": self.bytes_written,
            "experts": None if self.experts is None else self.experts.report().to_json(),
            "work_bytes": self.work_bytes,
            "peak_bytes": self.peak_bytes,
            "verification": self.verification.to_json(),
            "notes": [note.to_json() for note in self.notes],
        }


class Clock:
    """Takes the time of one step after the other."""

    def __init__(self) -> None:
        """Begin now."""
        self._started = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, step: str) -> None:
        """End *step* now."""
        now = time.perf_counter()
        self.laps[step] = now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far."""
        return self._last - self._started


def peak_memory() -> int | None:
    """Return the most bytes that the process has had in memory.

    Linux counts in ``ru_maxrss`` also what the process was before it became this program, so that
    one started by a large one seems as large; ``VmHWM`` begins anew (man 5 proc).
    """
    if sys.platform == "win32":
        return None
    with suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status", encoding="ascii") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
