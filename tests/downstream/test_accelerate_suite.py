"""accelerate's own tests of big modelling, offload, hooks and maps, with our functions in place.

They come from accelerate's source distribution as `make setup` downloads it; nothing of them is
copied here. On a CPU 62 of them pass as they are, the others want a GPU or are slow; none needs
the network. Few of the 62 load a checkpoint, so two kinds of tests are added: those that are
skipped only for want of a GPU to load onto (``ours_in_place`` says how they run without), and
those of test_accelerator.py that load what was saved. A dozen ask for a device map. Those that fix
the answer of accelerate's greedy rule are in ``GREEDY``; test_maps_no_worse.py shows for the same
models and capacities that ours is no worse.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOWNLOADED = ROOT / ".venv" / "downstream"

FILES = ("test_big_modeling.py", "test_offload.py", "test_hooks.py", "test_modeling_utils.py")
PASS_AS_THEY_ARE = 62

_BIG, _UTILS, _ACCELERATOR = (
    "test_big_modeling.BigModelingTester.",
    "test_modeling_utils.ModelingUtilsTester.",
    "test_accelerator.AcceleratorTester.",
)

AWAKE = frozenset(
    {
        f"{_BIG}test_load_checkpoint_and_dispatch",
        f"{_BIG}test_load_checkpoint_and_dispatch_multi_device",
        f"{_BIG}test_load_checkpoint_and_dispatch_multi_device_with_unused_submodules",
        f"{_BIG}test_load_checkpoint_and_dispatch_with_unused_submodules",
        f"{_UTILS}test_load_checkpoint_in_model_disk_offload",
        f"{_ACCELERATOR}test_nested_hook",
        f"{_UTILS}test_get_balanced_memory",
    }
)
"""Run one tier down, without the GPU that they ask for."""

MAPPING = frozenset(
    {
        f"{_UTILS}test_get_balanced_memory",
        f"{_UTILS}test_get_balanced_memory_no_split_module_classes_set",
        f"{_UTILS}test_infer_auto_device_map",
        f"{_UTILS}test_infer_auto_device_map_with_buffer_check",
        f"{_UTILS}test_infer_auto_device_map_with_buffer_check_and_multi_devices",
        f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation",
        f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation_and_buffers",
        f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation_no_fit",
        f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation_partial_fit",
        f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation_tied_weights",
        f"{_UTILS}test_infer_auto_device_map_with_tied_weights",
    }
)
"""The tests that ask for a device map or balanced memory."""

LOADING = (AWAKE - MAPPING) | {
    f"{_BIG}test_load_checkpoint_and_dispatch_device_map_none",
    f"{_UTILS}test_load_checkpoint_in_model",
    f"{_UTILS}test_load_checkpoint_in_model_dtype",
    f"{_UTILS}test_load_checkpoint_in_model_unexpected_keys_0",
    f"{_UTILS}test_load_checkpoint_in_model_unexpected_keys_1",
    f"{_ACCELERATOR}test_save_model_use_pytorch",
    f"{_ACCELERATOR}test_save_model_use_safetensors",
    f"{_ACCELERATOR}test_save_sharded_model_use_pytorch",
    f"{_ACCELERATOR}test_save_sharded_model_use_safetensors",
    f"{_ACCELERATOR}test_save_model_offload_use_pytorch",
    f"{_ACCELERATOR}test_save_model_offload_use_safetensors",
}
"""The tests that load a checkpoint."""

CALLING = LOADING | MAPPING
"""The tests that call what is put in place: all others say nothing about us."""

_DISPATCHED = (
    "asserts silence: it loads into a model that is dispatched already. accelerate 1.15 leaves "
    "the offloaded weights of that model as they were and does not say so, which the test "
    "cannot see because old and new are equal; ours refuses, naming the modules"
)
_RESERVE = (
    "wants device 0 to keep room for the largest layer though nothing, or less, has to be offloaded"
)
GREEDY: Mapping[str, str] = {
    f"{_UTILS}test_infer_auto_device_map": _RESERVE,
    f"{_UTILS}test_infer_auto_device_map_with_tied_weights": _RESERVE,
    f"{_UTILS}test_infer_auto_device_map_with_buffer_check": (
        "wants a warning that the buffers of offloaded layers may not fit on device 0; ours keeps "
        "room for them"
    ),
    f"{_UTILS}test_infer_auto_device_map_with_buffer_check_and_multi_devices": (
        "wants layers on the cpu for which device 1 has room"
    ),
    f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation": (
        "wants device 0 left empty without fallback_allocation; ours fills it in any case"
    ),
    f"{_UTILS}test_infer_auto_device_map_with_fallback_allocation_and_buffers": (
        "wants a warning that the buffers of offloaded layers may not fit on device 0; ours keeps "
        "room for them"
    ),
    f"{_UTILS}test_get_balanced_memory": (
        "wants 215 of 236 bytes for the first of two devices, an even share and 1.25 layers; ours "
        "is the even share in whole layers, 136"
    ),
}
"""The tests that fix the answer of a greedy rule."""

DIFFERENT: Mapping[str, str] = {
    **GREEDY,
    f"{_ACCELERATOR}test_save_model_offload_use_pytorch": _DISPATCHED,
    f"{_ACCELERATOR}test_save_model_offload_use_safetensors": _DISPATCHED,
}
"""The tests that do not pass with ours, and why that is right."""


class Outcome(NamedTuple):
    """What became of one test."""

    kind: str
    """``passed``, ``skipped``, ``failure`` or ``error``."""
    message: str
    calls: int


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with accelerate's tests, of the version that is installed."""
    name = f"accelerate-{version('accelerate')}"
    archive = DOWNLOADED / f"{name}.tar.gz"
    if not archive.exists():
        text = f"'{archive}' is not there: run `make -B setup` with a package index in reach"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    folder = tmp_path_factory.mktemp("accelerate")
    with tarfile.open(archive) as source:
        tests = [m for m in source.getmembers() if m.name.startswith(f"{name}/tests/")]
        source.extractall(folder, tests, filter="data")
    tests_folder = folder / name / "tests"
    (tests_folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return tests_folder


def ran(suite: Path, tests: Iterable[str], *options: str, report: Path) -> dict[str, Outcome]:
    """Run accelerate's tests in a process of their own; return outcomes by class and name."""
    ours = ("PYTHONPATH", "PYTEST_", "RUN_SLOW", "ACCELERATE_")
    inherited = {key: text for key, text in os.environ.items() if not key.startswith(ours)}
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "ours_in_place",
                "-p",
                "no:cacheprovider",
            ),
            f"--junitxml={report}",
            *(f"--awake={name.rpartition('.')[2]}" for name in sorted(AWAKE)),
            *options,
            *tests,
        ],
        cwd=suite,
        env=inherited
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    # 0: all passed, 1: some failed. Anything else is no result: a crash, or nothing collected.
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[:3000]
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": outcome_of(case) for case in cases}


