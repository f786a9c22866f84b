"""The zoo: every model class of transformers, tiny, loaded by accelerate, transformers and us.

    python benchmarks/zoo.py [--classes REGEX] [--sample N] [--pass fresh|released]

Each class is built from a shrunk config, filled at random and saved by ``save_pretrained``. Then
it is loaded by ``from_pretrained``; by accelerate alone, as its documentation says; and by
modelquirks in four placements: all on the CPU, all on the disk, cut by the planner where memory
ends, and cut at modules drawn by lot. Every tensor is compared bit for bit, offloaded ones through
their hooks, ties by storage, and the answer of a forward pass where there is a simple one.

The second pass, ``released``, rewrites the files into forms that released checkpoints have.

Models and results are kept in the cache folder: an interrupted run goes on where it was, results
of accelerate and transformers are reused, ours are taken again when our code has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo_pool import run_tasks
from zoo_results import Results, worklist
from zoo_worker import Task

VERDICTS = ("right", "refused", "failed", "wrong", "silent")
OURS = ("ours-cpu", "ours-mixed", "ours-map", "ours-disk")
ROADS = {"transformers": ("transformers",), "accelerate": ("accelerate",), "ours": OURS}


def main() -> int:
    """Read the command line, run, and print the table."""
    args = _arguments()
    from zoo_classes import class_names

    args.cache.mkdir(parents=True, exist_ok=True)
    names = _chosen(class_names(args.cache / "classes.json"), args.classes, args.sample)
    roads = [
        road for key, each in ROADS.items() if not args.only or key in args.only for road in each
    ]
    root = args.cache / args.kind
    root.mkdir(parents=True, exist_ok=True)
    results = Results(root / "results.jsonl")
    tasks = list(_tasks(names, roads, args, results))
    print(f"{len(names)} classes, {len(tasks)} with something to do", file=sys.stderr)
    started, seen = time.monotonic(), Counter[str]()

    def on_row(row: dict[str, Any]) -> None:
        results.add(row)
        seen[row["name"]] += 1
        if len(seen) % 25 == 0 and seen[row["name"]] == 1:
            rate = (time.monotonic() - started) / len(seen)
            print(f"  {len(seen)} of {len(tasks)}, {rate:.2f} s a class", file=sys.stderr)

    run_tasks(tasks, jobs=args.jobs, timeout_s=args.timeout, on_row=on_row)
    report = _report(names, roads, results, args.kind)
    _print(report)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["worklist"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", default="", help="regular expression; only classes it fits")
    parser.add_argument("--sample", type=int, help="only so many classes, evenly spread")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file with everything")
    parser.add_argument("--cache", type=Path, default=_cache(), help="where models and results are")
    parser.add_argument(
        "--only", choices=tuple(ROADS), action="append", help="take these roads only; repeatable"
    )
    parser.add_argument("--pass", dest="kind", choices=("fresh", "released"), default="fresh")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a step may take")
    parser.add_argument("--again", action="store_true", help="take the roads again in any case")
    return parser.parse_args()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "modelquirks-zoo"


def _chosen(names: Sequence[str], pattern: str, sample: int | None) -> list[str]:
    chosen = [name for name in names if re.search(pattern, name)]
    if sample is None or sample >= len(chosen):
        return chosen
    return [chosen[at * len(chosen) // sample] for at in range(sample)]


def _tasks(
    names: Iterable[str], roads: Sequence[str], args: argparse.Namespace, results: Results
) -> Iterable[Task]:
    for name in sorted(names, key=lambda name: zlib.crc32(name.encode())):  # soon some of each kind
        known = results.known(name, again=roads if args.again else ())
        if results.finished(name, roads, known):
            continue
        yield Task(name, str(args.cache / args.kind), args.kind, roads, known)


def _report(
    names: Sequence[str], roads: Sequence[str], results: Results, kind: str
) -> dict[str, Any]:
    rows = [row for name in names for row in results.rows(name)]
    table = {
        road: Counter(row["verdict"] for row in rows if row["road"] == road) for road in ROADS_ALL
    }
    cases = {(row["name"], row["form"]) for row in rows if row["road"] == "transformers"}
    verdict = {(row["name"], row["form"], row["road"]): row for row in rows}
    right = {c for c in cases if verdict[(*c, "transformers")]["verdict"] == "right"}

    def all_right(case: tuple[str, str], wanted: Sequence[str]) -> bool:
        return all(verdict.get((*case, r), {}).get("verdict") == "right" for r in wanted)

    return {
        "pass": kind,
        "versions": results.versions,
        "classes": len(names),
        "built": len({row["name"] for row in rows if row["road"] != "build"}),
        "not_built": {
            row["name"]: row["reason"]
            for row in rows
            if row["road"] in ("build", "zoo") and row["verdict"] != "right"
        },
        "cases": len(cases),
        "transformers_right": len(right),
        "accelerate_alone_fails": sum(not all_right(c, ("accelerate",)) for c in right),
        "ours_fails": sum(not all_right(c, OURS) for c in right),
        "forward_refused": sorted(
            {row["name"] for row in rows if row.get("more", {}).get("forward") == "refused"}
        ),
        "table": {road: dict(counts) for road, counts in table.items() if counts},
        "seconds": {
            road: round(sum(r.get("seconds", 0) for r in rows if r["road"] == road), 1)
            for road in ROADS_ALL
        },
        "worklist": worklist(right, verdict, OURS),
        "rows": rows,
    }


ROADS_ALL = tuple(road for each in ROADS.values() for road in each)


def _print(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Zoo, {report['pass']} checkpoints: {report['cases']} loaded")
    table.add_column("road")
    for verdict in (*VERDICTS, "s"):
        table.add_column(verdict, justify="right")
    for road, counts in report["table"].items():
        numbers = (str(counts.get(verdict, 0)) for verdict in VERDICTS)
        table.add_row(road, *numbers, str(report["seconds"][road]))
    console.print(table)
    console.print(
        f"{report['classes']} classes, {report['built']} built and saved, "
        f"{len(report['not_built'])} not built (listed in the JSON).\n"
        f"Of {report['transformers_right']} that transformers loads right, accelerate alone fails "
        f"on {report['accelerate_alone_fails']}, modelquirks in one placement or more on "
        f"{report['ours_fails']}.",
        highlight=False,
    )
    if refused := report["forward_refused"]:
        console.print(
            f"Loaded right, but a forward pass under offload is refused, with the reason, by "
            f"{len(refused)}: {', '.join(refused)}.",
            highlight=False,
        )
    for group in report["worklist"][:25]:
        classes = group["classes"]
        console.print(
            f"{len(classes):4} {group['verdict']}: {group['reason'][:150]}\n"
            f"     e.g. {', '.join(classes[:4])}",
            highlight=False, markup=False,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
