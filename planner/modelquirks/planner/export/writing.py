"""``write_file``: tensors made piece by piece, each written straight to its place in the file."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.loading import Piece, in_order, pieces
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.pool import available_cpus, run
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.export.layout import OutFile

__all__ = ["WRITING", "Written", "write_file"]

WRITING = "writing"
"""What progress calls the bytes that are written."""

Make = Callable[[LoadItem, Region], torch.Tensor]
"""Gives a region of an item on the CPU; what it read is let go of by the function beside it."""


class Written(NamedTuple):
    """A range of a file, and what was written to it."""

    name: str
    """Of the tensor."""
    begin: int
    nbytes: int
    digest: int
    """CRC-32 of the bytes, taken when they were written."""


class _Job(NamedTuple):
    piece: Piece
    begin: int
    """Offset in the file."""


def write_file(
    path: Path,
    file: OutFile,
    items: Mapping[str, LoadItem],
    *,
    make: Make,
    release: Callable[[], None],
    tensors: Mapping[str, StoredTensor],
    options: LoadOptions,
) -> tuple[list[Written], int]:
    """Write *file* to *path*, safe on the disk; return what was written, and the memory it took.

    *items* has each tensor of the file by name. Several threads *make* regions of them, read in the
    order of the checkpoint's files, where *tensors* are, and call *release* when one is written.
    """
    limit, n_threads = options.memory_bytes, options.n_threads(available_cpus())
    ordered = in_order([items[name] for name in file.places], tensors)
    jobs = (
        job
        for item in ordered
        for job in _jobs(item, file.places[item.name], tensors, memory=limit // n_threads)
    )
    written: list[Written] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def work(job: _Job) -> None:
        piece = job.piece
        try:
            chunk = as_bytes(make(piece.item, piece.region))
            digest = zlib.crc32(chunk)
            _write_at(descriptor, chunk, job.begin)
        finally:
            release()
        written.append(Written(piece.item.name, job.begin, chunk.nbytes, digest))
        options.progress.add(WRITING, chunk.nbytes)

    try:
        os.ftruncate(descriptor, file.size_bytes)
        _write_at(descriptor, memoryview(file.head), 0)
        cost = run(jobs, work, n_threads=n_threads, cost=lambda job: job.piece.cost, limit=limit)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written, cost


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of *tensor* in row-major order; a copy only if it is not so in memory."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _jobs(
    item: LoadItem, place: StoredTensor, tensors: Mapping[str, StoredTensor], *, memory: int
) -> Iterator[_Job]:
    """Yield the pieces with their offsets: each is one run of bytes, behind the one before."""
    begin = place.begin or 0
    for piece in pieces(item, tensors, memory=memory):
        yield _Job(piece, begin)
        begin += piece.nbytes


def _write_at(descriptor: int, chunk: memoryview, offset: int) -> None:
    while chunk:
        n_bytes = os.pwrite(descriptor, chunk, offset)
        chunk, offset = chunk[n_bytes:], offset + n_bytes
