"""``open_repository``: the manifest of a checkpoint on the hub, from ranges of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError, manifest_at
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.finding import Finding
from modelquirks.planner.hub.address import Address
from modelquirks.planner.hub.client import Client
from modelquirks.planner.hub.connect import connect
from modelquirks.planner.hub.hubpath import HubPath
from modelquirks.planner.hub.repository import Repository
from modelquirks.planner.hub.store import Store
from modelquirks.planner.hub.words import worded

__all__ = ["open_repository"]


def open_repository(
    address: Address, *, token: str | bool | None = None, options: OpenOptions = AS_USUAL
) -> Manifest:
    """Return what the checkpoint at *address* holds; no weight is fetched.

    *token* as in huggingface_hub: None takes that of HF_TOKEN or of the login, False sends none.
    Its ``root`` is where huggingface_hub's cache will have the files of that commit once they are
    downloaded. Raises
    :class:`~modelquirks.planner.hub.words.HubError` if the hub does not give it,
    :class:`~modelquirks.planner.checkpoint.open.CheckpointError` if there is no checkpoint in it.
    """
    client = Client(token)
    store = Store(client.endpoint)
    with worded(address, client):
        repository, findings = connect(address, client, store)
        manifest = _read(repository, address, options)
        repository.save()
    origin = HubOrigin(
        repository.id, address.revision or "main", repository.commit, address.path, token
    )
    return replace(
        manifest,
        shards=tuple(replace(shard, mtime_ns=None) for shard in manifest.shards),
        findings=(
            *findings,
            *manifest.findings,
            *_about_download(manifest, repository),
            *_about_store(store),
        ),
        origin=origin,
    )


def _read(repository: Repository, address: Address, options: OpenOptions) -> Manifest:
    path = HubPath(repository, address.path)
    if not path.exists():
        raise CheckpointError(
            f"{repository.id!r} has no file or folder {address.path!r}; in it are "
            f"{', '.join(map(repr, repository.entries('')[:10])) or 'no files'}"
        )
    try:
        return manifest_at(path, options=options)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Formats that only plugins open must be here: `hf download {repository.id} "
            "--local-dir DIR`, then give DIR"
        ) from error


def _about_download(manifest: Manifest, repository: Repository) -> Iterator[Finding]:
    """Say what executing would download: what is not in the cache yet."""
    lacking = [s for s in manifest.shards if s.size_bytes and not (manifest.root / s.name).exists()]
    if lacking:
        n_bytes = sum(shard.size_bytes or 0 for shard in lacking)
        text = (
            f"nothing but headers was fetched: executing downloads up to {len(lacking)} of "
            f"{len(manifest.shards)} files, {n_bytes:,} bytes, into the cache of huggingface_hub"
        )
        yield Finding("hub-download", "info", text)


def _about_store(store: Store) -> Iterator[Finding]:
    if store.trouble:
        text = f"what was read could not be kept, the next call fetches it again: {store.trouble}"
        yield Finding("hub-cache", "info", text)
