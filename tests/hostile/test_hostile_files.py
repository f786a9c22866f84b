"""Archives, links, special files and indexes that lead elsewhere: nothing outside is touched."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.checkpoint.torch_zip import read_torch
from modelquirks.planner.finding import Finding
from modelquirks.planner.writing import write_whole

SECRET = "a-key-that-nobody-should-see"
W = torch.arange(6.0)


def codes(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def saved(folder: Path, value: Any = None) -> Path:
    path = folder / "model.pt"
    torch.save({"w": W, "v": torch.zeros(5)} if value is None else value, path)
    return path


# -------------------------------------------------------------------------------------- zip files


def entries(path: Path) -> list[tuple[zipfile.ZipInfo, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(info, archive.read(info)) for info in archive.infolist()]


def with_entries(path: Path, *more: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "a") as archive:
        for name, content in more:
            archive.writestr(name, content)
    return path


def link_entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return info


SLIPS: list[tuple[str | zipfile.ZipInfo, bytes]] = [
    ("../../slipped.txt", b"x"),
    ("/tmp/slipped.txt", b"x"),
    ("model/../../slipped.txt", b"x"),
    ("..\\..\\slipped.txt", b"x"),
    ("C:\\slipped.txt", b"x"),
    (link_entry("model/data/link"), b"/etc/passwd"),
    (link_entry("model/.."), b"/"),
]


def test_no_entry_of_an_archive_is_ever_taken_out_of_it(tmp_path: Path, watched: Any) -> None:
    """What is read of a zip file are places in it; its names are never names of files."""
    folder = tmp_path / "area"
    folder.mkdir()
    with_entries(saved(folder), *SLIPS)
    before = sorted(tmp_path.rglob("*"))

    opened, planned = watched(folder, ["plan", str(folder / "model.pt"), "--dry-run"])

    assert sorted(tmp_path.rglob("*")) == before
    assert planned.code == 0
    for answer in (opened, planned):
        assert answer.of("write") == []
        assert answer.strange(folder) == []
        assert answer.touched(below=tmp_path, but=[folder]) == []


def patched(path: Path, name: str, change: Callable[[bytearray, int], object]) -> Path:
    """Change the file at the own head of the record *name*."""
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        change(raw, archive.getinfo(name).header_offset)
    path.write_bytes(raw)
    return path


def another_name(raw: bytearray, at: int) -> None:
    raw[at + 30 + len("model/data/")] = ord("9")


def another_packing(raw: bytearray, at: int) -> None:
    raw[at + 8 : at + 10] = struct.pack("<H", zipfile.ZIP_DEFLATED)


def another_size(raw: bytearray, at: int) -> None:
    raw[at + 18 : at + 26] = struct.pack("<II", 4, 4)


@pytest.mark.parametrize("change", [another_name, another_packing, another_size])
def test_a_record_whose_own_head_differs_from_the_directory_is_an_error(
    tmp_path: Path, change: Callable[[bytearray, int], object]
) -> None:
    """Readers believe one or the other: a file that is checked by one is loaded by the other."""
    path = patched(saved(tmp_path), "model/data/0", change)

    header = read_torch(path)

    assert "record-differs" in codes(header.findings)
    assert header.entries["w"].begin is None


def test_records_that_lie_in_each_other_are_an_error(tmp_path: Path) -> None:
    """As in bombs without compression: a thousand tensors that are all the same bytes."""
    path = saved(tmp_path, {"w": torch.zeros(64, dtype=torch.uint8), "v": torch.zeros(4)})
    kept = entries(path)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("model/data/1", {i.filename: c for i, c in kept}["model/data/1"])
    head = inner.getvalue()[: inner.getvalue().index(b"PK\x01\x02")]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info, content in kept:
            whole = (head + bytes(64))[:64] if info.filename == "model/data/0" else content
            archive.writestr(info.filename, whole)
    raw = bytearray(buffer.getvalue())
    outer = raw.index(head, raw.index(b"model/data/0") + 12)
    directory = raw.index(b"PK\x01\x02")
    at = raw.index(b"model/data/1", directory) - 46
    raw[at + 42 : at + 46] = struct.pack("<I", outer)
    path.write_bytes(raw)

    header = read_torch(path)

    assert "record-overlap" in codes(header.findings)
    assert [entry.begin for entry in header.entries.values()] == [None, None]


def test_a_directory_that_is_larger_than_can_be_is_not_read(tmp_path: Path) -> None:
    """Zeros in front of the end of a zip file, which cost nothing on the disk."""
    path = tmp_path / "model.pt"
    size = 1 << 33
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size)
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, (1 << 32) - 2, 4, 0))

    (finding,) = read_torch(path).findings

    assert finding.code in ("zip-invalid", "zip-truncated")


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_pickle_that_is_packed_in_another_way_is_refused(tmp_path: Path, packing: int) -> None:
    """LZMA says itself how much memory it wants."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}, 2))

    (finding,) = read_torch(path).findings

    assert finding.code == "zip-invalid"
    assert "unusual" in finding.message


