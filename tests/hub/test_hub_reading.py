"""Checkpoints on the hub: what is asked for, what is read of it, and what moves."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from modelquirks.planner import CheckpointError, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import manifest_at
from modelquirks.planner.opening import HubOptions, open_checkpoint

if TYPE_CHECKING:
    from hub_server import Blob, HubServer

DATA = Path(__file__).parents[1] / "data"
Put = Callable[..., None]
Weights = Callable[..., bytes]
NAME = "org/name"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def header(tensors: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """Return the start of a safetensors file as the library writes it, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in sorted(tensors.items()):
        end = begin + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + begin


@pytest.fixture
def large(hub_server: Any) -> Callable[[int], dict[str, bytes | Blob]]:
    """Give the function that makes a model of some 2 GB a file, of which only headers exist."""

    def files(n_files: int) -> dict[str, bytes | Blob]:
        found: dict[str, bytes | Blob] = {"config.json": b'{"model_type": "llama"}'}
        weight_map: dict[str, str] = {}
        for number in range(n_files):
            at = f"model.layers.{number}"
            tensors: dict[str, tuple[int, ...]] = {f"{at}.input_layernorm.weight": (4096,)}
            for expert in range(16):
                for which in ("gate_proj", "up_proj", "down_proj"):
                    tensors[f"{at}.mlp.experts.{expert}.{which}.weight"] = (4096, 4864)
            shard = f"model-{number + 1:05}-of-{n_files:05}.safetensors"
            head, size = header(tensors)
            found[shard] = hub_server.Blob(head, size, lfs=True)
            weight_map |= dict.fromkeys(tensors, shard)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        found[INDEX] = json.dumps(index, indent=2).encode()
        return found

    return files


def codes(manifest: Manifest) -> list[str]:
    return [finding.code for finding in manifest.findings]


def ranges(hub: HubServer, name: str) -> list[str]:
    """Return the ranges that the hub itself was asked for of a file."""
    return [one.range for one in hub.seen if name in one.path and one.range]


def test_sixty_files_are_planned_from_little_more_than_their_headers(
    hub: HubServer, put: Put, large: Any
) -> None:
    files = large(60)
    put(files)
    manifest = open_checkpoint(NAME)
    assert len(manifest.shards) == 60
    assert manifest.has_headers
    heads = sum(len(b.head) for name, b in files.items() if name.endswith(".safetensors"))
    rest = len(files[INDEX]) + len(files["config.json"])
    moved = hub.body_bytes
    print(f"{moved:,} bytes moved, {heads:,} of headers, {rest:,} of index and config")
    assert moved < 1.1 * heads + rest
    for shard in manifest.shards:
        assert len(ranges(hub, shard.name)) == 1, "each header comes with one request"


def test_a_second_plan_asks_only_whether_the_branch_has_moved(
    hub: HubServer, put: Put, large: Any
) -> None:
    put(large(3))
    first = open_checkpoint(NAME)
    hub.forget()
    again = open_checkpoint(NAME)
    assert [(one.method, one.body_bytes) for one in hub.seen] == [("HEAD", 0)]
    assert (again.tensors, again.shards, again.config) == (
        first.tensors,
        first.shards,
        first.config,
    )
    hub.forget()
    assert first.origin is not None
    pinned = open_checkpoint(NAME, hub=HubOptions(revision=first.origin.commit))
    assert hub.seen == []
    assert pinned.shards == first.shards


def test_a_new_commit_is_noticed_and_an_old_one_stays_at_hand(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put({SINGLE: weights(a=(2, 3)), "config.json": b"{}"})
    old = open_checkpoint(NAME)
    hub.repos[NAME].commit({SINGLE: weights(b=(5,)), "config.json": b"{}"})
    new = open_checkpoint(NAME)
    assert ([*old.tensors], [*new.tensors]) == (["a"], ["b"])
    assert old.origin is not None
    assert new.origin is not None
    assert old.origin.commit != new.origin.commit
    before = open_checkpoint(NAME, hub=HubOptions(revision=old.origin.commit))
    assert before.tensors == old.tensors


def test_a_revision_may_be_a_branch(hub: HubServer, put: Put, weights: Weights) -> None:
    put({SINGLE: weights(a=(2,))})
    hub.repos[NAME].commit({SINGLE: weights(b=(2,))}, "refs/pr/1")
    branch = open_checkpoint(NAME, hub=HubOptions(revision="refs/pr/1"))
    assert [*branch.tensors] == ["b"]
    assert [*open_checkpoint(f"hf://{NAME}@refs/pr/1").tensors] == ["b"]
    assert [*open_checkpoint(NAME).tensors] == ["a"]


def test_a_header_longer_than_expected_takes_one_more_range_and_no_byte_twice(
    hub: HubServer, put: Put, hub_server: Any
) -> None:
    head, size = header({f"some.long.name.of.a.tensor.{n}": (64, 64) for n in range(2000)})
    put({SINGLE: hub_server.Blob(head, size, lfs=True)})
    assert len(open_checkpoint(NAME).tensors) == 2000
    first, second = ranges(hub, "/blobs/")
    assert first == "bytes=0-65535"
    begin, _, end = second.removeprefix("bytes=").partition("-")
    assert int(begin) == 65536
    assert int(end) == len(head) - 1


@pytest.mark.parametrize(
    "folder",
    sorted(
        path.relative_to(DATA).as_posix()
        for path in (*(DATA / "files").iterdir(), *(DATA / "manifests").iterdir())
        if path.is_dir()
    ),
)
def test_a_repository_says_what_the_same_files_in_a_folder_say(
    hub: HubServer, put: Put, folder: str
) -> None:
    """Real files of every kind, sound and broken: the same reader, another way to the bytes."""
    root = DATA / folder
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    put(files)
    try:
        local = manifest_at(root)
    except CheckpointError:
        with pytest.raises(CheckpointError):
            open_checkpoint(NAME)
        return
    found = open_checkpoint(NAME)
    assert dict(found.tensors) == dict(local.tensors)
    assert found.shards == tuple(replace(s, mtime_ns=None) for s in local.shards)
    assert (found.config, found.format) == (local.config, local.format)
    assert {*codes(found)} - {"hub-download"} == {*codes(local)}


def torch_file(tmp_path: Path, *, legacy: bool = False, n: int = 6) -> bytes:
    path = tmp_path / "made.bin"
    tensors = {f"layers.{i}.weight": torch.rand(200, 300) for i in range(n)}
    torch.save(tensors, path, _use_new_zipfile_serialization=not legacy)
    return path.read_bytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_save_are_read_by_ranges_too(
    hub: HubServer, put: Put, tmp_path: Path, legacy: bool
) -> None:
    raw = torch_file(tmp_path, legacy=legacy)
    put({"pytorch_model.bin": raw})
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "pytorch_model.bin").write_bytes(raw)
    found = open_checkpoint(NAME)
    local = open_manifest(tmp_path / "local")
    assert dict(found.tensors) == dict(local.tensors)
    assert found.shards[0].digest == local.shards[0].digest
    assert hub.body_bytes < len(raw) / 4
    if not legacy:  # the start, the end, and where each of the tensors between them begins
        assert len(ranges(hub, ".bin")) <= 2 + len(found.tensors)


