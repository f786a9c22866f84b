"""Reports: a manifest and the plugins, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from modelquirks.planner.cli.terminal import Cell, Column, Styled, Terminal
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.wording import counted, show_shape, summary
from modelquirks.quirks.family import Family, show

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.finding import Finding
    from modelquirks.quirks.registry import PluginInfo

__all__ = [
    "SCHEMA",
    "STYLES",
    "add_html",
    "say_left_out",
    "show_findings",
    "show_manifest",
    "show_plugins",
    "write_json",
]

SCHEMA = 1
"""Number of the layout of every JSON report; it changes only if a reader could break."""

_SHOWN_FAMILIES = 100
_SHOWN_FINDINGS = 20
_NARROW = 72
"""Columns below which families are listed without a table."""
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
"""Severity → style, the gravest first."""


def add_html(parser: argparse.ArgumentParser) -> None:
    """Declare ``--html``."""
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page to look at: one file, no network"
    )


def write_json(report: Mapping[str, Any], stream: TextIO) -> None:
    """Write *report* to *stream*, in the order of its keys and in ASCII."""
    stream.write(f"{json.dumps(report, indent=2)}\n")


def show_manifest(out: Terminal, manifest: Manifest, *, everything: bool) -> None:
    """Write what the checkpoint holds, by family, and what was noticed about it."""
    out.say(manifest.shown, style="bold")
    out.say(summary(manifest.to_json()), indent=2)
    families = list(manifest.families.values())
    if families:
        out.say()
        _show_families(out, manifest, families, everything=everything)
    show_findings(out, manifest.findings, everything=everything)


def show_findings(out: Terminal, findings: Iterable[Finding], *, everything: bool) -> None:
    """Write the findings, errors first."""
    ranked = sorted(findings, key=lambda finding: list(STYLES).index(finding.severity))
    if not ranked:
        return
    kept = ranked if everything else ranked[:_SHOWN_FINDINGS]
    out.say()
    out.table(
        (Column("Findings"), Column("", folds=True)),
        [(Styled(f.severity, STYLES[f.severity]), f"{f.message} [{f.code}]") for f in kept],
    )
    say_left_out(out, len(ranked) - len(kept), "finding")


def show_plugins(out: Terminal, plugins: Sequence[PluginInfo]) -> None:
    """Write every plugin with where it comes from and what became of it."""
    if not plugins:
        out.say("No plugin is installed.")
        return
    styles = {"loaded": "green", "failed": "bold red", "disabled": "dim"}
    out.table(
        (Column("Plugin"), Column("From"), Column("Status"), Column("Gives", folds=True)),
        [
            (
                info.name,
                f"{info.distribution} {info.version}".strip(),
                Styled(info.status, styles[info.status]),
                info.error or ", ".join((*info.records, *info.schemes)) or _hooks(info.hooks),
            )
            for info in plugins
        ],
    )


def _show_families(
    out: Terminal, manifest: Manifest, families: Sequence[Family], *, everything: bool
) -> None:
    """Write one line a family; of names alone, only how many there are of each."""
    kept = families if everything else families[:_SHOWN_FAMILIES]
    if out.width < _NARROW:
        _list_families(out, manifest, kept)
        say_left_out(out, len(families) - len(kept), "family", "families")
        return
    columns = [Column("Family", folds=True), Column("Tensors", "right")]
    rows: list[list[Cell]] = [[show(f.template), f"{len(f):,}"] for f in kept]
    if any(tensor.dtype is not None for tensor in manifest.tensors.values()):
        columns += [Column("Dtype"), Column("Shape"), Column("Size", "right")]
        for row, family in zip(rows, kept, strict=True):
            row += _facts(manifest, family.names)
    out.table(columns, rows)
    say_left_out(out, len(families) - len(kept), "family", "families")


def _list_families(out: Terminal, manifest: Manifest, families: Sequence[Family]) -> None:
    """Write each family with its facts in lines of their own: a table would be all name."""
    for family in families:
        facts = [counted(len(family), "tensor")]
        if any(manifest.tensors[name].dtype is not None for name in family.names):
            facts += _facts(manifest, family.names)
        out.say(show(family.template))
        out.say(", ".join(facts), indent=2, style="dim")


def _facts(manifest: Manifest, names: Sequence[str]) -> tuple[str, str, str]:
    """Return dtypes, shapes and bytes of the members of one family."""
    tensors = [manifest.tensors[name] for name in names]
    dtypes = sorted({tensor.dtype or "?" for tensor in tensors})
    shapes = {tensor.shape for tensor in tensors}
    sizes = [manifest.sizes[name] for name in names]
    known = [n for n in sizes if n is not None]
    shape = next(iter(shapes)) if len(shapes) == 1 else None
    return (
        ", ".join(dtypes) if len(dtypes) < 3 else counted(len(dtypes), "dtype"),
        counted(len(shapes), "shape") if len(shapes) > 1 else show_shape(shape),
        show_bytes(sum(known)) if len(known) == len(sizes) else "?",
    )


def _hooks(hooks: Sequence[str]) -> str:
    return ", ".join(hook.removeprefix("modelquirks_") for hook in hooks)


def say_left_out(out: Terminal, number: int, singular: str, plural: str = "") -> None:
    """Say how many were not listed, if any, and how to see them."""
    if number > 0:
        left_out = counted(number, f"more {singular}", f"more {plural or f'{singular}s'}")
        out.say(f"… and {left_out} (--all lists them)", style="dim")
