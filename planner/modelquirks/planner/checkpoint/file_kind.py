"""What a file is by its first bytes, whatever its name says.

Half of the "broken checkpoint" reports are files that are something else: the pointer that
git-LFS left behind, the login page that a server sent, the start of a download. None of them
should be parsed as what their name promises, and the message should say what they are.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.confined import is_outside
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.finding import Finding

__all__ = ["HEAD_BYTES", "OUTSIDE", "Kind", "Look", "look", "not_weights", "pointer_text"]

Kind = Literal[
    "absent",
    "special",
    "unreadable",
    "empty",
    "zeros",
    "lfs-pointer",
    "html",
    "json",
    "safetensors",
    "zip",
    "legacy",
    "pickle",
    "tar",
    "gguf",
    "hdf5",
    "unknown",
]

HEAD_BYTES = 512
OUTSIDE = "it is a link to a file outside the folder, and not opened; name that file"
_LFS = (b"version https://git-lfs", b"version https://hawser")
_HTML = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")
_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c as a pickle
_STARTS: Mapping[bytes, Kind] = {
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"GGUF": "gguf",
    b"\x89HDF\r\n\x1a\n": "hdf5",
}


class Look(NamedTuple):
    """A file as it is now, without having been read."""

    kind: Kind
    size_bytes: int = 0
    mtime_ns: int = 0
    head: bytes = b""
    trouble: str = ""
    """What the operating system said, for ``unreadable``."""


def look(path: FilePath) -> Look:
    """Return what *path* is; never raises. Reads at most :data:`HEAD_BYTES` bytes.

    A link out of the folder that is looked into is not followed: ``unreadable``.
    """
    if is_outside(path):
        return Look("unreadable", trouble=OUTSIDE)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for ever
            return Look("special", trouble="a folder" if stat.S_ISDIR(status.st_mode) else "")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return Look("absent")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return Look("unreadable", trouble=str(getattr(error, "strerror", None) or error))
    return Look(_kind(head, status.st_size), status.st_size, status.st_mtime_ns, head)


def _kind(head: bytes, size: int) -> Kind:
    if size == 0 or not head:
        return "empty"
    for start, kind in _STARTS.items():
        if head.startswith(start):
            return kind
    if head.startswith(_LFS):
        return "lfs-pointer"
    # A header length below 4 GiB leaves four zero bytes where text has none.
    if head[4:8] == bytes(4) and head[8:9] in (b"{", b" ", b"\n"):
        return "safetensors"
    if _LEGACY_MAGIC in head[:32]:
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar"
    if len(head) > 8 and not head.strip(b"\0"):
        return "zeros"
    return _text_kind(head)


def _text_kind(head: bytes) -> Kind:
    text = head.lstrip().lower()
    if text.startswith(_HTML):
        return "html"
    if text[:1] in (b"{", b"[") and b"\0" not in head[:9]:
        return "json"
    if head[0] == 0x80 and head[1:2] <= b"\x05":
        return "pickle"
    return "unknown"


def pointer_text(head: bytes) -> str:
    """Return what a git-LFS pointer points to: ``of a file of 4,792,272,488 bytes``."""
    found = re.search(rb"^size ([0-9]{1,18})\s*$", head, re.MULTILINE)
    return f" for a file of {int(found[1]):,} bytes" if found else ""


_NOT_WEIGHTS: Mapping[Kind, tuple[str, str]] = {
    "special": ("not-a-file", "is {trouble}; a regular file was expected"),
    "unreadable": ("file-unreadable", "cannot be opened: {trouble}"),
    "empty": ("file-empty", "is empty (0 bytes): a broken upload or download; fetch it again"),
    "zeros": (
        "wrong-format",
        "begins with zero bytes only: an unfinished download (or an empty tar); fetch it again",
    ),
    "lfs-pointer": (
        "lfs-pointer",
        "is a git-LFS pointer{pointer}, not the file itself; fetch it with `git lfs pull`",
    ),
    "html": (
        "html-page",
        "is a web page, not weights: the download was answered by a login or error page",
    ),
    "json": ("wrong-format", "is JSON text, not weights"),
    "gguf": (
        "gguf-unsupported",
        "is a GGUF file, which is not read here; use the safetensors version of the model",
    ),
    "hdf5": ("wrong-format", "is an HDF5 file, which is not read here; convert it to safetensors"),
}


def not_weights(shard: str, seen: Look) -> Finding | None:
    """Return the error if *seen* is certainly no weight file that can be read, else None."""
    if seen.kind not in _NOT_WEIGHTS:
        return None
    code, sentence = _NOT_WEIGHTS[seen.kind]
    text = sentence.format(
        trouble=seen.trouble or "no regular file", pointer=pointer_text(seen.head)
    )
    return Finding(code, "error", f"{shard!r} {text}.")
