"""The layout holds: one namespace, three roots, one direction of imports, nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("quirks", "planner", "plugins")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "accelerate", "transformers", "safetensors", "huggingface_hub", "numpy", "rich")


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer / "modelquirks").rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Yield the modules that *source* imports anywhere: at the top, in functions, by name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names):
                yield from (f"{'.' * node.level}{module or ''}.{alias.name}" for alias in names)
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name), [first, *_]) if name in (
                "import_module",
                "__import__",
            ):
                yield ast.unparse(first).strip("f'\"")
            case _:
                pass


def forbidden(source: str, *packages: str) -> list[str]:
    return [
        name
        for name in imported(source)
        for package in packages
        if f"{name}.".startswith(f"{package}.")
    ]


def run(code: str, *, path: tuple[Path, ...] = ()) -> str:
    """Run *code* in a fresh interpreter on this checkout, installed or not."""
    roots = [str(p) for p in (*path, *(ROOT / layer for layer in LAYERS))]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MODELQUIRKS_")}
    environment["PYTHONPATH"] = os.pathsep.join(roots)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_root_of_the_namespace_has_no_file() -> None:
    """An ``__init__.py`` in one root would hide the other two."""
    assert import_module("modelquirks").__file__ is None
    assert not list(ROOT.glob("*/modelquirks/__init__.py"))
    for layer in LAYERS:
        assert import_module(f"modelquirks.{layer}").__name__ == f"modelquirks.{layer}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as n", ["torch.nn"]),
        ("def f():\n  from torch import nn", ["torch.nn"]),
        ("from importlib import import_module\nimport_module('torch.nn')", ["torch.nn"]),
        ("import importlib\nimportlib.import_module(f'torch.{x}')", ["torch.{x}"]),
        ("import torchvision, xtorch", []),
        ("'import torch'", []),
    ],
)
def test_the_guard_on_imports_sees(source: str, found: list[str]) -> None:
    assert forbidden(source, "torch") == found


@pytest.mark.parametrize(
    ("layer", "packages"),
    [
        ("quirks", (*HEAVY, "modelquirks.planner", "modelquirks.plugins", ".")),
        ("planner", ("modelquirks.plugins", ".")),
        ("plugins", (".",)),
    ],
)
def test_a_layer_imports_only_what_is_below_it(layer: str, packages: tuple[str, ...]) -> None:
    """And by absolute names, which say of what layer they are."""
    assert files(layer)
    broken = {
        str(path.relative_to(ROOT)): names
        for path in files(layer)
        if (names := forbidden(path.read_text(encoding="utf-8"), *packages))
    }
    assert broken == {}


def built(source: Path, folder: Path, **environ: str) -> Path:
    """Return the wheel of *source*."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"} | environ
    done = subprocess.run(
        [*command, str(source)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


def test_a_copy_elsewhere_gives_the_same_wheel_to_the_byte(
    wheel_file: Path, tmp_path: Path
) -> None:
    """Another folder, order, time, umask, time zone and language, with caches lying about."""
    source = tmp_path / "another place"
    kept = [ROOT / n for n in ("pyproject.toml", ".gitignore", "README.md", "LICENSE")]
    for layer in LAYERS:
        found = (ROOT / layer).rglob("*")
        kept += [p for p in found if p.is_file() and "__pycache__" not in p.parts]
    for path in sorted(kept, reverse=True):
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(0o600)
        os.utime(target, (10**9, 10**9))
    cache = source / "quirks" / "modelquirks" / "quirks" / "__pycache__"
    cache.mkdir()
    (cache / "family.cpython-311.pyc").write_bytes(b"\0")
    again = built(source, tmp_path / "out", TZ="Pacific/Auckland", LC_ALL="C", PYTHONHASHSEED="7")
    assert again.name == wheel_file.name
    assert again.read_bytes() == wheel_file.read_bytes()


def test_the_wheel_holds_the_namespace_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {Path(name) for name in wheel.namelist()}
    meta = f"modelquirks-{PROJECT['version']}.dist-info"
    assert {name.parts[0] for name in names} == {"modelquirks", meta}
    packaged = {name for name in names if name.parts[0] == "modelquirks"}
    expected = {path.relative_to(ROOT / layer) for layer in LAYERS for path in files(layer)}
    typed = {Path("modelquirks", layer, "py.typed") for layer in LAYERS}
    assert packaged >= expected | typed
    assert {name for name in packaged if name.suffix == ".py"} == expected
    pages = {Path("modelquirks/planner/report", name) for name in ("page.css", "page.js")}
    assert packaged >= pages
    assert Path("modelquirks/planner/schema/plan-v1.schema.json") in packaged


def test_the_wheel_announces_the_plugins(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    lines = wheel.read(name).decode().splitlines()
    plugins: dict[str, str] = PROJECT["entry-points"]["modelquirks"]
    assert "[modelquirks]" in lines
    assert {f"{name} = {module}" for name, module in plugins.items()} <= set(lines)


def test_the_vocabulary_and_all_plugins_load_without_anything_heavy(tmp_path: Path) -> None:
    """Through real metadata of this checkout, so that it need not be installed."""
    plugins: dict[str, str] = PROJECT["entry-points"]["modelquirks"]
    meta = tmp_path / f"modelquirks-{PROJECT['version']}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: modelquirks\nVersion: {PROJECT['version']}\n"
    )
    points = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (meta / "entry_points.txt").write_text(f"[modelquirks]\n{points}")
    code = (
        "import sys, modelquirks.quirks as q\n"
        "[getattr(q, name) for name in q.__all__]\n"
        "r = q.Registry.load()\n"
        "ours = [i for i in r.plugins if i.distribution == 'modelquirks']\n"
        "print(*(f'{i.name}:{i.status}{i.error}' for i in ours), sep=',')\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    loaded, _, heavy = run(code, path=(tmp_path,)).partition("\n")
    assert loaded == ",".join(f"{name}:loaded" for name in sorted(plugins))
    assert heavy == ""


def test_a_family_does_not_pay_for_the_plugin_machinery() -> None:
    code = "import sys, modelquirks.quirks.family\nprint('pluggy' in sys.modules)"
    assert run(code) == "False"


def test_the_public_names_of_quirks_are_those_of_its_modules() -> None:
    package: Any = import_module("modelquirks.quirks")
    modules = [import_module(f"modelquirks.quirks.{name}") for name in vars(package)["_MODULES"]]
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) == {name for module in modules for name in module.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_type_checkers_see_the_public_names_of_quirks() -> None:
    tree = ast.parse((ROOT / "quirks/modelquirks/quirks/__init__.py").read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(import_module("modelquirks.quirks").__all__)


STEPS = (
    *("checkpoint", "hub", "opening", "model", "mapping", "placement", "plan"),
    *("execution", "dispatcher", "dropin"),
)
"""The planner's own way through, in order; finding, dtypes and names serve all, cli may use all."""


def step_of(module: str) -> str:
    return module.removeprefix("modelquirks.planner.").split(".")[0]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_the_planner_imports_only_steps_before_it(step: str) -> None:
    """Data flows one way. A plan alone reaches forward, inside a method: it can execute itself."""
    root = ROOT / "planner" / "modelquirks" / "planner"
    sources = sorted((root / step).rglob("*.py")) or [root / f"{step}.py"]
    later = set(STEPS[STEPS.index(step) + 1 :]) | {"cli"}
    allowed = {"execution"} if step == "plan" else set[str]()
    for path in sources:
        modules = imported(path.read_text(encoding="utf-8"))
        reached = {step_of(m) for m in modules if m.startswith("modelquirks.planner.")}
        assert not reached & (later - allowed), path
