"""Computed weights in the offload folder: written once, whole, and used only if they fit."""

from __future__ import annotations

import json
import logging
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, wholefile
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.cli.command import main
from modelquirks.planner.execution import loaditem
from modelquirks.planner.execution import materialize as materializing
from modelquirks.planner.execution.execute import ExecutionError, ExecutionReport, execute
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.rowmajor import row_major
from modelquirks.planner.execution.target import Target
from modelquirks.quirks.recipe import Node, Slice, Source, Transpose

Located = Callable[[Path], dict[str, StoredTensor]]

EXAMPLES = Path(__file__).parents[2] / "examples"
DISK: Mapping[str, Any] = {"": "disk"}
X = torch.linspace(-1, 1, 6 * 8).reshape(6, 8)
BYTES = 2 * (8 * 8 + 8) * 3
"""Of three layers in BF16, which are stored as F32."""


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder, 1.0)
    return folder


def write(folder: Path, scale: float) -> None:
    state = net().state_dict()
    values = {
        k: torch.linspace(-scale, scale, v.numel()).reshape(v.shape) for k, v in state.items()
    }
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def off(tmp_path: Path) -> Path:
    return tmp_path / "work" / "offload"


def planned(
    checkpoint: Path, model: nn.Module, device_map: Any = DISK, dtype: str | None = "bfloat16"
) -> Plan:
    plan = Dispatcher().plan(
        checkpoint, model=model, device_map=device_map, dtype=dtype, dequantize=True
    )
    assert plan.ok, plan.problems
    return plan


def loaded(
    checkpoint: Path, off: Path | None, **options: Any
) -> tuple[torch.Tensor, ExecutionReport]:
    """Load the net with BF16 weights on disk; return what it computes, and the report."""
    model = net().to("meta")
    wanted = {} if off is None else {"offload_folder": off, "materialize": True}
    report = planned(checkpoint, model, **options).load_into(model, **wanted)
    dtype = next(model.parameters()).dtype
    return model(X.to(dtype)), report


def codes(report: ExecutionReport) -> set[str]:
    return {note.code for note in report.notes}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder, with contents."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def only(off: Path, pattern: str) -> Path:
    (path,) = off.rglob(pattern)
    return path


def weights_of(model: nn.Module) -> Any:
    """Return the weights map behind the hooks of a model."""
    for module in model.modules():
        if found := getattr(getattr(module, "_hf_hook", None), "weights_map", None):
            return found.dataset.state_dict
    raise AssertionError("no hook has weights")


# Real architectures ------------------------------------------------------------------------------


def gpt_oss(folder: Path) -> Path:
    """Packed experts: mxfp4 as released, BF16 in the model."""
    make: Callable[[Path], Path] = runpy.run_path(str(EXAMPLES / "tiny_gpt_oss.py"))["make"]
    return make(folder)


