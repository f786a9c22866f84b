"""Requests: what the user asked for by name and what came of it, said where it is nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from modelquirks.planner.finding import Finding
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import Alias
from modelquirks.quirks.resolve import Resolution

__all__ = ["idle_aliases", "idle_requests"]


def idle_aliases(aliases: Iterable[Alias], resolution: Resolution) -> Iterator[Finding]:
    """Yield a warning for each alias of the user that renames nothing."""
    used = {step.rule for piece in resolution.renamed for step in piece.steps}
    for alias in aliases:
        if f"{alias.stored} → {alias.model}" not in used:
            text = f"alias {f'{alias.stored}={alias.model}'!r} fits no name in the checkpoint"
            yield Finding("alias-unused", "warning", text)


def idle_requests(
    skeleton: Skeleton | None,
    *,
    ties: Sequence[str | Sequence[str]],
    allow_missing: Sequence[str],
    min_coverage: float | None,
) -> Iterator[Finding]:
    """Yield a warning for each waiver that allows nothing, and for what needs a model."""
    if skeleton is None:
        asked = {"ties": ties, "what may be missing": allow_missing, "coverage": min_coverage}
        if idle := [what for what, given in asked.items() if given]:
            text = f"{' and '.join(idle)} mean nothing without a model: give one"
            yield Finding("needs-model", "warning", text)
        return
    for pattern in allow_missing:
        if not any(Pattern(pattern).match(name) for name in skeleton.wanted):
            text = f"{pattern!r} may be missing, but the model has no tensor of such a name"
            yield Finding("waiver-unused", "warning", text)
