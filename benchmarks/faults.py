"""Faults of disks, memory, processes and networks, injected into whole jobs, and what they leave.

python benchmarks/faults.py [--runs 200] [--seed N] [--kinds WORD …] [--jobs WORD …] [--json F]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from faults_calls import Call, Trap
from faults_jobs import Job, jobs
from faults_judge import Found, counted, judged
from faults_kinds import KINDS, Kind, Place
from faults_whole import WHOLE, Whole, can_mount, prepared
from rich.console import Console
from rich.table import Table

_templates: dict[str, Path] = {}


def site(job: Job, folder: Path) -> Place:
    """Return a new site for *job* below *folder*."""
    root, other = folder / "site", folder / "other"
    if job.name not in _templates:
        _templates[job.name] = Path(tempfile.mkdtemp(dir=folder.parent, prefix="template-"))
        job.make(_templates[job.name] / "site")
        job.make(_templates[job.name] / "other", 2)
    shutil.copytree(_templates[job.name], folder, dirs_exist_ok=True)
    return Place(root, root / job.input, other / job.input)


_calls: dict[str, tuple[Place, list[Call]]] = {}


def points(job: Job, kind: Kind, memory: str) -> list[Call]:
    """Return the calls of *job* that *kind* could befall."""
    if job.name not in _calls:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            place = site(job, Path(folder))
            _calls[job.name] = place, counted(job, place)
    place, calls = _calls[job.name]
    return [call for call in calls if kind.hits(call, place)]


def one(job: Job, kind: Kind, at: int, *, lasting: bool, label: str, memory: str) -> Found:
    """Inject one fault."""
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        place = site(job, Path(folder))

        def arm(trap: Trap) -> Callable[[], list[str]]:
            trap.arm(
                lambda hit: kind.act(hit, place),
                lambda call: kind.hits(call, place),
                at=at,
                lasting=lasting,
            )
            return trap.disarm

        return judged(job, place, kind=kind, label=label, arm=arm)


def one_whole(job: Job, whole: Whole, level: int | str, *, memory: str) -> Found:
    """Have a fault last for a whole job."""
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        place = site(job, Path(folder))
        with prepared(whole, job, place, level):
            return judged(
                job,
                place,
                kind=whole.kind,
                label=str(level),
                arm=lambda trap: whole.arm(trap, job, place, level),
            )


Thrown = Callable[[random.Random], Found]
"""An injection of one kind into one job, wherever the dice fall."""


def at_calls(job: Job, kind: Kind, memory: str) -> Thrown | None:
    """Return what injects *kind* at some call of *job*; None if it has no such calls."""
    calls = points(job, kind, memory)
    if not calls:
        return None

    def throw(dice: random.Random) -> Found:
        at = dice.randrange(len(calls))
        lasting = dice.random() < 0.5 if kind.lasting is None else kind.lasting
        label = f"call {at + 1} of {len(calls)}, {calls[at].name} {Path(calls[at].path).name}"
        label += " and all after" if lasting else ""
        return one(job, kind, at, lasting=lasting, label=label, memory=memory)

    return throw


def all_along(job: Job, whole: Whole, memory: str) -> Thrown:
    """Return what has *whole* last for *job*, at some level that was not had before."""
    levels: list[int | str] = []

    def throw(dice: random.Random) -> Found:
        if not levels:
            levels.extend(whole.levels)
            dice.shuffle(levels)
        return one_whole(job, whole, levels.pop(), memory=memory)

    return throw


def injections(chosen: Sequence[Thrown], runs: int, dice: random.Random) -> Iterator[Found]:
    """Yield *runs* injections, each of those chosen once before any comes again."""
    order: list[Thrown] = []
    for _ in range(runs if chosen else 0):
        if not order:
            order = [*chosen]
            dice.shuffle(order)
        yield order.pop()(dice)


def show(found: Sequence[Found]) -> None:
    """Print the table, and what is wrong."""
    console = Console(width=150)
    outcomes = ("right", "refused", "interrupted", "killed", "not reached")
    table = Table("kind", "runs", *outcomes, "faults")
    for kind in dict.fromkeys(one.kind for one in found):
        of_kind = [one for one in found if one.kind == kind]
        count = Counter(one.outcome for one in of_kind)
        bad = sum(bool(one.faults) for one in of_kind)
        table.add_row(kind, str(len(of_kind)), *(str(count[o]) for o in outcomes), str(bad))
    console.print(table)
    for one_found in found:
        for fault in one_found.faults:
            console.print(
                f"{one_found.kind} | {one_found.job} | {one_found.at}: {fault}",
                markup=False,
                highlight=False,
            )
    console.print(f"{len(found)} injections, {sum(bool(f.faults) for f in found)} with faults")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[""], help="words of their names")
    parser.add_argument("--jobs", nargs="*", default=[""], help="words of their names")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=_memory()) as home:
        return _run(arguments, home)


def _memory() -> str | None:
    """Return where there is no disk to wait for."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run(arguments: argparse.Namespace, memory: str) -> int:
    found_jobs = [j for n, j in jobs().items() if any(word in n for word in arguments.jobs)]
    wanted = [word.lower() for word in arguments.kinds]
    kinds = [k for n, k in KINDS.items() if any(word in n.lower() for word in wanted)]
    whole = [w for n, w in WHOLE.items() if any(word in n.lower() for word in wanted)]
    whole = [w for w in whole if can_mount() or not w.is_mounted]
    for job in found_jobs:  # what is imported at the first use is imported here
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            place = site(job, Path(folder))
            job.begin()
            job.run(place.root, lambda name: None)
    thrown = [at_calls(job, kind, memory) for job in found_jobs for kind in kinds]
    chosen = [one for one in thrown if one is not None]
    chosen += [all_along(job, w, memory) for job in found_jobs for w in whole if w.jobs(job)]
    found = list(injections(chosen, arguments.runs, random.Random(arguments.seed)))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([f._asdict() for f in found], indent=1))
    return int(any(one.faults for one in found))


if __name__ == "__main__":
    sys.exit(main())
