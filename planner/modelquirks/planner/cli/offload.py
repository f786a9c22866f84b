"""The options that have computed weights written to an offload folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelquirks.planner.cli.command import CallError
from modelquirks.planner.cli.terminal import note

if TYPE_CHECKING:
    import argparse

__all__ = ["add_offload", "offload_options"]


def add_offload(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare ``--offload-folder`` and ``--materialize``."""
    parser.add_argument(
        "--offload-folder",
        metavar="DIR",
        help="accepted as in accelerate, and not needed: weights on disk stay in their files, "
        "and without --materialize nothing is written",
    )
    parser.add_argument(
        "--materialize",
        action="store_true",
        help="write weights that stay on disk and must be computed (stacked, cast, unpacked) "
        "to the offload folder, once, and read them there from then on",
    )


def offload_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for ``Plan.load_into``; CallError if one option lacks the other."""
    if args.materialize and not args.offload_folder:
        raise CallError("--materialize writes weights: say where, with --offload-folder DIR")
    if args.offload_folder and not args.materialize:
        note(
            "hint",
            "--offload-folder is not needed: weights on disk stay in their files, and nothing is "
            "written without --materialize",
        )
    return {"offload_folder": args.offload_folder, "materialize": args.materialize}
