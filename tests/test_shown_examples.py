"""Every command and every piece of Python in README and docs/ is run, here or in a test named here.

Words that stand for something of the reader's (CHECKPOINT, "path/to/checkpoint") are replaced by a
checkpoint of the tests. A new example that neither runs as it is nor is listed fails.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.planner.digest.digest import Digest
from modelquirks.planner.digest.hashing import hash_tensors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DATA = ROOT / "tests" / "data"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


pytestmark = pytest.mark.filterwarnings(  # peft asks transformers so
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


class Shown(NamedTuple):
    page: str
    text: str


WORDS = {
    "OTHER_CHECKPOINT": "acme",
    "CHECKPOINT": "whole",
    "path/to/checkpoint": "whole",
    "path/to/adapter": "adapter",
    "checkpoint-500": "deepspeed",
    "checkpoint_0/pytorch_model_fsdp_0": "fsdp",
    "global_step400": "global_step3",
    "global_step500": "global_step3",
    "your.module:factory": "mypkg.models:make",
    "model.layers.40": "model.layers.2",
    "ADAPTER": "adapter",
    "BASE": "whole",
    "OUT": "out",
    "COPY": "whole",
    " A B": " whole wrapped",
    '{0: "24GiB", "cpu": "64GiB"}': '{"cpu": "64GiB"}',
    'plan("checkpoint"': 'plan("whole"',
}
"""What stands for something of the reader's → what there is here."""

COMMANDS_ELSEWHERE = {
    "org/name": "tests/hub/test_hub_reading.py",
    ".gguf": "tests/plugins/test_gguf.py",
    "plan --schema": "tests/planner/test_plan_schema.py",
    "plugins new acme": "tests/test_example_package.py",
    "--record acme": "tests/planner/test_plugin_commands.py",
    "[": "tests/test_docs.py",  # a synopsis: its options are looked up
}
"""Part of a command → the test that runs it."""

PYTHON_ELSEWHERE = {
    "# acme_quirks.py": "tests/test_readme.py",
    "ACME = ": "tests/test_guides.py",
    "RECORD = ": "tests/test_guide_code.py",
    "# examples/loaders/": "tests/test_loader_examples.py",
    "modelquirks.plugins.testing import": "tests/plugins/test_testing_kit.py",
    "org/name": "tests/hub/test_hub_executing.py",
    "init_process_group": "tests/planner/test_distributed.py",  # each needs several processes
    "DistributedConfig": "tests/plugins/test_distributed_models.py",
    "together=True": "tests/planner/test_distributed.py",
    "PlanReader": "tests/planner/test_distributed.py",
}
"""Part of a piece of Python → the test that runs it."""


OTHERS = {
    "make demo": "tests/test_demo.py",
    "make check": "it runs these tests",
    "make test": "it runs these tests",
    "pip install": "it needs a network; tests/test_example_package.py installs a package",
    "python -m pytest modelquirks-acme": "tests/test_example_package.py",
    "torchrun --standalone": "tests/test_loader_examples.py",
    "torchrun --nproc-per-node": "tests/plugins/test_distributed_models.py",
    "torchrun --nnodes 2": "it needs two machines",
    "python benchmarks/faults.py": "tests/test_faults.py runs it with less",
    "python benchmarks/mutations.py": "tests/test_mutations.py runs it with less",
}
"""How a command of another program begins → the test that runs it, or why none does."""


def commands() -> Iterator[Shown]:
    """Yield the calls of ``modelquirks`` that are no console sessions: those are in the guides."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        indented = re.findall(r"^ {4,}modelquirks .*$", FENCED.sub("", text), re.MULTILINE)
        fenced = [
            line for kind, block in FENCED.findall(text) if not kind for line in block.split("\n")
        ]
        for line in map(str.strip, (*indented, *fenced)):
            if line.startswith("modelquirks "):
                yield Shown(page.name, re.split(" # | > ", line)[0].strip())


def pieces() -> Iterator[Shown]:
    """Yield the blocks of Python."""
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                yield Shown(page.name, textwrap.dedent(block))


def is_elsewhere(shown: Shown, elsewhere: dict[str, str]) -> bool:
    return any(part in shown.text for part in elsewhere)


def here(text: str) -> str:
    for word, stands_for in WORDS.items():
        text = text.replace(word, stands_for)
    return text


RUN_COMMANDS = [c for c in dict.fromkeys(commands()) if not is_elsewhere(c, COMMANDS_ELSEWHERE)]
RUN_PIECES = [p for p in pieces() if not is_elsewhere(p, PYTHON_ELSEWHERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the examples speak of, under the names of ``WORDS``."""
    root = tmp_path_factory.mktemp("shown")
    runpy.run_path(str(ROOT / "examples" / "broken_checkpoints.py"))["make_all"](root)
    adapter(root / "adapter")
    shutil.copytree(DATA / "deepspeed" / "zero2_bf16", root / "deepspeed")
    shutil.copytree(next((DATA / "dcp" / "accelerate").glob("**/.metadata")).parent, root / "fsdp")
    package = root / "mypkg"
    package.mkdir()
    (package / "models.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "def make():\n"
        "    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('whole'))\n"
    )
    for name in ("plan", "plan-before", "plan-after"):
        Dispatcher().plan(root / "whole", model=llama(root)).save(root / f"{name}.json")
    Digest(hash_tensors(open_manifest(root / "whole")).tensors).save(root / "digest.json")
    return root


