"""``modelquirks infer``: propose the rules that map a checkpoint's names to a model's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.inspect import note_unreadable
from modelquirks.planner.cli.model import TRANSFORMERS, build
from modelquirks.planner.cli.plugins import add_no_plugin, load_registry
from modelquirks.planner.cli.report import SCHEMA, write_json
from modelquirks.planner.cli.terminal import Terminal, note, progress
from modelquirks.planner.infer.inference import Inference, infer
from modelquirks.planner.infer.quirkfile import quirk_text, text_of_test
from modelquirks.planner.infer.sides import Side, side_of, types_of
from modelquirks.planner.mapping.conversions import rule_text
from modelquirks.planner.wording import counted, summary
from modelquirks.planner.writing import write_whole
from modelquirks.quirks.record import Alias

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.infer.rules import Rule
    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "run"]

_SHOWN_RULES = 40
_SHOWN_NAMES = 10
_STYLES = {"certain": "green", "likely": "yellow", "open": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, weight file or index")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=TRANSFORMERS,
        help="what the names are to become: MODULE:FACTORY, a function that returns the model; "
        f"{TRANSFORMERS!r}, the class that config.json names (the default); or another "
        "checkpoint of the same model, by its path",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.py", type=Path,
        help="write the proposals as a quirk, and its test beside it",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    add_no_plugin(parser)


def run(args: argparse.Namespace) -> Exit:
    """Infer, report, and with ``-o`` write the quirk; nothing is applied."""
    if args.output is not None:
        _check_output(args.output)
    registry = load_registry(args)
    with progress("Reading headers"):
        manifest = open_manifest(args.checkpoint, lambda: registry)
    if not manifest.tensors:
        note_unreadable(args.checkpoint)
        return Exit.BAD_CALL
    with progress("Building the model without its weights"):
        side = _model(args.model, manifest, registry)
    with progress("Comparing names and shapes"):
        found = infer(types_of(manifest), side.tensors, side.ties)
    if args.json:
        write_json({"schema": SCHEMA, "checkpoint": manifest.to_json(), "infer": found.to_json()},
                   sys.stdout)  # fmt: skip
    else:
        out = Terminal(sys.stdout)
        out.say(str(manifest.path), style="bold")
        out.say(summary(manifest.to_json()), indent=2)
        _show(out, found, everything=args.all)
    if args.output is not None:
        _write(args.output, found, manifest)
    return Exit.UNUSABLE if found.missing or found.count("open") else Exit.USABLE


def _model(spec: str, manifest: Manifest, registry: Registry) -> Side:
    """Return what *spec* names: a checkpoint, if there is one of that path, or a model."""
    if spec != TRANSFORMERS and Path(spec).exists():
        return side_of(open_manifest(spec, lambda: registry))
    built = build(spec, manifest, registry)
    from modelquirks.planner.model.from_module import skeleton_of

    return side_of(skeleton_of(built.model, source=built.source))


def _show(out: Terminal, found: Inference, *, everything: bool) -> None:
    """Write how many tensors have a reading, the rules, and what is left."""
    counts = [f"{found.count(tier):,} {tier}" for tier in ("certain", "likely", "open")]
    total = counted(len(found.model), "tensor")
    out.say()
    out.say(f"Of the model's {total}: {', '.join(counts)}, {len(found.missing):,} without a "
            "reading.")  # fmt: skip
    rules = sorted(found.rules, key=lambda rule: (rule.tier != "certain", -rule.n_tensors))
    shown = len(rules) if everything else _SHOWN_RULES
    for title, listed in (("Rules", rules[:shown]), ("Open, one of several readings", found.open)):
        if listed:
            out.say()
            out.say(f"{title}:", style="bold")
        for rule in listed:
            _show_rule(out, rule)
    if len(rules) > shown:
        out.say(f"… and {len(rules) - shown} more rules; --all lists them", indent=2)
    _show_names(out, "Without a reading", found.missing)
    _show_names(out, "Stored and not used", found.unread)


def _show_rule(out: Terminal, rule: Rule) -> None:
    text = (
        f"{rule.rule.stored} → {rule.rule.model}"
        if isinstance(rule.rule, Alias)
        else rule_text(rule.rule)
    )
    out.say(f"{rule.tier}: {text}", style=_STYLES[rule.tier], indent=2, wraps=False)
    out.say(f"{counted(rule.n_tensors, 'tensor')}: {rule.why}", indent=4)
    others = dict.fromkeys(text for claim in rule.claims for text in claim.others)
    for other in others:
        out.say(f"or {other}", indent=4)


def _show_names(out: Terminal, title: str, names: Sequence[str]) -> None:
    if not names:
        return
    out.say()
    out.say(f"{title}: {len(names):,}", style="bold")
    for name in names[:_SHOWN_NAMES]:
        out.say(name, indent=2, wraps=False)
    if len(names) > _SHOWN_NAMES:
        out.say(f"… and {len(names) - _SHOWN_NAMES} more", indent=2)


def _check_output(path: Path) -> None:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise CallError(f"{str(path)!r} must be the name of a Python module, as quirk_acme.py")
    for each in (path, _test_path(path)):
        if each.exists() or each.is_symlink():
            raise CallError(f"{str(each)!r} is there already; name another file with -o")


def _test_path(path: Path) -> Path:
    return path.with_name(f"test_{path.name}")


def _write(path: Path, found: Inference, manifest: Manifest) -> None:
    """Write the quirk and its test; say on standard error what to do with them."""
    if not found.rules:
        note("warning", f"there is no rule to write, so {str(path)!r} was not written")
        return
    write_whole(path, quirk_text(found, manifest.config, path.stem))
    write_whole(_test_path(path), text_of_test(found, manifest.config, path.stem, path.stem))
    note("hint", f"{str(path)!r} and {_test_path(path).name!r} are written: check what is likely, "
         "run the test, and install it as a plugin (docs/infer.md)")  # fmt: skip
