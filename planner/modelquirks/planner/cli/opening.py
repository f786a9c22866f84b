"""The options that choose among the states and weights of a training checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from modelquirks.planner.checkpoint.openoptions import OpenOptions, Weights
from modelquirks.planner.cli.command import CallError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_opening", "opening_options"]


def add_opening(parser: argparse.ArgumentParser) -> None:
    """Declare ``--weights`` and ``--tag``."""
    group = parser.add_argument_group("training checkpoints")
    group.add_argument(
        "--weights",
        choices=get_args(Weights),
        help="the optimizer's fp32 masters, or the module's own weights in the dtype of training "
        "(default: the masters, where there are some)",
    )
    group.add_argument(
        "--tag", metavar="NAME", help="which saved state (default: the one that 'latest' names)"
    )


def opening_options(args: argparse.Namespace) -> OpenOptions:
    """Return the choice; CallError for what is none."""
    try:
        return OpenOptions(args.weights, args.tag)
    except ValueError as error:
        raise CallError(f"--{error}") from error