def mixtral(folder: Path) -> Path:
    """Experts one by one in the checkpoint, in one stack in the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        architectures=["MixtralForCausalLM"],
    )
    torch.manual_seed(0)
    state = transformers.MixtralForCausalLM(config).state_dict()
    stored: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        at, _, leaf = name.partition(".mlp.")
        to = f"{at}.block_sparse_moe"
        if leaf == "experts.gate_up_proj":
            for e, both in enumerate(value):
                w1, w3 = both.chunk(2)
                stored[f"{to}.experts.{e}.w1.weight"] = w1.clone()
                stored[f"{to}.experts.{e}.w3.weight"] = w3.clone()
        elif leaf == "experts.down_proj":
            for e, w2 in enumerate(value):
                stored[f"{to}.experts.{e}.w2.weight"] = w2.clone()
        else:
            stored[f"{to}.{leaf}" if leaf else name] = value.clone()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


REAL = {"gpt-oss": gpt_oss, "mixtral": mixtral}


def built(folder: Path) -> nn.Module:
    model = Dispatcher().model(folder)
    assert model is not None
    return model.eval()


@pytest.mark.parametrize("kind", REAL)
def test_computed_experts_are_written_once_and_logits_are_equal_bit_by_bit(
    kind: str, tmp_path: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder = REAL[kind](tmp_path / kind)
    before = tree(tmp_path)
    words = torch.arange(12).reshape(2, 6)
    plain = built(folder)
    report = planned(folder, plain, dtype=None).load_into(plain, offload_folder=off)
    expected = plain(words).logits
    assert tree(tmp_path) == before, "0 bytes are written unless that is asked for"
    assert report.bytes_written == 0

    first = built(folder)
    report = planned(folder, first, dtype=None).load_into(
        first, offload_folder=off, materialize=True
    )
    store = load_file(only(off, "*.safetensors"))
    assert report.bytes_written == only(off, "*.safetensors").stat().st_size
    assert {name.rpartition(".")[2] for name in store} == {"gate_up_proj", "down_proj"}
    assert torch.equal(first(words).logits, expected)
    written = tree(off)

    second = built(folder)
    report = planned(folder, second, dtype=None).load_into(
        second, offload_folder=off, materialize=True
    )
    assert (report.bytes_read, report.bytes_written) == (0, 0)
    assert tree(off) == written

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a weight was computed again")

    monkeypatch.setattr(loaditem, "evaluate", refused)
    assert torch.equal(second(words).logits, expected)
    assert tree(folder) == {k.removeprefix(f"{kind}/"): v for k, v in before.items() if k != kind}


# What is written, and what is not ----------------------------------------------------------------


def test_nothing_is_written_without_materialize(checkpoint: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    model = net().to("meta")
    report = planned(checkpoint, model).load_into(model, offload_folder=tmp_path / "off")
    model(X.bfloat16())
    assert tree(tmp_path) == before
    assert report.bytes_written == 0


def test_materialized_weights_are_views_and_nothing_is_read_of_the_checkpoint(
    checkpoint: Path, off: Path
) -> None:
    model = net().to("meta")
    planned(checkpoint, model).load_into(model, offload_folder=off, materialize=True)
    found = weights_of(model)
    before = found._reader.bytes_read
    one, other = found["1.weight"], found["1.weight"]
    assert one.data_ptr() == other.data_ptr()
    assert found._reader.bytes_read == before
    assert torch.equal(one, load_file(checkpoint / "model.safetensors")["1.weight"].bfloat16())


def test_weights_that_lie_in_the_files_as_they_are_are_not_copied(
    checkpoint: Path, off: Path
) -> None:
    result, report = loaded(checkpoint, off, dtype=None)
    assert torch.equal(result, loaded(checkpoint, None, dtype=None)[0])
    assert report.bytes_written == 0
    assert not off.parent.exists()


@pytest.mark.parametrize(
    ("node", "shape", "made"),
    [
        (Source("w"), (4, 6), False),
        (Slice(Slice(Source("w"), 0, 1, 4), 0, 1, 2), (1, 6), False),
        (Slice(Source("w"), 1, 0, 2), (4, 2), True),
        (Transpose(Source("w")), (6, 4), True),
    ],
)
def test_rows_of_a_stored_tensor_are_views_of_it(
    node: Node, shape: tuple[int, int], made: bool, tmp_path: Path, located: Located
) -> None:
    value = torch.arange(24.0).reshape(4, 6)
    save_file({"w": value}, tmp_path / "a.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(shape, device="meta"))
    report = execute(
        model,
        [LoadItem("w", node, {}, "F32", shape, "disk")],
        device_map=DISK,
        root=tmp_path,
        tensors=located(tmp_path),
        schemes={},
        target=Target(tmp_path / "off", tmp_path, (), "", {}),
    )
    expected = {(1, 6): value[2:3], (4, 2): value[:, :2], (6, 4): value.T}.get(shape, value)
    assert torch.equal(weights_of(model)["w"], expected)
    assert (report.bytes_written > 0) is made
    assert (tmp_path / "off").exists() is made


def test_weights_are_made_in_pieces_of_bounded_size(
    checkpoint: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = loaded(checkpoint, None)
    sizes: list[int] = []
    write_all = wholefile._write_all

    def noted(descriptor: int, chunk: memoryview) -> None:
        sizes.append(len(chunk))
        write_all(descriptor, chunk)

    monkeypatch.setattr(wholefile, "_write_all", noted)
    monkeypatch.setattr(materializing, "_CHUNK_BYTES", 8)
    assert torch.equal(loaded(checkpoint, off)[0], expected)
    assert sizes.count(8) == BYTES // 8


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 12, 30, 60, 100])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (1, 6), (2, 0, 3)])
def test_pieces_are_in_the_order_of_memory(shape: tuple[int, ...], limit: int) -> None:
    count = torch.Size(shape).numel()
    whole = torch.arange(count).reshape(shape)
    pieces = [whole[tuple(slice(*b) for b in region)] for region in row_major(shape, limit)]
    assert [value for piece in pieces for value in piece.flatten().tolist()] == [*range(count)]
    assert all(piece.numel() <= limit for piece in pieces)


def test_another_placement_writes_only_what_is_lacking(checkpoint: Path, off: Path) -> None:
    expected, _ = loaded(checkpoint, None)
    last = {"0": "cpu", "1": "cpu", "2": "disk"}
    assert loaded(checkpoint, off, device_map=last)[1].bytes_written > 0
    assert torch.equal(loaded(checkpoint, off)[0], expected)
    names = [set(load_file(path)) for path in off.rglob("*.safetensors")]
    assert sorted(map(sorted, names)) == [
        ["0.bias", "0.weight", "1.bias", "1.weight"],
        ["2.bias", "2.weight"],
    ]
    assert loaded(checkpoint, off, device_map=last)[1].bytes_written == 0


def test_two_dtypes_live_side_by_side(checkpoint: Path, off: Path) -> None:
    for dtype in ("bfloat16", "float16", "float64") * 2:
        expected, _ = loaded(checkpoint, None, dtype=dtype)
        assert torch.equal(loaded(checkpoint, off, dtype=dtype)[0], expected)
    assert len(list(off.rglob("*.safetensors"))) == 3


# Does it still fit? ------------------------------------------------------------------------------


def test_weights_of_another_state_of_the_checkpoint_are_not_used(
    checkpoint: Path, off: Path
) -> None:
    loaded(checkpoint, off)
    old = only(off, "modelquirks-*")
    before = tree(old)
    write(checkpoint, 2.0)  # the same names, shapes and size
    expected, _ = loaded(checkpoint, None)
    result, report = loaded(checkpoint, off)
    assert torch.equal(result, expected)
    assert report.bytes_written > 0
    (note,) = [n for n in report.notes if n.code == "materialized-stale"]
    assert str(old) in note.message
    assert tree(old) == before
    assert "materialized-stale" in codes(loaded(checkpoint, off)[1])


def test_checkpoints_alike_in_all_but_their_values_do_not_share_weights(
    checkpoint: Path, off: Path
) -> None:
    """Fine-tunes of one model, with the fixed times that some images of containers give files."""
    other = checkpoint.with_name("fine-tuned")
    other.mkdir()
    write(other, 2.0)
    for folder in (checkpoint, other):
        os.utime(folder / "model.safetensors", ns=(0, 0))
    wanted = [loaded(folder, None)[0] for folder in (checkpoint, other)]
    for _ in range(2):
        got = [loaded(folder, off)[0] for folder in (checkpoint, other)]
        assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))
    assert not torch.equal(*wanted)
    assert len(list(off.iterdir())) == 2


def test_two_checkpoints_share_an_offload_folder(checkpoint: Path, off: Path) -> None:
    other = checkpoint.with_name("other")
    shutil.copytree(checkpoint, other)
    write(other, 3.0)
    for folder in (checkpoint, other, checkpoint, other):
        expected, _ = loaded(folder, None)
        result, report = loaded(folder, off)
        assert torch.equal(result, expected)
        assert codes(report) == {"materialized"}
    assert len(list(off.iterdir())) == 2


def cut(off: Path) -> None:
    path = only(off, "*.safetensors")
    os.truncate(path, path.stat().st_size - 1)


def grow(off: Path) -> None:
    with only(off, "*.safetensors").open("ab") as file:
        file.write(b"\0")


def flip(off: Path) -> None:
    with only(off, "*.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")


def remove(off: Path) -> None:
    only(off, "*.safetensors").unlink()


def link(off: Path) -> None:
    path = only(off, "*.safetensors")
    path.symlink_to(path.rename(off.parent / "precious"))


def header(off: Path) -> None:
    path = only(off, "*.safetensors")
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"0.weight", b"1.weight", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def no_json(off: Path) -> None:
    only(off, "manifest.json").write_text("{")


def no_list(off: Path) -> None:
    path = only(off, "manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": [{"name": 3}]}))


def outside(off: Path) -> None:
    path = only(off, "manifest.json")
    path.write_text(path.read_text().replace('"weights-', '"../weights-'))


def of_another(off: Path) -> None:
    path = only(off, "manifest.json")
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))


DAMAGES = (cut, grow, flip, remove, link, header, no_json, no_list, outside, of_another)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_told_and_written_anew(
    damage: Callable[[Path], None], checkpoint: Path, off: Path
) -> None:
    expected, _ = loaded(checkpoint, None)
    loaded(checkpoint, off)
    whole = only(off, "*.safetensors").read_bytes()
    damage(off)
    result, report = loaded(checkpoint, off)
    assert torch.equal(result, expected)
    assert "materialized-damaged" in codes(report)
    assert only(off, "*.safetensors").read_bytes() == whole
    assert not only(off, "*.safetensors").is_symlink()
    precious = off.parent / "precious"
    assert not precious.exists() or precious.read_bytes() == whole
    assert codes(loaded(checkpoint, off)[1]) == {"materialized"}


def test_wrong_values_that_keep_size_and_time_are_found_by_the_verification(
    checkpoint: Path, off: Path
) -> None:
    loaded(checkpoint, off)
    path = only(off, "*.safetensors")
    status = path.stat()
    flip(off)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ExecutionError, match="verification failed") as error:
        loaded(checkpoint, off)
    assert str(path.parent) in str(error.value)


def test_a_complete_folder_needs_no_right_to_write(
    checkpoint: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = loaded(checkpoint, off)

    def refused(*_: Any) -> None:
        raise AssertionError("something was to be written")

    monkeypatch.setattr(wholefile, "_taken", refused)
    assert torch.equal(loaded(checkpoint, off)[0], expected)


# Interrupted, at the same time, out of space -----------------------------------------------------

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from modelquirks.planner import Dispatcher
from modelquirks.planner import wholefile
from modelquirks.planner.execution import materialize

checkpoint, off, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
write_all, calls = wholefile._write_all, []

def counted(descriptor, chunk):
    calls.append(len(chunk))
    if len(calls) == kill_at:
        os.write(descriptor, chunk[: len(chunk) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write_all(descriptor, chunk)

wholefile._write_all = counted
materialize._FILE_BYTES = 1
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).eval().to("meta")
plan = Dispatcher().plan(checkpoint, model=model, device_map={"": "disk"}, dtype="bfloat16")
report = plan.load_into(model, offload_folder=off, materialize=True)
x = torch.linspace(-1, 1, 48).reshape(6, 8).bfloat16()
print(report.bytes_written, model(x).double().sum().item())
"""


