"""Packages of somebody else's, installed into a fresh environment, take part in a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "third_party_quirk"

MODEL = """
import torch


class Acme(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 8, bias=False)


def build():
    with torch.device("meta"):
        return Acme()
"""


def called(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without what ours says about Python and modelquirks."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MODELQUIRKS"))}
    return subprocess.run(
        list(map(str, command)),
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of commands of an environment with modelquirks and the example.

    Both are installed as wheels into an empty environment; only then the dependencies that this
    test itself runs with are lent to it. So nothing is downloaded, and no other installation of
    modelquirks is in sight of pip.
    """
    folder = tmp_path_factory.mktemp("fresh")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-index", "--no-deps")
    wheels = folder / "wheels"
    built = called(*pip, "wheel", *offline, "--no-build-isolation", "-w", wheels, ROOT, EXAMPLE)
    assert built.returncode == 0, built.stderr
    home = folder / "venv"
    builder = venv.EnvBuilder(symlinks=os.name != "nt")
    builder.create(home)
    python: str = builder.ensure_directories(home).env_exe
    installed = called(
        *pip, "--python", python, "install", *offline, "--no-compile", *wheels.glob("*.whl")
    )
    assert installed.returncode == 0, installed.stderr
    lent = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site,) = home.rglob("site-packages")
    (site / "lent.pth").write_text("\n".join(lent), encoding="utf-8")
    return Path(python).parent


@pytest.fixture(scope="module")
def novel(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a package that the installed command has made, installed editable."""
    folder = tmp_path_factory.mktemp("novel")
    made = called(commands / "modelquirks", "plugins", "new", "novel", "--into", folder)
    assert made.returncode == 0, made.stderr
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    package = folder / "modelquirks-novel"
    pip = (commands / "python", "-m", "pip")
    installed = called(*pip, "install", *options, "--editable", package)
    assert installed.returncode == 0, installed.stderr
    return package


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acme") / "checkpoint"
    code = folder.with_name("code")
    folder.mkdir()
    code.mkdir()
    stored = {
        "acme_body.0.weight": torch.zeros(4, 4),
        "acme_body.0.bias": torch.zeros(4),
        "acme_body.1.weight": torch.zeros(4, 4),
        "acme_body.1.bias": torch.zeros(4),
        "acme_body.1.angles": torch.zeros(2),
        "acme_top.weight": torch.zeros(8, 4),
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "acme"}), encoding="utf-8")
    (code / "acme_model.py").write_text(MODEL, encoding="utf-8")
    return folder


def plan(commands: Path, checkpoint: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = (commands / "modelquirks", "plan", checkpoint, "--dry-run", "--json")
    code = str(checkpoint.with_name("code"))
    done = called(*command, "--model", "acme_model:build", *options, PYTHONPATH=code)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_list_of_plugins_names_the_package_and_its_version(commands: Path) -> None:
    done = called(commands / "modelquirks", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert plugins["acme"] == {
        "name": "acme",
        "module": "modelquirks_acme",
        "distribution": "modelquirks-acme",
        "version": "1.0.0",
        "status": "loaded",
        "error": "",
        "records": ["acme"],
        "schemes": [],
        "hooks": ["modelquirks_records"],
    }
    assert plugins["wrappers"]["distribution"] == "modelquirks"


def test_a_plan_uses_the_quirk_of_the_package_and_says_whose_it_is(
    commands: Path, checkpoint: Path
) -> None:
    code, report = plan(commands, checkpoint)
    (quirk,) = [quirk for quirk in report["quirks"] if quirk["name"] == "acme"]
    assert (quirk["plugin"], quirk["distribution"], quirk["version"]) == (
        "acme",
        "modelquirks-acme",
        "1.0.0",
    )
    assert "acme" in quirk["why"]
    assert (code, report["ok"]) == (0, True)


@pytest.mark.parametrize("option", ["--no-quirk", "--no-plugin"])
def test_without_the_quirk_the_same_plan_is_refused(
    commands: Path, checkpoint: Path, option: str
) -> None:
    code, report = plan(commands, checkpoint, option, "acme")
    assert report["quirks"] == []
    assert (code, report["ok"]) == (1, False)


def test_a_new_package_registers_and_passes_its_own_tests(commands: Path, novel: Path) -> None:
    done = called(commands / "modelquirks", "plugins", "show", "novel", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["plugins"][0]["distribution"] == "modelquirks-novel"
    assert report["records"][0]["name"] == "novel"
    tests = called(commands / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", novel)
    assert tests.returncode == 0, tests.stdout
    assert "3 passed" in tests.stdout
