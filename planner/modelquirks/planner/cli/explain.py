"""``modelquirks explain``: why something is where it is, and what other memory would change."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modelquirks.planner.cli.adapter import add_adapter
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.hub import add_hub, hub_options
from modelquirks.planner.cli.model import add_model
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.placing import add_placing, checked
from modelquirks.planner.cli.plan import add_naming, planned
from modelquirks.planner.cli.plugins import add_no_plugin
from modelquirks.planner.cli.report import write_json
from modelquirks.planner.cli.saved import is_plan
from modelquirks.planner.cli.terminal import Terminal
from modelquirks.planner.explain import Alternative, Change, Explanation, explain, ranges, what_if
from modelquirks.planner.placement.memory import parse_max_memory, show_bytes
from modelquirks.planner.plan import Plan
from modelquirks.planner.wording import compact_names, show_seconds

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        metavar="PLAN|CHECKPOINT",
        help="a plan that was saved, or a checkpoint to plan for with the options below",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="modules or tensors")
    parser.add_argument(
        "--what-if",
        metavar="DEVICE=SIZE,...",
        type=checked(parse_max_memory),
        help="say what would change if these devices had so much, for example 0=20GiB",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    add_model(parser)
    add_adapter(parser)
    add_hub(parser)
    add_no_plugin(parser)
    add_opening(parser)
    add_placing(parser)
    add_naming(parser)


def run(args: argparse.Namespace) -> Exit:
    """Explain each name, then the change."""
    plan = _plan(args)
    told = [explain(plan, name) for name in args.names]
    change = None if args.what_if is None else what_if(plan.placement, args.what_if)
    if args.json:
        write_json(
            {
                "names": [explanation.to_json() for explanation in told],
                "what_if": None if change is None else change._asdict(),
            },
            sys.stdout,
        )
        return Exit.USABLE
    out = Terminal(sys.stdout)
    for explanation in told:
        _show(out, explanation)
    if change is not None:
        _show_change(out, change)
    return Exit.USABLE


def _plan(args: argparse.Namespace) -> Plan:
    """Return the plan of a file that is one, else a new one; nothing is loaded."""
    path = Path(args.checkpoint)
    if is_plan(path):
        if told := opening_options(args).told() or hub_options(args).told():
            raise CallError(f"{args.checkpoint!r} is a plan, made without regard to {told}")
        return Plan.load(path)
    args.dry_run = True
    return planned(args)


def _show(out: Terminal, told: Explanation) -> None:
    size = "" if told.n_bytes is None else f", {show_bytes(told.n_bytes)} in memory"
    out.say(f"{told.name or '(all)'}{size}", style="bold")
    for entry in told.families:
        how = f" by {entry.rule}" if entry.rule else f": {entry.reason}" if entry.reason else ""
        quirk = f" of {entry.quirk}" if entry.quirk else ""
        out.say(f"{entry.kind} {len(entry.names):,} x {entry.template}{how}{quirk}", indent=2)
    for names in told.made_from.values():
        more = f" … and {len(names) - 10} more" if len(names) > 10 else ""
        out.say(f"made from {', '.join(names[:10])}{more}", indent=2)
    if told.shares:
        out.say(f"shares the tensor of {told.shares}", indent=2)
    if told.device is not None:
        decided = "" if told.key == told.name else f" (as part of {told.key or 'the whole model'})"
        out.say(f"on {told.device}{decided}: {told.reason}", indent=2)
    for alternative in told.alternatives:
        out.say(_elsewhere(alternative, told.seconds), indent=2)


def _elsewhere(other: Alternative, seconds: float | None) -> str:
    if other.seconds is None:
        return f"not on {other.device}: {other.reason}"
    more = "" if seconds is None else f", {_signed(other.seconds - seconds)}"
    return f"on {other.device} instead: {show_seconds(other.seconds)} a token{more}"


def _show_change(out: Terminal, change: Change) -> None:
    for reason in change.findings:
        out.say(f"Nothing fits then: {reason}")
    if change.before is not None and change.after is not None:
        before, after = change.before, change.after
        gain = _signed(after - before)
        out.say(f"{show_seconds(before)} a token now, {show_seconds(after)} then ({gain}).")
    if change.after is not None and not change.moved:
        out.say("Nothing moves.")
    for (was, becomes), names in ranges(change.moved) if change.after is not None else ():
        out.say(f"from {was} to {becomes}: {', '.join(compact_names(names))}", indent=2)


def _signed(seconds: float) -> str:
    if abs(seconds) < 1e-9:
        return "no more"
    if abs(seconds) < 1e-5:
        return f"{show_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'}"
    sign = "-" if seconds < 0 else "+"
    return f"{sign}{show_seconds(abs(seconds))}"