def test_a_deflated_pickle_is_unpacked_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("model/data.pkl", "w", force_zip64=True) as record,
    ):
        for _ in range(140):
            record.write(bytes(1 << 20))

    (finding,) = read_torch(path).findings

    assert finding.code == "pickle-invalid"
    assert "more than" in finding.message


def test_an_archive_in_itself_is_read_once(tmp_path: Path) -> None:
    """A quine: what is in a record is bytes, also if they are the file that holds it."""
    path = saved(tmp_path)
    with_entries(path, ("model/model.pt", path.read_bytes()))

    assert [*read_torch(path).entries] == ["w", "v"]


# ------------------------------------------------------------------------------------------ links


def files_with_secrets(tmp_path: Path) -> Path:
    """Return a folder, and put beside it what links lead to: each is a file of the right kind."""
    folder, outside = tmp_path / "area", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    save_file({"w": W}, outside / "secret.safetensors")
    torch.save({"w": W}, outside / "secret.pt")
    (outside / "secret.json").write_text(json.dumps({"model_type": SECRET, SECRET: 1}))
    index = {"weight_map": {SECRET: "a.safetensors"}}
    (outside / "secret.index.json").write_text(json.dumps(index))
    (outside / "secret.txt").write_text(SECRET)
    return folder


_DEEPSPEED = "global_step1/mp_rank_00_model_states.pt"
_MEGATRON = "iter_0000001/mp_rank_00/model_optim_rng.pt"
_TRACKER = "latest_checkpointed_iteration.txt"
_RANKS = ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin")

LINKS: dict[str, dict[str, str]] = {
    "a weight file": {"model.safetensors": "secret.safetensors"},
    "a file of torch.save": {"pytorch_model.bin": "secret.pt"},
    "an index": {"model.safetensors.index.json": "secret.index.json"},
    "the config": {"config.json": "secret.json", "model.safetensors": "="},
    "params.json": {"params.json": "secret.json", "model.safetensors": "="},
    "an adapter's config": {"adapter_config.json": "secret.json", "adapter_model.bin": "="},
    "DeepSpeed's latest": {"latest": "secret.txt", _DEEPSPEED: "="},
    "a state of DeepSpeed": {"latest": "=global_step1", _DEEPSPEED: "secret.pt"},
    "DCP's metadata": {".metadata": "secret.pt", "__0_0.distcp": "secret.pt"},
    "Megatron's tracker": {_TRACKER: "secret.txt", _MEGATRON: "="},
    "a state of Megatron": {_TRACKER: "=1", _MEGATRON: "secret.pt"},
    "ranks of FSDP": dict.fromkeys(_RANKS, "secret.pt"),
    "a GGUF file": {"model.gguf": "secret.txt"},
    "a folder below": {"sub": "", "model.safetensors": "="},
}
"""What is in a folder: a link to the file of that name outside, a text, or (``=``) weights."""


def filled(folder: Path, content: dict[str, str]) -> None:
    for name, target in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not target.startswith("="):
            path.symlink_to(folder.parent / "outside" / target)
        elif target != "=":
            path.write_text(target[1:])
        elif path.suffix == ".safetensors":
            save_file({"w": W}, path)
        else:
            torch.save({"w": W}, path)


def test_no_link_out_of_a_folder_is_followed(tmp_path: Path, watched: Any) -> None:
    folders: list[Path] = []
    for number, content in enumerate(LINKS.values()):
        area = tmp_path / str(number)
        area.mkdir()
        folders.append(files_with_secrets(area))
        filled(folders[-1], content)

    answers = watched(*folders)

    for name, folder, answer in zip(LINKS, folders, answers, strict=True):
        assert answer.touched(below=tmp_path, but=[folder]) == [], name
        told = " ".join(text for _, _, text in answer.findings)
        assert SECRET not in told, name
        assert answer.strange(folder) == [], name


def test_a_link_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = files_with_secrets(tmp_path)
    filled(folder, LINKS["the config"])

    manifest = open_manifest(folder)

    (told,) = (f.message for f in manifest.findings if f.code == "config-unreadable")
    assert manifest.config == {}
    assert "a link to a file outside the folder" in told
    assert "'config.json'" in told


def test_links_within_the_folder_and_to_the_blobs_of_a_hub_cache_are_followed(
    tmp_path: Path,
) -> None:
    """Also a file that somebody names, wherever it leads."""
    snapshot, blobs = tmp_path / "m" / "snapshots" / "abc", tmp_path / "m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text('{"model_type": "acme"}')
    save_file({"w": W}, blobs / "2")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    save_file({"w": W}, here / "sub" / "real.safetensors")
    (here / "model.safetensors").symlink_to("sub/real.safetensors")
    (here / "named.safetensors").symlink_to(blobs / "2")

    assert open_manifest(snapshot).config == {"model_type": "acme"}
    for path in (snapshot, here / "model.safetensors", here / "named.safetensors"):
        assert [*open_manifest(path).tensors] == ["w"]


