"""``Repository``: the files of one commit, each from where it is nearest.

A file that huggingface_hub has downloaded is read there. JSON files are downloaded, into its cache,
for others read them too. Of weights only the parts that are asked for are fetched, and kept.
"""

from __future__ import annotations

import stat
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from modelquirks.planner.checkpoint.index import leaves_folder
from modelquirks.planner.hub.client import HTTP_ERROR, Client, Listed, Piece, Remote, readable
from modelquirks.planner.hub.failure import HubFailure
from modelquirks.planner.hub.remotefile import AT_ONCE, FIRST_BYTES, RemoteFile
from modelquirks.planner.hub.store import Store, snapshot_folder

__all__ = ["Repository"]


class Repository:
    """The files of a commit, for reading."""

    def __init__(self, listed: Listed, client: Client, store: Store) -> None:
        """Take what the hub listed; names that would lead out of a folder are left out."""
        self._client, self._store = client, store
        self.id, self.commit = listed.repository, listed.commit
        self.outside = {name: why for name in listed.names if (why := leaves_folder(name))}
        self.files = dict.fromkeys(name for name in listed.names if name not in self.outside)
        self.folder = snapshot_folder(listed.repository, listed.commit)
        self._remotes: dict[str, RemoteFile] = {}
        self._lock = Lock()

    def shown(self, inside: str) -> str:
        """Return the name of a file or folder for people."""
        return f"{self.id}/{inside}" if inside else self.id

    def leave_out(self, names: set[str]) -> None:
        """Go on as if the files *names* were not there."""
        self.files = {name: None for name in self.files if name not in names}
        vars(self).pop("_tree", None)

    def entries(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder; none if there is no such folder."""
        return tuple(self._tree.get(folder, ()))

    @cached_property
    def _tree(self) -> dict[str, dict[str, None]]:
        found: dict[str, dict[str, None]] = {}
        for name in self.files:
            while name:
                above, _, last = name.rpartition("/")
                found.setdefault(above, {})[last] = None
                name = above
        return found

    def is_at_hand(self, name: str) -> bool:
        """Tell whether a file, or what was read of it, is here."""
        return self._here(name) is not None or self._store.has_spans(self.id, self.commit, name)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        path = self._here(name)
        if path is None and name.endswith(".json"):
            path = self._download(name)
        if path is not None:
            return path.stat().st_size
        return self._remote(name).size

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; FileNotFoundError if there is none of that name."""
        if name not in self.files:
            raise FileNotFoundError(f"no file {self.shown(name)!r}")
        path = self._here(name)
        if path is None and name.endswith(".json"):
            path = self._download(name)
        return self._remote(name).open() if path is None else path.open("rb")

    def fetch_headers(self, files: Mapping[str, int | None]) -> None:
        """Fetch the starts of *files*, of about so many bytes; those that are here are not."""
        wanted = {name: n for name, n in files.items() if name in self.files}
        remotes = [(self._remote(name), n) for name, n in wanted.items() if not self._here(name)]
        unknown = [(remote, n) for remote, n in remotes if not remote.spans]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(one.begin, n or FIRST_BYTES) for one, n in unknown]:
                done.result()

    def save(self) -> None:
        """Keep what was fetched."""
        for name, remote in self._remotes.items():
            if remote.is_new:
                self._store.put_spans(self.id, self.commit, name, remote.spans)
                remote.is_new = False

    def _here(self, name: str) -> Path | None:
        path = self.folder / name
        try:
            return path if stat.S_ISREG(path.stat().st_mode) else None
        except OSError:
            return None

    def _remote(self, name: str) -> RemoteFile:
        with self._lock:
            if name not in self._remotes:
                place = self._client.remote(self.id, self.commit, name)
                spans = self._store.spans(self.id, self.commit, name)
                self._remotes[name] = RemoteFile(partial(self._read, place), spans)
            return self._remotes[name]

    def _read(self, place: Remote, begin: int, end: int) -> Piece:
        with told():
            return self._client.read(place, begin, end)

    def _download(self, name: str) -> Path:
        """Have huggingface_hub put a small file into its cache."""
        with told(), _quiet(), readable(f"the file {name!r}"):
            return Path(
                hf_hub_download(
                    self.id,
                    name,
                    revision=self.commit,
                    token=self._client.token,
                    endpoint=self._client.endpoint,
                )
            )


@contextmanager
def told() -> Generator[None, None, None]:
    """Have trouble with the hub pass through readers that take an OSError for that of a file."""
    try:
        yield
    except (OSError, HTTP_ERROR) as error:
        raise HubFailure(str(error)) from error


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Show no bars for files of some KiB."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
