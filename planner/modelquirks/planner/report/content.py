"""``Report``: what a report for people holds, as plain data; how it looks is not its business."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Area", "Fact", "FamilyRow", "Note", "NoteSeverity", "Place", "Report"]

NoteSeverity = Literal["error", "warning", "info", "ok"]
"""As of findings; ``ok`` is what an audit says of tensors with which all is well."""


class Fact(NamedTuple):
    """One line of the summary."""

    label: str
    text: str


@dataclass(frozen=True)
class FamilyRow:
    """The tensors of one family that lie in one area."""

    template: str
    """Each index as ``*``."""
    indices: tuple[str, ...]
    """For each index in the template the values that occur: ``0-4, 6-29``."""
    is_whole: bool
    """Whether all combinations of these indices are there."""
    n_tensors: int
    n_bytes: int | None
    """None: only the names are known."""
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    part: str
    """The part of the model that it belongs to: ``self_attn``, ``experts``, ``embed_tokens``."""
    why: tuple[str, ...] = ()
    """Why these tensors are on this device; with several reasons, each with its modules."""


@dataclass(frozen=True)
class Area:
    """One device, or the files of a checkpoint: what is in it, by family, the largest first."""

    name: str
    kind: Literal["device", "files", "unplaced"]
    used_bytes: int | None
    capacity_bytes: int | None
    """None: no limit, or none that is known."""
    kept_free: tuple[str, ...]
    """What else needs room there: bytes, for what, by which formula."""
    families: tuple[FamilyRow, ...]
    n_left_out: int = 0
    """Families beyond those that are listed."""
    rest_bytes: int = 0
    """Bytes in use that no listed family has."""


class Place(NamedTuple):
    """Entries of the device map that stand together: where they are and why."""

    modules: tuple[str, ...]
    device: str
    reason: str


class Note(NamedTuple):
    """One finding, or one family of the audit."""

    severity: NoteSeverity
    code: str
    """Of a finding; of the audit the class: ``missing``, ``matched``…"""
    text: str
    """The sentence of a finding, the template of a family."""
    n_tensors: int | None
    indices: tuple[str, ...]
    how: tuple[str, ...]
    """The rule, the record and the reason that decided, and what comes closest."""


@dataclass(frozen=True)
class Report:
    """A checkpoint, or a plan for it."""

    title: str
    summary: str
    verdict: str
    is_ok: bool
    problems: tuple[str, ...]
    facts: tuple[Fact, ...]
    areas: tuple[Area, ...]
    places: tuple[Place, ...]
    device_map: str
    """As JSON, as accelerate takes it; empty if nothing was placed."""
    notes: tuple[Note, ...]
    suggestions: tuple[tuple[str, str], ...]
    """What would mend something: a sentence, and what to type."""
    n_left_out: int = 0
    """Notes beyond those that are listed."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)
