"""The options for weights that are offloaded: what is written to a folder, what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelquirks.planner.cli.command import CallError
from modelquirks.planner.cli.placing import checked
from modelquirks.planner.cli.terminal import note
from modelquirks.planner.placement.memory import parse_size

if TYPE_CHECKING:
    import argparse

__all__ = ["add_offload", "offload_options"]


def add_offload(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare them."""
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
    parser.add_argument(
        "--no-expert-offload",
        action="store_true",
        help="move experts that are stacked in one tensor and offloaded as a whole, as accelerate "
        "does, not one by one",
    )
    parser.add_argument(
        "--expert-cache",
        metavar="SIZE",
        type=checked(parse_size),
        help="keep so much of the offloaded experts on the device that computes, for example "
        "4GiB; without it, a quarter of what is free there",
    )
    parser.add_argument(
        "--ahead",
        metavar="SIZE",
        type=checked(parse_size),
        help="compute at most so much of the offloaded weights in CPU memory before a forward pass "
        "comes to them; without it, what the plan leaves unused there, 1GiB at most; 0: nothing",
    )


def offload_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for ``Plan.load_into``; CallError if they do not agree."""
    if args.materialize and not args.offload_folder:
        raise CallError("--materialize writes weights: say where, with --offload-folder DIR")
    if args.offload_folder and not args.materialize:
        note(
            "hint",
            "--offload-folder is not needed: weights on disk stay in their files, and nothing is "
            "written without --materialize",
        )
    if args.no_expert_offload and args.expert_cache is not None:
        raise CallError("--expert-cache is for experts one by one: leave --no-expert-offload out")
    options = {"offload_folder": args.offload_folder, "materialize": args.materialize}
    options |= {"expert_cache": args.expert_cache, "ahead_bytes": args.ahead}
    return options | ({"expert_offload": False} if args.no_expert_offload else {})
