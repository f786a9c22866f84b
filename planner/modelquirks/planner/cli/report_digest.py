"""The reports of digests, for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.cli.report import say_left_out, show_findings
from modelquirks.planner.cli.terminal import Column, Styled, Terminal
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.wording import counted, summary

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.digest.comparison import Comparison
    from modelquirks.planner.digest.digest import Digest

__all__ = ["show_compared", "show_written"]

_SHOWN = 100
_STYLES = {"changed": "bold red", "unreadable": "bold red", "missing": "red", "extra": "yellow"}


def show_written(
    out: Terminal, manifest: Manifest, digest: Digest, n_bytes: int, path: Path
) -> None:
    """Write what was hashed, and the one digest of all of it."""
    _show_checkpoint(out, manifest)
    out.say()
    out.say(
        f"{counted(len(digest.tensors), 'tensor')}, {show_bytes(n_bytes)}, written to {path}",
        style="bold green",
    )
    out.say(f"SHA-256 of all: {digest.sha256}", wraps=False)


def show_compared(
    out: Terminal, manifest: Manifest, found: Comparison, path: str, *, everything: bool
) -> None:
    """Write which tensors are not as the digest says."""
    _show_checkpoint(out, manifest)
    errors = [finding for finding in manifest.findings if finding.severity == "error"]
    show_findings(out, errors, everything=everything)
    out.say()
    if found.changes:
        kept = found.changes if everything else found.changes[:_SHOWN]
        out.table(
            (Column("Difference"), Column("Tensor", folds=True), Column("What", folds=True)),
            [(Styled(c.kind, _STYLES[c.kind]), c.name, c.why) for c in kept],
        )
        say_left_out(out, len(found.changes) - len(kept), "tensor")
        out.say()
    same = (
        f"{counted(found.n_same, 'tensor')} {'is' if found.n_same == 1 else 'are'} as {path} says"
    )
    if found.is_same:
        out.say(f"All {same}, byte by byte: {show_bytes(found.n_bytes)}.", style="bold green")
        return
    counts = ", ".join(f"{number:,} {kind}" for kind, number in found.counts.items())
    out.say(f"{counts}; {same}.", style="bold")


def _show_checkpoint(out: Terminal, manifest: Manifest) -> None:
    out.say(manifest.shown, style="bold")
    out.say(summary(manifest.to_json()), indent=2)
