"""Files of ``torch.save`` from before torch 1.6, and of ``_use_new_zipfile_serialization=False``.

Five pickles follow each other: a magic number, the version of the protocol, facts about the
machine, the object, the keys of the storages. Behind them come the storages, in the order of the
keys, each as an eight-byte count of elements and its bytes.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, BinaryIO

from modelquirks.planner.checkpoint.file_kind import Look
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.checkpoint.pickle_machine import PickleProblem
from modelquirks.planner.checkpoint.torch_content import TorchContent
from modelquirks.planner.checkpoint.torch_pickle import TorchPickle, load
from modelquirks.planner.finding import Finding, brief

__all__ = ["read_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


def read_legacy(path: FilePath, *, shard: str, seen: Look) -> TorchContent:
    """Return what a file of the old format says.

    OSError if it cannot be read, PickleProblem if its pickles cannot.
    """
    with path.open("rb") as file:
        saved, keys = _pickles(file)
        header_bytes = file.tell()
        begins, trouble = _storages(file, saved, keys, size=seen.size_bytes, shard=shard)
        file.seek(0)
        digest = hashlib.sha256(file.read(header_bytes)).hexdigest()
    stored = Shard(shard, seen.size_bytes, seen.mtime_ns, digest)
    return TorchContent(stored, saved, begins, findings=trouble)


def _pickles(file: BinaryIO) -> tuple[TorchPickle, list[Any]]:
    magic, protocol, machine = (load(file).value for _ in range(3))
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise PickleProblem(f"is of an unknown version of the format ({brief(protocol, 40)})")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise PickleProblem("was not written on a little-endian machine, which is not read here")
    saved = load(file)
    keys = load(file).value
    if not isinstance(keys, list):
        raise PickleProblem("has no list of storages")
    return saved, keys


def _storages(
    file: BinaryIO, saved: TorchPickle, keys: list[Any], *, size: int, shard: str
) -> tuple[dict[str, int], tuple[Finding, ...]]:
    """Return the offset of each storage; after one that is wrong, no further is known."""
    begins: dict[str, int] = {}
    position = file.tell()
    for key in keys:
        storage = saved.storages.get(key) if isinstance(key, str) else None
        if storage is None:
            text = (
                f"{shard!r} has a storage {brief(key, 40)} of unknown kind; all behind it are lost."
            )
            return begins, (Finding("record-missing", "error", text),)
        file.seek(position)
        count = file.read(8)
        begin, position = position + 8, position + 8 + storage.nbytes
        if len(count) < 8 or position > size:
            text = (
                f"{shard!r} is cut off: it has {size:,} bytes and its storage {key!r} ends at byte "
                f"{position:,}."
            )
            return begins, (Finding("data-truncated", "error", text),)
        if struct.unpack("<q", count)[0] != storage.length:
            text = (
                f"{shard!r} has {struct.unpack('<q', count)[0]:,} elements in its storage {key!r}, "
                f"of which its tensors need {storage.length:,}; all behind it are lost."
            )
            return begins, (Finding("record-size", "error", text),)
        begins[key] = begin
    return begins, ()
