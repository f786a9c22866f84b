"""docs/loaders.md and docs/writing-quirks.md: what they show is there, word for word, and runs."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from modelquirks.plugins import testing
from modelquirks.quirks import ModelQuirks

ROOT = Path(__file__).parents[1]
GUIDES = ("docs/loaders.md", "docs/writing-quirks.md", "CONTRIBUTING.md")


def blocks(guide: str) -> list[str]:
    text = (ROOT / guide).read_text(encoding="utf-8")
    found = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def test_what_is_shown_of_an_example_stands_in_it() -> None:
    shown = [block for block in blocks("docs/loaders.md") if block.startswith("# examples/")]
    assert len(shown) >= 4
    for block in shown:
        first, _, code = block.partition("\n")
        source = (ROOT / first.removeprefix("# ")).read_text(encoding="utf-8")
        lines = [line.strip() for line in source.splitlines()]
        wanted = [line.strip() for line in code.splitlines()]
        starts = range(len(lines) - len(wanted) + 1)
        assert any(lines[at : at + len(wanted)] == wanted for at in starts), block


@pytest.mark.parametrize("guide", GUIDES)
def test_python_shown_is_python_and_imports_what_there_is(guide: str) -> None:
    for block in blocks(guide):
        tree = ast.parse(block)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and "acme" not in ast.unparse(node):
                exec(ast.unparse(node), {})


def test_the_record_of_the_guide_is_sound() -> None:
    (source,) = [block for block in blocks("docs/writing-quirks.md") if "RECORD" in block]
    space: dict[str, object] = {}
    exec(source, space)
    record = space["RECORD"]
    assert isinstance(record, ModelQuirks)
    testing.check_record(record, ["body.0.weight", "body.2.qkv", "top.bias", "body.1.angles"])


def test_every_function_of_the_kit_is_in_the_guide() -> None:
    text = (ROOT / "docs/writing-quirks.md").read_text(encoding="utf-8")
    functions = {name for name in testing.__all__ if name[0].islower()} - {"registry_of"}
    assert {name for name in functions if f"`{name}(" not in text} == set()


def test_every_example_of_a_loader_is_in_the_guide() -> None:
    text = (ROOT / "docs/loaders.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples" / "loaders").glob("*.py"):
        assert f"`{path.name}`" in text
