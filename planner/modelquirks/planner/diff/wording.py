"""What a difference says, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from modelquirks.planner.diff.compare import Difference, Group
from modelquirks.planner.wording import counted

__all__ = ["details", "verdict"]


def verdict(found: Difference) -> str:
    """Return whether the sides are the same, and else how many tensors differ in which ways."""
    if found.is_same and found.kind == "checkpoint":
        told = counted(found.n_same, "tensor")
        what = "names" if found.n_unknown else "names, shapes and dtypes"
        return f"No difference: {told} with the same {what}."
    if found.is_same:
        return f"No difference: {counted(found.n_same, 'entry', 'entries')} planned alike."
    counts = ", ".join(f"{n:,} {kind}" for kind, n in found.counts().items())
    return f"They differ: {counts}; {found.n_same:,} are the same."


def details(group: Group) -> Iterator[str]:
    """Yield how the tensors of a group differ."""
    if group.certain_by:
        yield f"renamed: {group.certain_by} says that both mean one tensor"
    for kind, before, after in group.changes:
        yield f"{kind}: {before} → {after}"
    if group.candidates:
        other = "now" if group.before else "before"
        names = ", ".join(group.candidates)
        yield f"perhaps {other} {names}: same indices, shapes and dtypes, but nothing says so"
