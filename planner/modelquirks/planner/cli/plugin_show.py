"""``modelquirks plugins show``: a plugin, a package or a record, with all that it says."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.report import SCHEMA, write_json
from modelquirks.planner.cli.terminal import Column, Styled, Terminal
from modelquirks.planner.finding import shown
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.mapping.uses import Rule, rules_of
from modelquirks.quirks.claims import Claim, claims
from modelquirks.quirks.record_json import match_json, record_json

if TYPE_CHECKING:
    import argparse

    from modelquirks.quirks.registry import PluginInfo, Registered, Registry

__all__ = ["add_arguments", "run", "show_rules"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help="of a plugin, a distribution or a record")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")


def run(args: argparse.Namespace, registry: Registry) -> Exit:
    """Show it; UNUSABLE if a plugin of that name failed."""
    infos, records = _found(args.name, registry)
    about = {r.record.name for r in records}
    told = [claim for claim in claims(registry.records) if about.intersection(claim.records)]
    if args.json:
        report = {
            "schema": SCHEMA,
            "plugins": [info.to_json() for info in infos],
            "records": [_record_json(one) for one in records],
            "claims": [claim._asdict() for claim in told],
        }
        write_json(report, sys.stdout)
    else:
        out = Terminal(sys.stdout)
        for info in infos:
            _show_plugin(out, info)
        for one in records:
            _show_record(out, one, told)
    return Exit.UNUSABLE if any(info.status == "failed" for info in infos) else Exit.USABLE


def _found(name: str, registry: Registry) -> tuple[Sequence[PluginInfo], Sequence[Registered]]:
    """Return the plugins that *name* means and the records to be shown with them."""
    one = [r for r in registry.records if r.record.name == name]
    infos = [info for info in registry.plugins if name in (info.name, info.distribution)]
    if not one and not infos:
        known = {r.record.name for r in registry.records}
        known |= {text for i in registry.plugins for text in (i.name, i.distribution) if text}
        near = closest(name, sorted(known))
        hint = f"; the nearest names are {shown(near)}" if near else ""
        raise CallError(
            f"there is no plugin, distribution or record {name!r}{hint}. "
            "`modelquirks plugins list` shows those that there are"
        )
    if infos:
        origins = {info.origin for info in infos}
        return infos, [r for r in registry.records if r.origin in origins]
    return [i for i in registry.plugins if i.origin == one[0].origin], one


def _record_json(one: Registered) -> dict[str, Any]:
    origin = one.origin
    return {
        **record_json(one.record),
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
    }


def _show_plugin(out: Terminal, info: PluginInfo) -> None:
    out.say(f"plugin {info.origin}", style="bold")
    out.say(f"module {info.module}, {info.status}", indent=2)
    if info.error:
        out.say(info.error, indent=2, style="bold red")
    if info.hooks:
        out.say(f"hooks {', '.join(info.hooks)}", indent=2)
    if info.schemes:
        out.say(f"makes plain weights of {', '.join(info.schemes)}", indent=2)


def _show_record(out: Terminal, one: Registered, told: Iterable[Claim]) -> None:
    record = one.record
    out.say()
    out.say(f"record {record.name}, {record.role}", style="bold")
    if record.why:
        out.say(record.why, indent=2, hanging=0)
    if record.url:
        out.say(record.url, indent=2, wraps=False)
    out.say(f"applies if {' and '.join(_asked(one))}", indent=2)
    for claim in told:
        if record.name in claim.records:
            out.say(claim.text, indent=2, style="" if claim.kind == "override" else "yellow")
    show_rules(out, list(rules_of(record)))


_ASKED = {
    "architectures": "architecture is",
    "model_types": "model_type is",
    "quant_methods": "quant_method is",
    "containers": "the container is",
    "any_of": "a name fits",
}


def _asked(one: Registered) -> Iterable[str]:
    """Yield each condition of the match of a record, as a phrase."""
    for field, values in match_json(one.record).items():
        if field in _ASKED:
            yield f"{_ASKED[field]} {' or '.join(map(repr, values))}"
        else:
            verb = "a name fits" if field == "all_of" else "no name fits"
            yield from (f"{verb} {value!r}" for value in values)


def show_rules(out: Terminal, rules: Sequence[Rule], *, indent: int = 2) -> None:
    """Write the rules, each kind named once; with how many tensors each is about, if known."""
    if not rules:
        return
    counted = any(rule.n_tensors is not None for rule in rules)
    columns = [Column(""), *([Column("", "right")] if counted else []), Column("", folds=True)]
    rows: list[list[Styled]] = []
    for kind, several in groupby(rules, key=lambda rule: rule.kind):
        for number, rule in enumerate(several):
            idle = "yellow" if rule.n_tensors == 0 else ""
            told = "" if rule.n_tensors is None else f"{rule.n_tensors:,}"
            middle = [Styled(told, idle)] if counted else []
            rows.append(
                [Styled("" if number else kind, "dim", indent), *middle, Styled(rule.text, idle)]
            )
    out.table(columns, rows)
