"""Faults planted in the product, which the judge has to see: else its silence means nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from faults_calls import Call
from faults_judge import Found
from faults_kinds import KINDS, Kind, Place

__all__ = ["PLANTED", "Planted", "unseen"]


class Planted(NamedTuple):
    """A fault of ours, and the injection that shows it."""

    name: str
    job: str
    kind: Kind
    plant: Callable[[], Any]
    word: str
    """In what the judge says."""


def _hits(*names: str, file: str = "") -> Callable[[Call, Place], bool]:
    return lambda call, place: call.name in names and file in Path(call.path).name


@contextmanager
def _written_in_place() -> Generator[None]:
    def careless(target: Path, text: str) -> None:
        target.write_text(text, encoding="utf-8")

    with patch("modelquirks.planner.plan.write_whole", careless):
        yield


def _nothing_known(_shards: object) -> dict[str, object]:
    return {}


@contextmanager
def _never_looking() -> Generator[None]:
    with (
        patch("modelquirks.planner.execution.perform.changed", return_value=[]),
        patch("modelquirks.planner.execution.perform.known_of", side_effect=_nothing_known),
    ):
        yield


@contextmanager
def _not_restored() -> Generator[None]:
    with patch("modelquirks.planner.execution.snapshot.Snapshot.restore"):
        yield


@contextmanager
def _left_lying() -> Generator[None]:
    with patch("modelquirks.planner.export.outfolder.shutil.rmtree"):
        yield


PLANTED: tuple[Planted, ...] = (
    Planted(
        "a plan is written over the old one",
        "save a plan",
        KINDS["disk full (ENOSPC)"]._replace(hits=_hits("write", file="plan.json"), lasting=True),
        _written_in_place,
        "lost: plan.json",
    ),
    Planted(
        "changed files are not looked at",
        "load",
        KINDS["all files replaced"]._replace(hits=_hits("planned")),
        _never_looking,
        "the model computes something else",
    ),
    Planted(
        "a model is not given back what it had",
        "load over values",
        KINDS["file removed"]._replace(hits=_hits("open to read", file=".safetensors")),
        _not_restored,
        "the model: ",
    ),
    Planted(
        "an export that failed is left lying",
        "export",
        KINDS["disk full (ENOSPC)"]._replace(hits=_hits("fsync"), lasting=True),
        _left_lying,
        "left behind: ",
    ),
)


def unseen(inject: Callable[[Planted], Iterator[Found]]) -> list[str]:
    """Return the planted faults that the judge does not see; *inject* tries all there is."""
    missed: list[str] = []
    for planted in PLANTED:
        with planted.plant():
            seen = any(planted.word in fault for found in inject(planted) for fault in found.faults)
        if not seen:
            missed.append(planted.name)
    return missed
