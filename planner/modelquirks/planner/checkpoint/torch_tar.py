"""Files of ``torch.save`` from before torch 0.1.11: tar archives.

``storages`` has their number, then of each a pickle (key, location, class), a count of elements and
the bytes, then a pickle of views; ``tensors`` their number, then of each a pickle (key, storage,
class), shape, stride and offset; ``pickle`` is the object, which refers to both by key.

Source: ``legacy_load`` in torch 2.13's ``serialization.py``, which still reads them.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
from typing import Any, BinaryIO, NamedTuple

from modelquirks.planner.checkpoint.file_kind import Look
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.checkpoint.pickle_machine import Global, PickleProblem
from modelquirks.planner.checkpoint.pickle_names import STORAGE_MODULES, STORAGES
from modelquirks.planner.checkpoint.torch_content import TorchContent
from modelquirks.planner.checkpoint.torch_pickle import (
    StorageRecord,
    TensorRecord,
    TorchPickle,
    load,
)
from modelquirks.planner.dtypes import MAX_DIMS, nbytes
from modelquirks.planner.finding import Finding, brief, shown

__all__ = ["read_tar"]

_PARTS = ("storages", "tensors", "pickle")
_MAX_ITEMS = 1_000_000


class _Stored(NamedTuple):
    """The storages, where each begins in the file, and where the last one ends."""

    records: dict[str, StorageRecord]
    begins: dict[str, int]
    end: int


def read_tar(path: FilePath, *, shard: str, seen: Look) -> TorchContent:
    """Return what a tar file says. OSError if it cannot be read, PickleProblem if it is none."""
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                parts = {name: archive.getmember(name) for name in _PARTS}
        except (tarfile.TarError, KeyError, ValueError, OverflowError, MemoryError) as error:
            raise PickleProblem(
                "is a tar archive, but not one of torch.save, or it is cut off; of other archives "
                f"take the weights out first ({brief(str(error))})"
            ) from error
        if beyond := [n for n, part in parts.items() if not _is_inside(part, seen.size_bytes)]:
            raise PickleProblem(f"is cut off: {shown(beyond)} are not in it as its headers say")
        try:
            stored = _storages(file, parts["storages"].offset_data, seen.size_bytes)
            tensors = _tensors(file, parts["tensors"].offset_data, stored.records)
        except (struct.error, TypeError, ValueError, KeyError) as error:
            raise PickleProblem(f"has a broken list of tensors ({brief(error)})") from error
        file.seek(parts["pickle"].offset_data)
        saved = load(file, known={**stored.records, **tensors})
        file.seek(parts["tensors"].offset_data)
        digest = hashlib.sha256(file.read(parts["tensors"].size))
        digest.update(str(sorted(stored.begins.items())).encode())
    findings: tuple[Finding, ...] = ()
    if stored.end > seen.size_bytes:
        text = (
            f"{shard!r} is cut off: it has {seen.size_bytes:,} bytes and its storages go up to "
            f"byte {stored.end:,}."
        )
        findings = (Finding("data-truncated", "error", text),)
    found = Shard(shard, seen.size_bytes, seen.mtime_ns, digest.hexdigest())
    value = TorchPickle(saved.value, saved.globals, stored.records)
    return TorchContent(found, value, stored.begins, findings=findings)


def _is_inside(part: tarfile.TarInfo, size: int) -> bool:
    return 0 <= part.offset_data <= part.offset_data + max(part.size, 0) <= size


def _number(file: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return int(value)


def _count(file: BinaryIO) -> int:
    count = load(file).value
    if type(count) is not int or not 0 <= count <= _MAX_ITEMS:
        raise ValueError(f"{brief(count, 20)} items")
    return count


def _storages(file: BinaryIO, at: int, size: int) -> _Stored:
    """Return the storages in the part of the file from *at* on; those behind its end are lost."""
    file.seek(at)
    records: dict[str, StorageRecord] = {}
    begins: dict[str, int] = {}
    end = at
    for _ in range(_count(file)):
        key, _, kind = load(file).value
        record = StorageRecord(_key(key), _dtype(kind), _whole(_number(file, "<q")))
        records[record.key], begins[record.key] = record, file.tell()
        end = file.tell() + record.nbytes
        if end > size:
            return _Stored(records, begins, end)
        file.seek(end)
    for target, root, offset, length in load(file).value or ():
        whole = records[_key(root)]
        width = nbytes(whole.dtype or "U8", (1,))
        if _whole(offset) + _whole(length) > whole.length:
            raise ValueError("a view beyond its storage")
        records[_key(target)] = StorageRecord(_key(target), whole.dtype, length)
        begins[_key(target)] = begins[_key(root)] + offset * width
    return _Stored(records, begins, end)


def _key(value: Any) -> str:
    if not isinstance(value, str | int):
        raise TypeError("a key that is none")
    return str(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a size that is none")
    return value


def _dtype(kind: Any) -> str:
    known = isinstance(kind, Global) and kind.module in STORAGE_MODULES
    dtype = STORAGES.get(kind.name) if known else None
    if dtype is None:
        raise ValueError(f"a storage of {brief(kind, 40)}")
    return dtype


def _tensors(
    file: BinaryIO, at: int, storages: dict[str, StorageRecord]
) -> dict[str, TensorRecord]:
    file.seek(at)
    found: dict[str, TensorRecord] = {}
    for _ in range(_count(file)):
        key, storage_key, _ = load(file).value
        n_dims = _number(file, "<i")
        file.seek(4, 1)  # the number of dimensions once had eight bytes
        if not 0 <= n_dims <= MAX_DIMS:
            raise ValueError(f"{n_dims} dimensions")
        numbers = struct.unpack(f"<{2 * n_dims + 1}q", file.read(8 * (2 * n_dims + 1)))
        if min(numbers) < 0:
            raise ValueError("a negative size")
        storage = storages[_key(storage_key)]
        shape, stride = tuple(numbers[:n_dims]), tuple(numbers[n_dims:-1])
        found[_key(key)] = TensorRecord(storage, storage.dtype or "U8", shape, stride, numbers[-1])
    return found
