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
    from modelquirks.planner.cli import plugin_check, plugin_new, plugin_show

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text, declare, action in (
        ("list", "list every plugin and what it gives", _add_list, _list),
        ("show", "show what a plugin or record says", plugin_show.add_arguments, plugin_show.run),
        (
            "check",
            "check the plugins; with a checkpoint, say which records apply, and why not",
            plugin_check.add_arguments,
            plugin_check.run,
        ),
        ("new", "make a package with a quirk of yours", plugin_new.add_arguments, plugin_new.run),
    ):
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        declare(command)
        add_no_plugin(command)
        command.set_defaults(action=action)


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


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
    """Do what the sub-command says."""
    code: Exit = args.action(args, load_registry(args))
    return code


def _list(args: argparse.Namespace, registry: Registry) -> Exit:
    """List the plugins; UNUSABLE if one of them, or something it gives, is not used."""
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
