"""``PassingReader``: a reader for bytes that are read once, on the way to somewhere else."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.openfile import Known
from modelquirks.planner.execution.pages import let_go, read_in
from modelquirks.planner.execution.reader import Reader, ReadError, Region, typed

__all__ = ["PassingReader"]

_SMALL = 1 << 16
"""Bytes that are simply touched: asking for them costs more than a fault."""

_MANY = 64
"""Small reads after which the files are mapped anew. Each fault maps what is around it: 64 KiB, or
2 MiB where the page cache holds the file in large folios (ext4 does since Linux 6.16)."""


class PassingReader(Reader):
    """Gives views of files that hold only until the thread calls :meth:`release`.

    What was read no longer counts as memory of the process then: a load of any size takes no
    more of it than its result and what is being worked on. Views must not be written to, and
    have to be of mappings of its own: give it to nobody who keeps a tensor. Safe to use from
    several threads.
    """

    def __init__(
        self,
        root: Path,
        tensors: Mapping[str, StoredTensor],
        *,
        known: Known | None = None,
        copies: bool = False,
    ) -> None:
        """As for :class:`Reader`; with *copies* there is nothing to let go of."""
        super().__init__(root, tensors, known=known, copies=copies)
        self._views = threading.local()
        self._n_small = 0

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return a tensor or a region of it; a copy only if the file has it unaligned.

        Raises :class:`~modelquirks.planner.execution.reader.ReadError`, also where the file turns
        out shorter than it was.
        """
        tensor, form = self._located(name, region)
        if self._copies:
            return tensor
        if tensor.nbytes >= _SMALL:
            self._read_in(name, tensor)
        else:
            self._n_small += 1  # roughly: threads may miss one another's
        return tensor if form.aligned or not tensor.numel() else typed(tensor, form)

    def release(self) -> None:
        """Let go of everything that this thread has read so far."""
        for view in self._held():
            let_go(view)
        self._held().clear()
        if self._n_small >= _MANY:
            self._n_small = 0
            self._files.clear()  # whoever has a view keeps its mapping

    def _held(self) -> list[torch.Tensor]:
        views: list[torch.Tensor] = self._views.__dict__.setdefault("list", [])
        return views

    def _read_in(self, name: str, tensor: torch.Tensor) -> None:
        self._held().append(tensor)
        if not tensor.is_contiguous():
            return  # columns: between them lies what is not wanted
        try:
            read_in(tensor)
        except OSError as error:
            shard = self._stored(name).shard
            raise ReadError(
                f"tensor {name!r}: {shard!r} cannot be read to the end: "
                f"{os.strerror(error.errno or 0)}; was it truncated?"
            ) from error
