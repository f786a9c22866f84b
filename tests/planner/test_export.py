"""Exports: what comes out is what was in, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.checkpoint.file_kind import Look, look
from modelquirks.planner.dispatcher import OptionError
from modelquirks.planner.execution.copies import bits_equal
from modelquirks.planner.export import sidefiles
from modelquirks.planner.export.exportreport import ExportError, ExportReport
from modelquirks.quirks.registry import Registry

Tensors = Mapping[str, torch.Tensor]

STATE: dict[str, torch.Tensor] = {
    "emb.weight": torch.linspace(-1, 1, 35).reshape(7, 5),
    "layers.0.weight": torch.arange(30.0).reshape(6, 5).bfloat16(),
    "layers.1.weight": torch.arange(30.0).reshape(6, 5).half() / 7,
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "steps": torch.tensor([1, 2, 3]),
    "mask": torch.tensor([True, False, True]),
    "codes": torch.arange(9, dtype=torch.uint8),
    "small": torch.arange(8.0).to(torch.float8_e4m3fn),
}


def exported(checkpoint: Path, out: Path, registry: Registry | None = None, **options: Any) -> Any:
    """Export, and look at everything that must hold of any export."""
    report: ExportReport = Dispatcher(registry or Registry()).export(checkpoint, out, **options)
    assert {*os.listdir(out)} >= {*report.files, *report.copied}
    found = open_manifest(out)
    assert {f.code for f in found.findings if f.severity != "info"} <= {"tensor-empty"}
    assert len(found.tensors) == report.n_tensors
    assert sum(size or 0 for size in found.sizes.values()) == report.n_bytes
    assert leftovers(out) == []
    return report


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]


def content(out: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}


def same(one: Tensors, other: Tensors) -> bool:
    return {*one} == {*other} and all(bits_equal(one[n], other[n]) for n in one)


def saved(folder: Path, state: Tensors = STATE, **metadata: str) -> Path:
    folder.mkdir()
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt", **metadata})
    return folder


def test_a_plain_checkpoint_comes_out_bit_for_bit(tmp_path: Path) -> None:
    report = exported(saved(tmp_path / "in"), tmp_path / "out")
    assert [*report.files] == ["model.safetensors"]
    assert same(content(tmp_path / "out"), STATE)


def test_a_large_one_is_cut_into_files_with_an_index(tmp_path: Path) -> None:
    report = exported(saved(tmp_path / "in"), tmp_path / "out", shard_size=100)
    assert len(report.files) == 4
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*STATE}
    assert {*index["weight_map"].values()} == {*report.files}
    assert same(content(tmp_path / "out"), STATE)
    again = exported(tmp_path / "out", tmp_path / "again")
    assert [*again.files] == ["model.safetensors"]
    assert same(content(tmp_path / "again"), STATE)


def test_a_tensor_is_written_in_pieces_that_make_it_up(tmp_path: Path) -> None:
    state = {"big": torch.randn(3001, 1013), "turned": torch.randn(700, 900).t().contiguous()}
    exported(saved(tmp_path / "in", state), tmp_path / "out", memory=1 << 24, dtype="bf16")
    wanted = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert same(content(tmp_path / "out"), wanted)


def test_files_of_torch_save_with_views_and_ties_are_exported(tmp_path: Path) -> None:
    flat = torch.arange(60.0)
    state = {"emb": flat[:35].view(7, 5), "turned": flat[35:55].view(5, 4).t()}
    (tmp_path / "in").mkdir()
    torch.save({**state, "head": state["emb"]}, tmp_path / "in" / "pytorch_model.bin")
    report = exported(tmp_path / "in", tmp_path / "out")
    assert report.ties == {"head": "emb"}
    assert same(content(tmp_path / "out"), {n: t.contiguous() for n, t in state.items()})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head": "emb"}


def test_the_metadata_of_a_plain_checkpoint_stays(tmp_path: Path) -> None:
    exported(saved(tmp_path / "in", about="this"), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "about": "this"}


def test_the_dtype_is_changed_of_wide_floats_only_and_in_the_config(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "vocab_size": 7}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    report = exported(folder, tmp_path / "out", dtype="bf16")
    wide = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    wanted = {n: t.bfloat16() if t.dtype in wide else t for n, t in STATE.items()}
    assert same(content(tmp_path / "out"), wanted)
    assert report.copied == ("config.json", "tokenizer.json")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "vocab_size": 7}
    assert [n.message for n in report.notes if n.code == "config-adapted"] == [
        "'config.json' follows the weights: 'dtype' is 'bfloat16', not 'float32'"
    ]


def test_without_a_change_the_config_is_copied_byte_for_byte(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    (folder / "config.json").write_text('{"dtype":   "float16"}')
    exported(folder, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"dtype":   "float16"}'


# With a model


def tied_model() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(7, 5)
    model.head = nn.Linear(5, 7, bias=False)
    model.head.weight = model.embed.weight
    model.norm = nn.LayerNorm(5)
    return model


def test_a_model_has_its_names_and_ties(tmp_path: Path) -> None:
    state = {f"wrapped.{n}": torch.randn_like(t) for n, t in tied_model().state_dict().items()}
    state["wrapped.head.weight"] = state["wrapped.embed.weight"].clone()
    state["optimizer.step"] = torch.tensor(3.0)
    folder = saved(tmp_path / "in", state)
    report = exported(folder, tmp_path / "out", model=tied_model(), aliases=["wrapped.**=**"])
    assert report.ties == {"head.weight": "embed.weight"}
    wanted = {n.removeprefix("wrapped."): t for n, t in state.items() if "head" not in n}
    del wanted["optimizer.step"]
    assert same(content(tmp_path / "out"), wanted)
    assert "copies-equal" in {note.code for note in report.notes}
    (left,) = [note for note in report.notes if note.code == "left-out"]
    assert "optimizer.step" in left.message


def test_copies_that_differ_are_both_written(tmp_path: Path) -> None:
    state = {n: torch.randn_like(t) for n, t in tied_model().state_dict().items()}
    report = exported(saved(tmp_path / "in", state), tmp_path / "out", model=tied_model())
    assert same(content(tmp_path / "out"), state)
    assert "copies-differ" in {note.code for note in report.notes}


def test_what_a_model_needs_and_nobody_has_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"4 missing: 'embed\.weight'"):
        Dispatcher(Registry()).export(saved(tmp_path / "in"), tmp_path / "out", model=tied_model())
    assert not (tmp_path / "out").exists()


def test_options_about_names_need_a_model(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'aliases', 'dequantize' need a model"):
        Dispatcher(Registry()).export(
            saved(tmp_path / "in"), tmp_path / "out", aliases=["a=b"], dequantize=True
        )


# Refusals


def test_a_folder_that_is_not_empty_is_refused_and_what_is_in_it_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    folder = saved(tmp_path / "in")
    with pytest.raises(ExportError, match=r"is not empty: it holds 'mine\.txt'; name another"):
        Dispatcher(Registry()).export(folder, tmp_path / "out")
    with pytest.raises(ExportError, match=r"no export wrote 'mine\.txt'"):
        Dispatcher(Registry()).export(folder, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_taken_and_an_export_replaced_on_demand(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    exported(saved(tmp_path / "in"), tmp_path / "out", shard_size=100)
    exported(saved(tmp_path / "other", {"a": torch.ones(2)}), tmp_path / "out", overwrite=True)
    assert same(content(tmp_path / "out"), {"a": torch.ones(2)})
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_the_checkpoint_itself_is_never_replaced(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    with pytest.raises(ExportError, match="holds the checkpoint itself"):
        Dispatcher(Registry()).export(folder, folder, overwrite=True)
    assert same(content(folder), STATE)


def test_a_missing_shard_is_refused_and_what_is_whole_told(tmp_path: Path) -> None:
    exported(saved(tmp_path / "in"), tmp_path / "cut", shard_size=100)
    (tmp_path / "cut" / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ExportError) as caught:
        Dispatcher(Registry()).export(tmp_path / "cut", tmp_path / "out")
    assert "'model-00002-of-00004.safetensors'" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    state = {"a": torch.ones(2), "wave": torch.ones(2, dtype=torch.complex128)}
    torch.save(state, tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"'wave': a safetensors file has no place for the dtype"):
        Dispatcher(Registry()).export(tmp_path / "in", tmp_path / "out")


# Failures


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "in")
    usage = shutil.disk_usage(tmp_path)._replace(free=200)

    def little(path: Path) -> Any:
        return usage

    monkeypatch.setattr(shutil, "disk_usage", little)
    with pytest.raises(ExportError, match=r"and where .* would be 200 \(200 B\) are free"):
        Dispatcher(Registry()).export(folder, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


@contextmanager
def files_of_at_most(n_bytes: int) -> Generator[None]:
    """Have the system refuse larger files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    with files_of_at_most(600), pytest.raises(ExportError, match=r"File too large.*Nothing was"):
        Dispatcher(Registry()).export(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = saved(tmp_path / "in"), iter(range(3))
    write = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, memoryview(data)[:7], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ExportError, match=r"No space left on device.*Make room"):
        Dispatcher(Registry()).export(folder, tmp_path / "new" / "out")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("reads", [False, True])
