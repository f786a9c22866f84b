"""``OffloadStore``: computed weights in safetensors files of our own, and the record of them.

One store belongs to one state of one checkpoint: a folder ``modelquirks-…`` in the user's offload
folder. A file counts only if ``manifest.json`` names it and it is what the manifest says; the
manifest is written after the file. Whoever has write access to the folder is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.execution.weightfile import Weight, by_key, file_of
from modelquirks.planner.typed import misfits
from modelquirks.planner.wholefile import exclusive, partials, write_whole

__all__ = ["FORMAT", "Contents", "OffloadStore"]

FORMAT = 1
"""Number of the layout of a store, and of how its weights are computed."""

_MANIFEST = "manifest.json"
_FILE = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
_ABOUT = (
    "weights that modelquirks computed from a checkpoint, so that they need not be computed "
    "again; safe to delete"
)


class _Record(NamedTuple):
    """What the manifest says of one file."""

    name: str
    size_bytes: int
    mtime_ns: int
    digest: str
    """sha256 of the JSON of its header."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a store holds that can be used, and what cannot."""

    tensors: Mapping[str, StoredTensor]
    """By the digest of how they are made."""
    faults: Mapping[str, str]
    """What is wrong, by file."""


class OffloadStore:
    """The computed weights of one state of a checkpoint, in one offload folder."""

    def __init__(self, folder: Path, *, fingerprint: str, checkpoint: Mapping[str, Any]) -> None:
        """Look at nothing yet. *checkpoint* is told in the manifest; its ``path`` says whose.

        *fingerprint* is a digest of that state, in hexadecimal digits.
        """
        self.folder = folder
        self.path = folder / f"modelquirks-{fingerprint[:16]}"
        self._fingerprint, self._checkpoint = fingerprint, checkpoint
        self._written: list[str] = []
        self.cleared: tuple[str, ...] = ()
        """Unfinished files of dead processes that :meth:`filling` removed."""

    def contents(self) -> Contents:
        """Return what is there, by manifest and headers; makes and changes nothing."""
        tensors: dict[str, StoredTensor] = {}
        records, faults = self._records()
        for record in records:
            found = self._file(record)
            if isinstance(found, str):
                faults[record.name] = found
            else:
                tensors |= found
        return Contents(tensors, faults)

    def stale(self) -> Mapping[str, int]:
        """Return the bytes of stores of the same checkpoint as it was before, by folder."""
        others = (path for path in self.folder.glob("modelquirks-*") if path.name != self.path.name)
        return {
            path.name: sum(map(_size, path.glob("*")))
            for path in sorted(others)
            if not path.is_symlink() and self._is_ours(path)
        }

    def free_bytes(self) -> int:
        """Return how much can be written, counting what :meth:`filling` clears away."""
        there = next(path for path in (self.path, *self.path.parents) if path.is_dir())
        return shutil.disk_usage(there).free + sum(map(_size, self._useless()))

    @contextmanager
    def filling(self) -> Generator[None]:
        """Have the store for this process alone, if the file system can do that; clear it up.

        What dead processes left unfinished goes, and what is damaged. If the block fails by an
        error, all that it wrote goes too; if it is interrupted, whole files stay for next time.
        """
        if self.path.is_symlink():
            raise OSError(None, "is a symbolic link, and nothing is written through one")
        with exclusive(self.path) as alone:
            if alone:
                for path in self._useless():
                    path.unlink(missing_ok=True)
                    self.cleared += (path.name,) if path.suffix == ".part" else ()
            self._written.clear()
            try:
                yield
            except Exception:
                self._take_back()
                raise

    def write(self, weights: Sequence[Weight]) -> tuple[Mapping[str, StoredTensor], int]:
        """Write one file with *weights* and record it.

        Returns where they are, by their keys, and the size of the file in bytes. Two processes
        that write the same weights write the same file.
        """
        head, data = file_of(weights, about=_ABOUT)
        digest = hashlib.sha256(head[8:]).hexdigest()
        name = f"weights-{digest[:16]}.safetensors"
        self._written.append(name)
        status = write_whole(self.path / name, chain([head], data))
        record = _Record(name, status.st_size, status.st_mtime_ns, digest)
        self._record([r for r in self._records()[0] if r.name != name] + [record])
        header = read_header(self.path / name, shard=name)
        if header.shard.digest != digest:
            text = f"{name!r}, just written, is not read back as it was written"
            raise OSError(errno.EIO, text, str(self.path / name))
        return by_key(header), status.st_size

    def _records(self) -> tuple[list[_Record], dict[str, str]]:
        """Return what the manifest says, and what is wrong with it."""
        try:
            data = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return [], {}
        except (ValueError, RecursionError) as error:
            return [], {_MANIFEST: f"is damaged ({error})"}
        try:
            if (data["format"], data["fingerprint"]) != (FORMAT, self._fingerprint):
                return [], {_MANIFEST: "belongs to another state of the checkpoint"}
            records = [_Record(**record) for record in data["files"]]
        except (KeyError, TypeError) as error:
            return [], {_MANIFEST: f"is damaged ({error!r})"}
        wrong = [fault for r in records for fault in misfits(r, _Record, "files")]
        if wrong or not all(_FILE.fullmatch(record.name) for record in records):
            return [], {_MANIFEST: f"is damaged ({(*wrong, 'a file of another name')[0]})"}
        return records, {}

    def _record(self, records: Sequence[_Record]) -> None:
        data = {
            "about": _ABOUT,
            "format": FORMAT,
            "fingerprint": self._fingerprint,
            "checkpoint": dict(self._checkpoint),
            "files": [record._asdict() for record in records],
        }
        text = json.dumps(data, indent=1) + "\n"
        write_whole(self.path / _MANIFEST, [text.encode("utf-8", "surrogatepass")])

    def _file(self, record: _Record) -> Mapping[str, StoredTensor] | str:
        """Return the tensors of a file by their digests, or why it is not what was recorded."""
        path = self.path / record.name
        try:
            status = path.lstat()
        except OSError as error:
            return f"is gone ({error.strerror})"
        if not stat.S_ISREG(status.st_mode):
            return "is no file of its own"
        if status.st_size != record.size_bytes:
            return f"has {status.st_size:,} bytes and had {record.size_bytes:,}"
        if status.st_mtime_ns != record.mtime_ns:
            return "was written to after it was made"
        header = read_header(path, shard=record.name)
        if any(finding.code == "file-unreadable" for finding in header.findings):
            # Not its fault, perhaps: as too many open files. Nobody should remove it for that.
            raise OSError(errno.EIO, header.findings[0].message, str(path))
        if header.shard.digest != record.digest:
            return "has another header than it was given"
        try:
            return by_key(header)
        except ValueError as error:
            return f"is damaged ({error})"

    def _useless(self) -> list[Path]:
        """Return files of ours that nobody can use: unfinished, damaged, or not recorded."""
        records, _ = self._records()
        whole = {record.name for record in records if not isinstance(self._file(record), str)}
        return partials(self.path) + [
            path
            for path in self.path.glob("weights-*")
            if _FILE.fullmatch(path.name) and path.name not in whole
        ]

    def _take_back(self) -> None:
        """Remove the files that were written, as far as can be."""
        if not self._written:
            return
        with suppress(OSError):
            for name in self._written:
                (self.path / name).unlink(missing_ok=True)
            kept = [r for r in self._records()[0] if r.name not in self._written]
            if kept:
                self._record(kept)
            else:
                (self.path / _MANIFEST).unlink(missing_ok=True)

    def _is_ours(self, path: Path) -> bool:
        """Tell whether a folder is a store for the same checkpoint."""
        try:
            data = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            return bool(data["checkpoint"]["path"] == self._checkpoint["path"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
