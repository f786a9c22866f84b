"""What the commands that take a checkpoint have in common, and what they take for the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.opening import HubOptions, open_checkpoint

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.quirks.registry import Registry

__all__ = ["CHECKPOINT_HELP", "add_hub", "add_token", "hub_options", "opened"]

CHECKPOINT_HELP = "folder, weight file or index; or org/name of a repository on the hub"


def add_hub(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say more about a repository on the hub."""
    group = parser.add_argument_group("repositories on the hub")
    group.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit (default: main)"
    )
    group.add_argument(
        "--subfolder",
        metavar="FOLDER",
        default="",
        help="where in the repository the checkpoint is",
    )
    add_token(group)


def add_token(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare ``--token``."""
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help="token for the hub (default: HF_TOKEN, or that of `hf auth login`)",
    )


def opened(
    args: argparse.Namespace,
    registry: Callable[[], Registry] | None = None,
    options: OpenOptions = AS_USUAL,
) -> Manifest:
    """Return the manifest of the checkpoint that the arguments name."""
    return open_checkpoint(args.checkpoint, registry, options, hub=hub_options(args))


def hub_options(args: argparse.Namespace) -> HubOptions:
    """Return what the arguments say about a repository."""
    return HubOptions(args.revision, args.token, args.subfolder)
