"""``fetch``: the files that executing a plan reads, downloaded by huggingface_hub."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.finding import shown
from modelquirks.planner.hub.address import Address
from modelquirks.planner.hub.client import Client
from modelquirks.planner.hub.store import snapshot_folder
from modelquirks.planner.hub.words import HubError, worded

__all__ = ["fetch"]


def fetch(origin: HubOrigin, root: Path, names: Iterable[str]) -> None:
    """Have the files *names* of the folder *root* of a snapshot here.

    What is in the cache of huggingface_hub is not fetched again, and nothing is asked if all of it
    is. Raises :class:`~modelquirks.planner.hub.words.HubError`.
    """
    folder = root.relative_to(snapshot_folder(origin.repository, origin.commit))
    lacking = [(folder / name).as_posix() for name in names if not (root / name).exists()]
    if not lacking:
        return
    if constants.is_offline_mode():
        raise HubError(
            f"{len(lacking)} files of {str(origin)!r} are not here, and huggingface_hub is in "
            f"offline mode (HF_HUB_OFFLINE): {shown(lacking)}. Run it without, or fetch them "
            f"where there is a network: hf download {origin.repository} --revision {origin.commit}"
        )
    client = Client(origin.token)
    with worded(Address(origin.repository, origin.commit, origin.path), client):
        snapshot_download(
            origin.repository,
            revision=origin.commit,
            allow_patterns=[glob.escape(name) for name in lacking],
            token=origin.token,
            endpoint=client.endpoint,
        )
