"""Mutations: right checkpoints, damaged at random in every way that has a name, and loaded.

    python benchmarks/mutations.py --cases 5000 [--seed N] [--kinds REGEX] [--subjects REGEX]
    python benchmarks/mutations.py --seed N --only NUMBER        # one case again, with details

Each case takes one of the right checkpoints, damages a copy in one way (or in two), plans it with
the default options into the true model (made from config.json, which may be what is damaged),
loads it if the plan is ok, and holds every tensor and tie against the truth, bit for bit. A case
depends on the seed and its number only. ``SILENT``, ``UNNAMED`` and ``CRASH`` are failures; see
``mutations_judge.py`` for what they mean, docs/damage.md for the table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mutations_cases import Case, drawn, run
from mutations_digest import caught, is_of_weights
from mutations_judge import BAD, Verdict, shown
from mutations_kinds import KINDS
from mutations_subjects import SUBJECTS
from mutations_table import as_markdown, print_table


def main() -> int:
    """Read the command line, run, and print the table."""
    args = _arguments()
    _quiet()
    if args.only is not None:
        return _again(args)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for case in _cases(args):
        with tempfile.TemporaryDirectory(prefix="mutations-", dir=_memory()) as folder:
            verdict = run(case, Path(folder))
            seen = _digest_sees(case, Path(folder), verdict)
        rows.append({
            "number": case.number, "kinds": case.kinds, "subject": case.subject.name,
            "device": case.device, "outcome": verdict.outcome, "digest": seen,
            "done": case.copy.done,
        })  # fmt: skip
        if _is_bad(rows[-1]):
            print(f"--only {case.number}: {case.told()}", *shown(verdict), sep="\n", flush=True)
        if len(rows) % 500 == 0:
            rate = (time.monotonic() - started) / len(rows)
            print(f"  {len(rows)} cases, {rate:.3f} s each", file=sys.stderr, flush=True)
        if len(rows) == args.cases or time.monotonic() - started > args.seconds:
            break
    seconds = time.monotonic() - started
    print_table(rows, f"{len(rows):,} damaged checkpoints, seed {args.seed}, {seconds:.0f} s")
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"seed": args.seed, "cases": rows}, indent=1) + "\n")
    return 1 if any(map(_is_bad, rows)) else 0


def _digest_sees(case: Case, folder: Path, verdict: Verdict) -> bool | None:
    """Tell whether a digest names what no header shows; None: no value in a file is another."""
    others = any(text.startswith("values:") for text in verdict.differing)
    if verdict.outcome != "unseen" or not others or not is_of_weights(case.subject, case.copy):
        return None
    return caught(case.subject, folder)


def _is_bad(row: Mapping[str, Any]) -> bool:
    return row["outcome"] in BAD or row["digest"] is False


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop by then, with fewer")
    parser.add_argument("--only", type=int, help="this case alone, with details")
    parser.add_argument("--keep", type=Path, help="with --only: leave the damaged files there")
    parser.add_argument("--kinds", default="", help="regular expression; kinds that fit it wholly")
    parser.add_argument("--subjects", default="", help="the same for subjects")
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    parser.add_argument("--json", type=Path, help="file for every case")
    return parser.parse_args()


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    number = 0
    kinds = [name for name in KINDS if re.fullmatch(args.kinds or ".*", name)]
    subjects = [name for name in SUBJECTS if re.fullmatch(args.subjects or ".*", name)]
    while True:
        if (case := drawn(args.seed, number, kinds=kinds, subjects=subjects)) is not None:
            yield case
        number += 1
        if number > 1000 + 50 * args.cases:
            raise SystemExit("there are not so many cases of these kinds and subjects")


def _again(args: argparse.Namespace) -> int:
    kinds = [name for name in KINDS if re.fullmatch(args.kinds or ".*", name)]
    subjects = [name for name in SUBJECTS if re.fullmatch(args.subjects or ".*", name)]
    case = drawn(args.seed, args.only, kinds=kinds, subjects=subjects)
    if case is None:
        raise SystemExit("that number has no case")
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=_memory()) as folder:
        verdict = run(case, args.keep or Path(folder))
    print(case.told(), *shown(verdict), sep="\n")
    return 1 if verdict.outcome in BAD else 0


def _memory() -> str | None:
    """Return a folder in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _quiet() -> None:
    import logging

    import torch
    import transformers

    torch.set_num_threads(1)
    messages: Any = transformers.utils.logging
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(main())
