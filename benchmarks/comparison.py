"""What accelerate, transformers and modelquirks make of damaged and odd checkpoints.

    python benchmarks/comparison.py [--folder DIR] [--cases REGEX] [--json FILE]

Makes the checkpoints of `comparison_cases.py` in DIR (by default a temporary one), has each loaded
by each loader in a process of its own, compares the answer with that of the model which was saved,
and prints the table of docs/comparison.md. Needs accelerate and transformers. Exits 1 if
modelquirks makes anything wrong of what it could have known.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from comparison_cases import CASES, Case, make
from comparison_judge import LOADERS, Outcome, judged

from modelquirks.planner import Dispatcher

Row = tuple[Case, Mapping[str, Outcome]]


def main() -> int:
    """Read the command line, make, load, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made, once")
    parser.add_argument("--cases", default="", help="regular expression; only titles it fits")
    parser.add_argument("--json", type=Path, help="write outcomes and messages to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked from here
    Dispatcher().registry  # noqa: B018  plug-ins are read once, before that
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        if not (root / "answers.pt").exists():
            make(root)
        chosen = [case for case in CASES if re.search(args.cases, case.title)]
        rows = [(case, {name: judged(case, name, root) for name in LOADERS}) for case in chosen]
    print("\n".join(table(rows)))
    if args.json is not None:
        args.json.write_text(json.dumps([_json(row) for row in rows], indent=1))
    bad = [c.title for c, by in rows if c.best != "none" and by["modelquirks"].verdict == "wrong"]
    print(f"wrong by modelquirks: {bad}" if bad else "", end="", file=sys.stderr)
    return 1 if bad else 0


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, as Markdown."""
    head = ["checkpoint", *LOADERS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for case, by in rows:
        lines.append(f"| {' | '.join([case.title, *(by[name].cell for name in LOADERS)])} |")
    return lines


def _json(row: Row) -> dict[str, object]:
    case, by = row
    return {"case": case.title, "best": case.best, **{n: o._asdict() for n, o in by.items()}}


if __name__ == "__main__":
    sys.exit(main())
