"""Which versions of what it depends on modelquirks works with: a part of the tests with each.

    python benchmarks/versions.py [ROW...] [--results FILE] [--write docs/versions.md]

A row is tried in the virtual environment that runs this program, with other versions of some
packages in a folder in front of it; one of another Python in a virtual environment of its own. pip
installs them: a torch from the network brings several GB of libraries for GPUs. Results are kept
as JSON, so that rows can be tried one at a time; with --write the table is written from all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUPS = {
    "records": ("tests/quirks",),
    "execution": (
        "tests/planner/test_execute.py",
        "tests/planner/test_plan.py",
        "tests/planner/test_reader.py",
        "tests/planner/test_verify.py",
    ),
    "transformers": ("tests/plugins/test_bridge.py", "tests/plugins/test_transformers_model.py"),
    "hub": ("tests/hub",),
}
"""What is tried, in processes of their own: a crash must not hide the rest."""

TOLD = ("torch", "accelerate", "transformers", "huggingface_hub", "safetensors", "pluggy", "psutil")
_LIMIT_S = 900


@dataclass(frozen=True)
class Row:
    """One set of versions."""

    title: str
    packages: Sequence[str] = ()
    """What is installed in front of the environment, as pip takes it, with its dependencies."""
    alone: Sequence[str] = ()
    """The same without dependencies: they would bring another torch."""
    groups: Sequence[str] = tuple(GROUPS)
    python: str = ""
    """Another Python, as ``3.12``."""


LOWEST = ("safetensors==0.5.0", "psutil==5.9.0", "rich==13.7.0")
ROWS = {
    "pinned": Row("the versions of constraints.txt"),
    "lowest": Row(
        "the lowest that pyproject.toml allows, but torch",
        ("transformers==5.0.0", "huggingface_hub==1.3.0", *LOWEST),
        ("accelerate==1.12.0", "peft==0.17.0"),
    ),
    "accelerate-1.13": Row("", alone=("accelerate==1.13.0",), groups=("execution",)),
    "accelerate-1.14": Row("", alone=("accelerate==1.14.0",), groups=("execution",)),
    **{
        f"transformers-{version.rpartition('.')[0]}": Row(
            "", (f"transformers=={version}",), groups=("transformers",)
        )
        for version in ("5.4.0", "5.8.1", "5.12.1", "5.16.1", "5.20.2")
    },
    "torch-2.6": Row("the lowest torch", ("torch==2.6.0",), groups=("execution",)),
    "torch-newest": Row("the newest torch", ("torch",), groups=("execution",)),
    "python-3.12": Row("", python="3.12"),
    "python-3.13": Row("", python="3.13"),
}


@dataclass
class Result:
    """What one row gave."""

    versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, str] = field(default_factory=dict)
    """By group: ``120 passed, 1 failed``."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""
    """Why nothing could be tried."""


def pip(python: str, *words: str) -> str:
    """Install something; return what pip says if it cannot."""
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def prepared(row: Row, folder: Path) -> tuple[str, str]:
    """Return the Python that runs the row, and what kept it from being made ready."""
    if row.python:
        base = shutil.which(f"python{row.python}")
        if base is None:
            return "", f"there is no python{row.python} here"
        subprocess.run([base, "-m", "venv", str(folder / "venv")], check=True)
        python = str(folder / "venv" / "bin" / "python")
        trouble = pip(python, "--upgrade", "pip>=25.1")
        pins = ("--constraint", str(ROOT / "constraints.txt"))
        wanted = ("--editable", f"{ROOT}[transformers]", "--group", f"{ROOT}/pyproject.toml:test")
        return python, trouble or pip(python, *pins, *wanted)
    target = ("--target", str(folder), "--upgrade")
    trouble = pip(sys.executable, *target, *row.packages) if row.packages else ""
    if row.alone and not trouble:
        trouble = pip(sys.executable, "--no-deps", *target, *row.alone)
    return sys.executable, trouble


