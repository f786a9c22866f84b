"""``modelquirks execute``: load what a plan that was made earlier says."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.hub import add_token
from modelquirks.planner.cli.loadbar import loading_shown
from modelquirks.planner.cli.loading import add_loading, loading_options
from modelquirks.planner.cli.model import TRANSFORMERS, add_model, build
from modelquirks.planner.cli.offload import add_offload, offload_options
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import write_json
from modelquirks.planner.cli.report_plan import show_loaded, show_plan
from modelquirks.planner.cli.terminal import Terminal, note, progress
from modelquirks.planner.opening import reopened
from modelquirks.planner.plan import Plan, PlanError

if TYPE_CHECKING:
    import argparse

    import torch

    from modelquirks.planner.adapter.adapter import Adapter

__all__ = ["add_arguments", "load", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN", type=Path, help="what `plan -o` wrote")
    parser.add_argument(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="where the checkpoint is now, if it has been moved",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    add_offload(parser)
    add_loading(parser)
    add_model(parser)
    add_token(parser)
    add_no_plugin(parser)


def run(args: argparse.Namespace) -> Exit:
    """Read the plan, build the model, load."""
    options = {**offload_options(args), **loading_options(args)}
    registry = load_registry(args)
    plan = replace(Plan.load(args.plan, checkpoint=args.checkpoint), registry=registry)
    if plan.origin is not None and args.token:
        plan = replace(plan, origin=replace(plan.origin, token=args.token))
    if not args.json:
        show_plan(Terminal(sys.stdout), plan, everything=args.all)
    with progress("Reading headers"):
        manifest = reopened(plan.path, plan.origin, lambda: registry, plan.opening)
    with progress("Building the model without its weights"):
        built = build(args.model or TRANSFORMERS, manifest, registry, adapter=_beside(plan))
    return load(plan, built.model, as_json=args.json, options=options)


def _beside(plan: Plan) -> Adapter | None:
    """Return the adapter that the model needs places for; None if there is none, or merged."""
    if plan.adapter is None or plan.adapter.merged:
        return None
    from modelquirks.planner.adapter.adapter import open_adapter

    return open_adapter(plan.adapter.path)


def load(plan: Plan, model: torch.nn.Module, *, as_json: bool, options: Mapping[str, Any]) -> Exit:
    """Execute *plan* and report; UNUSABLE, with the reason on standard error, if that fails."""
    _alone()
    from modelquirks.planner.execution.execute import ExecutionError

    try:
        with loading_shown() as listener:
            loaded = plan.load_into(model, progress=listener, **options)
    except (PlanError, ExecutionError) as error:
        if as_json:
            write_json({**plan.to_json(), "loaded": None}, sys.stdout)
        note("error", str(error))
        return Exit.UNUSABLE
    if as_json:
        write_json({**plan.to_json(), "loaded": loaded.to_json()}, sys.stdout)
    else:
        show_loaded(Terminal(sys.stdout), loaded)
    return Exit.USABLE if loaded.verification.ok else Exit.UNUSABLE


def _alone() -> None:
    """Raise CallError in a process that torchrun started beside others."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "1"):
        raise CallError(
            f"each of the {ranks} processes of torchrun would load the whole model: shard it in a "
            "program of yours, which then calls Plan.execute (examples/distributed_load.py is one, "
            "docs/distributed.md says how), or use --dry-run"
        )
