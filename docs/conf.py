"""How the documentation is built: ``make docs``, where a warning is an error.

The pages of ``reference/generated`` are written anew at each build, from the parsers of the
commands and the public names of the packages, so that they cannot be out of date.
"""

from __future__ import annotations

import importlib
import os
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

project = "modelquirks"
author = "the modelquirks authors"
copyright = "the modelquirks authors"
version = release = version_of("modelquirks")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "modelquirks"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
suppress_warnings = ["myst.xref_missing.outside"]

PACKAGES = {
    "modelquirks.planner": "From a checkpoint to a plan",
    "modelquirks.quirks": "The vocabulary of quirks",
    "modelquirks.planner.placement.workload": "What a model is asked to do",
    "modelquirks.planner.checkpoint.manifest": "What a checkpoint holds",
    "modelquirks.planner.checkpoint.opened": "Formats of your own",
    "modelquirks.planner.execution.stream": "Weights one after another",
    "modelquirks.plugins.testing": "Testing quirks",
}
"""Module → title of its page in the reference."""


def setup(app: Any) -> None:
    """Have the generated pages written before anything is read (Sphinx calls this)."""
    app.connect("builder-inited", lambda _: write_reference(Path(__file__).parent))


def write_reference(docs: Path) -> None:
    """Write the pages that come from the code."""
    to = docs / "reference" / "generated"
    to.mkdir(parents=True, exist_ok=True)
    (to / "commands.md").write_text(commands(), encoding="utf-8")
    for module, title in PACKAGES.items():
        (to / f"{module}.rst").write_text(page_of(module, title), encoding="utf-8")


def commands() -> str:
    """Return a page with the help of each command, as it prints it."""
    from modelquirks.planner.cli import command

    os.environ["COLUMNS"] = "90"
    parts = ["# Commands\n\nAs `modelquirks COMMAND --help` prints it.\n"]
    for name in subcommands(command._parser(())):
        for words, parser in nested(name, subcommands(command._parser((name,)))[name]):
            parts.append(f"## {words}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


def nested(words: str, parser: ArgumentParser) -> Iterator[tuple[str, ArgumentParser]]:
    """Yield a command, or instead of it those below it."""
    if below := subcommands(parser):
        for name, one in below.items():
            yield from nested(f"{words} {name}", one)
    else:
        yield words, parser


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the commands of a parser, by name."""
    actions = [a for a in parser._actions if isinstance(a, _SubParsersAction)]
    return {name: one for action in actions for name, one in action.choices.items()}


def page_of(module: str, title: str) -> str:
    """Return a page with every public name of a module."""
    names = importlib.import_module(module).__all__
    head = f"{title}\n{'=' * len(title)}\n\n.. automodule:: {module}\n   :no-members:\n"
    return head + "".join(f"\n{entry(module, name)}" for name in names)


def entry(module: str, name: str) -> str:
    """Return the directive for one name: by what it is."""
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, type):
        kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
        return f".. {kind}:: {module}.{name}\n   :members:\n"
    kind = "autofunction" if callable(thing) and hasattr(thing, "__code__") else "autodata"
    return f".. {kind}:: {module}.{name}\n"
