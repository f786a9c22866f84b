"""``modelquirks export``: write a checkpoint anew, as sharded safetensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.adapter import adapter_of, add_adapter
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.loadbar import loading_shown
from modelquirks.planner.cli.model import add_model, build
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.placing import add_dtype, checked
from modelquirks.planner.cli.plan import add_naming, naming_options
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import SCHEMA, write_json
from modelquirks.planner.cli.report_export import show_exported
from modelquirks.planner.cli.terminal import Terminal, note, progress
from modelquirks.planner.placement.memory import parse_size

if TYPE_CHECKING:
    import argparse

    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, weight file or index")
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be new, or empty")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a folder that holds nothing but what an export writes",
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=checked(parse_size),
        default="5GB",
        help="of a weight file at most, unless one tensor is larger (%(default)s)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=checked(parse_size),
        default="64MiB",
        help="what making the tensors may take (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    add_dtype(parser, "of floating-point weights (default: as stored)")
    add_model(parser)
    add_adapter(parser)
    add_no_plugin(parser)
    add_opening(parser)
    add_naming(parser)


def _adapter_options(args: argparse.Namespace, registry: Registry) -> dict[str, Any]:
    """Return the adapter to merge; CallError for one that would stay beside the weights."""
    adapter = adapter_of(args, registry)
    if adapter is None:
        return {}
    if not args.merge:
        raise CallError(
            "an adapter stays in its folder, or is merged into what is written: --merge"
        )
    return {"adapter": adapter, "merge_adapter": True}


def run(args: argparse.Namespace) -> Exit:
    """Open, plan, write, read back, report."""
    registry = load_registry(args)
    with progress("Reading headers"):
        manifest = open_manifest(args.checkpoint, lambda: registry, opening_options(args))
    model = None
    if args.model is not None:
        with progress("Building the model without its weights"):
            model = build(args.model, manifest, registry).model
    from modelquirks.planner.export.exportreport import ExportError
    from modelquirks.planner.export.perform import export

    about: dict[str, Any] = {"schema": SCHEMA, "checkpoint": manifest.to_json()}
    try:
        with loading_shown("Exporting") as listener:
            report = export(
                manifest,
                args.out,
                registry=registry,
                model=model,
                dtype=args.dtype,
                dequantize=args.dequantize,
                shard_size=args.shard_size,
                memory=args.memory,
                overwrite=args.overwrite,
                progress=listener,
                **naming_options(args),
                **_adapter_options(args, registry),
            )
    except ExportError as error:
        if args.json:
            write_json({**about, "export": None, "error": str(error)}, sys.stdout)
        note("error", str(error))
        return Exit.UNUSABLE
    except ValueError as error:
        raise CallError(str(error)) from error
    if args.json:
        write_json({**about, "export": report.to_json()}, sys.stdout)
    else:
        show_exported(Terminal(sys.stdout), report, everything=args.all)
    return Exit.USABLE
