"""``LoadOptions``: how weights are made when they are loaded to memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from modelquirks.planner.execution.progress import Progress, Silent
from modelquirks.planner.placement.memory import parse_size

__all__ = ["LoadOptions", "Verify"]

Verify = Literal["samples", "full"]

_DEFAULT_MEMORY = 256 << 20
_LEAST_MEMORY = 1 << 24
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How weights are made when they are loaded to memory, and how they are checked."""

    copy: bool = False
    """Copy what is kept in CPU memory, also where a view of the mapped file would do."""
    memory_bytes: int = _DEFAULT_MEMORY
    """What making the tensors may take beside their own memory."""
    verify: Verify = "samples"
    """Compare samples of each tensor with the files, or every byte."""
    sample_bytes: int = 65536
    """Bytes of each tensor that are compared in samples."""
    progress: Progress = field(default_factory=Silent)

    @classmethod
    def of(
        cls,
        *,
        copy: bool = False,
        load_memory: int | str | None = None,
        verify: Verify = "samples",
        progress: Progress | None = None,
    ) -> LoadOptions:
        """Return the options as people give them; ValueError says what cannot be."""
        n_bytes = _DEFAULT_MEMORY if load_memory is None else parse_size(load_memory)
        if n_bytes < _LEAST_MEMORY:
            raise ValueError(f"load memory {load_memory!r} is too little: give at least '16MiB'")
        if verify not in get_args(Verify):
            raise ValueError(f"verify {verify!r} is not known: it is 'samples' or 'full'")
        return cls(copy, n_bytes, verify, progress=progress or Silent())

    def n_threads(self, n_cpus: int) -> int:
        """Return how many threads make tensors: each has enough memory to work with."""
        return max(1, min(n_cpus, _MOST_THREADS, self.memory_bytes // _LEAST_MEMORY))
