"""The guides of docs/: each command shown is run, and prints what the page says.

MODELQUIRKS_UPDATE_GOLDEN=1 writes what is printed now into the pages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelquirks.planner import Dispatcher
from modelquirks.quirks.registry import Registry

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "docs" / f"{n}.md" for n in ("will-not-load", "does-not-fit", "new-naming")]
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the checkpoints that the guides speak of."""
    root = tmp_path_factory.mktemp("guides")
    maker = [sys.executable, str(ROOT / "examples" / "broken_checkpoints.py"), str(root)]
    subprocess.run(maker, check=True, capture_output=True)
    return root


def commands(block: str) -> Iterator[str]:
    return (line[2:] for line in block.splitlines() if line.startswith("$ "))


def printed(command: str, folder: Path) -> str:
    """Return what a shell prints; ``modelquirks`` is the code that is tested."""
    call = f"modelquirks() {{ '{sys.executable}' -m modelquirks.planner \"$@\"; }}\n{command}"
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", call], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert "Traceback" not in done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_commands_of_a_guide_print_what_it_shows(guide: Path, folder: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    shown = [match[1] for match in CONSOLE.finditer(text)]
    assert shown
    now = ["".join(f"$ {one}\n{printed(one, folder)}" for one in commands(b)) for b in shown]
    if os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"):
        fresh = iter(now)
        text = CONSOLE.sub(lambda _: f"```console\n{next(fresh)}```", text)
        guide.write_text(text, encoding="utf-8")
    else:
        assert now == shown


def test_the_quirk_of_the_guide_makes_its_checkpoint_load(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    text = (ROOT / "docs" / "new-naming.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    plugin = type(sys)("acme_llama")
    exec(source, vars(plugin))
    registry = Registry()
    registry.register(plugin, name="acme")
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "acme"))
    plan = Dispatcher(registry).plan(folder / "acme", model=model, device_map={"": "cpu"})
    assert plan.ok, plan.refusal()
    plan.execute(model)
    whole = LlamaForCausalLM.from_pretrained(folder / "whole").state_dict()
    loaded = model.state_dict()
    assert [name for name, tensor in whole.items() if not tensor.equal(loaded[name])] == []


def test_accelerate_alone_loads_what_the_picture_of_the_readme_says(folder: Path) -> None:
    example = ROOT / "examples" / "with_accelerate.py"
    run = [sys.executable, str(example), "wrapped"]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True)
    (said,) = done.stdout.splitlines()
    picture = (ROOT / "docs" / "images" / "terminal.svg").read_text(encoding="utf-8")
    assert said.endswith("9 of 39 tensors.")
    assert said in re.sub("<[^>]*>", "", picture).replace("&#160;", " ")
