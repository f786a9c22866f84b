"""Files that are replaced, written to or cut off while tensors are read from them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, ExecutionError
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.helper import Helper
from modelquirks.planner.execution.nomemory import is_no_memory, said
from modelquirks.planner.execution.openfile import CopiedFile, FileState, ReadError
from modelquirks.planner.execution.pool import run
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.planner.export.exportreport import ExportError
from modelquirks.planner.plan import Plan

SIZE = 64


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(2)))


def write(folder: Path, scale: float) -> Path:
    """Write a layer a file."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        tensors = {
            f"{number}.weight": torch.full((SIZE, SIZE), scale),
            f"{number}.bias": torch.full((SIZE,), scale),
        }
        save_file(tensors, folder / f"model-0000{number + 1}-of-00002.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", 1.0)


def planned(folder: Path, model: nn.Module, device: str, dtype: str = "bfloat16") -> Plan:
    return Dispatcher().plan(folder, model=model, device_map={"": device}, dtype=dtype)


class Saboteur:
    """Does something to the files when a load has looked at them and begins to read."""

    def __init__(self, folder: Path, other: Path, how: str) -> None:
        self.path = folder / "model-00002-of-00002.safetensors"
        self.other, self.how = other / self.path.name, how

    def begin(self, totals: Mapping[str, int]) -> None:
        if self.how == "replaced":
            os.replace(self.other, self.path)
        elif self.how == "rewritten":
            self.path.write_bytes(self.other.read_bytes())
        else:
            os.truncate(self.path, 700)
        self.begin = lambda totals: None  # type: ignore[method-assign]

    def add(self, where: str, n_bytes: int) -> None:
        return


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("how", ["replaced", "rewritten", "truncated"])
def test_a_file_that_changes_during_a_load_is_refused_and_the_model_is_as_before(
    checkpoint: Path, tmp_path: Path, how: str, copy: bool
) -> None:
    model = net()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    plan = planned(checkpoint, model, "cpu")
    saboteur = Saboteur(checkpoint, write(tmp_path / "other", 2.0), how)
    with pytest.raises(ExecutionError, match=r"model-00002-of-00002\.safetensors"):
        plan.load_into(model, progress=saboteur, copy=copy)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("how", ["replaced", "rewritten", "truncated"])
def test_a_file_that_changes_during_an_export_is_refused_and_nothing_is_left(
    checkpoint: Path, tmp_path: Path, how: str
) -> None:
    saboteur = Saboteur(checkpoint, write(tmp_path / "other", 2.0), how)
    with pytest.raises(ExportError, match=r"model-00002-of-00002\.safetensors"):
        Dispatcher().export(checkpoint, tmp_path / "out", dtype="bfloat16", progress=saboteur)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "other"]


def test_a_copy_of_an_offloaded_model_does_not_take_another_file_for_its_own(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = net().to("meta")
    planned(checkpoint, model, "disk").execute(model)
    other = write(tmp_path / "other", 2.0)
    for path in other.iterdir():
        path.replace(checkpoint / path.name)
    x = torch.ones(1, SIZE, dtype=torch.bfloat16)
    assert model(x).flatten()[0] == (SIZE + 1) * SIZE + 1, "what is mapped stays as it was"
    with pytest.raises(RuntimeError, match="was replaced or written to since"):
        copy.deepcopy(model)(x)


def stored(tmp_path: Path, shape: tuple[int, ...], *, shift: int = 0) -> StoredTensor:
    begin, n_bytes = 8 + shift, 4 * prod(shape)
    data = torch.arange(prod(shape), dtype=torch.float32).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(bytes(begin) + data)
    return StoredTensor("x", "x.safetensors", "F32", shape, begin, begin + n_bytes)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    bounds: list[tuple[int, int]] = []
    for size in shape:
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    return shape, tuple(bounds)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(regions(), st.integers(0, 3))
def test_copies_are_what_views_are(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Region], shift: int
) -> None:
    shape, region = case
    folder = tmp_path_factory.mktemp("file")
    tensors = {"x": stored(folder, shape, shift=shift)}
    views, copies = Reader(folder, tensors), Reader(folder, tensors, copies=True)
    assert torch.equal(views.read("x"), copies.read("x"))
    assert torch.equal(views.read("x", region), copies.read("x", region))
    assert copies.read("x", region).is_contiguous()
    assert not copies.is_view("x") and not copies.is_mapped("x")


