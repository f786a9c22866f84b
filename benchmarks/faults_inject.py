"""Injections: a site, a job in it, and a fault at some call or all along."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from faults_calls import Call, Trap
from faults_jobs import Job
from faults_judge import Found, counted, judged
from faults_kinds import Kind, Place
from faults_planted import Planted
from faults_whole import Level, Whole, prepared

__all__ = ["Bench", "Pair"]


class Pair(NamedTuple):
    """A job, and a kind of fault that can befall it."""

    job: Job
    kind: Kind | Whole


class Bench:
    """Where sites are made; what was found out about the jobs is kept."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        """Make sites below *folder*."""
        self._folder, self._dice = folder, dice
        self._calls: dict[str, tuple[Place, list[Call]]] = {}
        self._levels: dict[str, list[Level]] = {}

    def warm(self, jobs: Iterator[Job] | Sequence[Job]) -> None:
        """Do each job once in this process, so that what it imports is there for all children."""
        for job in jobs:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                place = self._site(job, Path(folder))
                job.begin()
                job.run(place.root, lambda name: None)
                job.end()

    def all(self, pairs: Sequence[Pair], runs: int) -> Iterator[Found]:
        """Yield *runs* injections, each pair once before any comes again."""
        done, order = 0, [*pairs]
        while done < runs and order:
            self._dice.shuffle(order)
            usable: list[Pair] = []
            for pair in order:
                if done < runs and (found := self.inject(pair)) is not None:
                    usable.append(pair)
                    done += 1
                    yield found
            order = usable

    def inject(self, pair: Pair) -> Found | None:
        """Inject a fault wherever the dice fall; None if the job has no such calls."""
        job, kind = pair
        if isinstance(kind, Whole):
            levels = self._levels.setdefault(f"{job.name} {kind.name}", [])
            if not levels:
                levels.extend(kind.levels)
                self._dice.shuffle(levels)
            return self._all_along(job, kind, levels.pop())
        calls = self._points(job, kind)
        if not calls:
            return None
        at = self._dice.randrange(len(calls))
        lasting = self._dice.random() < 0.5 if kind.lasting is None else kind.lasting
        label = f"call {at + 1} of {len(calls)}, {calls[at].name} {Path(calls[at].path).name}"
        label += " and all after" if lasting else ""
        return self._at_call(job, kind, at, lasting=lasting, label=label)

    def from_the_end(self, planted: Planted, jobs: dict[str, Job]) -> Iterator[Found]:
        """Yield injections of a planted fault, the last calls first."""
        job, kind = jobs[planted.job], planted.kind
        for at in reversed(range(len(self._points(job, kind)))):
            yield self._at_call(job, kind, at, lasting=bool(kind.lasting), label=f"call {at + 1}")

    def _site(self, job: Job, folder: Path) -> Place:
        """Return a new site for *job* in *folder*."""
        template = self._folder / f"template {job.name}"
        if not template.exists():
            job.make(template / "site")
            job.make(template / "other", 2)
        shutil.copytree(template, folder, dirs_exist_ok=True)
        root = folder / "site"
        return Place(root, root / job.input, folder / "other" / job.input)

    def _points(self, job: Job, kind: Kind) -> list[Call]:
        """Return the calls of *job* that *kind* could befall."""
        if job.name not in self._calls:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                place = self._site(job, Path(folder))
                self._calls[job.name] = place, counted(job, place)
        place, calls = self._calls[job.name]
        return [call for call in calls if kind.hits(call, place)]

    def _at_call(self, job: Job, kind: Kind, at: int, *, lasting: bool, label: str) -> Found:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            place = self._site(job, Path(folder))

            def arm(trap: Trap) -> Callable[[], list[str]]:
                trap.arm(
                    lambda hit: kind.act(hit, place),
                    lambda call: kind.hits(call, place),
                    at=at,
                    lasting=lasting,
                )
                return trap.disarm

            return judged(job, place, kind=kind, label=label, arm=arm)

    def _all_along(self, job: Job, whole: Whole, level: Level) -> Found:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            place = self._site(job, Path(folder))
            with prepared(whole, job, place, level):
                return judged(
                    job,
                    place,
                    kind=whole.kind,
                    label=str(level),
                    arm=lambda trap: whole.arm(trap, job, place, level),
                )
