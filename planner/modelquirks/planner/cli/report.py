"""Reports: a manifest and the plugins, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.cli.terminal import Cell, Column, Styled, Terminal
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.quirks.family import Family, show

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.finding import Finding
    from modelquirks.quirks.registry import PluginInfo

__all__ = [
    "SCHEMA",
    "STYLES",
    "counted",
    "say_left_out",
    "show_findings",
    "show_manifest",
    "show_plugins",
    "summary",
    "write_json",
]

SCHEMA = 1
"""Number of the layout of every JSON report; it changes only if a reader could break."""

_SHOWN_FAMILIES = 100
_SHOWN_FINDINGS = 20
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
"""Severity → style, the gravest first."""


def write_json(report: Mapping[str, Any], stream: TextIO) -> None:
    """Write *report* to *stream*, in the order of its keys and in ASCII."""
    stream.write(f"{json.dumps(report, indent=2)}\n")


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "family", "families"), counted(35743, "tensor")
    ('1 family', '35,743 tensors')
    """
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def summary(checkpoint: Mapping[str, Any]) -> str:
    """Return what the checkpoint is, in half a line, from the object of the JSON report."""
    parts = [
        str(checkpoint["format"]),
        counted(checkpoint["tensors"], "tensor"),
        counted(checkpoint["families"], "family", "families"),
        counted(checkpoint["shards"], "file"),
    ]
    if checkpoint["total_bytes"] is not None:
        parts.append(show_bytes(checkpoint["total_bytes"]))
    if chosen := OpenOptions(**checkpoint.get("chosen", {})).told():
        parts.append(chosen)
    return ", ".join(parts)


def show_manifest(out: Terminal, manifest: Manifest, *, everything: bool) -> None:
    """Write what the checkpoint holds, by family, and what was noticed about it."""
    out.say(str(manifest.path), style="bold")
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
    columns = [Column("Family", folds=True), Column("Tensors", "right")]
    rows: list[list[Cell]] = [[show(f.template), f"{len(f):,}"] for f in kept]
    if any(tensor.dtype is not None for tensor in manifest.tensors.values()):
        columns += [Column("Dtype"), Column("Shape"), Column("Size", "right")]
        for row, family in zip(rows, kept, strict=True):
            row += _facts(manifest, family.names)
    out.table(columns, rows)
    say_left_out(out, len(families) - len(kept), "family", "families")


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
        counted(len(shapes), "shape") if len(shapes) > 1 else _shape(shape),
        show_bytes(sum(known)) if len(known) == len(sizes) else "?",
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "?"
    return f"[{', '.join(map(str, shape))}]"


def _hooks(hooks: Sequence[str]) -> str:
    return ", ".join(hook.removeprefix("modelquirks_") for hook in hooks)


def say_left_out(out: Terminal, number: int, singular: str, plural: str = "") -> None:
    """Say how many were not listed, if any, and how to see them."""
    if number > 0:
        left_out = counted(number, f"more {singular}", f"more {plural or f'{singular}s'}")
        out.say(f"… and {left_out} (--all lists them)", style="dim")
