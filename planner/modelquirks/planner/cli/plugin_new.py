"""``modelquirks plugins new``: a package with a quirk, its test and its proof, ready to install."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from modelquirks.planner.checkpoint.listing import Listing
from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.command import CallError, Exit
from modelquirks.planner.cli.terminal import progress
from modelquirks.planner.finding import shown
from modelquirks.planner.wording import clean
from modelquirks.planner.writing import write_whole
from modelquirks.quirks.family import Family, group

if TYPE_CHECKING:
    import argparse

    from modelquirks.quirks.registry import Registry

__all__ = ["add_arguments", "files_of", "run"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATES = Path(__file__).with_name("new_plugin")
_PLACES = {
    "README.md.txt": "README.md",
    "CHANGELOG.md.txt": "CHANGELOG.md",
    "pyproject.toml.txt": "pyproject.toml",
    "module.py.txt": "src/modelquirks_{name}/__init__.py",
    "test.py.txt": "tests/test_{name}.py",
}
"""Template → where it goes in the package."""

_SAMPLE = Listing(
    {
        "body.0.weight": "F32 [4, 4]",
        "body.0.bias": "F32 [4]",
        "body.1.weight": "F32 [4, 4]",
        "body.1.bias": "F32 [4]",
        "top.weight": "F32 [8, 4]",
    }
)
"""What a new package is about until it has a checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help="of the plugin and its first record")
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=Path(), help="folder to make it in (here)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="CHECKPOINT",
        help="take names, shapes and config of this checkpoint as the proof; no weights",
    )


def run(args: argparse.Namespace, registry: Registry) -> Exit:
    """Write the package; CallError if the name is none or taken, or the folder is there."""
    name = args.name.replace("-", "_")
    if not _NAME.fullmatch(name):
        raise CallError(
            f"{args.name!r} must be lower-case words of letters and digits with '-' or '_' between "
            "them, as 'acme'"
        )
    takers = [str(i.origin) for i in registry.plugins if i.name == name]
    takers += [str(r.origin) for r in registry.records if r.record.name == name]
    if takers:
        raise CallError(
            f"the name {name!r} is taken by {shown(dict.fromkeys(takers))}: choose another"
        )
    folder = args.into / f"modelquirks-{name.replace('_', '-')}"
    if folder.exists() or folder.is_symlink():
        raise CallError(f"{str(folder)!r} is there already: name another folder with --into")
    listing = None if args.source is None else _listing(args.source, registry)
    for place, text in files_of(name, listing).items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    print(_next_steps(folder, name, args.source))
    return Exit.USABLE


def files_of(name: str, listing: Listing | None = None) -> Mapping[str, str]:
    """Return the files of the package *name*, by their place in it.

    *listing* is that of the checkpoint that it is about; without one it is about a made-up one.
    """
    words = _words(name, listing)
    files = {
        place.format(name=name): Template(
            (_TEMPLATES / template).read_text(encoding="utf-8")
        ).substitute(words)
        for template, place in _PLACES.items()
    }
    about = listing or Listing(_SAMPLE.tensors, {"model_type": name})
    return {
        **files,
        f"src/modelquirks_{name}/py.typed": "",
        "tests/listing.json": about.to_text(),
    }


def _words(name: str, listing: Listing | None) -> Mapping[str, str]:
    """Return what the templates leave open."""
    major, minor, *_ = (int(part) for part in re.findall(r"\d+", version("modelquirks")))
    words = {
        "name": name,
        "distribution": f"modelquirks-{name.replace('_', '-')}",
        "since": f"{major}.{minor}",
        "before": f"{major}.{minor + 1}" if major == 0 else f"{major + 1}",
    }
    if listing is None:
        return {
            **words,
            "match": f'model_types=("{name}",)',
            "aliases": "\n".join(
                (
                    "    aliases=(",
                    '        Alias("body.{i}.**", "layers.{i}.**"),',
                    '        Alias("top.**", "head.**"),',
                    "    ),",
                )
            ),
            "imports": "Alias, Match, ModelQuirks, hookimpl",
            "stored": _quoted("body.1.weight"),
            "model": _quoted("layers.1.weight"),
            "ask": "",
        }
    families = list(group(listing.tensors).values())
    first = _quoted(families[0].names[0] if families else "")
    return {
        **words,
        "match": _match(listing.config, families),
        "aliases": '    aliases=(),  # such as Alias("body.{i}.**", "layers.{i}.**")',
        "ask": "  # what does the model call it?",
        "imports": "Match, ModelQuirks, hookimpl",
        "stored": first,
        "model": first,
    }


def _match(config: Mapping[str, Any], families: list[Family]) -> str:
    """Return the match, as source, that fits this config; else one by names."""
    if isinstance(kind := config.get("model_type"), str):
        return f"model_types=({_quoted(kind)},)"
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return f"architectures=({_quoted(architectures[0])},)"
    telling = max(families, key=len).template if families else "body.{0}.**"
    letters = iter("ijklmnop")
    return f"any_of=({_quoted(re.sub(r'{[0-9]+}', lambda _: f'{{{next(letters)}}}', telling))},)"


def _quoted(text: str) -> str:
    """Return *text*, which anybody may have made, as source: nothing of it ends the string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{clean(escaped)}"'


def _listing(source: str, registry: Registry) -> Listing:
    with progress("Reading headers"):
        manifest = open_manifest(source, lambda: registry)
    if not manifest.tensors:
        raise CallError(f"{source!r} holds no tensor that can be read, so it proves nothing")
    return Listing.of(manifest)


def _next_steps(folder: Path, name: str, source: str | None) -> str:
    return "\n".join(
        (
            f"{folder}",
            f"  src/modelquirks_{name}/__init__.py   the record: when it applies, what is so",
            "  tests/listing.json      names, dtypes, shapes, config: what proves it",
            f"  tests/test_{name}.py   what it must do",
            "",
            "Then:",
            f"  pip install -e {folder} pytest",
            f"  python -m pytest {folder}",
            f"  modelquirks plugins check {source or 'CHECKPOINT'} --record {name}",
        )
    )
