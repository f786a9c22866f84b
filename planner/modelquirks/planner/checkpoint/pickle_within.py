"""Pickles within a pickle: ``torch.storage._load_from_bytes`` gets a whole file of ``torch.save``.

Plain pickles of tensors hold them so. Loaded the usual way the inner pickle is executed like the
outer one, so that the names in it count as much.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

from modelquirks.planner.checkpoint.pickle_machine import (
    MAX_BYTES,
    Global,
    Opaque,
    PickleProblem,
    load,
)

__all__ = ["UNREADABLE", "names_within"]

UNREADABLE = Global("?", "a pickle within that cannot be read")
_MAX_DEPTH = 3
_LEGACY = 5
"""So many pickles follow each other in a file from before torch 1.6."""


def names_within(content: Any, depth: int = 0) -> tuple[Global, ...]:
    """Return the classes and functions that the pickles in *content* name, those within included.

    *content* is the argument of the call: bytes, or how protocol 2 writes them.
    """
    raw = _bytes(content)
    if raw is None or depth >= _MAX_DEPTH:
        return (UNREADABLE,)
    found: dict[Global, None] = {}
    try:
        file = io.BytesIO(_pickle_of_zip(raw) if raw.startswith(b"PK") else raw)
        for _ in range(_LEGACY):
            if file.tell() == len(file.getbuffer()):
                break
            loaded = load(file, rebuild={}, persistent=_stays, depth=depth + 1)
            found |= dict.fromkeys(loaded.globals)
    except (PickleProblem, zipfile.BadZipFile, ValueError, KeyError, NotImplementedError, OSError):
        return (*found, UNREADABLE)
    return tuple(found)


def _bytes(content: Any) -> bytes | None:
    if isinstance(content, Opaque) and content.kind == "_codecs.encode":
        text = content.args[0] if isinstance(content.args, tuple) and content.args else None
        try:
            return text.encode("latin-1") if isinstance(text, str) else None
        except UnicodeEncodeError:
            return None
    return bytes(content) if isinstance(content, bytes | bytearray) else None


def _pickle_of_zip(raw: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        name = next((n for n in archive.namelist() if n.endswith("data.pkl")), "data.pkl")
        with archive.open(name) as record:
            return record.read(MAX_BYTES)


def _stays(identifier: Any) -> Any:
    raise ValueError("an object outside the pickle")
