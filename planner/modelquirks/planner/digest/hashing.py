"""``hash_tensors``: the SHA-256 of tensors, read once, each from its first byte to its last.

Imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.digest.digest import TensorDigest
from modelquirks.planner.execution.evaluate import EvaluationError
from modelquirks.planner.execution.loading import in_order, pieces
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.pool import available_cpus, run
from modelquirks.planner.execution.preflight import needs
from modelquirks.planner.execution.reader import ReadError
from modelquirks.planner.export.storeditems import stored_items
from modelquirks.planner.export.writing import as_bytes
from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.registry import Registry

__all__ = ["DIGEST", "Hashed", "hash_tensors"]

DIGEST = "digest"
"""What progress calls the bytes that are hashed."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """What was read of a checkpoint, and what could not be."""

    tensors: Mapping[str, TensorDigest]
    unreadable: Mapping[str, str]
    """Why a tensor has no digest, by name."""
    n_bytes: int
    """Bytes that were hashed; a tensor of several names counts once."""


def hash_tensors(
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    registry: Registry | None = None,
    options: LoadOptions | None = None,
) -> Hashed:
    """Return the digests of the tensors *names* of *manifest*, by default of all.

    A tensor that lies in its file in one piece is hashed as it lies there, whatever its dtype;
    one with strides, or one that several files hold parts of, in the row-major order of its
    values. Read is in the order of the files, in pieces, by as many threads as there are CPUs,
    within the memory of *options*; pages that were read are let go. Nothing that is wrong with a
    tensor is raised: it is told by name.
    """
    registry = registry or Registry.load()
    items = [
        item
        for item in stored_items(manifest, lambda name, stored: stored)
        if names is None or any(name in names for name in item.names)
    ]
    job = _Job(manifest, options or LoadOptions(), registry.schemes)
    job.run(items)
    owners = {name: item.name for item in items for name in item.names}
    tensors: dict[str, TensorDigest] = {}
    unreadable: dict[str, str] = {}
    for name, tensor in manifest.tensors.items():
        if names is not None and name not in names:
            continue
        owner = owners.get(name)
        if owner in job.digests and tensor.dtype is not None and tensor.shape is not None:
            tensors[name] = TensorDigest(tensor.dtype, tensor.shape, job.digests[owner])
        else:
            unreadable[name] = job.faults.get(owner or "", _UNKNOWN)
    return Hashed(tensors, unreadable, job.n_bytes)


_UNKNOWN = "its dtype, shape and place are not known: only the index is there"


class _Task(NamedTuple):
    """A tensor and what it is read from."""

    item: LoadItem
    reader: PassingReader
    located: Mapping[str, StoredTensor]


class _Job:
    """One run: what is found goes into ``digests`` and ``faults``, by the name of the item."""

    def __init__(
        self, manifest: Manifest, options: LoadOptions, schemes: Mapping[str, Scheme]
    ) -> None:
        self.digests: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.n_bytes = 0
        self._manifest, self._options, self._schemes = manifest, options, schemes
        self._made = PassingReader(manifest.root, manifest.readable)

    def run(self, items: Iterable[LoadItem]) -> None:
        """Hash every item that can be read."""
        tasks = list(self._tasks(items))
        options, n_threads = self._options, self._options.n_threads(available_cpus())
        share = options.memory_bytes // n_threads
        self.n_bytes = sum(task.item.nbytes for task in tasks)
        options.progress.begin({DIGEST: self.n_bytes})
        run(
            tasks,
            lambda task: self._hash(task, share),
            n_threads=n_threads,
            cost=lambda task: share,
            limit=options.memory_bytes,
        )

    def _tasks(self, items: Iterable[LoadItem]) -> Iterator[_Task]:
        """Yield what can be read, in the order of the files; note what cannot."""
        whole, parts = dict[str, LoadItem](), dict[str, LoadItem]()
        plain: dict[str, StoredTensor] = {}
        for item in items:
            stored = self._manifest.readable.get(item.name)
            if item.name in self._manifest.assembled or not _is_run(stored):
                parts[item.name] = item
            elif stored.nbytes != item.nbytes:
                self.faults[item.name] = (
                    f"{item.dtype} {list(item.shape)} takes {item.nbytes} bytes, "
                    f"{stored.shard!r} has {stored.nbytes} for it"
                )
            else:
                n_bytes = (item.nbytes,)
                plain[item.name] = stored._replace(dtype="U8", shape=n_bytes)
                whole[item.name] = replace(item, dtype="U8", shape=n_bytes)
        reader = PassingReader(self._manifest.root, plain)
        for located, source, chosen in (
            (plain, reader, whole),
            (self._manifest.readable, self._made, parts),
        ):
            readable = [item for item in chosen.values() if self._can_be_read(item, source)]
            yield from (_Task(item, source, located) for item in in_order(readable, located))

    def _can_be_read(self, item: LoadItem, reader: PassingReader) -> bool:
        faults = reader.faults(needs(item))
        if faults:
            self.faults[item.name] = faults[0]
        return not faults

    def _hash(self, task: _Task, memory: int) -> None:
        """Hash one tensor; called from several threads."""
        item, reader, located = task
        total = hashlib.sha256()
        try:
            for piece in pieces(item, located, memory=memory):
                tensor = item.make(
                    read=reader.read,
                    types=reader.type_of,
                    schemes=self._schemes,
                    region=piece.region,
                )
                total.update(as_bytes(tensor))
                del tensor
                reader.release()
                self._options.progress.add(DIGEST, piece.nbytes)
        except (EvaluationError, ReadError) as error:
            self.faults[item.name] = str(error)
        else:
            self.digests[item.name] = total.hexdigest()
        finally:
            reader.release()


def _is_run(stored: StoredTensor | None) -> TypeGuard[StoredTensor]:
    """Tell whether the tensor is one run of bytes in its file, in the order of its values."""
    return stored is not None and stored.nbytes is not None and stored.stride is None
