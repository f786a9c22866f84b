"""``open_manifest``: which files are the checkpoint, and everything that is wrong with them."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.checkpoint.names_only import NamesOnly
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest

DATA = Path(__file__).parents[1] / "data"
FILES = DATA / "files"
MANIFESTS = DATA / "manifests"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


def put(folder: Path, name: str, **shapes: tuple[int, ...]) -> Path:
    """Write a safetensors file with F32 zeros of these shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "from": name}}
    end = 0
    for tensor, shape in shapes.items():
        size = 4 * int(torch.Size(shape).numel())
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    return path


def put_index(
    folder: Path, weight_map: dict[str, str], size: Any = None, name: str = "model.safetensors"
) -> Path:
    metadata = {} if size is None else {"total_size": size}
    path = folder / f"{name}.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return path


def sharded(folder: Path, size: Any = 40) -> Path:
    """Write a whole checkpoint: a and b in the first file, c in the second."""
    put(folder, ONE, a=(2,), b=(3,))
    put(folder, TWO, c=(5,))
    put_index(folder, {"c": TWO, "a": ONE, "b": ONE}, size)
    return folder


def found(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Return severity and message by code."""
    return {one.code: (one.severity, one.message) for one in manifest.findings}


def codes(manifest: Manifest) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in manifest.findings]


def shapes(manifest: Manifest) -> dict[str, tuple[int, ...] | None]:
    return {name: tensor.shape for name, tensor in manifest.tensors.items()}


# ------------------------------------------------------------------------------------ an index


def test_a_sharded_checkpoint_is_read_from_its_folder_its_index_and_a_string(
    tmp_path: Path,
) -> None:
    folder = sharded(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')

    for path in (folder, folder / "model.safetensors.index.json", str(folder)):
        manifest = open_manifest(path)

        assert (manifest.root, manifest.path) == (folder, Path(path))
        assert shapes(manifest) == {"c": (5,), "a": (2,), "b": (3,)}
        assert [*manifest.tensors] == ["c", "a", "b"]  # the order of the index
        assert {t.shard for t in manifest.tensors.values()} == {ONE, TWO}
        assert [shard.name for shard in manifest.shards] == [TWO, ONE]
        assert (manifest.total_bytes, manifest.declared_bytes) == (40, 40)
        assert (manifest.format, manifest.findings) == ("safetensors", ())
        assert manifest.config == {"model_type": "llama"}
        assert manifest.metadata == {"format": "pt", "from": TWO}


def test_without_any_shard_names_are_known_and_shapes_are_not(tmp_path: Path) -> None:
    put_index(tmp_path, {"a": ONE, "b": TWO}, 40)

    manifest = open_manifest(tmp_path)

    assert codes(manifest) == [("headers-absent", "info")]
    assert manifest.tensors["a"] == ("a", ONE, None, None, None, None, None)
    assert not manifest.has_headers
    assert manifest.total_bytes == 40
    assert [(s.name, s.size_bytes, s.digest) for s in manifest.shards] == [
        (ONE, None, None),
        (TWO, None, None),
    ]


def test_tensors_known_by_name_alone_are_a_mapping_like_any_other() -> None:
    weight_map = {"b": ONE, "a": TWO}
    tensors = NamesOnly(weight_map)
    plain = {name: StoredTensor(name, file) for name, file in weight_map.items()}

    assert tensors == plain
    assert [*tensors] == [*tensors.keys()] == ["b", "a"]
    assert [*tensors.values()] == [*plain.values()]
    assert [*tensors.items()] == [*plain.items()]
    assert ("a" in tensors, "c" in tensors, len(tensors)) == (True, False, 2)
    assert plain["a"] in tensors.values()
    with pytest.raises(KeyError, match="c"):
        tensors["c"]


def test_a_missing_shard_is_an_error_that_names_it_and_its_tensors(tmp_path: Path) -> None:
    (sharded(tmp_path) / TWO).unlink()

    manifest = open_manifest(tmp_path)

    severity, message = found(manifest)["shard-missing"]
    assert severity == "error"
    assert repr(TWO) in message and "'c'" in message
    assert shapes(manifest) == {"c": None, "a": (2,), "b": (3,)}


def test_an_index_without_its_files_beside_files_of_another_version_is_an_error(
    tmp_path: Path,
) -> None:
    put_index(tmp_path, {"a": ONE, "b": TWO})
    for i in range(3):
        put(tmp_path, f"model-0000{i}-of-00003.safetensors", **{f"x{i}": (1,)})

    manifest = open_manifest(tmp_path)

    assert found(manifest)["shard-missing"][0] == "error"
    assert "model-00000-of-00003.safetensors" in found(manifest)["extra-shards"][1]
    assert "headers-absent" not in found(manifest)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "file-empty"),
        (POINTER, "lfs-pointer"),
        (b"<html>Sign in</html>", "html-page"),
        (b"PK\x03\x04" + bytes(40), "wrong-format"),
        (b"\x00\x01\x00\x00\x00\x00\x00\x00{", "header-cut"),
    ],
)
def test_a_shard_that_is_not_what_it_should_be_is_an_error_and_the_others_are_read(
    tmp_path: Path, content: bytes, code: str
) -> None:
    (sharded(tmp_path) / TWO).write_bytes(content)

    manifest = open_manifest(tmp_path)

    assert found(manifest)[code][0] == "error"
    assert repr(TWO) in found(manifest)[code][1]
    assert shapes(manifest) == {"c": None, "a": (2,), "b": (3,)}


def test_a_shard_whose_data_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path) / TWO
    path.write_bytes(path.read_bytes()[:-1])

    assert "'c'" in found(open_manifest(tmp_path))["data-truncated"][1]


def test_the_same_fault_in_many_shards_is_one_finding(tmp_path: Path) -> None:
    names = [f"model-{i:05}-of-00072.safetensors" for i in range(1, 73)]
    for name in names:
        (tmp_path / name).write_bytes(POINTER)
    put_index(tmp_path, {f"w{i}": name for i, name in enumerate(names)})

    manifest = open_manifest(tmp_path)

    (pointer,) = (one for one in manifest.findings if one.code == "lfs-pointer")
    assert "71 more files" in pointer.message
    assert len(pointer.message) < 900


def test_a_tensor_that_its_file_does_not_hold_is_an_error_and_no_tensor(tmp_path: Path) -> None:
    """accelerate 1.15 passes over this in silence, also with strict=True."""
    sharded(tmp_path)
    put(tmp_path, ONE, a=(2,))

    manifest = open_manifest(tmp_path)

    severity, message = found(manifest)["tensor-missing"]
    assert severity == "error"
    assert f"'b' in {ONE!r}" in message
    assert [*manifest.tensors] == ["c", "a"]


def test_a_copy_in_a_file_that_the_index_does_not_name_for_it_is_not_taken(
    tmp_path: Path,
) -> None:
    """accelerate 1.15 takes the last file by name, whatever the index says."""
    sharded(tmp_path)
    put(tmp_path, TWO, c=(5,), a=(99,))

    manifest = open_manifest(tmp_path)

    assert manifest.tensors["a"].shape == (2,)
    severity, message = found(manifest)["stale-duplicate"]
    assert severity == "warning"
    assert f"'a' in {TWO!r}" in message


def test_tensors_that_the_index_does_not_name_are_a_finding_and_not_taken(tmp_path: Path) -> None:
    sharded(tmp_path)
    put(tmp_path, TWO, c=(5,), extra=(1,))

    manifest = open_manifest(tmp_path)

    assert f"'extra' in {TWO!r}" in found(manifest)["unindexed-tensor"][1]
    assert "extra" not in manifest.tensors


def test_a_file_of_the_series_that_the_index_does_not_name_is_a_finding(tmp_path: Path) -> None:
    """accelerate 1.15 passes over this in silence."""
    sharded(tmp_path)
    put(tmp_path, "model-00003-of-00003.safetensors", d=(1,))

    manifest = open_manifest(tmp_path)

    assert codes(manifest) == [("extra-shards", "warning")]
    assert "'model-00003-of-00003.safetensors'" in manifest.findings[0].message


def test_names_of_shards_that_lie_about_their_number_are_no_fault(tmp_path: Path) -> None:
    """gpt-oss-20b has model-00000-of-00002 to model-00002-of-00002: three files."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in range(3)]
    for i, name in enumerate(names):
        put(tmp_path, name, **{f"w{i}": (1,)})
    put_index(tmp_path, {f"w{i}": name for i, name in enumerate(names)}, 12)

    assert open_manifest(tmp_path).findings == ()


@pytest.mark.parametrize(
    ("declared", "expected"),
    [(40, []), (41, ["warning"]), (4000, ["warning"]), (39.0, ["info", "warning"])],
)
def test_a_declared_size_that_differs_from_the_headers_is_a_finding(
    tmp_path: Path, declared: float, expected: list[str]
) -> None:
    manifest = open_manifest(sharded(tmp_path, declared))

    assert sorted(one.severity for one in manifest.findings) == expected
    assert manifest.total_bytes == 40


def test_a_declared_size_that_counts_the_headers_too_is_told_as_that(tmp_path: Path) -> None:
    """The index of chatglm-6b-int4 gives the size of the file."""
    path = put(tmp_path, "model.safetensors", a=(2,))
    put_index(tmp_path, {"a": "model.safetensors"}, path.stat().st_size)

    severity, message = found(open_manifest(tmp_path))["total-size-mismatch"]

    assert severity == "info"
    assert "headers included" in message


def test_paths_that_leave_the_folder_are_never_opened(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    outside = put(tmp_path, "outside.safetensors", a=(2,))
    put(folder, ONE, b=(2,))
    (folder / "linked.safetensors").symlink_to(outside)
    weight_map = {"a": "../outside.safetensors", "b": ONE, "c": "linked.safetensors"}
    put_index(folder, weight_map)

    manifest = open_manifest(folder)

    assert shapes(manifest) == {"a": None, "b": (2,), "c": None}
    messages = [one.message for one in manifest.findings if one.code == "shard-path"]
    assert len(messages) == 2
    assert any("'../outside.safetensors'" in message for message in messages)
    assert any("'linked.safetensors'" in message for message in messages)


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """huggingface_hub keeps snapshots/<revision>/<file> as links to blobs/<hash>."""
    repository = tmp_path / "models--org--name"
    put(repository / "blobs", "0123abcd", a=(2,))
    snapshot = repository / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")

    manifest = open_manifest(snapshot)

    assert shapes(manifest) == {"a": (2,)}
    assert manifest.findings == ()


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    target = put(tmp_path / "elsewhere", "weights.safetensors", a=(2,))
    (tmp_path / "link.safetensors").symlink_to(target)

    assert shapes(open_manifest(tmp_path / "link.safetensors")) == {"a": (2,)}


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")

    assert any(one.severity == "error" for one in open_manifest(tmp_path).findings)


def test_a_sharded_torch_checkpoint_is_read(tmp_path: Path) -> None:
    shared = torch.ones(2, 2)
    torch.save({"a": shared, "tied": shared}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": 1, "tied": 1, "b": 2}
    files = {n: f"pytorch_model-0000{i}-of-00002.bin" for n, i in weight_map.items()}
    put_index(tmp_path, files, 28, name="pytorch_model.bin")

    manifest = open_manifest(tmp_path)

    assert manifest.format == "torch"
    assert shapes(manifest) == {"a": (2, 2), "tied": (2, 2), "b": (3,)}
    assert manifest.shared == (("a", "tied"),)
    assert manifest.total_bytes == 28  # what is in one place counts once
    assert codes(manifest) == [("shared-storage", "info")]


# ------------------------------------------------------------------------- the choice in a folder

W = {"w": (1,)}
V = {"v": (1,)}


def torch_file(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    torch.save({"t": torch.ones(1)}, folder / name)


@pytest.mark.parametrize(
    ("safe", "torch_files", "taken"),
    [
        (["model.safetensors"], [], ["model.safetensors"]),
        (["any-name.safetensors"], [], ["any-name.safetensors"]),
        (["model.safetensors"], ["pytorch_model.bin"], ["model.safetensors"]),
        (["x.safetensors"], ["pytorch_model.bin"], ["x.safetensors"]),
        (["model.safetensors", "x.safetensors"], [], ["model.safetensors"]),
        (["x.safetensors", "consolidated.safetensors"], [], ["consolidated.safetensors"]),
        (["adapter_model.safetensors"], [], ["adapter_model.safetensors"]),
        (["adapter_model.safetensors"], ["pytorch_model.bin"], ["pytorch_model.bin"]),
        ([], ["pytorch_model.bin"], ["pytorch_model.bin"]),
        ([], ["x.pth"], ["x.pth"]),
        ([], ["x.ckpt", "pytorch_model.bin"], ["pytorch_model.bin"]),
        ([], ["x.pt", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"], ["x.pt"]),
        ([], ["x.pt", "training_args.bin", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], ["x.pt"]),
        ([ONE, TWO], [], [ONE, TWO]),
        ([ONE, TWO], ["pytorch_model.bin"], ["pytorch_model.bin"]),
    ],
)
def test_one_checkpoint_is_chosen_by_a_fixed_order(
    tmp_path: Path, safe: list[str], torch_files: list[str], taken: list[str]
) -> None:
    for i, name in enumerate(safe):
        put(tmp_path, name, **{f"w{i}": (1,)})
    for name in torch_files:
        torch_file(tmp_path, name)

    manifest = open_manifest(tmp_path)

    assert [shard.name for shard in manifest.shards] == taken
    assert not any(one.severity == "error" for one in manifest.findings)


def test_a_stale_file_beside_the_checkpoint_is_named_with_the_reason_and_the_remedy(
    tmp_path: Path,
) -> None:
    """accelerate 1.15 silently loads the .bin here."""
    put(tmp_path, "model.safetensors", **W)
    torch_file(tmp_path, "pytorch_model.bin")

    severity, message = found(open_manifest(tmp_path))["rival-weights"]

    assert severity == "warning"
    assert "'model.safetensors' was taken: a single safetensors file comes before" in message
    assert "Not taken: 'pytorch_model.bin'; give the path" in message
    other = open_manifest(tmp_path / "pytorch_model.bin")
    assert ([*other.tensors], other.findings) == (["t"], ())


@pytest.mark.parametrize(
    ("taken", "other"),
    [
        ("model.safetensors", "model-old.safetensors"),
        ("model.safetensors", "backup.pt"),
        ("pytorch_model.bin", "old.bin"),
        ("model.safetensors.index.json", "old.safetensors"),
    ],
)
def test_every_weight_file_that_is_not_read_is_named(
    taken: str, other: str, tmp_path: Path
) -> None:
    if taken.endswith(".json"):
        sharded(tmp_path)
    else:
        put(tmp_path, taken, **W) if taken.endswith(".safetensors") else torch_file(tmp_path, taken)
    put(tmp_path, other, stale=(1,)) if other.endswith("tensors") else torch_file(tmp_path, other)

    manifest = open_manifest(tmp_path)

    assert "stale" not in manifest.tensors
    text = found(manifest)["rival-weights"][1]
    assert f"{taken!r} was taken" in text
    assert f"Not taken: {other!r};" in text


def test_a_single_file_beside_an_index_is_named(tmp_path: Path) -> None:
    """accelerate 1.15 silently loads the single file here."""
    sharded(tmp_path)
    put(tmp_path, "model.safetensors", stale=(1,))

    manifest = open_manifest(tmp_path)

    assert "stale" not in manifest.tensors
    assert "'model.safetensors'" in found(manifest)["rival-weights"][1]


def test_several_indexes_are_named_and_the_usual_one_is_taken(tmp_path: Path) -> None:
    sharded(tmp_path)
    put_index(tmp_path, {"z": "pytorch_model-00001-of-00001.bin"}, name="pytorch_model.bin")
    torch_file(tmp_path, "pytorch_model-00001-of-00001.bin")
    put_index(tmp_path, {"z": "x.msgpack"}, name="flax_model.msgpack")

    manifest = open_manifest(tmp_path)

    assert manifest.format == "safetensors"
    assert codes(manifest) == [("several-indexes", "warning")]
    (finding,) = manifest.findings
    assert "'pytorch_model.bin.index.json', 'flax_model.msgpack.index.json'" in finding.message


def test_an_index_of_another_name_is_found(tmp_path: Path) -> None:
    put(tmp_path, "diffusion_pytorch_model-00001-of-00001.safetensors", **W)
    weight_map = {"w": "diffusion_pytorch_model-00001-of-00001.safetensors"}
    put_index(tmp_path, weight_map, 4, name="diffusion_pytorch_model.safetensors")

    manifest = open_manifest(tmp_path)

    assert (shapes(manifest), manifest.findings) == ({"w": (1,)}, ())


@pytest.mark.parametrize("broken", [False, True], ids=["files absent", "index a pointer"])
def test_an_index_without_its_files_gives_way_to_a_whole_file(tmp_path: Path, broken: bool) -> None:
    index = put_index(tmp_path, {"a": ONE, "b": TWO})
    if broken:
        index.write_bytes(POINTER)
    torch_file(tmp_path, "pytorch_model.bin")

    manifest = open_manifest(tmp_path)

    assert [*manifest.tensors] == ["t"]
    assert "'pytorch_model.bin' was taken instead" in found(manifest)["rival-weights"][1]
    assert not any(one.severity == "error" for one in manifest.findings)
    assert ("lfs-pointer" in found(manifest)) == broken


def test_an_index_without_its_files_gives_way_to_another_that_has_them(tmp_path: Path) -> None:
    put_index(tmp_path, {"a": ONE, "b": TWO})
    put_index(tmp_path, {"t": "x.bin"}, name="pytorch_model.bin")
    torch_file(tmp_path, "x.bin")

    assert shapes(open_manifest(tmp_path)) == {"t": (1,)}


def test_an_index_without_its_files_does_not_give_way_to_an_adapter(tmp_path: Path) -> None:
    """The folder of qwen3-4b-koyash: index of the base model, adapter beside it, no weights."""
    put_index(tmp_path, {"a": ONE, "b": TWO})
    put(tmp_path, "adapter_model.safetensors", **W)
    (tmp_path / "adapter_config.json").write_text("{}")

    manifest = open_manifest(tmp_path)

    assert [*manifest.tensors] == ["a", "b"]
    assert "adapter-beside" in found(manifest)


def test_files_without_an_index_are_one_checkpoint_if_no_tensor_is_in_two(tmp_path: Path) -> None:
    put(tmp_path, ONE, a=(2,))
    put(tmp_path, TWO, b=(3,))

    manifest = open_manifest(tmp_path)

    assert shapes(manifest) == {"a": (2,), "b": (3,)}
    assert codes(manifest) == [("no-index", "info")]


def test_files_without_an_index_of_unlike_names_are_a_warning(tmp_path: Path) -> None:
    put(tmp_path, "left.safetensors", a=(2,))
    put(tmp_path, "right.safetensors", b=(3,))

    assert codes(open_manifest(tmp_path)) == [("no-index", "warning")]


def test_files_without_an_index_that_share_names_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, "left.safetensors", a=(2,), b=(1,))
    put(tmp_path, "right.safetensors", a=(3,))

    manifest = open_manifest(tmp_path)

    severity, message = found(manifest)["duplicate-name"]
    assert severity == "error"
    assert "'a' in 'left.safetensors', 'right.safetensors'" in message
    assert manifest.tensors["a"].shape == (2,)


def test_torch_files_of_unlike_names_are_not_guessed_to_be_one_checkpoint(tmp_path: Path) -> None:
    for name in ("generator.pt", "discriminator.pt"):
        torch.save({name: torch.ones(1)}, tmp_path / name)

    assert codes(open_manifest(tmp_path)) == [("no-index", "error")]


def test_a_series_of_which_files_are_missing_by_name_is_a_warning(tmp_path: Path) -> None:
    put(tmp_path, "model-00002-of-00003.safetensors", a=(2,))

    manifest = open_manifest(tmp_path)

    assert found(manifest)["series-incomplete"][0] == "warning"


def test_one_part_that_is_named_alone_says_that_there_are_others(tmp_path: Path) -> None:
    manifest = open_manifest(sharded(tmp_path) / ONE)

    assert shapes(manifest) == {"a": (2,), "b": (3,)}
    assert codes(manifest) == [("one-of-several", "warning")]


def test_copies_of_other_formats_and_in_folders_below_are_named(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", **W)
    put(tmp_path, "original/model.safetensors", **V)
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x81")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    manifest = open_manifest(tmp_path)

    severity, message = found(manifest)["other-copies"]
    assert severity == "info"
    assert all(name in message for name in ("flax_model.msgpack", "model.gguf", "original/"))
    assert [*manifest.tensors] == ["w"]


def test_an_adapter_is_told_as_one(tmp_path: Path) -> None:
    put(tmp_path, "adapter_model.safetensors", **W)

    assert codes(open_manifest(tmp_path)) == [("adapter", "info")]


@pytest.mark.parametrize(
    ("name", "content", "format", "code"),
    [
        ("model.gguf", b"GGUF\x03\0\0\0", "gguf", "gguf-invalid"),
        ("odd.bin", b"GGUF\x03\0\0\0", "gguf", "gguf-unsupported"),
        ("flax_model.msgpack", b"\x81\xa5model", "flax", "flax-unsupported"),
        ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "unknown", "wrong-format"),
    ],
)
def test_formats_that_are_not_read_are_an_error_that_says_so(
    tmp_path: Path, name: str, content: bytes, format: str, code: str
) -> None:
    (tmp_path / name).write_bytes(content)

    for path in (tmp_path, tmp_path / name):
        manifest = open_manifest(path)

        assert (manifest.format, codes(manifest)) == (format, [(code, "error")])


def test_a_file_whose_name_gives_another_format_is_read_with_a_warning(tmp_path: Path) -> None:
    put(tmp_path, "pytorch_model.bin", **W)

    manifest = open_manifest(tmp_path)

    assert (manifest.format, shapes(manifest)) == ("safetensors", {"w": (1,)})
    assert codes(manifest) == [("wrong-extension", "warning")]


def test_a_file_without_an_extension_is_read_by_its_content(tmp_path: Path) -> None:
    put(tmp_path, "blob", **W)

    assert open_manifest(tmp_path / "blob").findings == ()


def test_tensors_without_elements_are_told(tmp_path: Path) -> None:
    """DeepSpeed ZeRO-3 leaves tensors of shape [0]."""
    put(tmp_path, "model.safetensors", a=(0,), b=(2,))
    assert codes(open_manifest(tmp_path)) == [("tensor-empty", "warning")]

    put(tmp_path, "model.safetensors", a=(0,), b=(0, 4))
    assert codes(open_manifest(tmp_path)) == [("tensor-empty", "error")]


# ----------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    "content",
    [b"", POINTER, b"{'a': 1}", b'{"a": 1}\nEOF', b"[1]", b"\xff", b'{"a":' + b"[" * 100_000],
)
def test_a_config_that_cannot_be_read_is_a_warning_and_empty(
    tmp_path: Path, content: bytes
) -> None:
    put(tmp_path, "model.safetensors", **W)
    (tmp_path / "config.json").write_bytes(content)

    manifest = open_manifest(tmp_path)

    assert codes(manifest) == [("config-unreadable", "warning")]
    assert manifest.config == {}


def test_a_config_may_hold_nan_and_huge_numbers(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", **W)
    (tmp_path / "config.json").write_text(f'{{"a": NaN, "b": {"9" * 400}}}')

    manifest = open_manifest(tmp_path)

    assert manifest.findings == ()
    assert manifest.config["b"] == int("9" * 400)


# --------------------------------------------------------------------------------- no checkpoint


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'.*none' is not a file or folder that exists"):
        open_manifest(tmp_path / "none")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="a link to something that is not there"):
        open_manifest(tmp_path / "link")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], r"no files, none of \*\.safetensors\.index\.json, \*\.safetensors, "),
        (["README.md", "config.json"], "2 files, none of "),
        (["vae/model.safetensors", "unet/model.bin"], "in the folders below: 'unet', 'vae'"),
        (["index.json"], "1 file, none of "),
    ],
)
def test_a_folder_without_a_checkpoint_says_what_was_looked_for_and_what_is_near(
    tmp_path: Path, files: list[str], words: str
) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")

    with pytest.raises(CheckpointError, match=words):
        open_manifest(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "adapter_config.json"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"a": 1}' if name.endswith("json") else "some notes")

    with pytest.raises(CheckpointError, match=f"'.*{name}' is no "):
        open_manifest(path)


