"""Files of ``torch.save``: where each tensor lies, without torch and without running the pickle.

Since torch 1.6 they are zip files: ``data.pkl`` describes the tensors and each storage is a record
of its own. Torch maps such files into memory without checking them (2.13: a record that is too
short or compressed is loaded as garbage with ``mmap=True``), so here every record must be stored
as it is and have exactly the bytes that its storage needs.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from modelquirks.planner.checkpoint.file_kind import Look, look, not_weights
from modelquirks.planner.checkpoint.filepath import FilePath, announce_ranges
from modelquirks.planner.checkpoint.header import Header, unread
from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.checkpoint.pickle_machine import MAX_BYTES, PickleProblem
from modelquirks.planner.checkpoint.place_tensors import place_tensors
from modelquirks.planner.checkpoint.torch_content import TorchContent, weights_of
from modelquirks.planner.checkpoint.torch_legacy import read_legacy
from modelquirks.planner.checkpoint.torch_pickle import StorageRecord, TensorRecord, load
from modelquirks.planner.checkpoint.torch_tar import read_tar
from modelquirks.planner.finding import Finding, brief, shown

__all__ = ["ZIP_ERRORS", "read_content", "read_item", "read_torch", "written_as"]

ZIP_ERRORS = (
    *(zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError),
    *(zlib.error, EOFError, RuntimeError, IndexError),
)
"""What ``zipfile`` raises for bytes that are no archive, or a damaged one."""
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MAX_PACKED = 100
"""A record may be so many times as large as it is in the file; beyond 1 MiB. Pickles get to 20."""
_LOCAL = struct.Struct("<4s4xH8xIIHH")
"""Signature, …, compression, …, both sizes, length of the name, length of the extra field."""
_FORMATS = {
    "pickle": "is a pickle, but no file of torch.save",
    "safetensors": "is a safetensors file; give it that name",
    "unknown": "is no file of torch.save",
}


class _Archive(NamedTuple):
    """An open zip file of ``torch.save``."""

    file: BinaryIO | _Window
    reader: zipfile.ZipFile
    records: Mapping[str, zipfile.ZipInfo]
    """By name below the folder in which all of them are."""
    root: str
    """That folder."""


class _Refused(ValueError):
    """The file cannot be read; carries the finding."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_torch(path: FilePath, *, shard: str = "") -> Header:
    """Return the weights that a file of ``torch.save`` holds, of either format.

    *shard* is the name to use in the result and in messages, by default the file's own. Never
    raises for what is in the file, nor for a file that is not there.
    """
    return weights_of(read_content(path, shard=shard))


def read_content(path: FilePath, *, shard: str = "") -> TorchContent:
    """Return all that a file of ``torch.save`` says, of either format, in the same way."""
    shard = shard or path.name
    seen = look(path)
    if seen.kind == "absent":
        return _unread(shard, seen, Finding("shard-missing", "error", f"{shard!r} is not there."))
    try:
        if seen.kind == "legacy":
            return read_legacy(path, shard=shard, seen=seen)
        if seen.kind == "tar":
            return read_tar(path, shard=shard, seen=seen)
        if seen.kind == "zip":
            return _read_zip(path, shard=shard, seen=seen)
    except PickleProblem as problem:
        return _unread(shard, seen, Finding("pickle-invalid", "error", f"{shard!r} {problem}."))
    except _Refused as refused:
        return _unread(shard, seen, Finding(refused.code, "error", f"{shard!r} {refused}."))
    except OSError as error:
        text = f"{shard!r} cannot be read: {error.strerror or error}."
        return _unread(shard, seen, Finding("file-unreadable", "error", text))
    wrong = not_weights(shard, seen)
    text = f"{shard!r} {_FORMATS.get(seen.kind, '')} (it begins with {seen.head[:8]!r})."
    return _unread(shard, seen, wrong or Finding("wrong-format", "error", text))


