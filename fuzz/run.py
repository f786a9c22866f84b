"""Run the fuzzer: ``python fuzz/run.py [--target T …] [--seconds N] [--engine atheris|mutate]``.

Each target gets N seconds of CPU time, by default 60, in a process of its own, one after the other.
What is found is written to ``fuzz/found/TARGET``: the input, and a text with the way to it; a
fault that is found again is not kept again. Exit status 1: something was found.

``atheris`` (``pip install atheris``) is guided by what is covered of the package; ``mutate`` needs
nothing and is guided by how inputs are treated: what findings and errors they get.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOUND = HERE / "found"
_MAX_BYTES = 65_536
_POOL = 4000


@dataclass
class Result:
    """What the run of one target came to."""

    target: str
    engine: str
    cpu_seconds: float = 0.0
    inputs: int = 0
    kinds: int = 0
    """Ways in which inputs were treated."""
    covered: int = 0
    """Edges of the package, by atheris."""
    slowest_seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    """Where, and the file with the input."""


class Session:
    """One target under fuzzing: counts, and keeps what shows a fault."""

    def __init__(self, target: str, engine: str, seconds: float) -> None:
        """Import the target, which must come after atheris has hooked itself in."""
        from guard import attempt, limit_memory
        from seeds import inputs
        from targets import TARGETS

        self.target, self.seconds = TARGETS[target], seconds
        self.result = Result(target, engine)
        self.corpus = inputs(target)
        self._attempt = attempt
        self._seen: set[str] = set()
        for data in self.corpus:  # what is imported and made once is not to be counted later
            self.target.run(data) if not self.target.allowed else self._quiet(data)
        limit_memory()
        self._began = time.process_time()

    def _quiet(self, data: bytes) -> None:
        self._attempt(self.target.run, data, self.target.allowed)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.process_time() - self._began > self.seconds

    def one(self, data: bytes) -> bool:
        """Run an input; return whether it was treated in a new way."""
        began = time.process_time()
        treated, problem = self._attempt(self.target.run, data, self.target.allowed)
        took = time.process_time() - began
        self.result.inputs += 1
        self.result.slowest_seconds = max(self.result.slowest_seconds, took)
        if problem is not None and problem.where not in self.result.problems:
            self.result.problems[problem.where] = self._kept(problem, data)
        new = treated not in self._seen
        self._seen.add(treated)
        return new

    def _kept(self, problem: Any, data: bytes) -> str:
        name = f"{problem.kind}-{hashlib.sha256(problem.where.encode()).hexdigest()[:8]}"
        path = FOUND / self.result.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        told = f"{problem.where}\n\n{problem.text}\n"
        path.with_suffix(".txt").write_text(told, encoding="utf-8", errors="backslashreplace")
        print(f"{self.result.target}: {problem.kind}: {problem.where}", flush=True)
        return str(path)

    def done(self) -> Result:
        """Return the result."""
        self.result.cpu_seconds = time.process_time() - self._began
        self.result.kinds = len(self._seen)
        return self.result


def _mutate(session: Session, seed: int) -> None:
    """Mutate what is in the corpus, and what was treated in a new way since."""
    from mutate import mutated

    rng = random.Random(seed)
    pool = [*session.corpus] or [b""]
    for data in session.corpus:
        session.one(data)
    while not session.is_over:
        data = mutated(rng.choice(pool), session.target.form, rng, pool)[:_MAX_BYTES]
        if session.one(data):
            if len(pool) >= _POOL:
                pool.pop(rng.randrange(len(session.corpus), len(pool)))
            pool.append(data)


def _atheris(session: Session, report: Path, atheris: Any) -> None:
    """Hand over to libFuzzer, which never comes back: it leaves by ``os._exit``."""
    from guard import clear
    from mutate import mutated

    def change(data: bytes, limit: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, limit))
        return mutated(data, session.target.form, rng, session.corpus)[:limit]

    def one(data: bytes) -> None:
        session.one(data)
        if session.is_over:
            result = session.done()
            clear()
            report.write_text(json.dumps(asdict(result)), encoding="utf-8")
            os._exit(0)

    folder = Path(tempfile.mkdtemp(prefix="modelquirks-corpus-"))
    for number, data in enumerate(session.corpus):
        (folder / f"{number}").write_bytes(data)
    flags = [f"-max_len={_MAX_BYTES}", "-timeout=100000", "-rss_limit_mb=0", "-print_final_stats=0"]
    atheris.Setup(["fuzz", str(folder), *flags, "-use_value_profile=0"], one, custom_mutator=change)
    atheris.Fuzz()


def run_one(target: str, *, engine: str, seconds: float, seed: int, report: Path) -> None:
    """Fuzz one target in this process."""
    sys.path.insert(0, str(HERE))
    if engine == "mutate":
        session = Session(target, engine, seconds)
        _mutate(session, seed)
        report.write_text(json.dumps(asdict(session.done())), encoding="utf-8")
        return
    atheris: Any = import_module("atheris")  # which has no types
    with atheris.instrument_imports(include=["modelquirks"]):
        session = Session(target, engine, seconds)
    _atheris(session, report, atheris)


def main() -> int:
    """Run the targets one after the other; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", action="append", help="one of them (repeatable; default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time of each (60)")
    parser.add_argument("--engine", choices=("atheris", "mutate"), help="default: atheris if there")
    parser.add_argument("--seed", type=int, default=0, help="of the mutator")
    parser.add_argument("--json", help="add a line a target to this file")
    parser.add_argument("--in-process", metavar="REPORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    engine = args.engine or ("atheris" if find_spec("atheris") else "mutate")
    if args.in_process:
        (target,) = args.target
        run_one(
            target,
            engine=engine,
            seconds=args.seconds,
            seed=args.seed,
            report=Path(args.in_process),
        )
        return 0
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    results = [_in_process(name, engine, args) for name in args.target or TARGETS]
    _show(results)
    return 1 if any(result.problems for result in results) else 0


def _in_process(target: str, engine: str, args: argparse.Namespace) -> Result:
    """Fuzz a target in a process of its own; one that dies is a problem too."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--in-process", str(report)]
        command += ["--target", target, "--engine", engine]
        command += ["--seconds", str(args.seconds), "--seed", str(args.seed)]
        log = Path(folder) / "log.txt"
        with log.open("wb") as errors:
            done = subprocess.run(command, stderr=errors, check=False)
        if report.is_file():
            result = Result(**json.loads(report.read_text(encoding="utf-8")))
            covered = re.findall(rb"cov: ([0-9]+)", log.read_bytes())
            result.covered = int(covered[-1]) if covered else 0
        else:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            died = {f"the process ended with {done.returncode}": ""}
            result = Result(target, engine, problems=died)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    _show([result])
    return result


def _show(results: list[Result]) -> None:
    for r in results:
        print(
            f"{r.target:12} {r.engine:8} {r.cpu_seconds:8.1f} s CPU {r.inputs:9,} inputs "
            f"{r.kinds:6,} kinds {r.covered:6,} edges  slowest {r.slowest_seconds:5.2f} s  "
            f"{len(r.problems)} problems",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
