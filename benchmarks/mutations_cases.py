"""``drawn``: the case of a number, which depends on the seed and that number only."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import mutations_adapter
import mutations_config
import mutations_index
import mutations_layout
import mutations_names
import mutations_ranks
import mutations_values
from mutations_copy import Copy, NothingLeft
from mutations_files import write_files
from mutations_judge import Load, Verdict, judged, ours
from mutations_kinds import KINDS
from mutations_subjects import SUBJECTS, Subject, subject_named

__all__ = ["Case", "drawn", "each_kind", "made", "run", "usual"]

_GROUPS = (
    mutations_names,
    mutations_values,
    mutations_layout,
    mutations_index,
    mutations_config,
    mutations_ranks,
    mutations_adapter,
)
"""The modules that enter kinds when they are imported."""
TWO_AT_ONCE = 0.15
ON_DISK = 0.15


AGREEING: tuple[set[str], ...] = (
    {"config-ties", "tied-head-stored-otherwise"},
    {"config-ties", "tied-head-stored-as-well"},
    {"config-ties", "untied-head-dropped"},
)
"""Damages that together make another checkpoint with which nothing is wrong: an untied model with
its head, a tied one without."""


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint."""

    number: int
    kinds: tuple[str, ...]
    subject: Subject
    copy: Copy
    device: str
    seed: object

    def told(self) -> str:
        """Say what was done, in one line."""
        done = "; ".join(self.copy.done)
        return f"{' + '.join(self.kinds)} on {self.subject.name} ({self.device}): {done[:600]}"


def drawn(
    seed: int,
    number: int,
    *,
    kinds: Collection[str] = (),
    subjects: Collection[str] = (),
) -> Case | None:
    """Return the case *number* of *seed*; None if it is not of these *kinds* and *subjects*."""
    chance = Random(f"{seed}/{number}")
    count = 2 if chance.random() < TWO_AT_ONCE else 1
    chosen = [chance.choice(sorted(KINDS)) for _ in range(count)]
    chosen.sort(key=lambda name: not KINDS[name].unseen)  # what is to be seen comes last, and lasts
    device = "disk" if chance.random() < ON_DISK else "cpu"
    order = chance.sample(sorted(SUBJECTS), len(SUBJECTS))
    if kinds and not {*chosen} <= {*kinds}:
        return None
    for name in order:
        case = made(chosen, name, chance.random(), number=number, device=device)
        if case is not None:
            return case if not subjects or name in subjects else None
    return None


def made(
    kinds: Sequence[str], subject: str, seed: object, *, number: int = 0, device: str = "cpu"
) -> Case | None:
    """Return *subject* damaged in these ways; None if it has nothing of the kind."""
    found = subject_named(subject)
    copy = Copy(found, Random())
    for kind in kinds:
        copy.chance = Random(f"{subject}/{seed}/{kind}")
        try:
            if not KINDS[kind].apply(copy):
                return None
        except NothingLeft:
            return None
    if copy.files == dict(found.files):
        return None
    copy.may_be_unseen |= _agrees(kinds, copy)
    return Case(number, tuple(kinds), found, copy, device, seed)


def _agrees(kinds: Collection[str], copy: Copy) -> bool:
    """Tell whether two damages together left nothing for anybody to see but the values."""
    return {*kinds} in AGREEING or (
        len(kinds) > 1 and _outsides(copy.files) == _outsides(copy.subject.files)
    )


def _outsides(files: Mapping[str, bytes]) -> dict[str, object]:
    """Return all of the files but the values: of safetensors files the entries of their headers."""
    found: dict[str, object] = {}
    for name, raw in files.items():
        found[name] = raw
        with suppress(ValueError, TypeError):
            if name.endswith(".json"):
                found[name] = json.loads(raw)
            elif name.endswith(".safetensors"):
                header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
                found[name] = {**header, "__metadata__": None}
    return found


@cache
def usual(subject: str, device: str) -> tuple[str, ...]:
    """Return what is said of the right checkpoint."""
    right = subject_named(subject)
    with TemporaryDirectory() as folder:
        write_files(Path(folder), right.files)
        verdict = judged(right, Path(folder), Copy(right, Random(0)), usual=(), device=device)
    if verdict.outcome != "harmless":
        raise RuntimeError(f"{subject!r} is not right to begin with: {verdict}")
    return verdict.said


def run(case: Case, folder: Path, *, load: Load = ours) -> Verdict:
    """Write the damaged files to *folder*, load them, and return the verdict."""
    write_files(folder, case.copy.files)
    said = usual(case.subject.name, case.device)
    found = judged(case.subject, folder, case.copy, usual=said, device=case.device, load=load)
    if _agrees(case.kinds, case.copy):
        return found
    if found.outcome == "unseen" and any(map(_is_seen_alone, _parts(case))):
        return found._replace(outcome="SILENT")
    return found


def _parts(case: Case) -> Iterator[Case]:
    """Yield what in a damage of several kinds has to be seen, by itself."""
    for kind in case.kinds if len(case.kinds) > 1 else ():
        if not KINDS[kind].unseen:
            alone = made([kind], case.subject.name, case.seed, device=case.device)
            if alone is not None:
                yield alone


def _is_seen_alone(case: Case) -> bool:
    """Tell whether a part, without the other, is more than harmless."""
    with TemporaryDirectory() as folder:
        return run(case, Path(folder)).outcome != "harmless"


def each_kind(seed: int) -> Iterator[Case]:
    """Yield a case for every kind of damage, on one of the subjects that it can be done to."""
    for kind in KINDS:
        chance = Random(f"{seed}/{kind}")
        cases = (
            made([kind], subject, f"{seed}/{attempt}")
            for attempt in range(20)
            for subject in chance.sample(sorted(SUBJECTS), len(SUBJECTS))
        )
        found = next((case for case in cases if case is not None), None)
        if found is None:
            raise RuntimeError(f"{kind!r} can be done to none of the checkpoints")
        yield found