def written_as(path: FilePath) -> str:
    """Return the name under which ``torch.save`` wrote a zip file, from its first bytes.

    Without a suffix; ``""`` for any other file. See ``TorchContent.written_as``.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_LOCAL.size)
            signature, *_, name_bytes, _ = _LOCAL.unpack(head.ljust(_LOCAL.size, b"\0"))
            name = file.read(name_bytes) if signature == b"PK\x03\x04" else b""
    except OSError:
        return ""
    folder, slash, _ = name.decode("utf-8", "replace").rpartition("/")
    return folder if slash else ""


def read_item(
    file: BinaryIO, name: str, *, shard: str, begin: int, length: int
) -> StoredTensor | Finding:
    """Return where a tensor lies that was saved by itself with ``torch.save`` into part of *file*.

    *begin* and *length* say which bytes of *file*, whose name is *shard*, are that zip file. The
    finding says by *name* why it cannot be read.
    """
    try:
        archive = _opened(_Window(file, begin, length))
        saved = load(io.BytesIO(_content(archive, "data.pkl")))
        if not isinstance(saved.value, TensorRecord):
            raise _Refused("wrong-format", "is no plain tensor")
        storage = saved.value.storage
        begins = {storage.key: begin + _begin(archive, storage)}
    except _Refused as refused:
        code, why = refused.code, str(refused)
    except PickleProblem as problem:
        code, why = "pickle-invalid", str(problem)
    except OSError as error:  # of the disk, or a record before the start of the part
        code, why = "zip-invalid", f"cannot be read ({error.strerror or error})"
    else:
        entries, beyond = place_tensors(shard, {name: saved.value}, begins=begins)
        return beyond[0] if beyond else entries[name]
    return Finding(code, "error", f"{name!r}, from byte {begin:,} of {shard!r}, {why}.")


class _Window(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length = file, begin, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(f"position {start + offset} is before the start")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._begin + self._position)
        content = self._file.read(size)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class _Careful:
    """A file of which no more is read at once than a directory of a million records takes.

    A zip file says itself how long its directory is, and a file of zeros costs nothing.
    """

    def __init__(self, file: BinaryIO | _Window) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > MAX_BYTES:
            raise _Refused("zip-invalid", f"is a zip file with a directory of {size:,} bytes")
        content = self._file.read(size if size >= 0 else MAX_BYTES + 1) or b""
        if len(content) > MAX_BYTES:
            raise _Refused("zip-invalid", f"is a zip file with more than {MAX_BYTES:,} at its end")
        return content


def _unread(shard: str, seen: Look, finding: Finding) -> TorchContent:
    header = unread(shard, seen, finding)
    return TorchContent(header.shard, None, findings=header.findings)


def _read_zip(path: FilePath, *, shard: str, seen: Look) -> TorchContent:
    with path.open("rb") as file:
        archive = _opened(file)
        pickled = _content(archive, "data.pkl")
        saved = load(io.BytesIO(pickled))
        file.seek(archive.reader.start_dir)
        digest = hashlib.sha256(_Careful(file).read())
        digest.update(pickled)
        begins, faults = _begins(archive, saved.storages.values())
    stored = Shard(shard, seen.size_bytes, seen.mtime_ns, digest.hexdigest())
    return TorchContent(stored, saved, begins, faults, written_as=archive.root)


def _opened(file: BinaryIO | _Window) -> _Archive:
    careful: Any = _Careful(file)  # ZipFile needs no more of a file than it has
    try:
        archive = zipfile.ZipFile(careful)
    except _Refused:
        raise
    except (*ZIP_ERRORS, OSError) as error:
        raise _Refused(
            "zip-truncated",
            f"begins as a zip file and has no whole directory at its end ({error}): it is cut off",
        ) from error
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise _Refused("zip-invalid", "is a zip file in which a record occurs twice")
    root = next((name[: -len("data.pkl")] for name in names if name.endswith("/data.pkl")), None)
    if root is None:
        raise _Refused(
            "wrong-format", f"is a zip file without data.pkl, not of torch.save: {shown(names, 3)}"
        )
    if f"{root}constants.pkl" in names or any(name.startswith(f"{root}code/") for name in names):
        raise _Refused(
            "torchscript",
            "is a TorchScript archive, code and weights in one; save the module's state_dict()",
        )
    below = {i.filename.removeprefix(root): i for i in archive.infolist()}
    found = _Archive(file, archive, below, root.rstrip("/"))
    if "byteorder" in below and (order := _content(found, "byteorder")) != b"little":
        raise _Refused(
            "big-endian", f"has the byte order {brief(order, 20)}; only 'little' is read"
        )
    return found


def _content(archive: _Archive, name: str) -> bytes:
    """Return the bytes of a small record."""
    told = archive.records[name]
    if told.compress_type not in _PLAIN:  # others ask for memory before any byte
        raise _Refused("zip-invalid", f"has a record {name!r} that is packed in an unusual way")
    if told.file_size > MAX_BYTES:  # no more than it claims is ever unpacked
        raise _Refused("pickle-invalid", f"has a record {name!r} of more than {MAX_BYTES:,} bytes")
    if told.file_size > max(1 << 20, _MAX_PACKED * told.compress_size):
        text = f"has a record {name!r} that claims {told.file_size:,} bytes"
        raise _Refused("pickle-invalid", f"{text} and takes {told.compress_size:,}: a bomb")
    try:
        with archive.reader.open(told) as record:
            return record.read(told.file_size + 1)
    except ZIP_ERRORS as error:
        raise _Refused("zip-invalid", f"has a broken record {name!r} ({error})") from error


def _begins(
    archive: _Archive, storages: Iterable[StorageRecord]
) -> tuple[dict[str, int], dict[str, list[tuple[str, str]]]]:
    """Return the offset of each storage, and what is wrong with the records of the others.

    The latter by code, with the key of the storage and a remark.
    """
    storages = [*storages]
    records = [archive.records.get(f"data/{storage.key}") for storage in storages]
    heads = [
        (r.header_offset, r.header_offset + _LOCAL.size + len(_name(r)))
        for r in records
        if r is not None
    ]
    announce_ranges(archive.file, heads)
    begins: dict[str, int] = {}
    faults: dict[str, list[tuple[str, str]]] = {}
    for storage in storages:
        try:
            begins[storage.key] = _begin(archive, storage)
        except _Refused as refused:
            faults.setdefault(refused.code, []).append((storage.key, str(refused)))
    for key, other in _overlapping(begins, storages):
        begins.pop(key, None)
        begins.pop(other, None)
        faults.setdefault("record-overlap", []).append((key, f"in that of 'data/{other}'"))
    return begins, faults


def _overlapping(
    begins: Mapping[str, int], storages: Iterable[StorageRecord]
) -> list[tuple[str, str]]:
    """Return the storages that begin before the end of another one, and that one."""
    spans = sorted((begins[s.key], s.nbytes, s.key) for s in storages if s.key in begins)
    found: list[tuple[str, str]] = []
    end, last = 0, ""
    for begin, n_bytes, key in spans:
        if begin < end and n_bytes:
            found.append((key, last))
        if begin + n_bytes > end:
            end, last = begin + n_bytes, key
    return found


def _name(record: zipfile.ZipInfo) -> bytes:
    """Return the name of a record as the directory has it."""
    return record.orig_filename.encode("utf-8" if record.flag_bits & 0x800 else "cp437")


def _begin(archive: _Archive, storage: StorageRecord) -> int:
    """Return the offset of the bytes of a storage, which must be exactly those it needs."""
    record = archive.records.get(f"data/{storage.key}")
    if record is None:
        raise _Refused("record-missing", "no such record")
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
        raise _Refused("record-compressed", "compressed or encrypted")
    if record.file_size != storage.nbytes or record.compress_size != record.file_size:
        text = f"{record.file_size:,} bytes, its storage needs {storage.nbytes:,}"
        raise _Refused("record-size", text)
    if not 0 <= record.header_offset < archive.reader.start_dir:
        raise _Refused("record-misplaced", "not where the directory says, or cut off")
    archive.file.seek(record.header_offset)
    wanted = _name(record)
    head = (archive.file.read(_LOCAL.size + len(wanted)) or b"").ljust(_LOCAL.size, b"\0")
    signature, packing, packed, whole, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    begin: int = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or begin + record.file_size > archive.reader.start_dir:
        raise _Refused("record-misplaced", "not where the directory says, or cut off")
    sizes = {packed, whole} - {0, 0xFFFFFFFF}  # told behind the record, or in the extra field
    same = name_bytes == len(wanted) and head[_LOCAL.size :] == wanted
    if not same or packing != zipfile.ZIP_STORED or sizes - {record.file_size}:
        raise _Refused("record-differs", "its own head says something else than the directory")
    return begin