def test_an_export_copies_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    """An export is made to be given away: a tokenizer.json that is a key would go with it."""
    from modelquirks.planner.export.perform import export

    folder = files_with_secrets(tmp_path)
    filled(folder, {"model.safetensors": "=", "tokenizer.json": "secret.txt"})

    report = export(folder, tmp_path / "out")

    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"]
    (note,) = (n for n in report.notes if n.code == "side-file")
    assert "'tokenizer.json'" in note.message


def test_what_is_written_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("as it was")
    for name in ("report.html", "report.html.part", ".report.html.part"):
        (tmp_path / name).symlink_to(target)

    write_whole(tmp_path / "report.html", "new")

    assert target.read_text() == "as it was"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()


# ---------------------------------------------------------------------------------- special files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket may have 107 bytes only
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def folder_of_that_name(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL: list[dict[str, str]] = [
    {"model.safetensors": ""},
    {"pytorch_model.bin": ""},
    {"model.safetensors.index.json": ""},
    {"config.json": "", "model.safetensors": "="},
    {"adapter_config.json": "", "adapter_model.safetensors": "="},
    {"latest": "", _DEEPSPEED: "="},
    {"latest": "=global_step1", _DEEPSPEED: ""},
    {".metadata": "", "__0_0.distcp": "="},
    {_TRACKER: "", _MEGATRON: "="},
    {_TRACKER: "=1", _MEGATRON: ""},
    {_RANKS[0]: "", _RANKS[1]: "="},
    {"model.gguf": ""},
    {"metadata.json": "", ".metadata": "=x"},
]
"""What is in a folder; ``""`` stands for what is no file."""


@pytest.mark.parametrize("make", [fifo, listening, folder_of_that_name, endless])
def test_what_is_no_file_is_never_waited_for(
    tmp_path: Path,
    make: Callable[[Path], None],
    opened: Callable[[Path], Sequence[Finding]],
) -> None:
    for number, content in enumerate(SPECIAL):
        folder = tmp_path / str(number)
        folder.mkdir()
        filled(folder, {name: what for name, what in content.items() if what})
        for name in (name for name, what in content.items() if not what):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name)

        assert opened(folder) is not None


# ---------------------------------------------------------------------------------------- indexes


PATHS = {
    "above": "../model.safetensors",
    "far above": "../../../../../../etc/passwd",
    "in the middle": "sub/../../outside.safetensors",
    "absolute": "/etc/passwd",
    "of Windows": "C:\\Windows\\win.ini",
    "with backslashes": "..\\..\\outside.safetensors",
    "a drive": "C:x.safetensors",
    "a share": "\\\\server\\share\\x.safetensors",
    "with a NUL": "model.safetensors\0.bin",
    "empty": "",
    "a dot": ".",
    "very long": "x" * 5000 + ".safetensors",
    "very deep": "/".join(["x"] * 3000) + "/a.safetensors",
    "a link": "link/secret.safetensors",
}


@pytest.mark.parametrize("name", PATHS)
def test_an_index_that_leads_elsewhere_is_an_error_and_nothing_there_is_opened(
    tmp_path: Path, name: str
) -> None:
    folder = files_with_secrets(tmp_path)
    (folder / "link").symlink_to(tmp_path / "outside")
    save_file({"w": W}, folder / "real.safetensors")
    places = {"stolen": PATHS[name], "w": "real.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    manifest = open_manifest(folder)

    assert codes(f for f in manifest.findings if f.severity == "error") & {
        "shard-path",
        "shard-missing",
    }
    assert manifest.tensors["stolen"].begin is None


@pytest.mark.parametrize("tag", ["../outside", "/tmp", "..", "\x00", "x" * 5000, "\x1b[31m"])
def test_a_pointer_of_deepspeed_or_megatron_cannot_lead_out(tmp_path: Path, tag: str) -> None:
    from modelquirks.quirks.registry import Registry

    folder = files_with_secrets(tmp_path)
    (folder / "global_step1").mkdir()
    torch.save({"module": {"w": W}}, folder / "global_step1" / "mp_rank_00_model_states.pt")
    torch.save({"w": W}, tmp_path / "outside" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(tag)
    registry = Registry.load()

    try:
        manifest = open_manifest(folder, lambda: registry)
    except CheckpointError as error:
        assert "outside" not in str(error) or tag == "../outside"
    else:
        assert not manifest.tensors
        assert [f for f in manifest.findings if f.severity == "error"]


# ------------------------------------------------------------------------------ kept weights


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "weights-0.safetensors", "a\\b", "\0"])
def test_the_record_of_kept_weights_names_its_own_files_only(tmp_path: Path, name: str) -> None:
    from modelquirks.planner.execution.offloadstore import OffloadStore

    store = OffloadStore(tmp_path, fingerprint="0" * 64, checkpoint={"path": "x"})
    store.path.mkdir()
    record = {"name": name, "size_bytes": 1, "mtime_ns": 1, "digest": "x"}
    manifest = {"format": 1, "fingerprint": "0" * 64, "files": [record]}
    (store.path / "manifest.json").write_text(json.dumps(manifest))

    found = store.contents()

    assert found.tensors == {}
    assert "damaged" in found.faults["manifest.json"]
