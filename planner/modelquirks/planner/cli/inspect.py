"""``modelquirks inspect``: what a checkpoint holds, from headers alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from modelquirks.planner.cli.command import Exit
from modelquirks.planner.cli.hub import CHECKPOINT_HELP, add_hub, opened
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.report import SCHEMA, add_html, show_manifest, write_json
from modelquirks.planner.cli.terminal import Terminal, note, progress
from modelquirks.planner.writing import write_whole

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.checkpoint.manifest import Manifest

__all__ = ["add_arguments", "note_unreadable", "run", "verdict"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument("--all", action="store_true", help="list every family and finding")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    parser.add_argument(
        "--listing",
        metavar="FILE",
        help="also write names, dtypes, shapes and config to FILE: what proves a quirk",
    )
    add_opening(parser, compares=True)
    add_html(parser)
    add_hub(parser)


def run(args: argparse.Namespace) -> Exit:
    """Read the headers and report them."""
    with progress("Reading headers"):
        manifest = opened(args, options=opening_options(args))
    if args.html is not None:
        from modelquirks.planner.report.gather import of_manifest
        from modelquirks.planner.report.page import page

        write_whole(args.html, page(of_manifest(manifest)))
    if args.json:
        write_json({"schema": SCHEMA, "checkpoint": manifest.to_json()}, sys.stdout)
    else:
        show_manifest(Terminal(sys.stdout), manifest, everything=args.all)
    if args.listing is not None:
        from modelquirks.planner.checkpoint.listing import Listing

        Listing.of(manifest).write(args.listing)
    code = verdict(manifest)
    if code is Exit.BAD_CALL:
        note_unreadable(args.checkpoint)
    return code


def note_unreadable(checkpoint: str) -> None:
    """Say on standard error that there was nothing to go on with."""
    note("error", f"{checkpoint!r} holds no tensor that can be read")


def verdict(manifest: Manifest) -> Exit:
    """Return USABLE if nothing is wrong; with errors, whether there is anything to go on with."""
    if all(finding.severity != "error" for finding in manifest.findings):
        return Exit.USABLE
    return Exit.UNUSABLE if manifest.tensors else Exit.BAD_CALL
