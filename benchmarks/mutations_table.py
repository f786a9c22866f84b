"""The table of kinds and outcomes, for a terminal and for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mutations_judge import OUTCOMES
from mutations_kinds import KINDS

__all__ = ["as_markdown", "digest_told", "print_table"]

TWO = "two at once"
Row = Mapping[str, Any]
"""A case: ``kinds``, ``subject``, ``outcome``, and ``digest`` of one that is unseen."""


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print what came of each kind of damage."""
    from rich.console import Console
    from rich.table import Table

    counts = _by_kind(rows)
    table = Table(title=title)
    table.add_column("damage")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    for name, found in counts.items():
        table.add_row(_marked(name), *(str(found[o] or "") for o in OUTCOMES))
    table.add_section()
    total = _total(counts.values())
    table.add_row("all", *(str(total[o]) for o in OUTCOMES))
    console = Console(width=120)
    console.print(table)
    console.print(
        f"* declared beforehand: no header shows it. {digest_told(rows)}", highlight=False
    )


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the table by group of damage, with all kinds of a group named."""
    groups: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        groups.setdefault(kind.group, []).append(name)
    counts = _by_kind(rows)
    lines = [f"| damage | {' | '.join(OUTCOMES)} |", f"|---|{'--:|' * len(OUTCOMES)}"]
    for group, names in groups.items():
        found = _total(counts[name] for name in names if name in counts)
        lines.append(f"| **{group}** | {' | '.join(f'**{found[o]}**' for o in OUTCOMES)} |")
        for name in names:
            cells = (str(counts.get(name, Counter())[o] or "") for o in OUTCOMES)
            lines.append(f"| {_marked(name)} | {' | '.join(cells)} |")
    for label, found in ((TWO, counts.get(TWO, Counter())), ("all", _total(counts.values()))):
        lines.append(f"| **{label}** | {' | '.join(f'**{found[o]}**' for o in OUTCOMES)} |")
    return "\n".join(lines) + "\n"


def digest_told(rows: Iterable[Row]) -> str:
    """Say how many of the unseen a digest of the right checkpoint tells."""
    seen = Counter(row["digest"] for row in rows if row["outcome"] == "unseen")
    return (
        f"Of {seen.total()} unseen, a digest of the right checkpoint tells {seen[True]} and not "
        f"{seen[False]}; {seen[None]} are in settings, which are no tensors."
    )


def _by_kind(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {name: Counter() for name in (*KINDS, TWO)}
    for row in rows:
        key = row["kinds"][0] if len(row["kinds"]) == 1 else TWO
        counts[key][row["outcome"]] += 1
    return {name: found for name, found in counts.items() if found}


def _total(counts: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counts, Counter[str]())


def _marked(name: str) -> str:
    return f"{name} *" if name in KINDS and KINDS[name].unseen else name