def test_a_checkpoint_error_is_a_value_error() -> None:
    assert issubclass(CheckpointError, ValueError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")

    assert found(open_manifest(tmp_path))["not-a-file"][0] == "error"


# ------------------------------------------------------------------------------------- in general


def test_findings_come_in_order_of_severity(tmp_path: Path) -> None:
    sharded(tmp_path, size=None)
    (tmp_path / TWO).write_bytes(b"")
    torch_file(tmp_path, "pytorch_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")

    severities = [one.severity for one in open_manifest(tmp_path).findings]

    assert severities == ["error", "warning", "info", "info"]


def test_messages_never_hold_control_characters(tmp_path: Path) -> None:
    weight_map = {"a\x1b[2J\nb": "x\x07.safetensors", "c": "../\x1b.safetensors"}
    put_index(tmp_path, weight_map, "1\n2")
    put(tmp_path, "x\x07.safetensors", **{"q\r": (1,)})
    put(tmp_path, "y\x07.safetensors", **W)

    for one in open_manifest(tmp_path).findings:
        assert one.message.isprintable(), one


def test_the_garbage_collector_is_as_it_was(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", **W)
    open_manifest(tmp_path)
    assert gc.isenabled()

    gc.disable()
    try:
        open_manifest(tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_reading_headers_imports_nothing_heavy(tmp_path: Path) -> None:
    sharded(tmp_path)
    torch_file(tmp_path, "pytorch_model.bin")
    code = """
import sys
from modelquirks.planner.checkpoint.open import open_manifest
for path in sys.argv[1:]:
    assert open_manifest(path).tensors
heavy = {"torch", "numpy", "safetensors", "transformers", "accelerate", "rich"}
sys.exit(f"imported: {heavy & set(sys.modules)}" if heavy & set(sys.modules) else 0)
"""
    paths = [str(tmp_path), str(tmp_path / "pytorch_model.bin")]
    roots = [path for path in sys.path if path.endswith(("quirks", "planner", "plugins"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}

    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------ real ones

REAL = {
    "gpt-oss-20b": ("safetensors", 459, 3, ["headers-absent"]),
    "granite-3.1-1b-a400m": ("safetensors", 218, 2, ["headers-absent"]),
    "mistral-7b-v0.1": ("safetensors", 291, 2, ["headers-absent"]),
    "olmocr-7b": ("safetensors", 730, 4, ["headers-absent"]),
    "qwen-7b-chat-int4-gptq": ("safetensors", 867, 3, ["headers-absent"]),
    "qwen3-14b-mlx-4bit": ("safetensors", 1007, 2, ["headers-absent"]),
    "smollm-135m-ft": ("safetensors", 272, 3, ["headers-absent"]),
    "wizardlm-2-8x22b": ("safetensors", 1739, 59, ["headers-absent"]),
    "bloom-176b-bin-hugesize": ("torch", 845, 72, ["total-size-invalid", "headers-absent"]),
    "gemma-2b-it-flax": ("flax", 164, 2, ["flax-unsupported", "headers-absent"]),
    "kimi2-pcl-empty": ("unknown", 0, 0, ["weight-map-empty"]),
    "lumina-not-json": ("unknown", 0, 0, ["not-json"]),
    "codefuse-34b-lfs-index": ("unknown", 0, 0, ["lfs-pointer"]),
}


@pytest.mark.parametrize("slug", REAL)
def test_real_manifests_are_read_as_far_as_they_go(slug: str) -> None:
    manifest = open_manifest(MANIFESTS / slug)

    seen = (manifest.format, len(manifest.tensors), len(manifest.shards))
    assert (*seen, [one.code for one in manifest.findings]) == REAL[slug]
    assert json.dumps(manifest.to_json())
    assert ("model_type" in manifest.config) == (slug != "lumina-not-json")  # has no config


REAL_FOLDERS = {
    "ain-empty-shards": (0, ["file-empty", "file-empty", "series-incomplete", "no-index"]),
    "bloom-lfs-pointer": (0, ["lfs-pointer", "rival-weights", "series-incomplete"]),
    "burn-pt-models": (9, ["rival-weights"]),
    "codefuse-lfs-pointer-index": (0, ["lfs-pointer"]),
    "fastsafetensors-examples": (2, ["duplicate-name"]),
    "modelsaver-f32-tiny": (4, []),
    "runai-streamer-test": (10, []),
    "torchtune-assets": (1, []),
    "peft/bin": (2, ["adapter"]),
    "peft/broken_no_tensors": (0, ["no-tensors", "adapter"]),
    "peft/broken_zero3_empty": (4, ["tensor-empty", "adapter"]),
    "dcp-hf/hf_2": (7, []),
    "dcp-hf/hf_sharded": (7, []),
    "dcp-hf/hf_stale": (1, ["rival-weights", "total-size-absent"]),
    "deepspeed-zero2/global_step3": (12, ["rank-missing", "can-load", "not-loaded"]),
}


@pytest.mark.parametrize("name", REAL_FOLDERS)
def test_real_folders_give_what_is_in_them(name: str) -> None:
    manifest = open_manifest(FILES / name)

    got = (len(manifest.tensors), [one.code for one in manifest.findings])
    assert got == REAL_FOLDERS[name]


def test_the_side_files_of_a_trainer_are_no_checkpoint(tmp_path: Path) -> None:
    """scheduler.pt, rng_state.pth and training_args.bin are pickles of other things."""
    shutil.copytree(FILES / "lora-distilbert-imdb", tmp_path / "side")

    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_manifest(tmp_path / "side")
    put(tmp_path / "side", "adapter_model.safetensors", **W)
    assert codes(open_manifest(tmp_path / "side")) == [("adapter", "info")]