def outcome_of(case: ElementTree.Element) -> Outcome:
    calls = case.find("properties/property[@name='calls']")
    n_calls = 0 if calls is None else int(calls.get("value", "0"))
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return Outcome(kind, found.get("message", ""), n_calls)
    return Outcome("passed", "", n_calls)


def node_id(name: str) -> str:
    module, group, test = name.split(".")
    return f"{module}.py::{group}::{test}"


def test_accelerates_own_tests_pass_with_our_functions_in_place(
    suite: Path, tmp_path: Path
) -> None:
    """All but those that assert silence, or what a greedy rule gives."""
    more = [node_id(name) for name in sorted(LOADING) if name.startswith(_ACCELERATOR)]
    outcomes = ran(suite, (*FILES, *more), report=tmp_path / "ours.xml")
    failed = {n: o.message for n, o in outcomes.items() if o.kind in ("failure", "error")}
    assert {n: text for n, text in failed.items() if n not in DIFFERENT} == {}
    assert [n for n in DIFFERENT if n not in failed] == [], "these pass now: take them out"
    assert {name for name, outcome in outcomes.items() if outcome.calls} == CALLING
    untouched = [n for n, o in outcomes.items() if o.kind == "passed" and n not in AWAKE]
    counted = [n for n in untouched if not n.startswith(_ACCELERATOR)]
    assert len(counted) >= PASS_AS_THEY_ARE - len(GREEDY.keys() - AWAKE)


def test_the_tests_that_call_pass_with_accelerates_own_function_too(
    suite: Path, tmp_path: Path
) -> None:
    """So that each of them says something, also those that run one tier down."""
    outcomes = ran(suite, map(node_id, sorted(CALLING)), "--theirs", report=tmp_path / "theirs.xml")
    assert outcomes.keys() == CALLING
    assert {n: o for n, o in outcomes.items() if o.kind != "passed" or not o.calls} == {}
