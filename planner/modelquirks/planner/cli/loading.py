"""The options that say how weights are made and checked when they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelquirks.planner.cli.command import CallError
from modelquirks.planner.digest.digest import Digest
from modelquirks.planner.placement.memory import parse_size

if TYPE_CHECKING:
    import argparse

__all__ = ["add_loading", "loading_options"]


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Declare ``--copy``, ``--load-memory``, ``--verify`` and ``--digest``."""
    group = parser.add_argument_group("loading")
    group.add_argument(
        "--copy",
        action="store_true",
        help="copy weights instead of mapping their files, those on disk for each pass: needed "
        "only if the files will be overwritten in place while the model is in use",
    )
    group.add_argument(
        "--load-memory",
        metavar="SIZE",
        default="256MiB",
        help="what making the tensors may take beside their own memory (%(default)s)",
    )
    group.add_argument(
        "--verify",
        choices=("samples", "full"),
        default="samples",
        help="compare samples of every tensor with the files, or every byte (%(default)s)",
    )
    group.add_argument(
        "--digest",
        metavar="FILE",
        help="load nothing unless every stored tensor that the plan reads has the bytes that FILE "
        "says, which `modelquirks digest` wrote",
    )


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for ``Plan.load_into``; CallError if the size means nothing.

    DigestError if the digest cannot be used: that is better known before a model is built.
    """
    try:
        n_bytes = parse_size(args.load_memory)
        if n_bytes < 1 << 24:
            raise ValueError(f"{args.load_memory!r} is too little: give at least 16MiB")
    except ValueError as error:
        raise CallError(f"--load-memory: {error}") from error
    digest = None if args.digest is None else Digest.load(args.digest)
    options = {"copy": args.copy, "load_memory": n_bytes, "verify": args.verify}
    return options | {"digest": digest}
