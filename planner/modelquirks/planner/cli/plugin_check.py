"""``modelquirks plugins check``: are the plugins sound, and which records apply to a checkpoint.

With a checkpoint, every record is told with why it applies or what keeps it from that, and for
those that apply how many tensors each of their rules is about. Headers are all that is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.hub import CHECKPOINT_HELP
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.plugin_show import show_rules
from modelquirks.planner.cli.report import SCHEMA, show_findings, write_json
from modelquirks.planner.cli.terminal import Terminal, progress
from modelquirks.planner.finding import Finding, Severity, shown
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.mapping.offers import Offers, find_offers
from modelquirks.planner.mapping.uses import Rule, uses
from modelquirks.planner.opening import open_checkpoint
from modelquirks.planner.wording import counted, summary
from modelquirks.quirks.claims import claims
from modelquirks.quirks.family import show
from modelquirks.quirks.invariants import invariant_faults
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import TensorType
from modelquirks.quirks.record import Match
from modelquirks.quirks.resolve import Facts, Resolution, first_name, resolve
from modelquirks.quirks.verdict import Verdict, verdicts

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.quirks.registry import Registered, Registry

__all__ = ["add_arguments", "run"]

_OURS = "modelquirks"


class _Told(NamedTuple):
    """One record, and what is to be said of it."""

    verdict: Verdict
    rules: tuple[Rule, ...]
    near: tuple[str, ...]
    """For each pattern of its match that no name fits, the nearest names."""

    @property
    def one(self) -> Registered:
        return self.verdict.registered

    def to_json(self) -> dict[str, Any]:
        record, origin = self.one.record, self.one.origin
        return {
            "name": record.name,
            "role": record.role,
            "plugin": origin.plugin,
            "distribution": origin.distribution,
            "version": origin.version,
            "applies": self.verdict.applies,
            "why": list(self.verdict.why),
            "fits": list(self.verdict.fits),
            "near": list(self.near),
            "rules": [rule._asdict() for rule in self.rules],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", help=CHECKPOINT_HELP)
    parser.add_argument(
        "--record", metavar="NAME", action="append", default=[], help="only this one (repeatable)"
    )
    parser.add_argument("--all", action="store_true", help="also what is nothing special")
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    add_opening(parser)


def run(args: argparse.Namespace, registry: Registry) -> Exit:
    """Check the plugins, or what they have to say of a checkpoint.

    UNUSABLE if something is wrong with the plugins, if records are in conflict over the checkpoint,
    or if one that was asked for does not apply.
    """
    known = {r.record.name for r in registry.records}
    if unknown := [name for name in args.record if name not in known]:
        near = [other for name in unknown for other in closest(name, sorted(known))]
        hint = f"; the nearest are {shown(near)}" if near else ""
        raise CallError(f"there is no record {shown(unknown)}{hint}")
    if args.checkpoint is None:
        return _check_registry(args, registry)
    with progress("Reading headers"):
        manifest = open_checkpoint(args.checkpoint, lambda: registry, opening_options(args))
    return _check_checkpoint(args, registry, manifest)


def _check_registry(args: argparse.Namespace, registry: Registry) -> Exit:
    records = [r for r in registry.records if not args.record or r.record.name in args.record]
    about = {r.record.name for r in records}
    findings = [Finding("plugin-problem", "error", problem) for problem in registry.problems]
    findings += _faults(records)
    for kind, text, everything in _claimed(registry.records, about):
        if args.all or not everything:
            severity: Severity = "info" if kind == "override" else "warning"
            findings.append(Finding(f"record-{kind}", severity, text))
    if args.json:
        report = {"schema": SCHEMA, "findings": [finding.to_json() for finding in findings]}
        write_json(report, sys.stdout)
    else:
        out = Terminal(sys.stdout)
        packages = {info.distribution for info in registry.plugins}
        out.say(
            f"{counted(len(records), 'record')} from {counted(len(registry.plugins), 'plugin')} "
            f"of {counted(len(packages), 'distribution')} looked at"
            + ("." if findings else ": nothing to say.")
        )
        show_findings(out, findings, everything=args.all)
    grave = any(finding.severity != "info" for finding in findings)
    return Exit.UNUSABLE if grave else Exit.USABLE


def _faults(records: Iterable[Registered]) -> Iterator[Finding]:
    for one in records:
        for fault in invariant_faults(one.record):
            text = f"{one.record.name!r} from {one.origin}: {fault}"
            yield Finding("record-fault", "error", text)


def _claimed(records: Sequence[Registered], about: set[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield kind and text of each claim, and whether it is only between records of ours."""
    origins = {r.record.name: r.origin.distribution for r in records}
    for claim in claims(records):
        if about.intersection(claim.records):
            ours = {origins.get(name, "") for name in claim.records} == {_OURS}
            yield claim.kind, claim.text, ours and claim.kind == "override"


