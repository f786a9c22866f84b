"""``modelquirks plan``: account for every tensor, say where each goes, then load exactly that."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.planner.cli.adapter import adapter_of, add_adapter
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.hub import CHECKPOINT_HELP, add_hub, opened
from modelquirks.planner.cli.inspect import note_unreadable
from modelquirks.planner.cli.loading import add_loading, loading_options
from modelquirks.planner.cli.model import TRANSFORMERS, Built, add_model, build
from modelquirks.planner.cli.offload import add_offload, offload_options
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.placing import add_placing, checked, placing_options
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import add_html, write_json
from modelquirks.planner.cli.report_plan import show_plan, show_verdict
from modelquirks.planner.cli.terminal import Terminal, progress
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.finding import Finding
from modelquirks.planner.plan import Plan
from modelquirks.planner.writing import write_whole

if TYPE_CHECKING:
    from modelquirks.planner.adapter.adapter import Adapter
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.model.skeleton import Skeleton
    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "add_naming", "naming_options", "planned", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument(
        "--schema", action=_Schema, help="print the JSON Schema of saved plans and exit"
    )
    parser.add_argument("--dry-run", action="store_true", help="only plan: no weight is read")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="save the plan as JSON")
    add_html(parser)
    add_model(parser)
    add_adapter(parser)
    add_hub(parser)
    add_no_plugin(parser)
    group = add_placing(parser)
    add_offload(group)
    add_loading(parser)
    add_opening(parser, compares=True)
    add_naming(parser)


class _Schema(argparse.Action):
    """``--schema``, which needs no checkpoint."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **rest)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from modelquirks.planner.schema.planschema import plan_schema

        sys.stdout.write(plan_schema())
        parser.exit()


def add_naming(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say what is the same, and what may be missing."""
    group = parser.add_argument_group("what counts as the same tensor, and what may be missing")
    for option, metavar, text in (
        ("--alias", "A=B", "names that fit A in the checkpoint are called B in the model"),
        ("--tie", "A=B", "these two names of the model share one tensor"),
        ("--quirk", "NAME", "apply this record even if it does not match"),
        ("--no-quirk", "NAME", "never apply this record"),
        ("--allow-missing", "PATTERN", "tensors of the model that may be missing"),
    ):
        group.add_argument(
            option,
            metavar=metavar,
            type=checked(_pair) if metavar == "A=B" else str,
            action="append",
            default=[],
            help=f"{text} (repeatable)",
        )
    group.add_argument(
        "--min-coverage",
        metavar="SHARE",
        type=checked(_share),
        help="share of the model's tensors, 0 to 1, that must be accounted for",
    )


def naming_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_naming` as ``Dispatcher.plan`` takes them."""
    return {
        "aliases": args.alias,
        "ties": args.tie,
        "quirks": args.quirk,
        "no_quirks": args.no_quirk,
        "allow_missing": args.allow_missing,
        "min_coverage": args.min_coverage,
    }


def run(args: argparse.Namespace) -> Exit:
    """Plan, report, and without ``--dry-run`` load."""
    options = {**offload_options(args), **loading_options(args)}
    plan, built, manifest = _planned(args)
    if args.html is not None:
        from modelquirks.planner.report.gather import of_plan
        from modelquirks.planner.report.page import page

        write_whole(args.html, page(of_plan(plan, manifest)))
    if args.output is not None:
        plan.save(args.output)
    if args.materialize and plan.ok:
        plan = replace(plan, findings=(*plan.findings, _foreseen(plan, built, args.offload_folder)))
    code = verdict(plan)
    loads = built is not None and not args.dry_run and code is Exit.USABLE
    out = Terminal(sys.stdout)
    if not args.json:
        show_plan(out, plan, everything=args.all)
    if built is not None and loads:
        from modelquirks.planner.cli.execute import load

        return load(plan, built.model, as_json=args.json, options=options)
    if args.json:
        write_json(plan.to_json(), sys.stdout)
    else:
        show_verdict(out, plan)
    if code is Exit.BAD_CALL:
        note_unreadable(args.checkpoint)
    return code


def verdict(plan: Plan) -> Exit:
    """Return whether the plan can be used; BAD_CALL if there was nothing to plan for."""
    if plan.ok:
        return Exit.USABLE
    return Exit.UNUSABLE if plan.checkpoint["tensors"] else Exit.BAD_CALL


def _built(
    args: argparse.Namespace, manifest: Manifest, registry: Registry, adapter: Adapter | None
) -> Built | None:
    """Return the model, which a dry run does without unless it is asked for."""
    spec: str | None = args.model or (None if args.dry_run else TRANSFORMERS)
    if spec is None:
        return None
    with progress("Building the model without its weights"):
        return build(spec, manifest, registry, adapter=None if args.merge else adapter)


def planned(args: argparse.Namespace) -> Plan:
    """Return the plan that the arguments ask for."""
    return _planned(args).plan


class _Planned(NamedTuple):
    plan: Plan
    built: Built | None
    manifest: Manifest


def _planned(args: argparse.Namespace) -> _Planned:
    registry = load_registry(args)
    with progress("Reading headers"):
        manifest = opened(args, lambda: registry, opening_options(args))
        adapter = adapter_of(args, registry)
    built = _built(args, manifest, registry, adapter)
    with progress("Planning"):
        plan = Dispatcher(registry).plan(
            manifest,
            model=None if built is None else built.model,  # not its skeleton: a library has rules
            dtype=args.dtype,
            dequantize=args.dequantize,
            expert_offload=not getattr(args, "no_expert_offload", False),
            adapter=adapter,
            merge_adapter=args.merge,
            **naming_options(args),
            **placing_options(args),
        )
    if built is not None and plan.model is not None:
        plan = replace(plan, model=plan.model._replace(source=built.source))
    return _Planned(plan, built, manifest)


def _foreseen(plan: Plan, built: Built | None, folder: str) -> Finding:
    """Return what ``--materialize`` would write, or why that is not known."""
    if built is None:
        text = "what --materialize would write is not known without a model: name one with --model"
        return Finding("materialize", "info", text)
    from modelquirks.planner.execution.perform import foresee

    return foresee(plan, _skeleton(built), folder)


def _skeleton(built: Built) -> Skeleton:
    from modelquirks.planner.model.from_module import skeleton_of

    return skeleton_of(built.model, source=built.source)


def _pair(text: str) -> str:
    first, _, second = text.partition("=")
    if not first or not second:
        raise CallError(f"{text!r} must have a name on both sides of '=', as 'module.**=**'")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise CallError(f"{text!r} is not between 0 and 1, as 0.99")
    return share