def tried(name: str, row: Row, folder: Path) -> Result:
    """Run the tests of one row with what is in *folder*."""
    result, started = Result(), time.perf_counter()
    python, result.trouble = prepared(row, folder)
    if result.trouble:
        return result
    before = os.environ.get("PYTHONPATH", "")
    environ = {**os.environ, "VERSIONS_ROW": name, "PYTHONPATH": f"{folder}{os.pathsep}{before}"}
    asked = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in "
    asked += f"{TOLD!r}}} | {{'python': sys.version.split()[0]}}))"
    done = subprocess.run(
        [python, "-c", asked], env=environ, capture_output=True, text=True, check=True
    )
    result.versions = json.loads(done.stdout)
    for group in row.groups:
        counts: dict[str, int] = {}
        for path in GROUPS[group]:
            for kind, number in _run(python, path, environ, result.failures):
                counts[kind] = counts.get(kind, 0) + number
        result.counts[group] = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    result.seconds = time.perf_counter() - started
    return result


def _run(
    python: str, path: str, environ: Mapping[str, str], failures: list[str]
) -> Iterator[tuple[str, int]]:
    """Run one file of tests; yield how many passed, failed, were skipped."""
    command = [python, "-m", "pytest", "-n0", "-q", "--tb=no", "-p", "no:cacheprovider", path]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        failures.append(f"{path}: not done within {_LIMIT_S} s")
        yield "failed", 1
        return
    lines = done.stdout.splitlines()
    failures += [re.sub(r"^(FAILED|ERROR) | - .*$", "", line) for line in lines if _is_bad(line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else "")
    if not found or done.returncode < 0:
        told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        failures.append(f"{path}: ended with {done.returncode}: {told}")
        yield "failed", 1
    for number, kind in found:
        yield kind.replace("error", "failed"), int(number)


def _is_bad(line: str) -> bool:
    return line.startswith(("FAILED ", "ERROR "))


BEGIN, END = "<!-- written by benchmarks/versions.py -->", "<!-- until here -->"


def table(results: Mapping[str, Result]) -> str:
    """Return the table of all rows, and what failed."""
    titles = ("Row", *TOLD, "Python", *GROUPS)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in ROWS.items():
        result = results.get(name, Result(trouble="not tried"))
        cells = [f"**{name}** {row.title}".strip()]
        cells += [result.versions.get(one, "") for one in (*TOLD, "python")]
        cells += [result.counts.get(group, "") for group in GROUPS]
        cells[-1] = result.trouble or cells[-1]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *_failures(results)])


def rewrite(page: Path, results: Mapping[str, Result]) -> None:
    """Put the table between its marks in *page*."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"
    page.write_text(text, encoding="utf-8")


def _failures(results: Mapping[str, Result]) -> Iterator[str]:
    for name in ROWS:
        if name in results and results[name].failures:
            yield f"\nFailed with **{name}**:\n"
            yield from (f"- `{failure}`" for failure in results[name].failures)


def main(argv: Iterable[str] | None = None) -> None:
    """Try rows and write the table."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--results", type=Path, default=ROOT / ".venv" / "versions.json")
    parser.add_argument("--write", type=Path, help="write the table of all results")
    parser.add_argument("--packages", type=Path, help="folder in which the packages lie already")
    args = parser.parse_args(None if argv is None else [*argv])
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"{unknown} are none of {', '.join(ROWS)}")
    kept: dict[str, Any] = {}
    if args.results.exists():
        kept = json.loads(args.results.read_text(encoding="utf-8"))
    for name in args.rows or (() if args.write else ROWS):
        with tempfile.TemporaryDirectory(prefix=f"versions-{name}-") as made:
            row = ROWS[name]
            if args.packages is not None:
                row = Row(row.title, groups=row.groups)
            result = tried(name, row, args.packages or Path(made))
        print(name, result.trouble or result.counts, *result.failures, sep="\n  ", flush=True)
        kept[name] = vars(result)
        args.results.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if args.write is not None:
        results = {name: Result(**data) for name, data in kept.items()}
        rewrite(args.write, results)


if __name__ == "__main__":
    main()
