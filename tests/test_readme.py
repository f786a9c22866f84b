"""README.md: what it shows works, and what it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from modelquirks.quirks.hookspecs import GROUP
from modelquirks.quirks.registry import Registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_plugin_shown_registers_as_its_entry_point_says() -> None:
    (toml,) = blocks("toml")
    ((name, module),) = tomllib.loads(toml)["project"]["entry-points"][GROUP].items()
    (source,) = [block for block in blocks("python") if f"# {module}.py" in block]
    plugin = ModuleType(module)
    exec(source, vars(plugin))
    registry = Registry()
    registry.register(plugin, name=name)
    assert [r.record.name for r in registry.records] == ["acme.decoder"]


def test_python_shown_imports_what_there_is() -> None:
    lines = [
        line
        for block in blocks("python")
        for line in block.splitlines()
        if line.startswith(("import ", "from "))
    ]
    assert lines
    exec("\n".join(lines), {})


def test_every_option_named_is_one_of_the_commands() -> None:
    helps = ""
    commands = ("inspect", "plan", "explain", "diff", "execute", "export", "infer", "digest")
    for command in (*commands, "plugins list", "plugins new"):
        done = subprocess.run(
            [sys.executable, "-m", "modelquirks.planner", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        helps += done.stdout
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named
    assert named <= set(re.findall(r"--[a-z][a-z-]+", helps))


def test_every_dependency_is_named_with_the_reason_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    needed = {re.split(r"[<>=\[ ]", text)[0]: "" for text in project["dependencies"]}
    for extra, texts in extras.items():
        needed |= {re.split(r"[<>=\[ ]", text)[0]: " (extra)" for text in texts}
        assert extra in {re.split(r"[<>=\[ ]", text)[0] for text in texts}
    table = README.split("## Dependencies")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    told = {name: why for name, why in rows if name != "package"}
    assert told.keys() == {f"{name}{kind}" for name, kind in needed.items()}
    assert all(len(why) > 8 for why in told.values())


def test_every_make_target_named_is_there() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.split("## ")[0]))
    assert named - {"are"} <= targets
    assert "demo" in named
