"""The report of an export, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelquirks.planner.cli.report import say_left_out, show_findings
from modelquirks.planner.cli.terminal import Column, Terminal
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.wording import counted, show_seconds, summary

if TYPE_CHECKING:
    from modelquirks.planner.export.exportreport import ExportReport

__all__ = ["show_exported"]

_SHOWN = 20


def show_exported(out: Terminal, report: ExportReport, *, everything: bool) -> None:
    """Write what was written where, how fast, within what memory, and that it was read back."""
    out.say(str(report.checkpoint["path"]), style="bold")
    out.say(summary(report.checkpoint), indent=2)
    out.say(f"exported to {report.out}", indent=2, wraps=False)
    out.say()
    rows = [(name, show_bytes(size)) for name, size in report.files.items()]
    kept = rows if everything else rows[:_SHOWN]
    out.table((Column("Written", folds=True), Column("Size", "right")), kept)
    say_left_out(out, len(rows) - len(kept), "file")
    out.say()
    for alias, name in report.ties.items():
        out.say(f"Tied: {alias} is stored as {name}")
    if report.copied:
        out.say(f"Copied: {', '.join(report.copied)}")
    show_findings(out, report.notes, everything=everything)
    out.say()
    steps = ", ".join(f"{k} {show_seconds(s)}" for k, s in report.seconds_by_step.items())
    peak = report.peak_bytes
    memory = "" if peak is None else f"; the process had {show_bytes(peak)} at most"
    out.say(f"Steps: {steps}{memory}.", style="dim")
    out.say(
        f"{counted(report.n_tensors, 'tensor')}, {show_bytes(report.n_bytes)} in "
        f"{counted(len(report.files), 'file')}: every byte was read back as it was written.",
        style="bold green",
    )
