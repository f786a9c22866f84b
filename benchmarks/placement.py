"""Placements beside accelerate's: predicted time of a token, the gap to the bound, and solve time.

    python benchmarks/placement.py [--quick] [--models RE] [--machines RE] [--out FILE]

Models of real sizes, from 135 million to a trillion parameters, on the machines that ship. For
each pair accelerate's ``auto`` (``get_balanced_memory`` and ``infer_auto_device_map``) and ours are
priced by the same rule (docs/placement.md), and both must keep within the capacities. A placement
of accelerate's that does not is marked; one of ours that is dearer, or missing where there is any,
ends the run with exit code 1. ``--quick`` takes the smaller models only.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from placement_models import MODELS, Model, built

from modelquirks.planner.collector import collector_paused
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.placement.machine import Machine, read_machine, shipped_machines
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.placement import Placement, place
from modelquirks.planner.placement.wishes import Wishes
from modelquirks.planner.placement.workload import Workload
from modelquirks.planner.placing import Request, prepare

QUICK = re.compile("SmolLM|GPT-2|Llama-3-8B|Mistral|Qwen3-30B|Mixtral")
GAP, SECONDS, SHARE = 0.01, 2.0, 0.95
"""So near to the bound, within so many seconds, must so many of the pairs be."""

CONTEXT = 4096


class Row(NamedTuple):
    """One pair."""

    model: str
    machine: str
    theirs_ms: float | None
    """None: accelerate gives no map that can be used."""
    theirs_note: str
    ours_ms: float | None
    gap: float | None
    solve_s: float
    keys: int
    """Entries of our map."""


def prepared(model: Any) -> tuple[ModuleTree, Wishes]:
    """Return what the planner would place, and what it would heed."""
    skeleton = skeleton_of(model)
    aliases = {name: group[0] for group in skeleton.ties for name in group[1:]}
    tree = ModelTree(skeleton, (), aliases)
    config = getattr(model, "config", None)
    indexed = callable(getattr(model, "set_experts_implementation", None))
    request = Request(workload=Workload(CONTEXT), experts_indexed=indexed)
    found, wishes, _ = prepare(tree, skeleton, config.to_dict() if config else {}, request)
    return found.whole, wishes


def theirs(model: Any, memory: Mapping[Device, int | None]) -> Mapping[str, Any]:
    """Return accelerate's map; by itself it puts on the disk what fits nowhere else."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, modeling

    # It leaves out devices that this machine has not; all else is as it comes.
    modeling.get_max_memory = dict
    given: dict[Any, Any] = {d: n for d, n in memory.items() if d != "disk"}
    whole = list(getattr(model, "_no_split_modules", None) or ())
    options: dict[str, Any] = {"no_split_module_classes": whole}
    balanced = get_balanced_memory(model, dict(given), **options)
    return dict(infer_auto_device_map(model, balanced, **options))


def compared(name: str, model: Any, tree: ModuleTree, given: Wishes, machine: Machine) -> Row:
    """Return one row."""
    memory = machine.memory
    wishes = replace(given, machine=machine)
    started = time.perf_counter()
    with collector_paused():  # as Dispatcher.plan has it
        ours = place(tree, device_map="auto", max_memory=memory, wishes=wishes)
    took = time.perf_counter() - started
    price: float | None = None
    try:
        room = 0 if wishes.running is None else wishes.running.n_bytes
        cached = sum(tree.state.values())
        lessened = {  # as a careful user would, who knows what running takes
            d: n if n is None or d in ("cpu", "disk") else max(0, n - room - cached)
            for d, n in memory.items()
        }
        their = place(tree, device_map=theirs(model, lessened), max_memory=memory, wishes=wishes)
    except Exception as error:  # what accelerate raises is told
        note = f"{type(error).__name__}: {error}"[:60]
    else:
        note = unusable(their)
        if their.prediction is not None:
            price = their.prediction.seconds * 1e3
    found = ours.prediction
    return Row(
        model=name,
        machine=machine.name,
        theirs_ms=price,
        theirs_note=note,
        ours_ms=None if found is None else found.seconds * 1e3,
        gap=None if found is None else found.gap,
        solve_s=took,
        keys=len(ours.device_map),
    )


def unusable(placement: Placement) -> str:
    """Return why a map of accelerate's cannot be taken; empty if it can."""
    codes = {finding.code for finding in placement.findings}
    found = codes & {"over-capacity", "no-room-for-streaming", "device-map-incomplete"}
    return ", ".join(sorted(found))


def rows(models: list[Model], machines: list[Machine]) -> Iterator[Row]:
    """Yield all pairs."""
    for each in models:
        model = built(each)
        tree, wishes = prepared(model)
        for machine in machines:
            yield compared(each.name, model, tree, wishes, machine)


def judged(row: Row) -> str:
    """Return what is wrong with a row; empty if nothing."""
    if row.ours_ms is None:
        return "NO PLACEMENT" if row.theirs_ms is not None and not row.theirs_note else ""
    if row.theirs_ms is not None and not row.theirs_note and row.ours_ms > row.theirs_ms * 1.0001:
        return "WORSE"
    return ""


def shown(row: Row) -> str:
    """Return a row as text."""
    their = "-" if row.theirs_ms is None else f"{row.theirs_ms:,.2f}"
    our = "-" if row.ours_ms is None else f"{row.ours_ms:,.2f}"
    ratio = (
        f"{row.theirs_ms / row.ours_ms:.2f}x"
        if row.theirs_ms is not None and row.ours_ms is not None and row.ours_ms
        else ""
    )
    gap = "" if row.gap is None else f"{row.gap:.2%}"
    note = " ".join(part for part in (judged(row), row.theirs_note) if part)
    return (
        f"{row.model:20} {row.machine:10} {their:>11} {our:>11} {ratio:>7} {gap:>7} "
        f"{row.solve_s:6.2f} {row.keys:5}  {note}"
    )


def main() -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller models only")
    parser.add_argument("--models", type=re.compile, default=re.compile(""))
    parser.add_argument("--machines", type=re.compile, default=re.compile(""))
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    models = [m for m in MODELS if args.models.search(m.name)]
    if args.quick:
        models = [m for m in models if QUICK.search(m.name)]
    machines = [read_machine(n) for n in shipped_machines() if args.machines.search(n)]
    print(
        f"{'model':20} {'machine':10} {'theirs ms':>11} {'ours ms':>11} {'ratio':>7} {'gap':>7} "
        f"{'solve':>6} {'keys':>5}"
    )
    found: list[Row] = []
    for row in rows(models, machines):
        found.append(row)
        print(shown(row), flush=True)
    placed = [row for row in found if row.gap is not None]
    near = [row for row in placed if (row.gap or 0) <= GAP and row.solve_s <= SECONDS]
    ratios = [r.theirs_ms / r.ours_ms for r in placed if r.theirs_ms and r.ours_ms]
    print(
        f"{len(found)} pairs, {len(placed)} placed; gap at most {GAP:.0%} within {SECONDS:g} s: "
        f"{len(near)}; accelerate's takes {statistics.median(ratios):.2f}x as long (median)"
    )
    if args.out is not None:
        args.out.write_text(json.dumps([row._asdict() for row in found], indent=1))
    if any(judged(row) for row in found) or len(near) < SHARE * len(placed):
        sys.exit(1)


if __name__ == "__main__":
    main()