def _check_checkpoint(args: argparse.Namespace, registry: Registry, manifest: Manifest) -> Exit:
    facts = Facts(manifest.config, tuple(manifest.families.values()), manifest.container)
    resolution = resolve(registry.records, facts)
    found = verdicts(registry.records, resolution, facts)
    offers = _offers(registry, resolution, manifest)
    told = [_told(v, resolution, offers) for v in found if _wanted(v, args)]
    if args.json:
        report = {
            "schema": SCHEMA,
            "checkpoint": manifest.to_json(),
            "records": [one.to_json() for one in told],
            "conflicts": list(resolution.conflicts),
        }
        write_json(report, sys.stdout)
    else:
        out = Terminal(sys.stdout)
        out.say(str(manifest.path), style="bold")
        out.say(summary(manifest.to_json()), indent=2)
        everything = args.all or bool(args.record)
        _show(out, told, len(found) - len(told), everything=everything)
        for conflict in resolution.conflicts:
            out.say()
            out.say(f"Conflict: {conflict}", style="bold red")
    refused = args.record and not all(one.verdict.applies for one in told)
    bad = refused or resolution.conflicts or registry.problems
    return Exit.UNUSABLE if bad else Exit.USABLE


def _wanted(verdict: Verdict, args: argparse.Namespace) -> bool:
    """Tell whether a record is worth a line: of ours only those that apply, or nearly."""
    if args.record:
        return verdict.registered.record.name in args.record
    foreign = verdict.registered.origin.distribution != _OURS
    return args.all or verdict.applies or foreign or verdict.is_near


def _offers(registry: Registry, resolution: Resolution, manifest: Manifest) -> Offers:
    """Return what the checkpoint offers to no model in particular."""

    def types(name: str) -> TensorType:
        return TensorType(manifest.tensors[name].dtype, manifest.tensors[name].shape)

    return find_offers(resolution, manifest.config, (), registry.schemes, types)


def _told(verdict: Verdict, resolution: Resolution, offers: Offers) -> _Told:
    record = verdict.registered.record
    if verdict.applies:
        return _Told(verdict, tuple(uses(record, resolution, offers)), ())
    return _Told(verdict, (), tuple(_near(record.match, resolution)))


def _near(match: Match, resolution: Resolution) -> Iterator[str]:
    """Yield the nearest names for what no name fits, at most three patterns of a match."""
    texts = (*match.any_of, *match.all_of)
    lacking = [t for t in texts if first_name(Pattern(t), resolution.unwrapped) is None]
    names = [show(piece.name) for piece in resolution.unwrapped]
    for text in lacking[:3]:
        if near := closest(text, names):
            yield f"nearest to {text!r}: {shown(near)}"


def _show(out: Terminal, told: Sequence[_Told], n_left_out: int, *, everything: bool) -> None:
    for title, applies in (("Applies", True), ("Does not apply", False)):
        some = [one for one in told if one.verdict.applies is applies]
        if some:
            out.say()
            out.say(title, style="bold")
        for one in some:
            _show_one(out, one, everything=everything)
    if n_left_out:
        out.say()
        records = counted(n_left_out, "more record", "more records")
        out.say(f"… and {records} that ask for something else (--all lists them)", style="dim")


def _show_one(out: Terminal, one: _Told, *, everything: bool) -> None:
    record, verdict = one.one.record, one.verdict
    out.say(f"{record.name} ({record.role}) from {one.one.origin}", indent=2)
    for reason in verdict.why:
        out.say(reason, indent=4, style="" if verdict.applies else "yellow")
    for text in one.near:
        out.say(text, indent=4, style="dim")
    if verdict.fits:
        out.say(f"but this fits: {', '.join(verdict.fits)}", indent=4, style="dim")
    show_rules(out, _shown_rules(one, everything=everything), indent=4)


def _shown_rules(one: _Told, *, everything: bool) -> Sequence[Rule]:
    """Return the rules that a checkpoint can tell about; of ours not those that are idle."""
    foreign = one.one.origin.distribution != _OURS
    told = [rule for rule in one.rules if rule.n_tensors is not None]
    return [rule for rule in told if everything or foreign or rule.n_tensors]
