"""A plan is bound to the files that were read: whatever changed is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner.checkpoint.fingerprint import changed
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import open_manifest

SAFE, ZIP, LEGACY = "model.safetensors", "model.bin", "model.pt"


def saved(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> Manifest:
    folder.mkdir(exist_ok=True)
    if name == SAFE:
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=name == ZIP)
    return open_manifest(folder)


def messages(manifest: Manifest, folder: Path, *, same_place: bool) -> list[str]:
    found = changed(folder, manifest.shards, same_place=same_place)
    assert all((one.code, one.severity) == ("shard-changed", "error") for one in found)
    return [one.message for one in found]


formats = pytest.mark.parametrize("name", [SAFE, ZIP, LEGACY])


@formats
def test_untouched_files_and_copies_elsewhere_are_as_they_were(tmp_path: Path, name: str) -> None:
    manifest = saved(tmp_path / "here", name, {"w": torch.ones(3)})
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    os.utime(tmp_path / "there" / name, ns=(1, 1))

    assert messages(manifest, tmp_path / "here", same_place=True) == []
    assert messages(manifest, tmp_path / "there", same_place=False) == []


@formats
@pytest.mark.parametrize("same_place", [True, False])
def test_a_changed_header_is_seen_though_the_size_is_the_same(
    tmp_path: Path, name: str, same_place: bool
) -> None:
    manifest = saved(tmp_path, name, {"w": torch.ones(3, 4)})
    size = (tmp_path / name).stat().st_size
    saved(tmp_path, name, {"w": torch.ones(4, 3)})
    assert (tmp_path / name).stat().st_size == size

    (message,) = messages(manifest, tmp_path, same_place=same_place)

    assert (
        message == f"{name!r} has another header than when the plan was made; make the plan again."
    )


@formats
def test_weights_written_again_under_the_same_header_are_seen_by_the_time(
    tmp_path: Path, name: str
) -> None:
    manifest = saved(tmp_path, name, {"w": torch.ones(3)})
    os.utime(tmp_path / name, ns=(1, 1))

    (message,) = messages(manifest, tmp_path, same_place=True)

    assert "was written again" in message
    assert messages(manifest, tmp_path, same_place=False) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "is gone"),
        (cut, "bytes when the plan was made and has"),
        (replaced_by_a_folder, "can no longer be read"),
    ],
)
@formats
def test_every_file_that_vanished_or_changed_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    manifest = saved(tmp_path, name, {"w": torch.ones(3)})
    damage(tmp_path / name)

    (message,) = messages(manifest, tmp_path, same_place=False)

    assert words in message
    assert repr(name) in message


def test_a_shard_that_was_absent_and_has_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {"total_size": 4}, "weight_map": {"w": "x.safetensors"}}'
    )
    manifest = open_manifest(tmp_path)
    assert messages(manifest, tmp_path, same_place=True) == []

    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")

    assert "was not there" in messages(manifest, tmp_path, same_place=True)[0]


def test_a_broken_file_that_is_still_as_broken_has_not_changed(tmp_path: Path) -> None:
    (tmp_path / SAFE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    manifest = open_manifest(tmp_path)

    assert messages(manifest, tmp_path, same_place=True) == []