def test_a_file_that_is_cut_off_behind_our_back_is_an_error_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the file and the reading of it; a mapping would kill the process."""
    reader = Reader(tmp_path, {"x": stored(tmp_path, (64, 64))}, copies=True)
    reader.read("x")
    monkeypatch.setattr(CopiedFile, "size", property(lambda file: 1 << 20))
    monkeypatch.setattr(CopiedFile, "is_rewritten", property(lambda file: False))
    os.truncate(tmp_path / "x.safetensors", 4096)
    with pytest.raises(ReadError, match="cannot be read to the end"):
        reader.read("x")
    reader.read("x", ((0, 4), (0, 64)))  # which is there


def test_readers_agree_on_what_the_files_are(tmp_path: Path) -> None:
    tensors = {"x": stored(tmp_path, (2, 2))}
    known: dict[str, FileState] = {}
    first = Reader(tmp_path, tensors, known=known)
    first.read("x")
    (tmp_path / "new").write_bytes((tmp_path / "x.safetensors").read_bytes())
    (tmp_path / "new").replace(tmp_path / "x.safetensors")
    first.read("x")  # has the old one open
    for late in (Reader(tmp_path, tensors, known=known), pickle.loads(pickle.dumps(first))):
        with pytest.raises(ReadError, match="was replaced or written to since"):
            late.read("x")


TRUNCATE = """
import os, shutil, sys
import torch
from torch import nn
from modelquirks.planner import Dispatcher

def case(folder, moment, how, device, dtype):
    path = os.path.join(folder, "model-00002-of-00002.safetensors")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).to("meta")
    plan = Dispatcher().plan(folder, model=model, device_map={"": device}, dtype=dtype)

    class Cut:
        def begin(self, totals):
            if moment == "during":
                os.truncate(path, 700)
        def add(self, where, n_bytes):
            pass

    try:
        if moment == "before":
            os.truncate(path, 700)
        plan.load_into(model, copy=how == "copy", progress=Cut())
        if moment == "after":
            os.truncate(path, 700)
        model(torch.ones(1, 64, dtype=getattr(torch, dtype)))
        return "computed"
    except Exception as error:
        return f"{type(error).__module__} {error}".replace(chr(10), " ")

for line in sys.argv[2:]:
    folder = f"{sys.argv[1]} {line}"
    shutil.copytree(sys.argv[1], folder)
    pid = os.fork()
    if not pid:
        print(case(folder, *line.split()), flush=True)
        os._exit(0)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
CASES = (
    *("before view cpu float32", "during copy cpu bfloat16", "after copy cpu float32"),
    *("after view disk float32", "after copy disk bfloat16", "after copy disk float32"),
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_a_truncated_file_is_an_error_and_kills_nobody(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATE, checkpoint, *CASES],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for case, told, status in zip(CASES, lines[::2], lines[1::2], strict=True):
        assert status == "0", f"{case}: killed by {status}"
        if case.startswith("after copy cpu"):
            assert told == "computed", "it has its own copies"
        else:
            assert told.startswith("modelquirks."), f"{case}: {told}"
            assert "model-00002-of-00002.safetensors" in told


def test_want_of_memory_is_told_with_the_tensor_and_the_way_out(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> torch.Tensor:
        raise MemoryError

    model = net()
    plan = planned(checkpoint, model, "cpu")
    before = dict(model.named_parameters())
    monkeypatch.setattr("modelquirks.planner.execution.loading.fresh", none)
    with pytest.raises(ExecutionError, match=r"'0\..*not enough memory.*--load-memory"):
        plan.execute(model)
    assert all(model.get_parameter(name) is value for name, value in before.items())


def test_torch_s_own_words_for_want_of_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as told:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_no_memory(told.value)
    assert said(told.value) == said(MemoryError()) == "there was not enough memory for it"
    assert said(ValueError("bad")) == "bad"


def test_without_room_for_threads_the_caller_does_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Helper, "start", refused)
    done: list[int] = []
    run(range(5), done.append, n_threads=3, cost=lambda job: 1, limit=2)
    assert done == [0, 1, 2, 3, 4]


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it dies of want of memory before Python runs in it."""
    monkeypatch.setattr("modelquirks.planner.execution.helper._START_S", 0.05)
    late: list[Helper] = []

    def nothing(self: Helper) -> None:
        late.append(self)
        self._started.wait()

    monkeypatch.setattr(Helper, "start", nothing)
    done: list[int] = []
    run(range(3), done.append, n_threads=2, cost=lambda job: 1, limit=9)
    assert done == [0, 1, 2]
    late[0].run()  # and should it begin after all, it does nothing
    assert done == [0, 1, 2]
