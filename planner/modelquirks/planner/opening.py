"""``open_checkpoint``: what people give as a checkpoint, on this machine or on the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.hub.address import SCHEME, address_of

if TYPE_CHECKING:
    from modelquirks.quirks.registry import Registry

__all__ = ["HubOptions", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What can be said about a repository beside its name; nothing of it goes with a local path."""

    revision: str | None = None
    """Branch, tag or commit; None: ``main``."""
    token: str | bool | None = field(default=None, repr=False)
    """As in huggingface_hub: None takes that of HF_TOKEN or of the login, False sends none."""
    subfolder: str = ""
    """Folder of the repository in which the checkpoint is, or a file."""


def open_checkpoint(
    checkpoint: str | Path,
    registry: Callable[[], Registry] | None = None,
    *,
    hub: HubOptions | None = None,
) -> Manifest:
    """Return what *checkpoint* holds: a path as in ``open_manifest``, or a repository on the hub.

    What exists on this machine is a path and is never sent anywhere. Any other text of the form
    ``org/name`` is a repository, and so is ``hf://org/name``. Raises
    :class:`~modelquirks.planner.checkpoint.open.CheckpointError`.
    """
    asked = hub or HubOptions()
    address = address_of(checkpoint) if isinstance(checkpoint, str) else None
    if address is None:
        _refuse_options(checkpoint, asked)
        return open_manifest(checkpoint, registry)
    for name in ("revision", "path"):
        given = asked.subfolder.strip("/") if name == "path" else asked.revision
        if given and getattr(address, name):
            raise CheckpointError(f"{checkpoint!r} says the {name} already; leave {given!r} out")
    from modelquirks.planner.hub.open import open_repository  # 0.3 s, and the way to the network

    return open_repository(
        address._replace(
            revision=asked.revision or address.revision,
            path=asked.subfolder.strip("/") or address.path,
        ),
        token=asked.token,
    )


def _refuse_options(checkpoint: str | Path, asked: HubOptions) -> None:
    """Say so if options for the hub were given with a path of this machine."""
    given = [name for name in ("revision", "subfolder", "token") if getattr(asked, name)]
    if not given:
        return
    here = "is here" if Path(checkpoint).exists() else "is a path of this machine"
    raise CheckpointError(
        f"{str(checkpoint)!r} {here}, so {' and '.join(given)} mean nothing: leave them out, or "
        f"write {SCHEME}org/name for the repository of that name on the hub"
    )
