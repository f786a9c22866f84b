"""What SECURITY.md and the README promise is held by tests that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_each_promise_names_tests_that_there_are() -> None:
    table = SECURITY.partition("## What holds")[2].partition("## What does not hold")[0]
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert named, row
        assert [path for path in named if not (ROOT / path).is_file()] == []


def test_every_module_of_attacks_holds_a_promise() -> None:
    here = {f"tests/hostile/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert {path for path in here if path not in SECURITY} == set()


def test_dependencies_are_few_and_each_has_its_reason() -> None:
    """The table of the README has just those of pyproject.toml, those of extras marked so."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Dependencies")[2].partition("## ")[0]
    rows = re.findall(r"^\| ([\w-]+)( \(extra\))? \| (.+) \|$", table, re.MULTILINE)
    told = {name: bool(extra) for name, extra, why in rows if why.strip("- ")}
    extras = PROJECT["optional-dependencies"].values()
    expected = dict.fromkeys(map(name_of, PROJECT["dependencies"]), False)
    expected |= dict.fromkeys((name_of(one) for several in extras for one in several), True)
    assert {k: v for k, v in told.items() if k != "package"} == expected
    assert len(PROJECT["dependencies"]) <= 8


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0]


def test_the_security_notes_are_linked() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search("^security$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)


def test_nothing_that_executes_what_it_reads_is_used_to_read() -> None:
    """No YAML, no shelve, no pickle.loads, no eval; modules that do it are not even imported."""
    found = [
        f"{path.name}: {hit[0].strip()}"
        for layer in ("quirks", "planner", "plugins")
        for path in (ROOT / layer / "modelquirks").rglob("*.py")
        for hit in FORBIDDEN.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


FORBIDDEN = re.compile(
    r"^[ ]*(?:import|from) (?:pickle|cPickle|dill|cloudpickle|shelve|marshal|yaml|joblib|runpy|"
    r"subprocess|code|codeop|xml)\b(?!\w)"
    r"|(?<![\w.])(?:eval|exec|compile|__import__|input)\("
    r"|\btorch\.load\(|\bos\.(?:system|popen)\(",
    re.MULTILINE,
)


def test_the_guard_sees_what_it_is_for() -> None:
    seen = ("import pickle\n", "    from yaml import load\n", "x = eval(text)", "torch.load(path)")
    assert all(map(FORBIDDEN.search, seen))
    assert not any(map(FORBIDDEN.search, ("re.compile(x)", "import pickletools", "evaluate(x)")))
