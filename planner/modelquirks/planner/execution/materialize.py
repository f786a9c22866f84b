"""``materialize``: write the weights that stay on disk and must be computed, once, for all runs.

Without it nothing is written: such weights are made from the checkpoint's files whenever they are
asked for. What lies in those files as it is needed is never copied.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelquirks.planner.batches import batches
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import BITS
from modelquirks.planner.execution.evaluate import Types
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.offloadstore import Contents, OffloadStore
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.planner.execution.rowmajor import row_major
from modelquirks.planner.execution.target import Target
from modelquirks.planner.execution.weightfile import Weight
from modelquirks.planner.execution.weights import is_view
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.wholefile import partials
from modelquirks.quirks.recipe import Stack

__all__ = ["Materialized", "forecast", "materialize"]

Evaluate = Callable[[LoadItem, Region], torch.Tensor]

_CHUNK_BYTES = 1 << 26
"""Bytes that are computed and written in one go."""

_FILE_BYTES = 1 << 31
"""Bytes of a file, unless one tensor takes more. What was finished survives an interruption."""

_WAY_OUT = "Name another offload folder, or leave materialize out: nothing is written then"


@dataclass(frozen=True, slots=True)
class Materialized:
    """What was written or found, ready to be read."""

    folder: Path
    readers: Mapping[str, Reader]
    """What reads it, by the name of the item, which is also its name there."""
    bytes_written: int
    notes: tuple[Finding, ...]


def materialize(
    items: Iterable[LoadItem], target: Target, *, types: Types, evaluate: Evaluate
) -> Materialized:
    """Have every one of *items* that must be computed in the store, and return them.

    *items* are those that stay on disk, *types* the types of the stored tensors; *evaluate* gives
    a region of an item. Computed and written is only what the store lacks, in pieces, each file
    in one step. Raises :class:`ExecutionError` if it cannot be written; the store then holds what
    it held before.
    """
    made = {target.key(item): item for item in items if _is_made(item, types)}
    with _told(target):
        store = target.store()
        before = store.contents()
        found, n_written = before.tensors, 0
        if _lacking(made, found):
            found, n_written = _fill(store, made, evaluate)
    tensors = {item.name: found[key]._replace(name=item.name) for key, item in made.items()}
    return Materialized(
        folder=store.path,
        readers=dict.fromkeys(tensors, Reader(store.path, tensors)),
        bytes_written=n_written,
        notes=(
            *_cleared(store),
            *_damage(store, before),
            *_stale(store),
            _outcome(store, len(made), n_written),
        ),
    )


def forecast(items: Iterable[LoadItem], target: Target, *, types: Types) -> Finding:
    """Say what :func:`materialize` would write; an error if it does not fit."""
    made = {target.key(item): item for item in items if _is_made(item, types)}
    with _told(target):
        store = target.store()
        lacking = _lacking(made, store.contents().tensors)
        free = store.free_bytes()
    needed = sum(item.nbytes for item in lacking.values())
    text = (
        f"materializing writes {needed:,} bytes ({show_bytes(needed)}) to {str(store.path)!r}: "
        f"{len(lacking)} of the {len(made)} tensors that stay on disk and must be computed"
    )
    if needed > free:
        return Finding("materialize-no-space", "error", f"{text}; {show_bytes(free)} are free")
    return Finding("materialize", "info", text)


def _fill(
    store: OffloadStore, made: Mapping[str, LoadItem], evaluate: Evaluate
) -> tuple[Mapping[str, StoredTensor], int]:
    """Write what the store lacks, as it is once it is ours; return its tensors and bytes written.

    What was written is not looked up again: without locks another process may just be writing.
    """
    _check_space(store, made)  # before a folder is made for nothing
    with store.filling():
        _check_space(store, made)
        found, n_written = dict(store.contents().tensors), 0
        weights = [_weight(key, i, evaluate) for key, i in _lacking(made, found).items()]
        for batch in batches(weights, _FILE_BYTES):
            new, size = store.write(batch)
            found |= new
            n_written += size
    return found, n_written


def _check_space(store: OffloadStore, made: Mapping[str, LoadItem]) -> None:
    needed = sum(item.nbytes for item in _lacking(made, store.contents().tensors).values())
    free = store.free_bytes()
    if needed > free:
        raise ExecutionError(
            f"materializing needs {needed:,} bytes ({show_bytes(needed)}) in "
            f"{str(store.folder)!r}, where {free:,} ({show_bytes(free)}) are free: nothing was "
            f"written. {_WAY_OUT}"
        )


@contextmanager
def _told(target: Target) -> Generator[None]:
    """Turn what the operating system says into an error that says what to do."""
    try:
        yield
    except OSError as error:
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = f" with {show_bytes(target.store().free_bytes())} free"
        left = shown(path.name for path in partials(target.store().path))
        rest = f"Left is {left}: the next run removes it" if left else "Nothing new was left there"
        raise ExecutionError(
            f"offload folder {str(target.folder)!r}: {error.strerror or error}{free}. "
            f"{rest}. {_WAY_OUT}"
        ) from error


def _lacking(
    made: Mapping[str, LoadItem], there: Mapping[str, StoredTensor]
) -> Mapping[str, LoadItem]:
    return {key: item for key, item in made.items() if key not in there}


def _weight(key: str, item: LoadItem, evaluate: Evaluate) -> Weight:
    def chunks() -> Iterator[memoryview]:
        for region in _regions(item):
            tensor = evaluate(item, region).contiguous().reshape(-1)
            array: Any = tensor.view(torch.uint8).numpy()
            yield memoryview(array)

    return Weight(item.name, item.dtype, item.shape, key, chunks)


def _regions(item: LoadItem) -> Iterator[Region]:
    """Yield the pieces in which the tensor is made."""
    limit = _CHUNK_BYTES * 8 // BITS[item.dtype]
    if item.is_opaque:  # made as a whole, and anew for every piece
        limit = max(limit, math.prod(item.shape[isinstance(item.node, Stack) :]))
    return row_major(item.shape, limit)


def _is_made(item: LoadItem, types: Types) -> bool:
    """Tell whether the tensor must be computed at each use, and a file can hold it."""
    return not is_view(item, types) and item.dtype != "C128" and 0 not in item.shape


def _damage(store: OffloadStore, contents: Contents) -> Iterator[Finding]:
    for name, fault in contents.faults.items():
        text = f"{str(store.path / name)!r} {fault}: it is not used, what is needed was made anew"
        yield Finding("materialized-damaged", "warning", text)


def _cleared(store: OffloadStore) -> Iterator[Finding]:
    for name in store.cleared:
        text = f"'{store.path / name}', which a process left that died, was removed"
        yield Finding("materialized-cleared", "info", text)


def _stale(store: OffloadStore) -> Iterator[Finding]:
    for name, size in store.stale().items():
        yield Finding(
            "materialized-stale",
            "warning",
            f"{str(store.folder / name)!r} ({show_bytes(size)}) holds weights of the checkpoint "
            "as it was before, or of another format: it is not used, and can be deleted",
        )


def _outcome(store: OffloadStore, n_made: int, n_written: int) -> Finding:
    if not n_made:
        text = "no tensor on disk must be computed: there is nothing to materialize"
    elif n_written:
        text = f"{show_bytes(n_written)} of computed weights were written to {str(store.path)!r}"
    else:
        text = f"{n_made} computed tensors are read from {str(store.path)!r}, where they were"
    return Finding("materialized", "info", text)
