"""``open_checkpoint``: what people give as a checkpoint, on this machine or on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.hub.address import SCHEME, Address, address_of

if TYPE_CHECKING:
    from modelquirks.quirks.registry import Registry

__all__ = ["NO_HUB", "HubOptions", "fetch_files", "open_checkpoint", "reopened"]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What can be said about a repository beside its name; nothing of it goes with a local path."""

    revision: str | None = None
    """Branch, tag or commit; None: ``main``."""
    token: str | bool | None = field(default=None, repr=False)
    """As in huggingface_hub: None takes that of HF_TOKEN or of the login, False sends none."""
    subfolder: str = ""
    """Folder of the repository in which the checkpoint is, or a file."""

    def __bool__(self) -> bool:
        """Tell whether anything was said."""
        return bool(self.told())

    def told(self) -> str:
        """Return the names of what was said.

        >>> HubOptions("v1", subfolder="unet").told()
        'revision and subfolder'
        """
        given = (name for name in ("revision", "subfolder", "token") if getattr(self, name))
        return " and ".join(given)


NO_HUB = HubOptions()
"""Nothing said."""


def open_checkpoint(
    checkpoint: str | Path,
    registry: Callable[[], Registry] | None = None,
    options: OpenOptions = AS_USUAL,
    *,
    hub: HubOptions = NO_HUB,
) -> Manifest:
    """Return what *checkpoint* holds: a path as in ``open_manifest``, or a repository on the hub.

    What exists on this machine is a path and is never sent anywhere. Any other text of the form
    ``org/name`` is a repository, and so is ``hf://org/name``. Raises
    :class:`~modelquirks.planner.checkpoint.open.CheckpointError`.
    """
    address = address_of(checkpoint) if isinstance(checkpoint, str) else None
    if address is None:
        _refuse_options(checkpoint, hub)
        return open_manifest(checkpoint, registry, options)
    for name in ("revision", "path"):
        given = hub.subfolder.strip("/") if name == "path" else hub.revision
        if given and getattr(address, name):
            raise CheckpointError(f"{checkpoint!r} says the {name} already; leave {given!r} out")
    from modelquirks.planner.hub.open import open_repository  # 0.3 s, and the way to the network

    return open_repository(
        address._replace(
            revision=hub.revision or address.revision,
            path=hub.subfolder.strip("/") or address.path,
        ),
        token=hub.token,
        options=options,
    )


def reopened(
    path: Path,
    origin: HubOrigin | None,
    registry: Callable[[], Registry] | None = None,
    options: OpenOptions = AS_USUAL,
) -> Manifest:
    """Return again what was planned for: the commit *origin* if it came from the hub, else *path*.

    What was read of a commit is kept, so that a plan made here is opened without a request.
    """
    if origin is None:
        return open_manifest(path, registry, options)
    from modelquirks.planner.hub.open import open_repository

    return open_repository(
        Address(origin.repository, origin.commit, origin.path), token=origin.token, options=options
    )


def fetch_files(manifest: Manifest, names: Iterable[str]) -> None:
    """Have the files *names* of a checkpoint here, which those of one from the hub need not be.

    Raises :class:`~modelquirks.planner.checkpoint.open.CheckpointError` if they cannot be fetched.
    """
    if manifest.origin is not None:
        from modelquirks.planner.hub.fetch import fetch

        fetch(manifest.origin, manifest.root, names)


def _refuse_options(checkpoint: str | Path, hub: HubOptions) -> None:
    """Say so if options for the hub were given with a path of this machine."""
    if not hub:
        return
    here = "is here" if Path(checkpoint).exists() else "is a path of this machine"
    what = f"{hub.told()} {'mean' if ' and ' in hub.told() else 'means'}"
    raise CheckpointError(
        f"{str(checkpoint)!r} {here}, so {what} nothing: leave that out, or write "
        f"{SCHEME}org/name for the repository of that name on the hub"
    )
