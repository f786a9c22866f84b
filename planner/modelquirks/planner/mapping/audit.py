"""``Audit``: both sides accounted for, every tensor in exactly one class, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from modelquirks.planner.finding import Finding

__all__ = ["Audit", "Entry", "ModelClass", "StoredClass", "Suggestion"]

ModelClass = Literal["matched", "made", "tied", "missing", "mismatched", "absent", "waived"]
"""Of a model tensor. ``matched``: stored under a name that is the model's or is only renamed.
``made``: computed from stored tensors. ``tied``: another copy serves it. ``absent``: missing as
a record expects. ``waived``: missing, and the user allows it."""

StoredClass = Literal["used", "extra", "unexpected", "duplicate"]
"""Of a checkpoint tensor. ``extra``: not wanted, as a record expects. ``duplicate``: another
stored tensor already serves the same model tensor."""


class Entry(NamedTuple):
    """One family (or part of one) of either side, in one class, for one reason."""

    kind: ModelClass | StoredClass
    template: str
    """For people: indices as ``*``."""
    names: tuple[str, ...]
    reason: str = ""
    rule: str = ""
    quirk: str = ""
    """Record whose rule decided, with its distribution; empty if none."""
    nearest: tuple[str, ...] = ()
    """Names of the other side that come closest."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {**self._asdict(), "names": list(self.names), "nearest": list(self.nearest)}


class Suggestion(NamedTuple):
    """A rule that would mend something; proposed, never applied unasked."""

    text: str
    """A sentence."""
    option: str
    """What to type: ``--alias 'module.**=**'``."""
    n_matched: int
    """Model tensors that would be accounted for in addition."""


@dataclass(frozen=True)
class Audit:
    """The account. ``model`` and ``stored`` hold every tensor of each side once."""

    model: tuple[Entry, ...]
    stored: tuple[Entry, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups that share one tensor once loaded; the owner is first."""
    unequal_ties: tuple[tuple[str, ...], ...] = ()
    """Declared groups of which several copies are stored: compared on loading."""
    suggestions: tuple[Suggestion, ...] = ()
    findings: tuple[Finding, ...] = ()

    def names(self, kind: ModelClass | StoredClass) -> tuple[str, ...]:
        """Return every tensor of one class."""
        entries = (*self.model, *self.stored)
        return tuple(name for e in entries if e.kind == kind for name in e.names)

    @property
    def missing(self) -> tuple[str, ...]:
        """Model tensors that nothing provides."""
        return self.names("missing")

    @property
    def mismatched(self) -> tuple[str, ...]:
        """Model tensors whose stored counterpart does not fit."""
        return self.names("mismatched")

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Checkpoint tensors that nobody wants."""
        return self.names("unexpected")

    @property
    def duplicates(self) -> tuple[str, ...]:
        """Checkpoint tensors that stand for a model tensor which another one serves."""
        return self.names("duplicate")

    @property
    def n_model(self) -> int:
        """Model tensors that a checkpoint has to provide."""
        return sum(len(entry.names) for entry in self.model)

    @property
    def n_accounted(self) -> int:
        """Model tensors that will arrive (matched, made or tied)."""
        return sum(len(e.names) for e in self.model if e.kind in ("matched", "made", "tied"))

    @property
    def coverage(self) -> float:
        """``n_accounted / n_model``; 1.0 for a model that needs nothing."""
        return self.n_accounted / self.n_model if self.n_model else 1.0

    def by_class(self) -> Mapping[str, int]:
        """Return the number of tensors in each class that occurs."""
        counts: dict[str, int] = {}
        for entry in (*self.model, *self.stored):
            counts[entry.kind] = counts.get(entry.kind, 0) + len(entry.names)
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return the ``audit`` object of the reports."""
        told = ("missing", "mismatched", "unexpected", "duplicate", "absent", "waived", "extra")
        return {
            "model_tensors": self.n_model,
            "accounted": self.n_accounted,
            "coverage": self.coverage,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "mismatched": list(self.mismatched),
            "duplicates": list(self.duplicates),
            "ties": [list(group) for group in self.ties],
            "unequal_ties": [list(group) for group in self.unequal_ties],
            "suggestions": [s._asdict() for s in self.suggestions],
            "classes": dict(self.by_class()),
            "details": [
                entry.to_json() for entry in (*self.model, *self.stored) if entry.kind in told
            ],
        }
