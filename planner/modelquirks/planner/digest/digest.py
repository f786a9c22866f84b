"""``Digest``: the SHA-256 of every tensor of a checkpoint, as data and as a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.json_text import (
    JsonProblem,
    has_duplicates,
    parse_json,
    read_json,
)
from modelquirks.planner.finding import shown
from modelquirks.planner.writing import write_whole

__all__ = ["FORMAT", "VERSION", "Digest", "DigestError", "TensorDigest"]

FORMAT = "modelquirks digest"
VERSION = 1
"""Number of the file's layout. A reader refuses what it does not know."""

_HASH = re.compile("[0-9a-f]{64}")
_KEYS = ("format", "version", "sha256", "tensors")
_SHOWN = 10


class DigestError(RuntimeError):
    """A file that cannot be read as a digest, or a checkpoint of which there can be none."""


class TensorDigest(NamedTuple):
    """What a tensor is: its dtype, its shape and the SHA-256 of its bytes."""

    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    sha256: str
    """In hexadecimal, of the values in row-major order, little-endian, as safetensors has them."""


@dataclass(frozen=True)
class Digest:
    """The digests of the tensors of a checkpoint, by stored name.

    It says nothing of files: what was sharded anew, or exported, has the same digest.
    """

    tensors: Mapping[str, TensorDigest]

    @cached_property
    def sha256(self) -> str:
        """One digest for all: SHA-256 of the lines ``["name","dtype",[shape],"sha256"]``.

        Each line is JSON in ASCII without blanks and ends with a line feed; names are in the order
        of their code points.
        """
        total = hashlib.sha256()
        for name, (dtype, shape, digest) in sorted(self.tensors.items()):
            line = json.dumps([name, dtype, shape, digest], separators=(",", ":"))
            total.update(line.encode() + b"\n")
        return total.hexdigest()

    def to_text(self) -> str:
        """Return the file: JSON with a line for each tensor, sorted by name.

        Equal checkpoints give equal files, and a text ``diff`` of two files is readable.
        """
        head = {"format": FORMAT, "version": VERSION, "sha256": self.sha256}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        entries = [
            f"  {json.dumps(name)}: {json.dumps(tensor._asdict())}"
            for name, tensor in sorted(self.tensors.items())
        ]
        return "\n".join(["{", *lines, ' "tensors": {', ",\n".join(entries), " }", "}", ""])

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; OSError names it."""
        write_whole(Path(path), self.to_text())

    @classmethod
    def load(cls, path: str | Path) -> Digest:
        """Read what :meth:`save` wrote. DigestError lists all that is wrong with the file."""
        value, raw = read_json(Path(path))
        if isinstance(value, JsonProblem):
            raise DigestError(f"{str(path)!r} {value.text}")
        faults = list(islice(_faults(value, raw), _SHOWN + 1))
        if not faults:
            digest = cls(
                {
                    name: TensorDigest(entry["dtype"], tuple(entry["shape"]), entry["sha256"])
                    for name, entry in value["tensors"].items()
                }
            )
            if digest.sha256 == value["sha256"]:
                return digest
            faults = [
                f"was changed after it was written: its tensors have the digest {digest.sha256}, "
                f"and under 'sha256' it says {value['sha256']}"
            ]
        more = ["… and more"] if len(faults) > _SHOWN else []
        listed = "\n- ".join(
            [f"{str(path)!r} cannot be used as a digest:", *faults[:_SHOWN], *more]
        )
        raise DigestError(f"{listed}\nMake it anew with `modelquirks digest CHECKPOINT -o FILE`")


def _faults(data: Any, raw: bytes) -> Iterator[str]:
    """Yield what keeps *data*, the JSON value of the text *raw*, from being a digest."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        yield f"is no digest: it has no 'format' that says {FORMAT!r}"
        return
    if data.get("version") != VERSION:
        yield f"is of version {data.get('version')!r}, this program reads version {VERSION}"
        return
    yield from _key_faults("it", data, _KEYS)
    tensors = data.get("tensors")
    if not isinstance(tensors, dict):
        yield "has no object 'tensors'"
        return
    if not isinstance(data.get("sha256"), str):
        yield "has no text 'sha256'"
    n_keys = len(data) + sum(1 + len(e) for e in tensors.values() if isinstance(e, dict))
    if has_duplicates(raw, n_keys=n_keys, strings=tensors):
        twice: dict[str, bool] = {}
        parse_json(raw.decode("utf-8-sig"), duplicates=twice)
        if twice:
            yield f"says twice: {shown(twice)}"
    for name, entry in tensors.items():
        yield from _entry_faults(name, entry)


def _entry_faults(name: str, entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{name!r} is no object"
        return
    yield from _key_faults(repr(name), entry, TensorDigest._fields)
    dtype, shape, sha256 = (entry.get(key) for key in TensorDigest._fields)
    if not isinstance(dtype, str):
        yield f"{name!r} has a dtype that is no text"
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        yield f"{name!r} has a shape that is no list of sizes"
    if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        yield f"{name!r} has a sha256 that is not 64 hexadecimal digits in lower case"


def _key_faults(whose: str, data: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    if unknown := [key for key in data if key not in keys]:
        yield f"{whose} has keys that mean nothing: {shown(unknown, 3)}"
