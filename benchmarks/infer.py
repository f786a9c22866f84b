"""Inference of quirks, over the classes of transformers whose checkpoints have other names.

    python benchmarks/infer.py [--classes REGEX] [--drop 0.1 --seeds 1 2 3] [--json FILE]
    python benchmarks/infer.py --real [--manifests FOLDER] [--drop 0.1 --seeds 1 2 3] [--json FILE]

Both sides are names, dtypes and shapes alone; no plugin takes part. The truth is what a plan with
all plugins says. Printed are, of the classes that need renames only and of those that need
conversions, how many mappings are recovered fully and right, how many are left open in part, how
many have a wrong proposal; and of the tensors, how many are certain, and how many of these wrong.
With ``--drop`` a share of the modules is taken away, independently on each side, so that much of
what is left has no counterpart: what is certain must still be right.

With ``--real`` the same for real checkpoints of full size: those manifests in FOLDER whose mapping
is known; the others are listed with the reason. Exits 1 if anything certain is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infer_listings import Listing, extracted
from infer_score import Verdict, dropped, need_of, scored, state_of

from modelquirks.planner.infer.inference import infer

MANIFESTS = Path(__file__).parents[1] / "tests" / "data" / "manifests"


def main() -> int:
    """Read the command line, run, print; 1 if anything certain is wrong."""
    args = _arguments()
    listings = _real(args) if args.real else _classes(args)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds if args.drop else [0]:
        if args.drop:
            print(f"{args.drop:.0%} of modules dropped on each side, seed {seed}")
        runs.append({"drop": args.drop, "seed": seed, **_run(listings, args.drop, seed)})
    if args.json is not None:
        args.json.write_text(json.dumps({"names": [x.name for x in listings], "runs": runs}))
    return 1 if any(run["certain_wrong"] for run in runs) else 0


def _classes(args: argparse.Namespace) -> list[Listing]:
    """Return the listings of the zoo's classes."""
    from zoo import _cache
    from zoo_classes import class_names

    zoo = args.zoo or _cache()
    zoo.mkdir(parents=True, exist_ok=True)
    names = [n for n in class_names(zoo / "classes.json") if re.search(args.classes, n)]
    cache = args.cache or zoo / "infer"
    return [x for x in extracted(names, zoo / "fresh", cache) if args.all or _differs(x)]


def _real(args: argparse.Namespace) -> list[Listing]:
    """Return the listings of the real manifests, and say of the others why there is none."""
    from infer_real import Left, real_listings

    found = [x for x in real_listings(args.manifests) if re.search(args.classes, x.name)]
    left = [x for x in found if isinstance(x, Left)]
    known = [x for x in found if isinstance(x, Listing)]
    total = sum(len(x.stored) for x in known)
    print(f"{len(known)} manifests with {total:,} stored tensors; left out are {len(left)}:")
    for name, why in left:
        print(f"  {name}: {why}")
    return known


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", default="", help="regular expression; only classes it fits")
    parser.add_argument("--drop", type=float, default=0.0, help="share of modules to drop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--all", action="store_true", help="classes of equal names, too")
    parser.add_argument("--real", action="store_true", help="real manifests instead of the zoo")
    parser.add_argument("--manifests", type=Path, default=MANIFESTS, help="folder of manifests")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--zoo", type=Path, help="cache folder of benchmarks/zoo.py")
    parser.add_argument("--cache", type=Path, help="where listings are kept")
    return parser.parse_args()


def _differs(listing: Listing) -> bool:
    partners = {name: group for group in listing.ties for name in group}
    needs = (need_of((n, *partners.get(n, ())), true) for n, true in listing.truth.items())
    return not {"renamed", "converted"}.isdisjoint(needs)


def _run(listings: Iterable[Listing], share: float, seed: int) -> dict[str, Any]:
    """Score each listing, print the tables, and return the counts."""
    states: dict[str, Counter[str]] = {}
    tensors: Counter[Verdict] = Counter()
    seconds: list[float] = []
    for listing in listings:
        less = dropped(listing, share, seed)
        started = time.perf_counter()
        found = infer(less.stored, less.model, less.ties)
        seconds.append(time.perf_counter() - started)
        verdicts = scored(less, listing.stored, found)
        need, state = state_of(verdicts)
        states.setdefault(need, Counter())[state] += 1
        tensors.update(verdicts.values())
        if state == "certain and wrong" or (state != "right" and not share):
            print(f"  {listing.name}: {state}", file=sys.stderr)
    for need, counts in sorted(states.items()):
        total = counts.total()
        told = ", ".join(f"{n} {state}" for state, n in counts.most_common())
        print(f"classes, {need}: {total}: {told}; {counts['right'] / total:.1%} fully right")
    for need in ("same", "renamed", "converted", "nothing"):
        _print_tensors(need, {v: n for v, n in tensors.items() if v.need == need})
    seconds.sort()
    if seconds:
        print(f"seconds a model: median {seconds[len(seconds) // 2]:.3f}, most {seconds[-1]:.2f}")
    return {
        "classes": {need: dict(counts) for need, counts in states.items()},
        "tensors": [{**v._asdict(), "count": n} for v, n in sorted(tensors.items())],
        "certain": sum(n for v, n in tensors.items() if v.tier == "certain"),
        "certain_wrong": sum(n for v, n in tensors.items() if v.tier == "certain" and not v.right),
        "seconds": max(seconds, default=0.0),
    }


def _print_tensors(need: str, counts: dict[Verdict, int]) -> None:
    total = sum(counts.values())
    if not total:
        return
    tiers: Sequence[str] = ("certain", "likely", "open", "none")
    told = [
        f"{tier} {n:,}" + (f" ({bad:,} wrong)" if tier != "none" else "")
        for tier in tiers
        if (n := sum(c for v, c in counts.items() if v.tier == tier))
        for bad in [sum(c for v, c in counts.items() if v.tier == tier and not v.right)]
    ]
    print(f"tensors, {need}: {total:,}: {', '.join(told)}")


if __name__ == "__main__":
    sys.exit(main())
