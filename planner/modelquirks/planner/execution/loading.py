"""``load``: make tensors in memory, piece by piece, straight into their final place.

A piece is read, computed and written by one of a few threads, in the order of the files. The
result is allocated once; beside it there is never more in use than is allowed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import nbytes, to_torch
from modelquirks.planner.execution.evaluate import elements, torch_shape
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.nomemory import NO_MEMORY, with_memory
from modelquirks.planner.execution.pages import fresh, prepare
from modelquirks.planner.execution.pool import available_cpus, run
from modelquirks.planner.execution.preflight import needs
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.execution.rowmajor import row_major
from modelquirks.planner.execution.upload import Upload
from modelquirks.planner.placement.memory import Device, show_bytes
from modelquirks.quirks.recipe import Cast, Dequantize, Merge, Reshape, Stack

__all__ = ["MORE_MEMORY", "Loaded", "Piece", "Write", "in_order", "load", "pieces", "work_bytes"]

Write = Callable[[LoadItem, Region, torch.Tensor], object]
"""Writes a region of an item, as it is in memory, to a tensor on the CPU."""

_PIECE = 1 << 23
"""Values of a piece at most: enough for Python to take no time, and for the threads to be done
at about the same moment."""

_PREPARED = 1 << 16
"""Bytes of a piece whose memory is asked for at once."""

MORE_MEMORY = (
    "plan with less max_memory for the CPU, so that more stays on disk, or give less --load-memory"
)
"""What to do where there is too little."""

_UNPACKING = 24
"""Bytes that schemes may take for a value while they compute, an upper estimate: the parts spread
out, their indices, float32 copies, the result. mxfp4 was seen to take 2 to 4 with its result."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was made, by the name of the item."""

    tensors: Mapping[str, torch.Tensor]
    n_bytes: int
    """Bytes of all of them."""
    peak_bytes: int
    """The most that making them took at a time beside that, by estimate."""


class Piece(NamedTuple):
    """A part of a tensor that one thread makes in one go."""

    item: LoadItem
    region: Region
    cost: int
    """Bytes that making it takes beside the result."""

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return nbytes(self.item.dtype, tuple(stop - start for start, stop in self.region))


def load(
    wanted: Iterable[tuple[LoadItem, Device | torch.device]],
    *,
    write: Write,
    tensors: Mapping[str, StoredTensor],
    options: LoadOptions,
) -> Loaded:
    """Return the wanted items as new tensors on their devices.

    *write* makes a region of one; it is called from several threads. *tensors* are the stored
    ones. Raises :class:`ExecutionError` with the name of the first item that cannot be made.
    """
    given = [*wanted]
    devices = {item.name: device for item, device in given}
    ordered = in_order((item for item, _ in given), tensors)
    made = {item.name: _empty(item, devices[item.name]) for item in ordered}
    limit, n_threads = options.memory_bytes, options.n_threads(available_cpus())
    jobs = [p for item in ordered for p in pieces(item, tensors, memory=limit // n_threads)]
    uploads = _Uploads(n_threads, max((job.nbytes for job in jobs if job.cost <= limit), default=0))
    told = {name: str(device) for name, device in devices.items()}
    options.progress.begin(_totals((told[job.item.name], job.nbytes) for job in jobs))

    def work(job: Piece) -> None:
        whole = made[job.item.name]
        part = whole[tuple(slice(a, b) for a, b in elements(job.item.dtype, job.region))]
        uploads.fill(part, lambda out: write(job.item, job.region, out))
        options.progress.add(told[job.item.name], job.nbytes)

    peak = run(jobs, work, n_threads=n_threads, cost=lambda job: job.cost, limit=limit)
    uploads.finish()
    return Loaded(made, sum(job.nbytes for job in jobs), peak)


def pieces(item: LoadItem, tensors: Mapping[str, StoredTensor], *, memory: int) -> Iterator[Piece]:
    """Yield the pieces of an item, each made within *memory* bytes; what is empty has none.

    What code makes as a whole is one piece, or one for each member of a stack of such, and may
    take more.
    """
    if 0 in item.shape:
        return
    per_value = work_bytes(item, tensors)
    limit = max(2, min(_PIECE, int(memory / per_value)) // 2 * 2)  # F4: two values in a byte
    if item.is_opaque:
        limit = max(limit, math.prod(item.shape[isinstance(item.node, Stack) :]))
    for region in row_major(item.shape, limit):
        n_values = math.prod(stop - start for start, stop in region)
        yield Piece(item, region, math.ceil(n_values * per_value))


def work_bytes(item: LoadItem, tensors: Mapping[str, StoredTensor]) -> float:
    """Return the bytes that making a value of *item* takes beside the value, by estimate.

    What is read for it, what it is while it changes its form, and room on the way to a device,
    twice, as one piece is made while another is under way.
    """
    read = sum(tensors[name].nbytes or 0 for name in needs(item)) / max(1, math.prod(item.shape))
    total = read + 2 * to_torch(item.dtype).itemsize
    for node in item.nodes():
        if isinstance(node, Cast | Reshape):
            total += 8
        elif isinstance(node, Dequantize | Merge):
            total += _UNPACKING
    return total


class _Uploads:
    """The ways to the devices, each made when the first piece goes there."""

    def __init__(self, n_threads: int, n_bytes: int) -> None:
        self._n_threads, self._n_bytes = n_threads, n_bytes
        self._by_device: dict[torch.device, Upload] = {}

    def fill(self, part: torch.Tensor, make: Callable[[torch.Tensor], object]) -> None:
        if part.device.type == "cpu":
            if part.nbytes >= _PREPARED:
                prepare(part)
            make(part)
            return
        upload = self._by_device.get(part.device)
        if upload is None:
            new = Upload(part.device, n_buffers=2 * self._n_threads, n_bytes=self._n_bytes)
            upload = self._by_device.setdefault(part.device, new)
        upload.send(part, make)

    def finish(self) -> None:
        for upload in self._by_device.values():
            upload.finish()


def _empty(item: LoadItem, device: Device | torch.device) -> torch.Tensor:
    shape, dtype = torch_shape(item.dtype, item.shape), to_torch(item.dtype)
    if str(device) == "cpu":
        text = f"{item}: {NO_MEMORY} ({show_bytes(item.nbytes)}); {MORE_MEMORY}"
        with with_memory(ExecutionError, text):
            return fresh(shape, dtype)
    try:
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that
        raise ExecutionError(f"{item} cannot be put on {device!r}: {error}") from error


def in_order(items: Iterable[LoadItem], tensors: Mapping[str, StoredTensor]) -> list[LoadItem]:
    """Return *items* as they lie in the files, by the first tensor that each is made of."""

    def place(item: LoadItem) -> tuple[str, int]:
        first = next((tensors[name] for name in needs(item)), None)
        return ("", 0) if first is None else (first.shard, first.begin or 0)

    return sorted(items, key=place)


def _totals(parts: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    totals: Counter[str] = Counter()
    for where, n_bytes in parts:
        totals[where] += n_bytes
    return totals