def test_a_folder_or_a_file_of_a_repository_can_be_named(
    hub: HubServer, put: Put, weights: Weights
) -> None:
    put(
        {
            f"unet/diffusion_pytorch_{SINGLE}": weights(u=(2,)),
            "unet/config.json": b'{"_class_name": "UNet"}',
            "vae/model.fp16.safetensors": weights(v=(2,)),
            "vae/model.safetensors": weights(w=(2,)),
        }
    )
    with pytest.raises(CheckpointError, match="weights in the folders below: 'unet', 'vae'"):
        open_checkpoint(NAME)
    unet = open_checkpoint(NAME, hub=HubOptions(subfolder="unet"))
    assert ([*unet.tensors], unet.config["_class_name"]) == (["u"], "UNet")
    assert unet.root.name == "unet"
    assert [*open_checkpoint(f"hf://{NAME}/vae").tensors] == ["w"]
    assert [*open_checkpoint(f"hf://{NAME}/vae/model.fp16.safetensors").tensors] == ["v"]
    with pytest.raises(CheckpointError, match="no file or folder 'text'; in it are 'unet', 'vae'"):
        open_checkpoint(NAME, hub=HubOptions(subfolder="text"))


def test_of_several_formats_the_same_is_taken_as_in_a_folder(
    hub: HubServer, put: Put, weights: Weights, tmp_path: Path
) -> None:
    put(
        {
            "pytorch_model.bin": torch_file(tmp_path),
            SINGLE: weights(a=(2,)),
            "original/consolidated.00.pth": torch_file(tmp_path),
            "flax_model.msgpack": b"\x81\xa1a",
        }
    )
    manifest = open_checkpoint(NAME)
    assert [shard.name for shard in manifest.shards] == [SINGLE]
    assert {"rival-weights", "other-copies"} <= {*codes(manifest)}
    assert ranges(hub, "pytorch_model.bin") == []


def test_a_listing_cannot_lead_out_of_the_cache(hub: HubServer, put: Put, weights: Weights) -> None:
    put({SINGLE: weights(a=(2,)), "../../evil.json": b"{}", "/etc/evil": b"", "a\\..\\b": b""})
    manifest = open_checkpoint(NAME)
    (finding,) = [one for one in manifest.findings if one.code == "listing-path"]
    assert finding.severity == "error"
    for told in ("'../../evil.json' leads out", "'/etc/evil' is absolute", "has a backslash"):
        assert told in finding.message
    assert not any("evil" in one.path for one in hub.seen)


def test_what_could_not_be_kept_is_said_and_does_not_matter(
    hub: HubServer, put: Put, weights: Weights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "file"))
    put({SINGLE: weights(a=(2,))})
    manifest = open_checkpoint(NAME)
    assert [*manifest.tensors] == ["a"]
    assert "hub-cache" in codes(manifest)


def test_damaged_parts_in_the_cache_are_fetched_again(
    hub: HubServer, put: Put, weights: Weights, tmp_path: Path
) -> None:
    put({SINGLE: weights(a=(2,))})
    first = open_checkpoint(NAME)
    (kept,) = (tmp_path / "hf" / "assets").rglob("*.part")
    for damage in (b"", b"{}\n", kept.read_bytes()[:-1], b"\xff" + kept.read_bytes()):
        kept.write_bytes(damage)
        hub.forget()
        assert open_checkpoint(NAME).tensors == first.tensors
        assert len(ranges(hub, SINGLE)) == 1
