"""``modelquirks diff``: what differs between two checkpoints, or two plans."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import SCHEMA, add_html, say_left_out, write_json
from modelquirks.planner.cli.saved import is_plan
from modelquirks.planner.cli.terminal import Cell, Column, Styled, Terminal, progress
from modelquirks.planner.diff.compare import Difference, Group, compare
from modelquirks.planner.diff.sides import Side, of_checkpoint, of_plan
from modelquirks.planner.diff.wording import details, verdict
from modelquirks.planner.opening import open_checkpoint
from modelquirks.planner.plan import Plan
from modelquirks.planner.writing import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "run"]

_SHOWN = 100
_STYLES = {"removed": "red", "added": "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit codes, as those of diff: 0 no tensor differs, 1 some do, 2 bad call or unreadable "
        "input. Only headers are read: values are not compared."
    )
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(), metavar=name, help="checkpoint, or a plan that was saved with `plan -o`"
        )
    parser.add_argument("--all", action="store_true", help="list every family")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    add_html(parser)
    add_no_plugin(parser)


def run(args: argparse.Namespace) -> Exit:
    """Compare and report; UNUSABLE if a tensor differs."""
    plans = [is_plan(Path(name)) for name in (args.a, args.b)]
    if len(set(plans)) > 1:
        plan, other = (args.a, args.b) if plans[0] else (args.b, args.a)
        raise CallError(
            f"{plan!r} is a plan and {other!r} is a checkpoint: give two checkpoints, or make a "
            f"plan of the second with `modelquirks plan {other} --dry-run -o FILE`"
        )
    registry = load_registry(args)
    with progress("Reading headers"):
        a, b = (_side(name, registry, a_plan=plans[0]) for name in (args.a, args.b))
    found = compare(a, b)
    if args.html is not None:
        from modelquirks.planner.diff.page import page

        write_whole(args.html, page(found))
    if args.json:
        write_json({"schema": SCHEMA, "diff": found.to_json()}, sys.stdout)
    else:
        _show(Terminal(sys.stdout), found, everything=args.all)
    return Exit.USABLE if found.is_same else Exit.UNUSABLE


def _side(name: str, registry: Registry, *, a_plan: bool) -> Side:
    if a_plan:
        return of_plan(Plan.load(name))
    manifest = open_checkpoint(name, lambda: registry)
    if not manifest.tensors:
        raise CallError(f"{name!r} holds no tensor that can be read: modelquirks inspect {name}")
    return of_checkpoint(manifest, registry)


def _show(out: Terminal, found: Difference, *, everything: bool) -> None:
    for letter, title, about in zip(
        "AB", (found.before, found.after), found.summaries, strict=True
    ):
        out.say(f"{letter}  {title}", style="bold")
        out.say(about, indent=3)
    if found.groups:
        kept = found.groups if everything else found.groups[:_SHOWN]
        out.say()
        out.table(
            (Column("Difference"), Column("Tensors", "right"), Column("Family", folds=True)),
            [row for group in kept for row in _rows(group)],
        )
        say_left_out(out, len(found.groups) - len(kept), "family", "families")
    if found.facts:
        out.say()
        out.table(
            (Column("Besides"), Column("A", folds=True), Column("B", folds=True)), list(found.facts)
        )
    out.say()
    for note in found.notes:
        out.say(note, style="dim")
    out.say(verdict(found), style="bold green" if found.is_same else "bold")


def _rows(group: Group) -> Iterator[tuple[Cell, ...]]:
    """Yield the row of a family, and one for each way in which it differs."""
    first, *more = dict.fromkeys(filter(None, (group.before, group.after)))
    style = _STYLES.get(group.kinds[0], "yellow")
    kinds = list(group.kinds)
    told = [first, *(f"→ {name}" for name in more)]
    lines: list[Cell] = [*told, *(Styled(text, "dim", indent=2) for text in details(group))]
    for number, line in enumerate(lines):
        kind = Styled(kinds[number], style) if number < len(kinds) else ""
        yield kind, f"{group.n_tensors:,}" if number == 0 else "", line
