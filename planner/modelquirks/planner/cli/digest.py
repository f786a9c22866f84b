"""``modelquirks digest``: the SHA-256 of every tensor, written down or compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.cli.adapter import adapter_of, add_adapter
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.hub import CHECKPOINT_HELP, add_hub, opened
from modelquirks.planner.cli.loadbar import loading_shown
from modelquirks.planner.cli.opening import add_opening, opening_options
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import SCHEMA, write_json
from modelquirks.planner.cli.report_digest import show_compared, show_written
from modelquirks.planner.cli.terminal import Terminal, note, progress
from modelquirks.planner.digest.digest import Digest
from modelquirks.planner.opening import fetch_files

if TYPE_CHECKING:
    import argparse

    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit codes: 0 done, or nothing differs; 1 a tensor differs, or cannot be read; 2 bad call "
        "or unreadable input."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to FILE, not to standard output"
    )
    way.add_argument(
        "--check", metavar="FILE", help="compare with FILE, which was written earlier or elsewhere"
    )
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    add_adapter(parser, merges=False)
    add_opening(parser)
    add_hub(parser)
    add_no_plugin(parser)


def run(args: argparse.Namespace) -> Exit:
    """Read every tensor once."""
    known = None if args.check is None else Digest.load(args.check)
    registry = load_registry(args)
    manifest = _manifest(args, registry)
    if not manifest.tensors:
        raise CallError(f"{args.checkpoint!r} holds no tensor that can be read")
    if known is None:
        return _write(args, manifest, registry)
    return _check(args, manifest, known, registry)


def _manifest(args: argparse.Namespace, registry: Registry) -> Manifest:
    """Return the checkpoint, with the adapter if there is one, and have all its files here."""
    with progress("Reading headers"):
        manifest = opened(args, lambda: registry, opening_options(args))
        adapter = adapter_of(args, registry)
    with progress("Fetching files"):
        fetch_files(manifest, (shard.name for shard in manifest.shards))
    if adapter is None:
        return manifest
    from modelquirks.planner.adapter.beside import beside

    return beside(manifest, adapter.manifest)


def _write(args: argparse.Namespace, manifest: Manifest, registry: Registry) -> Exit:
    """Write the digest; UNUSABLE if there is something that nobody should vouch for."""
    if errors := [f.message for f in manifest.findings if f.severity == "error"]:
        return _refused(f"{manifest.shown!r} is damaged, so no digest was made of it", errors)
    from modelquirks.planner.digest.hashing import hash_tensors
    from modelquirks.planner.execution.loadoptions import LoadOptions

    with loading_shown("Reading") as listener:
        options = LoadOptions.of(progress=listener)
        hashed = hash_tensors(manifest, registry=registry, options=options)
    if hashed.unreadable:
        lines = [f"{name!r}: {why}" for name, why in hashed.unreadable.items()]
        return _refused(f"{manifest.shown!r} cannot be read, so no digest was made of it", lines)
    digest = Digest(hashed.tensors)
    if args.output is None:
        sys.stdout.write(digest.to_text())
        return Exit.USABLE
    digest.save(args.output)
    if args.json:
        about = {"sha256": digest.sha256, "tensors": len(digest.tensors), "bytes": hashed.n_bytes}
        checkpoint = manifest.to_json()
        write_json({"schema": SCHEMA, "checkpoint": checkpoint, "digest": about}, sys.stdout)
    else:
        show_written(Terminal(sys.stdout), manifest, digest, hashed.n_bytes, args.output)
    return Exit.USABLE


def _check(args: argparse.Namespace, manifest: Manifest, known: Digest, registry: Registry) -> Exit:
    """Compare with a digest; UNUSABLE if something differs."""
    from modelquirks.planner.digest.comparison import compare
    from modelquirks.planner.execution.loadoptions import LoadOptions

    with loading_shown("Reading") as listener:
        options = LoadOptions.of(progress=listener)
        found = compare(manifest, known, registry=registry, options=options)
    if args.json:
        checkpoint = manifest.to_json()
        report = {"schema": SCHEMA, "checkpoint": checkpoint, "comparison": found.to_json()}
        write_json(report, sys.stdout)
    else:
        show_compared(Terminal(sys.stdout), manifest, found, args.check, everything=args.all)
    return Exit.USABLE if found.is_same else Exit.UNUSABLE


def _refused(text: str, lines: list[str]) -> Exit:
    more = [f"… and {len(lines) - 10:,} more"] if len(lines) > 10 else []
    note("error", "\n- ".join([f"{text}:", *lines[:10], *more]))
    return Exit.UNUSABLE
