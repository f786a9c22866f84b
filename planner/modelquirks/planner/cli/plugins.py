"""``modelquirks plugins``: which plugins there are, where they come from, what they give."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from modelquirks.planner.cli.command import Exit
from modelquirks.planner.cli.report import SCHEMA, show_plugins, write_json
from modelquirks.planner.cli.terminal import Terminal, note
from modelquirks.quirks.registry import Registry

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listing = commands.add_parser(
        "list", help="list every plugin", description="List every plugin.", allow_abbrev=False
    )
    listing.add_argument("--json", action="store_true", help="write JSON instead of a table")
    add_no_plugin(listing)


def add_no_plugin(parser: argparse.ArgumentParser) -> None:
    """Declare ``--no-plugin``."""
    parser.add_argument(
        "--no-plugin",
        metavar="NAME",
        action="append",
        default=[],
        help="leave out a plugin or a distribution; '*' for all",
    )


def load_registry(args: argparse.Namespace) -> Registry:
    """Return what the plugins give; every trouble with them is told on standard error."""
    registry = Registry.load(disable=args.no_plugin)
    for problem in registry.problems:
        note("warning", problem)
    return registry


def run(args: argparse.Namespace) -> Exit:
    """List the plugins; UNUSABLE if one of them, or something it gives, is not used."""
    registry = load_registry(args)
    if args.json:
        report = {
            "schema": SCHEMA,
            "plugins": [info.to_json() for info in registry.plugins],
            "problems": list(registry.problems),
        }
        write_json(report, sys.stdout)
    else:
        show_plugins(Terminal(sys.stdout), registry.plugins)
    return Exit.UNUSABLE if registry.problems else Exit.USABLE
