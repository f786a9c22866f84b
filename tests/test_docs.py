"""docs/: it builds without a warning, and what its pages name is there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(find_spec("sphinx") is None, reason="sphinx is not installed")
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), "docs", str(tmp_path / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    reference = tmp_path / "html" / "reference" / "generated"
    commands = (reference / "commands.html").read_text(encoding="utf-8")
    assert "--max-memory" in commands
    planner = (reference / "modelquirks.planner.html").read_text(encoding="utf-8")
    assert "modelquirks.planner.Dispatcher.plan" in planner


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_shown_is_python_and_imports_what_there_is(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        ours = [n for n in imports if "modelquirks" in ast.unparse(n)]
        exec("\n".join(ast.unparse(n) for n in ours), {})


def test_every_option_named_is_one_of_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import conf; print(conf.commands())"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    known = set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    named = {
        (page.stem, option)
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if "modelquirks " in line and "python " not in line
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }
    assert named
    assert {(page, option) for page, option in named if option not in known} == set()


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w./-]+)$", index, re.MULTILINE))
    assert {page.stem for page in PAGES} - {"index"} <= listed
