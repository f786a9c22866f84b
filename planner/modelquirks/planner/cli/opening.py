"""The options that choose among the states and weights of a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.openoptions import OpenOptions, Weights
from modelquirks.planner.cli.command import CallError
from modelquirks.planner.cli.parsing import checked, read_json_file

if TYPE_CHECKING:
    import argparse

__all__ = ["add_opening", "opening_options"]


def add_opening(parser: argparse.ArgumentParser, *, compares: bool = False) -> None:
    """Declare ``--weights`` and ``--tag``, of a command that *compares* also ``--expect``."""
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
    if compares:
        group.add_argument(
            "--expect",
            metavar="KEY=VALUE,...|FILE",
            type=checked(_expected),
            help="how a job is going to load it, as zero_stage=3,dp=8,tp=2,pp=1,ep=1,dtype=bf16,"
            " or DeepSpeed's config: says what differs from how it was saved, and the way out",
        )


def opening_options(args: argparse.Namespace) -> OpenOptions:
    """Return the choice; CallError for what is none."""
    try:
        return OpenOptions(args.weights, args.tag, getattr(args, "expect", None))
    except ValueError as error:
        raise CallError(f"--{error}") from error


def _expected(text: str) -> Mapping[str, Any]:
    """Return what is expected: pairs, or the content of a JSON file."""
    if "=" not in text or look(Path(text)).kind not in ("absent", "unreadable"):
        data = read_json_file(text, "not as zero_stage=3,dp=8, nor ")
        if not isinstance(data, dict) or not data:
            raise CallError(f"{text!r} holds no JSON object with settings")
        return data
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if faults := [key for key, _, value in pairs if not key.strip() or not value.strip()]:
        raise CallError(f"{text!r}: {faults[0]!r} has no value; write zero_stage=3,dp=8")
    names = [key.strip() for key, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CallError(f"{text!r} says {twice!r} twice")
    return {key.strip(): value.strip() for key, _, value in pairs}