def test_no_export_goes_without_a_configuration_that_could_not_be_looked_at(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out by one look that failed, and the next one saw nothing odd to speak of."""
    checkpoint = saved(tmp_path / "in")
    (checkpoint / "config.json").write_text("{}")

    def fails(path: Path) -> Look:
        odd = path.name == "config.json"
        return Look("unreadable", trouble="Input/output error") if odd else look(path)

    def unread(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(sidefiles, "look", fails)
    if reads:
        exported(checkpoint, tmp_path / "out")
        assert (tmp_path / "out" / "config.json").read_text() == "{}"
        return
    monkeypatch.setattr(Path, "read_bytes", unread)
    with pytest.raises(ExportError, match=r"config.json' belongs beside the weights and cannot be"):
        exported(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("lost", [0, 1])
def test_bytes_that_change_on_the_way_to_the_disk_are_noticed(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is written first; then a tensor."""
    folder, write, number = saved(tmp_path / "in"), os.pwrite, iter(range(1 << 20))

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        found = bytearray(data)
        if next(number) == lost:
            found[len(found) // 2] ^= 1
        return write(descriptor, found, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ExportError, match="is not what is read back, and was removed"):
        Dispatcher(Registry()).export(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_short_writes_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        return write(descriptor, memoryview(data)[:11], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    exported(saved(tmp_path / "in"), tmp_path / "out")
    assert same(content(tmp_path / "out"), STATE)


def test_what_a_process_left_that_died_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    import fcntl

    folder = saved(tmp_path / "in")
    dead = tmp_path / ".out.0123456789abcdef.part"
    alive = tmp_path / ".out.fedcba9876543210.part"
    for path in (dead, alive):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        report = Dispatcher(Registry()).export(folder, tmp_path / "out")
    finally:
        os.close(descriptor)
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out", alive.name}
    codes = [note.code for note in report.notes]
    assert codes[:2] == ["export-cleared", "export-unfinished"]


def test_a_folder_about_to_be_replaced_is_back(tmp_path: Path) -> None:
    exported(saved(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.0123456789abcdef.old")
    with pytest.raises(ExportError, match="is not empty"):
        Dispatcher(Registry()).export(tmp_path / "in", tmp_path / "out")
    assert same(content(tmp_path / "out"), STATE)


def test_a_killed_process_leaves_nothing_that_looks_whole() -> None:
    script = Path(__file__).with_name("export_kills.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 20


MEMORY = """
import sys
from modelquirks.planner import Dispatcher
from modelquirks.planner.export.perform import export
from modelquirks.quirks.registry import Registry
import psutil
base = psutil.Process().memory_info().rss
report = Dispatcher(Registry()).export(sys.argv[1], sys.argv[2], dtype="bf16", memory="32MiB")
print(report.peak_bytes - base)
"""


def test_the_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", {"big": torch.zeros(4000, 8000)})  # 128 MB
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, folder, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 120 << 20  # torch's own first steps are in it
