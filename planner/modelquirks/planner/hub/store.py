"""``Store``: what is kept of repositories between calls, in huggingface_hub's cache of assets.

What a revision was when it was last asked for, which files a commit has, and the parts of them
that were read. A commit never changes, so nothing of it goes stale. Files that were downloaded as a
whole are in huggingface_hub's own cache and not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from modelquirks.planner.checkpoint.index import leaves_folder
from modelquirks.planner.hub.client import COMMIT, Listed
from modelquirks.planner.hub.spans import Spans
from modelquirks.planner.wholefile import clear_partials, write_whole

__all__ = ["Ref", "Store", "cached_commit", "files_below", "snapshot_folder"]


class Ref(NamedTuple):
    """What a revision was when it was last asked for."""

    repository: str
    """What the hub called it."""
    commit: str


class Store:
    """What is kept of the repositories of one endpoint."""

    def __init__(self, endpoint: str) -> None:
        """Take the endpoint: another one may have other repositories of the same names."""
        self._endpoint = endpoint
        self.trouble = ""
        """Why something could not be written, if so: all works without, and asks again."""

    def ref(self, repository: str, revision: str) -> Ref | None:
        """Return what a revision was, None if it was never asked for."""
        found = _json(self._folder(repository, "refs") / _name(revision))
        if not isinstance(found, list) or len(found) != 3 or found[0] != self._endpoint:
            return None
        _, name, commit = found
        if not isinstance(name, str) or not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            return None
        return Ref(name, commit) if _is_repository(name) else None

    def put_ref(self, repository: str, revision: str, ref: Ref) -> None:
        """Keep what a revision is."""
        raw = json.dumps([self._endpoint, *ref]).encode()
        self._write(self._folder(repository, "refs") / _name(revision), [raw])

    def listing(self, repository: str, commit: str) -> Listed | None:
        """Return the files of a commit, None if they are not known."""
        found = _json(self._folder(repository, commit) / "files.json")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            return None
        return Listed(repository, commit, tuple(found))

    def put_listing(self, listed: Listed) -> None:
        """Keep the files of a commit."""
        path = self._folder(listed.repository, listed.commit) / "files.json"
        self._write(path, [json.dumps(listed.names).encode()])

    def has_spans(self, repository: str, commit: str, name: str) -> bool:
        """Tell whether parts of a file are kept."""
        return self._spans_path(repository, commit, name).is_file()

    def spans(self, repository: str, commit: str, name: str) -> Spans:
        """Return the parts of a file that are kept; none if there are none or they are damaged."""
        try:
            return Spans.parse(self._spans_path(repository, commit, name).read_bytes())
        except (OSError, ValueError, TypeError):
            return Spans()

    def put_spans(self, repository: str, commit: str, name: str, spans: Spans) -> None:
        """Keep the parts of a file."""
        self._write(self._spans_path(repository, commit, name), spans.dump())

    def _spans_path(self, repository: str, commit: str, name: str) -> Path:
        return self._folder(repository, commit) / f"{_name(name)}.part"

    def _folder(self, repository: str, what: str) -> Path:
        root = Path(constants.HF_ASSETS_CACHE) / "modelquirks"
        return root / _folder_name(repository) / what

    def _write(self, path: Path, parts: Iterable[bytes]) -> None:
        """Write a file whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_partials(path)
            write_whole(path, parts, durable=False)
        except OSError as error:
            self.trouble = f"{error.filename or str(path)!r}: {error.strerror or error}"


def snapshot_folder(repository: str, commit: str) -> Path:
    """Return where the cache of huggingface_hub has, or will have, the files of a commit."""
    return Path(constants.HF_HUB_CACHE) / _folder_name(repository) / "snapshots" / commit


def cached_commit(repository: str, revision: str) -> str | None:
    """Return the commit that a revision was when huggingface_hub last downloaded of it."""
    if leaves_folder(revision):
        return None
    path = Path(constants.HF_HUB_CACHE) / _folder_name(repository) / "refs" / revision
    try:
        commit = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None  # it becomes the name of a folder


def files_below(folder: Path) -> Iterator[str]:
    """Yield the names of all files below *folder*, relative to it, with ``/``."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _folder_name(repository: str) -> str:
    return repo_folder_name(repo_id=repository, repo_type="model")


def _is_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def _name(text: str) -> str:
    return quote(text, safe="")


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