def adapter(folder: Path) -> None:
    """Write an adapter of the Llama as peft writes it."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    at = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 64), "B": (64, 2)}
    tensors = {at.format(n, x): torch.ones(shapes[x]) for n in range(4) for x in shapes}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture
def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    shutil.rmtree(folder / "out", ignore_errors=True)
    for left in folder.glob("*quirk_acme.py"):
        left.unlink()
    return folder


def llama(root: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from modelquirks.planner.model.build import empty_weights

    factory: Any = AutoModelForCausalLM
    with empty_weights():
        return factory.from_config(AutoConfig.from_pretrained(root / "whole"))


def module_of(shapes: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module of just these tensors."""
    root = nn.Module()
    for name, tensor in shapes.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if tensor.is_floating_point():
            owner.register_parameter(last, nn.Parameter(torch.zeros_like(tensor)))
        else:
            owner.register_buffer(last, torch.zeros_like(tensor))
    return root


def trained(root: Path) -> nn.Module:
    return module_of(load_file(root / "deepspeed" / "truth.safetensors"))


def sharded(_: Path) -> nn.Module:
    return module_of(load_file(DATA / "dcp" / "truth.safetensors"))


MODELS: dict[str, Callable[[Path], nn.Module]] = {"deepspeed": trained, "fsdp": sharded}
"""Checkpoint → its model, where it is not the Llama."""


@pytest.mark.parametrize("shown", RUN_COMMANDS, ids=lambda shown: f"{shown.page}: {shown.text}")
def test_a_command_does_what_it_is_shown_for(
    shown: Shown, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(here(shown.text))[1:]
    code = main(words)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert code == (1 if words[0] == "diff" and "whole" in words else 0), said.out + said.err


@pytest.mark.parametrize("shown", RUN_PIECES, ids=lambda shown: f"{shown.page}: {shown.text[:40]}")
def test_python_runs(shown: Shown, at: Path) -> None:
    text = here(shown.text)
    make = next((make for name, make in MODELS.items() if f'"{name}"' in text), llama)
    space: dict[str, Any] = {
        "Dispatcher": Dispatcher,
        "model": make(at),
        "folder": at / "whole",
        "base": at / "whole",
        "tokens": torch.arange(4).reshape(1, 4),
        "plan": Dispatcher().plan(at / "whole", model=llama(at), device_map={"": "disk"}),
    }
    exec(compile(text, shown.page, "exec"), space)


def test_what_is_run_elsewhere_is_shown_and_its_test_is_there() -> None:
    everything = [*commands()], [*pieces()]
    for shown, elsewhere in zip(everything, (COMMANDS_ELSEWHERE, PYTHON_ELSEWHERE), strict=True):
        for part, path in elsewhere.items():
            assert any(part in one.text for one in shown), part
            assert (ROOT / path).is_file(), path


def test_commands_of_other_programs_are_run_somewhere_or_it_is_said_why_not() -> None:
    programs = re.compile(r"^ {4,}((?:make|torchrun|pip|python) .*)$", re.MULTILINE)
    shown = {line for page in PAGES for line in programs.findall(page.read_text(encoding="utf-8"))}
    assert [line for line in sorted(shown) if not line.startswith(tuple(OTHERS))] == []
    for start, where in OTHERS.items():
        assert any(line.startswith(start) for line in shown), start
        assert all((ROOT / path).is_file() for path in re.findall(r"tests/\S+\.py", where))
