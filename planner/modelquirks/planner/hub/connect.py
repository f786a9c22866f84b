"""From an address to the files of one commit, with as few requests as can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.hub.address import Address
from modelquirks.planner.hub.client import COMMIT, HTTP_ERROR, Client, Listed
from modelquirks.planner.hub.repository import Repository
from modelquirks.planner.hub.store import (
    Ref,
    Store,
    cached_commit,
    files_below,
    snapshot_folder,
)
from modelquirks.planner.hub.words import is_unreachable, words

__all__ = ["Connected", "connect"]

_MAIN = "main"


class Connected(NamedTuple):
    """The files of the commit that was asked for, and what was noticed on the way to them."""

    repository: Repository
    findings: tuple[Finding, ...]


def connect(address: Address, client: Client, store: Store) -> Connected:
    """Return the commit that *address* is now.

    If that was found out before, one HEAD request asks whether it still is; a commit is asked for
    nothing. Without a network, or in offline mode, what is cached is used, and that is said.
    OSError or an error of the HTTP library if the hub gives nothing and nothing is cached.
    """
    revision = address.revision or _MAIN
    try:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled("offline mode")
        listed = _now(address.repository, revision, client, store)
    except (OSError, HTTP_ERROR) as error:
        kept = _kept(address.repository, revision, store) if is_unreachable(error) else None
        if kept is None:
            raise
        return _from_cache(kept, error, address, client, store)
    found = Repository(listed, client, store)
    return Connected(found, (*_about_name(address, listed), *_about_outside(found)))


def _now(repository: str, revision: str, client: Client, store: Store) -> Listed:
    """Return the files of the commit that *revision* is now; asks the hub unless it is one."""
    if COMMIT.fullmatch(revision):
        ref = store.ref(repository, revision)
        if ref is not None and (known := store.listing(*ref)) is not None:
            return known
    elif known := _known(repository, revision, store):
        name = "config.json" if "config.json" in known.names else known.names[0]
        if client.commit(known.repository, revision, name) == known.commit:
            return known
    listed = client.listing(repository, revision)
    store.put_listing(listed)
    for name in dict.fromkeys((repository, listed.repository)):
        for asked in dict.fromkeys((revision, listed.commit)):
            store.put_ref(name, asked, Ref(listed.repository, listed.commit))
    return listed


def _known(repository: str, revision: str, store: Store) -> Listed | None:
    ref = store.ref(repository, revision)
    known = None if ref is None else store.listing(*ref)
    return known if known is not None and known.names else None


def _kept(repository: str, revision: str, store: Store) -> Listed | None:
    """Return what is cached of a revision: what was read of it, or what was downloaded."""
    if (known := _known(repository, revision, store)) is not None:
        return known
    commit = revision if COMMIT.fullmatch(revision) else cached_commit(repository, revision)
    if commit is None:
        return None
    names = tuple(files_below(snapshot_folder(repository, commit)))
    return Listed(repository, commit, names) if names else None


def _from_cache(
    kept: Listed, error: Exception, address: Address, client: Client, store: Store
) -> Connected:
    """Return what is at hand of *kept*; files of which nothing is cached are left out."""
    found = Repository(kept, client, store)
    absent = [name for name in found.files if not found.is_at_hand(name)]
    found.leave_out({*absent})
    findings = [*_about_name(address, kept), *_about_outside(found)]
    if not isinstance(error, OfflineModeIsEnabled):
        text = (
            f"{words(error, address, client)}; the state that was last seen was taken, commit "
            f"{kept.commit[:8]}"
        )
        findings.append(Finding("hub-unreachable", "warning", text))
    if gone := [name for name in absent if _is_read(name)]:
        text = (
            f"without a network only what is cached can be read; of {len(gone)} files nothing is: "
            f"{shown(gone)}. They are taken as if they were not there"
        )
        findings.append(Finding("hub-not-cached", "warning", text))
    return Connected(found, tuple(findings))


def _is_read(name: str) -> bool:
    return name.endswith((".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"))


def _about_name(address: Address, listed: Listed) -> Iterator[Finding]:
    if listed.repository != address.repository:
        text = (
            f"{address.repository!r} is called {listed.repository!r} on the hub now; write that, "
            "for the old name may be given to something else"
        )
        yield Finding("repository-renamed", "warning", text)


def _about_outside(found: Repository) -> Iterator[Finding]:
    if found.outside:
        listed = ", ".join(f"{name!r} {why}" for name, why in [*found.outside.items()][:10])
        text = f"the repository lists files that are not opened: {listed}"
        yield Finding("listing-path", "error", text)
