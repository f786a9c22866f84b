"""Adapters on the command line: the options, and the adapter that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelquirks.planner.cli.command import CallError

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.adapter.adapter import Adapter
    from modelquirks.quirks.registry import Registry

__all__ = ["adapter_of", "add_adapter"]


def add_adapter(parser: argparse.ArgumentParser, *, merges: bool = True) -> None:
    """Declare ``--adapter``, and of a command that *merges* also ``--merge``."""
    parser.add_argument(
        "--adapter",
        metavar="ADAPTER",
        action="append",
        default=[],
        help="folder of a PEFT adapter, to be loaded together with its base, CHECKPOINT",
    )
    if not merges:
        parser.set_defaults(merge=False)
        return
    parser.add_argument(
        "--merge",
        action="store_true",
        help="make the adapter part of the weights; without it, load it beside them",
    )


def adapter_of(args: argparse.Namespace, registry: Registry) -> Adapter | None:
    """Return the adapter that is asked for; CallError for several, or for none to merge."""
    if len(args.adapter) > 1:
        raise CallError(
            f"--adapter is given {len(args.adapter)} times: one at a time is planned with its "
            "base. Merge the first with `export`, and the next into that; or let PEFT "
            "join them (add_weighted_adapter)"
        )
    if not args.adapter:
        if args.merge:
            raise CallError("--merge needs the adapter to merge: --adapter FOLDER")
        return None
    from modelquirks.planner.adapter.adapter import open_adapter

    return open_adapter(args.adapter[0], lambda: registry)
