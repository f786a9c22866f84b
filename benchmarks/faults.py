"""Faults of disks, memory, processes and networks, injected into whole jobs, and what they leave.

    python benchmarks/faults.py [--runs 200] [--seed N] [--kinds WORD …] [--jobs WORD …]
                                [--quick] [--self-test] [--json FILE]

Each injection is a forked process that does one job (``faults_jobs``), in which one call for a
file fails, or all from one on, or which has a limit, a small disk or another process beside it
(``faults_kinds``, ``faults_whole``, ``faults_network``). Judged (``faults_judge``) are the error,
the model, the checkpoint, what is left, the same job once more in that process, and in a new one.
Exits 1 if anything is lost, half used, hangs or is not told clearly. Linux only; small disks are
mounted by root only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from faults_inject import Bench, Pair
from faults_jobs import Job, jobs
from faults_judge import Found
from faults_kinds import KINDS, Kind
from faults_network import NETWORK, Hub
from faults_planted import PLANTED, unseen
from faults_whole import WHOLE, Whole, can_mount
from rich.console import Console
from rich.table import Table

_SLOW = ("stall", "two processes at once")
"""Left out where each kind comes once."""


def kinds_of(words: Sequence[str]) -> list[Kind | Whole]:
    """Return the kinds in whose names one of the words is."""
    found: list[Kind | Whole] = [*KINDS.values(), *WHOLE.values(), *NETWORK]
    usable = [k for k in found if not isinstance(k, Whole) or not k.is_mounted or can_mount()]
    return [k for k in usable if any(word.lower() in k.name.lower() for word in words)]


def pairs_of(found_jobs: Sequence[Job], kinds: Sequence[Kind | Whole]) -> Iterator[Pair]:
    """Yield each job with each kind that can befall it."""
    for job in found_jobs:
        for kind in kinds:
            changes = not isinstance(kind, Whole) and kind.changes
            if kind.jobs(job) if isinstance(kind, Whole) else job.is_local or not changes:
                yield Pair(job, kind)


def each_kind(bench: Bench, pairs: Sequence[Pair], dice: random.Random) -> Iterator[Found]:
    """Yield one injection of each kind, in the first job of some order that it can befall."""
    mixed = [*pairs]
    dice.shuffle(mixed)
    by_kind: dict[str, list[Pair]] = {}
    for pair in mixed:
        by_kind.setdefault(pair.kind.name, []).append(pair)
    for name, some in by_kind.items():
        if name not in _SLOW:
            yield from [*islice(filter(None, map(bench.inject, some)), 1)]


def show(found: Sequence[Found]) -> None:
    """Print the table, and what is wrong."""
    console = Console(width=140)
    outcomes = ("right", "refused", "interrupted", "killed", "not reached")
    table = Table("kind", "runs", *outcomes, "faults")
    for kind in sorted({one.kind for one in found}):
        of_kind = [one for one in found if one.kind == kind]
        count = Counter(one.outcome for one in of_kind)
        bad = sum(bool(one.faults) for one in of_kind)
        table.add_row(kind, str(len(of_kind)), *(str(count[o]) for o in outcomes), str(bad))
    console.print(table)
    for one in found:
        for fault in one.faults:
            text = f"{one.kind} | {one.job} | {one.at}: {fault}"
            console.print(text, markup=False, highlight=False)
    console.print(f"{len(found)} injections, {sum(bool(f.faults) for f in found)} with faults")


def self_test(bench: Bench, by_name: Mapping[str, Job]) -> bool:
    """Plant faults in the product; tell whether the judge sees them all."""
    bench.warm([by_name[name] for name in dict.fromkeys(p.job for p in PLANTED)])
    missed = unseen(lambda planted: bench.from_the_end(planted, dict(by_name)))
    print(f"{len(PLANTED)} faults planted; the judge does not see: {', '.join(missed) or 'none'}")
    return not missed


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[""], help="words of their names")
    parser.add_argument("--jobs", nargs="*", default=[""], help="words of their names")
    parser.add_argument("--quick", action="store_true", help="each kind once, in a job by chance")
    parser.add_argument("--self-test", action="store_true", help="plant faults, to see them seen")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk to wait for
    by_name = {**jobs(), Hub.name: Hub()}
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        bench = Bench(Path(folder), dice)
        if arguments.self_test and not self_test(bench, by_name):
            return 1
        found_jobs = [j for n, j in by_name.items() if any(word in n for word in arguments.jobs)]
        pairs = [*pairs_of(found_jobs, kinds_of(arguments.kinds))]
        bench.warm([*{pair.job.name: pair.job for pair in pairs}.values()])
        if arguments.quick:
            found = [*each_kind(bench, pairs, dice)]
        else:
            found = [*bench.all(pairs, arguments.runs)]
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([f._asdict() for f in found], indent=1))
    return int(any(one.faults for one in found))


if __name__ == "__main__":
    sys.exit(main())