def start(checkpoint: Path, off: Path, kill_at: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(off), str(kill_at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_run_that_is_killed_leaves_nothing_that_passes_for_complete(
    checkpoint: Path, off: Path
) -> None:
    expected, _ = loaded(checkpoint, None)
    killed = start(checkpoint, off, kill_at=5)  # head, data, manifest; head, half of the data
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    whole, partial = only(off, "*.safetensors"), only(off, ".*.part")
    kept = whole.stat()
    result, report = loaded(checkpoint, off)
    assert torch.equal(result, expected)
    assert codes(report) == {"materialized", "materialized-cleared"}
    assert not partial.exists()
    assert (whole.stat().st_ino, whole.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    new = [path for path in off.rglob("*.safetensors") if path != whole]
    assert report.bytes_written == sum(path.stat().st_size for path in new)
    names = [name for path in (whole, *new) for name in load_file(path)]
    assert sorted(names) == sorted(net().state_dict())


def test_two_processes_write_once_and_both_load_right(checkpoint: Path, off: Path) -> None:
    expected, _ = loaded(checkpoint, None)
    both = [start(checkpoint, off) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    written, sums = zip(*(out.split() for out, _ in said), strict=True)
    assert set(sums) == {str(expected.double().sum().item())}
    sizes = [path.stat().st_size for path in off.rglob("*.safetensors")]
    assert sum(map(int, written)) == sum(sizes)
    assert len(sizes) == 6
    assert not list(off.rglob("*.part"))


def test_where_there_are_no_locks_both_write_and_the_last_name_counts(
    checkpoint: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = loaded(checkpoint, None)
    meet = threading.Barrier(2)

    def unlocked(*_: Any) -> None:
        meet.wait(timeout=30)
        raise OSError("no locks here")

    monkeypatch.setattr(wholefile, "_lock", unlocked)
    results: list[tuple[torch.Tensor, ExecutionReport]] = []
    threads = [
        threading.Thread(target=lambda: results.append(loaded(checkpoint, off))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert all(torch.equal(result, expected) for result, _ in results)
    assert not list(off.rglob("*.part"))


def test_whoever_waits_for_another_is_told(
    checkpoint: Path, off: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(checkpoint, off)
    remove(off)
    with wholefile.exclusive(only(off, "modelquirks-*")) as alone:
        assert alone
        thread = threading.Thread(target=loaded, args=(checkpoint, off))
        with caplog.at_level(logging.WARNING):
            thread.start()
            while not any("waiting until it is done" in r.getMessage() for r in caplog.records):
                thread.join(0.01)
                assert thread.is_alive()
    thread.join()
    assert only(off, "*.safetensors").exists()


def test_too_little_room_is_found_before_anything_is_made(
    checkpoint: Path, off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)

    def usage(_: Any) -> Any:
        return shutil._ntuple_diskusage(1000, 900, BYTES - 1)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    model = net().to("meta")
    plan = planned(checkpoint, model)
    with pytest.raises(ExecutionError, match=f"needs {BYTES} bytes.*where {BYTES - 1} .*are free"):
        plan.load_into(model, offload_folder=off, materialize=True)
    assert tree(tmp_path) == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model, "hf_device_map")


@pytest.fixture
def small_files() -> Generator[None]:
    """Let no file grow beyond 600 bytes, as a full disk or a quota would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_halfway_leaves_what_was_there_before(
    checkpoint: Path, off: Path, tmp_path: Path, small_files: None
) -> None:
    before = tree(tmp_path)
    with pytest.raises(ExecutionError, match=r"offload'.*File too large.*free\. Nothing new"):
        loaded(checkpoint, off)
    assert tree(tmp_path) == before


def test_an_error_in_a_later_file_takes_the_earlier_ones_back(
    checkpoint: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = loaded(checkpoint, off, device_map={"0": "disk", "1": "cpu", "2": "cpu"})
    before = tree(off)
    monkeypatch.setattr(materializing, "_FILE_BYTES", 1)
    files: list[str] = []
    write_whole = wholefile.write_whole

    def failing(path: Path, chunks: Any) -> os.stat_result:
        files.append(path.name)
        if len(files) == 5:
            raise OSError(28, "No space left on device", str(path))
        return write_whole(path, chunks)

    monkeypatch.setattr("modelquirks.planner.execution.offloadstore.write_whole", failing)
    with pytest.raises(ExecutionError, match="No space left on device"):
        loaded(checkpoint, off)
    assert tree(off).keys() == before.keys()
    monkeypatch.undo()
    result, report = loaded(checkpoint, off)
    assert torch.equal(result, expected)
    assert codes(report) == {"materialized"}


# Refused -----------------------------------------------------------------------------------------


def test_materialize_needs_a_folder(checkpoint: Path) -> None:
    model = net().to("meta")
    with pytest.raises(ValueError, match="offload_folder"):
        planned(checkpoint, model).execute(model, materialize=True)


@pytest.mark.parametrize("spelt", ["checkpoint", "checkpoint/../checkpoint", "link"])
def test_the_checkpoint_is_no_offload_folder(spelt: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    before = tree(tmp_path)
    with pytest.raises(ExecutionError, match="holds the checkpoint itself"):
        loaded(checkpoint, tmp_path / spelt)
    assert tree(tmp_path) == before


def test_nothing_is_written_through_a_link(checkpoint: Path, off: Path, tmp_path: Path) -> None:
    loaded(checkpoint, off)
    store = only(off, "modelquirks-*")
    remove(off)
    (store / ".lock").unlink()
    (store / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(ExecutionError, match="symbolic link"):
        loaded(checkpoint, off)
    assert not (tmp_path / "made").exists()
    shutil.rmtree(store)
    (tmp_path / "elsewhere").mkdir()
    store.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExecutionError, match="symbolic link"):
        loaded(checkpoint, off)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_the_way_is_told(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for off in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExecutionError, match=r"offload folder '.*file.*Nothing new was left"):
            loaded(checkpoint, off)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is denied to root")
def test_a_folder_that_may_not_be_written_is_told(checkpoint: Path, off: Path) -> None:
    off.mkdir(parents=True)
    off.chmod(0o500)
    with pytest.raises(ExecutionError, match="Permission denied"):
        loaded(checkpoint, off)


def test_a_folder_that_may_not_be_made_is_told(
    checkpoint: Path, off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ExecutionError, match=r"Permission denied.*leave materialize out"):
        loaded(checkpoint, off)


# The command -------------------------------------------------------------------------------------

MODULE = """
from torch import nn
def make():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Give a function that runs the command where the checkpoint is."""
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "three_layers.py").write_text(MODULE)
    (checkpoint.parent / "map.json").write_text('{"": "disk"}')
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "three_layers", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


MODEL = ("--model", "three_layers:make")
PLAN = ("plan", "checkpoint", *MODEL, "--dtype", "bfloat16", "--device-map", "map.json")
OFF = ("--offload-folder", "off")


def findings(text: str) -> dict[str, str]:
    return {finding["code"]: finding["message"] for finding in json.loads(text)["findings"]}


def test_the_dry_run_says_how_many_bytes_would_be_written(call: Call, checkpoint: Path) -> None:
    dry = (*PLAN, "--dry-run", "--json", *OFF)
    code, out, _ = call(*dry, "--materialize")
    assert code == 0
    said = findings(out)["materialize"]
    assert f"writes {BYTES} bytes" in said and "6 of the 6 tensors" in said
    assert not (checkpoint.parent / "off").exists()
    assert "materialize" not in findings(call(*dry)[1])
    assert call(*PLAN, *OFF, "--materialize")[0] == 0
    assert "writes 0 bytes" in findings(call(*dry, "--materialize")[1])["materialize"]
    without_model = ("plan", "checkpoint", "--dry-run", "--json", *OFF, "--materialize")
    assert "--model" in findings(call(*without_model)[1])["materialize"]


def test_the_dry_run_says_if_there_is_no_room(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(_: Any) -> Any:
        return shutil._ntuple_diskusage(1000, 1000, 0)

    monkeypatch.setattr(shutil, "disk_usage", full)
    code, out, _ = call(*PLAN, "--dry-run", "--json", *OFF, "--materialize")
    assert code == 1
    assert "0 B are free" in findings(out)["materialize-no-space"]


def test_the_command_materializes_and_reads_that_later(call: Call) -> None:
    code, out, err = call(*PLAN, "-o", "plan.json", "--json", *OFF, "--materialize")
    assert (code, err) == (0, "")
    assert json.loads(out)["loaded"]["bytes_written"] > BYTES
    later = ("execute", "plan.json", *MODEL)
    for words, written in ((OFF, 0), ((*OFF, "--materialize"), 0), (("--offload-folder", "o"), 0)):
        code, out, _ = call(*later, *words, "--json")
        assert (code, json.loads(out)["loaded"]["bytes_written"]) == (0, written)
    assert not Path("o").exists()
    assert "computed tensors are read from" in call(*later, *OFF, "--materialize")[1]


@pytest.mark.parametrize("words", [PLAN, ("execute", "plan.json", *MODEL)])
def test_materialize_alone_is_a_bad_call(call: Call, words: tuple[str, ...]) -> None:
    assert call(*PLAN, "--dry-run", "-o", "plan.json")[0] == 0
    code, _, err = call(*words, "--materialize")
    assert code == 2
    assert "--offload-folder DIR" in err
    assert "nothing is written without --materialize" in " ".join(
        call(*PLAN, "--dry-run", *OFF)[2].split()
    )
