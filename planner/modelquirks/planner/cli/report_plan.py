"""Reports of a plan and of what was loaded, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from modelquirks.planner.cli.report import STYLES, say_left_out, show_findings
from modelquirks.planner.cli.terminal import Cell, Column, Styled, Terminal
from modelquirks.planner.placement.memory import Device, show_bytes
from modelquirks.planner.placement.outlook import predicted
from modelquirks.planner.wording import compact_names, counted, show_seconds, summary

if TYPE_CHECKING:
    from modelquirks.planner.adapter.joint import AdapterFacts
    from modelquirks.planner.execution.execute import ExecutionReport
    from modelquirks.planner.mapping.audit import Audit, Entry, Suggestion
    from modelquirks.planner.placement.placement import Placement
    from modelquirks.planner.plan import Plan

__all__ = ["show_loaded", "show_plan", "show_verdict"]

_SHOWN_NAMES = 20
_SHOWN_ENTRIES = 100
_TROUBLE = ("missing", "mismatched", "duplicate", "unexpected")


def show_plan(out: Terminal, plan: Plan, *, everything: bool) -> None:
    """Write all of *plan* but the verdict."""
    out.say(plan.shown, style="bold")
    out.say(summary(plan.checkpoint), indent=2)
    if plan.model is not None:
        out.say(f"for {plan.model.source}, {counted(plan.model.tensors, 'tensor')}", indent=2)
    _show_quirks(out, plan)
    _show_adapter(out, plan.adapter)
    if plan.model is not None:
        _show_audit(out, plan.audit, everything=everything)
    _show_placement(out, plan.placement)
    show_findings(out, plan.all_findings, everything=everything)
    _show_suggestions(out, plan.audit.suggestions)


def show_verdict(out: Terminal, plan: Plan) -> None:
    """Write whether *plan* can be used, and if not, every reason."""
    out.say()
    if plan.ok:
        what = "can be used" if plan.model is not None else "shows nothing wrong so far"
        out.say(f"The plan {what}.", style="bold green")
        return
    out.say("The plan cannot be used:", style=STYLES["error"])
    for problem in plan.problems:
        out.say(f"- {problem}", indent=2)


def show_loaded(out: Terminal, loaded: ExecutionReport) -> None:
    """Write what was loaded where, how fast, and what was verified."""
    out.say()
    out.table(
        (Column("Loaded to"), Column("Size", "right")),
        [(device, show_bytes(n)) for device, n in loaded.bytes_by_device.items()],
    )
    out.say()
    out.say(
        f"{counted(loaded.n_tensors, 'tensor')}, {show_bytes(loaded.bytes_read)} read in "
        f"{loaded.seconds:.2f} s{_made(loaded)}."
    )
    if loaded.seconds_by_step:
        steps = ", ".join(f"{k} {show_seconds(s)}" for k, s in loaded.seconds_by_step.items())
        peak = loaded.peak_bytes
        memory = "" if peak is None else f"; the process had {show_bytes(peak)} at most"
        out.say(f"Steps: {steps}{memory}.", style="dim")
    show_findings(out, loaded.notes, everything=True)
    seen = loaded.verification
    ties = f"{counted(seen.n_ties, 'tie')} sharing storage, " if seen.n_ties else ""
    out.say(
        f"Verified: {counted(seen.n_tensors, 'name')} in place, {seen.n_offloaded:,} of them "
        f"offloaded, {ties}{show_bytes(seen.sampled_bytes)} equal to the files."
        if seen.ok
        else "Verification failed: " + "; ".join(seen.problems),
        style="bold green" if seen.ok else STYLES["error"],
    )


def _made(loaded: ExecutionReport) -> str:
    """Return how much was made in memory, how fast, and what that took beside the result."""
    if not loaded.bytes_made:
        return ", nothing made: all are views of the files"
    text = f", {show_bytes(loaded.bytes_made)} made"
    if seconds := loaded.seconds_by_step.get("make"):
        text += f" at {show_bytes(int(loaded.bytes_made / seconds))}/s"
    return f"{text} within {show_bytes(loaded.work_bytes)} beside them"


def _show_quirks(out: Terminal, plan: Plan) -> None:
    if not plan.quirks:
        return
    out.say()
    out.say("Quirks", style="bold")
    for quirk in plan.quirks:
        origin = f"{quirk.distribution} {quirk.version}".strip()
        out.say(f"{quirk.name}{f' ({origin})' if origin else ''}: {quirk.why}", indent=2)


def _show_adapter(out: Terminal, adapter: AdapterFacts | None) -> None:
    """Write what is put on the base, and which of its weights that changes."""
    if adapter is None:
        return
    out.say()
    how = "merged into the weights" if adapter.merged else "beside the weights"
    whose = f", trained on {adapter.base}" if adapter.base else ""
    out.say(f"Adapter: {adapter.path}", style="bold")
    out.say(f"{adapter.method}, {counted(adapter.tensors, 'tensor')}{whose}, {how}", indent=2)
    out.table(
        (Column("Changed"), Column("Weights", "right"), Column("How", folds=True)),
        [(one.family, f"{one.weights:,}", one.change) for one in adapter.changes],
    )


def _show_audit(out: Terminal, audit: Audit, *, everything: bool) -> None:
    entries = [e for e in (*audit.model, *audit.stored) if e.kind != "used"]
    kept = entries if everything else entries[:_SHOWN_ENTRIES]
    out.say()
    out.table(
        (Column("Audit"), Column("Tensors", "right"), Column("Family", folds=True)),
        [row for entry in kept for row in _entry_rows(entry)],
    )
    say_left_out(out, len(entries) - len(kept), "family", "families")
    out.say()
    share = f"{audit.n_accounted:,} of {counted(audit.n_model, 'model tensor')} accounted for"
    n_stored = sum(len(entry.names) for entry in audit.stored)
    used = f"{len(audit.names('used')):,} of {counted(n_stored, 'stored tensor')} used"
    out.say(f"{share} ({audit.coverage:.1%}), {used}.", style="bold")
    _show_ties(out, audit)
    for kind in _TROUBLE:
        _show_trouble(out, kind, [e for e in entries if e.kind == kind], everything=everything)


def _entry_rows(entry: Entry) -> Iterator[tuple[Cell, ...]]:
    """Yield the row of the family, and one for how it came to be there if that needs saying."""
    style = STYLES["error"] if entry.kind in _TROUBLE[:3] else ""
    yield Styled(entry.kind, style), f"{len(entry.names):,}", entry.template
    how = f"by {entry.rule}" if entry.rule else ""
    if entry.quirk:
        how = f"{how} of {entry.quirk}" if how else f"see {entry.quirk}"
    if not how and entry.kind not in _TROUBLE:
        how = entry.reason
    if how:
        yield "", "", Styled(how, "dim", indent=2)


def _show_trouble(out: Terminal, kind: str, entries: Sequence[Entry], *, everything: bool) -> None:
    """Write the first names of one class, each family with its reason and what comes closest."""
    if not entries:
        return
    number = sum(len(entry.names) for entry in entries)
    room = number if everything else _SHOWN_NAMES
    out.say()
    out.say(f"{kind.capitalize()}: {counted(number, 'tensor')}", style="bold")
    for explained, alike in groupby(entries, key=_explained):
        names = [name for entry in alike for name in entry.names][:room]
        if not names:
            break
        for name in names:
            out.say(name, indent=2)
        room -= len(names)
        out.say(explained, indent=4, hanging=0, style="dim")
    say_left_out(out, number - (number if everything else _SHOWN_NAMES), "tensor")


def _explained(entry: Entry) -> str:
    nearest = f"nearest: {', '.join(entry.nearest)}" if entry.nearest else ""
    return "; ".join(part for part in (entry.reason, nearest) if part) or "no reason is known"


def _show_ties(out: Terminal, audit: Audit) -> None:
    compared = [set(names) for names in audit.unequal_ties]
    for names in audit.ties:
        how = " (several copies stored, compared on loading)" if set(names) in compared else ""
        out.say(f"Tied: {' = '.join(names)}{how}")


def _show_suggestions(out: Terminal, suggestions: Sequence[Suggestion]) -> None:
    """Write what would mend something, each option on a line of its own, to be copied."""
    for suggestion in suggestions:
        out.say()
        text = suggestion.text.removesuffix(suggestion.option)
        out.say(f"Suggestion: {text.rstrip()}", style="cyan")
        out.say(suggestion.option, indent=2, style="cyan", wraps=False)


def _show_placement(out: Terminal, placement: Placement) -> None:
    if placement.memory:
        out.say()
        out.table(
            (
                Column("Memory"),
                Column("Used", "right"),
                Column("Of", "right"),
                Column("Full", "right"),
            ),
            [
                (
                    str(device),
                    show_bytes(memory.used_bytes),
                    show_bytes(memory.capacity_bytes),
                    _share(memory.used_bytes, memory.capacity_bytes),
                )
                for device, memory in placement.memory.items()
            ],
        )
    for reserve in placement.reserves:
        size = show_bytes(reserve.n_bytes)
        out.say(f"{size} on {reserve.device} for {reserve.what}: {reserve.formula}", style="dim")
    if placement.device_map:
        out.say()
        out.table(
            (Column("Device"), Column("Modules", folds=True)),
            [
                (str(device), ", ".join(compact_names(names)))
                for device, names in _by_device(placement.device_map).items()
            ],
        )
    if placement.prediction is not None:
        out.say()
        out.say(predicted(placement.prediction))


def _share(used: int, capacity: int | None) -> str:
    return "" if not capacity else f"{used / capacity:.0%}"


def _by_device(device_map: Mapping[str, Device]) -> Mapping[Device, list[str]]:
    by_device: dict[Device, list[str]] = {}
    for name, device in device_map.items():
        by_device.setdefault(device, []).append(name)
    return by_device
