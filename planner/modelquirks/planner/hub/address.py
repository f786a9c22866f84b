"""``Address``: which repository on the hub a text names, if it names one. Nothing is asked here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from modelquirks.planner.checkpoint.index import format_of, leaves_folder
from modelquirks.planner.checkpoint.open import CheckpointError

__all__ = ["SCHEME", "Address", "address_of"]

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,95})"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_EXPLICIT = re.compile(
    rf"(?P<repository>{_PART}/{_PART}|{_PART}(?=@|$))"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/@]+|[^/@]+))?"
    r"(?:/(?P<path>.*))?"
)


class Address(NamedTuple):
    """What to look for on the hub."""

    repository: str
    revision: str | None = None
    """Branch, tag or commit; None: ``main``."""
    path: str = ""
    """Folder or file within it."""


def address_of(text: str) -> Address | None:
    """Return the repository that *text* names; None if it is a path on this machine.

    What exists here is a path, as in transformers' ``from_pretrained``; else ``org/name`` is a
    repository. ``hf://org/name``, which may go on with ``@revision`` and ``/folder/or/file``,
    always is one. The latter is the notation of huggingface_hub's ``HfFileSystem``.

    >>> address_of("hf://org/name@v1.0/unet/model.safetensors")
    Address(repository='org/name', revision='v1.0', path='unet/model.safetensors')
    >>> address_of("no/such-thing-here"), address_of("./no/such-thing-here")
    (Address(repository='no/such-thing-here', revision=None, path=''), None)
    """
    if text.startswith(SCHEME):
        return _explicit(text)
    if not _REPOSITORY.fullmatch(text) or "--" in text or ".." in text:
        return None
    if text.endswith(".json") or format_of(text) != "unknown" or _is_here(text):
        return None
    return Address(text)


def _explicit(text: str) -> Address:
    found = _EXPLICIT.fullmatch(text.removeprefix(SCHEME))
    path = (found["path"] or "").removesuffix("/") if found else ""
    if found is None or (path and leaves_folder(path)) or "//" in f"/{path}":
        raise CheckpointError(
            f"{text!r} names no repository; write {SCHEME}org/name, which may go on with @revision "
            "and /folder or /file"
        )
    revision = found["revision"]
    return Address(found["repository"], None if revision is None else unquote(revision), path)


def _is_here(text: str) -> bool:
    path = Path(text)
    return path.exists() or path.is_symlink()
