"""Digests of real checkpoints: equal tensors have equal digests, in whatever files they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modelquirks.planner import Dispatcher
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.digest.comparison import compare
from modelquirks.planner.digest.digest import Digest, DigestError, TensorDigest
from modelquirks.planner.digest.hashing import hash_tensors
from modelquirks.planner.execution.loadoptions import LoadOptions

DATA = Path(__file__).parents[1] / "data"
Tensors = Mapping[str, torch.Tensor]


def manifest_of(checkpoint: Path, **options: Any) -> Manifest:
    return Dispatcher().manifest(checkpoint, **options)


def digest_of(checkpoint: Path, **options: Any) -> Digest:
    hashed = hash_tensors(manifest_of(checkpoint), **options)
    assert hashed.unreadable == {}
    return Digest(hashed.tensors)


def raw(tensor: torch.Tensor) -> str:
    """Return the digest of the values in row-major order, by hashlib and numpy alone."""
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def values(digest: Digest) -> dict[str, str]:
    return {name: tensor.sha256 for name, tensor in digest.tensors.items()}


STATE: Tensors = {
    "embed.weight": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "norm.weight": torch.ones(5, dtype=torch.bfloat16),
    "scale": torch.tensor(0.5),
    "count": torch.tensor([1, 2, 3], dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    save_file(dict(STATE), tmp_path / "one" / "model.safetensors")
    return tmp_path / "one"


def test_a_tensor_has_the_digest_of_its_bytes_in_the_file(folder: Path) -> None:
    digest = digest_of(folder)
    assert values(digest) == {name: raw(tensor) for name, tensor in STATE.items()}
    assert digest.tensors["norm.weight"][:2] == ("BF16", (5,))
    assert digest.tensors["scale"].shape == ()


def test_sharding_anew_and_exporting_change_nothing(folder: Path, tmp_path: Path) -> None:
    Dispatcher().export(folder, tmp_path / "shards", shard_size=64)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert digest_of(tmp_path / "shards") == digest_of(folder)
    assert digest_of(tmp_path / "shards").to_text() == digest_of(folder).to_text()


def test_a_pickle_of_views_ties_and_columns_has_the_digest_of_its_values(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {"a": base, "tied": base, "columns": base.t(), "row": base[2], "apart": base[:, 1]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    digest = digest_of(tmp_path / "pytorch_model.bin")
    assert values(digest) == {name: raw(tensor) for name, tensor in state.items()}
    assert digest.tensors["columns"].shape == (6, 4)


@pytest.mark.parametrize(
    "case",
    sorted(p.name for p in (DATA / "deepspeed").iterdir() if (p / "truth.safetensors").exists()),
)
def test_a_training_checkpoint_has_the_digest_of_what_its_own_tools_make_of_it(case: str) -> None:
    truth = load_file(DATA / "deepspeed" / case / "truth.safetensors")
    digest = digest_of(DATA / "deepspeed" / case)
    alike = {n for n, t in digest.tensors.items() if t.dtype == "F32" or n not in truth}
    if case == "universal_from_round_robin":  # its values are under wrong names
        return
    assert {n: values(digest)[n] for n in alike} == {n: raw(truth[n]) for n in alike}


@pytest.mark.parametrize(
    ("case", "truth"), [("fsdp2", "truth"), ("grid", "truth_grid"), ("hugging_face", "truth")]
)
def test_a_dcp_checkpoint_has_the_digest_of_its_whole_tensors(case: str, truth: str) -> None:
    expected = {n: raw(t) for n, t in load_file(DATA / "dcp" / f"{truth}.safetensors").items()}
    found = values(digest_of(DATA / "dcp" / case))
    assert found == {name: expected[name] for name in found}
    assert expected.keys() - found.keys() <= {"count"}  # Hugging Face's writer has no integers


def test_packed_weights_of_gguf_are_hashed_as_they_lie_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    weight = np.arange(128, dtype=np.float32).reshape(2, 64)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", weight)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = values(digest_of(path))
    assert found["packed.q8_0"] == hashlib.sha256(packed.tobytes()).hexdigest()
    assert found["plain"] == hashlib.sha256(weight.tobytes()).hexdigest()


def test_dtypes_that_torch_lacks_are_hashed_too(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = bytes(range(12))
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    digest = digest_of(tmp_path / "model.safetensors")
    assert digest.tensors["w"] == ("F6_E2M3", (4, 4), hashlib.sha256(data).hexdigest())


def test_memory_is_bounded_and_no_piece_is_lost(tmp_path: Path) -> None:
    big = torch.arange(5_000_000, dtype=torch.float64).reshape(1000, 5000)
    save_file({"big": big, "small": big[:3].clone()}, tmp_path / "model.safetensors")
    seen: dict[str, list[int]] = {"begin": [], "add": []}

    class Listener:
        def begin(self, totals: Mapping[str, int]) -> None:
            seen["begin"] += totals.values()

        def add(self, where: str, n_bytes: int) -> None:
            seen["add"].append(n_bytes)

    options = LoadOptions.of(load_memory="16MiB", progress=Listener())
    digest = digest_of(tmp_path, options=options)
    assert values(digest) == {"big": raw(big), "small": raw(big[:3])}
    assert sum(seen["add"]) == sum(seen["begin"]) == big.nbytes + big[:3].nbytes
    assert max(seen["add"]) <= 16 << 20


def test_a_file_cut_off_meanwhile_is_told_by_tensor(folder: Path) -> None:
    manifest = manifest_of(folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    path.write_bytes(path.read_bytes()[:-1])
    hashed = hash_tensors(manifest)
    assert hashed.unreadable
    assert all("truncated" in why for why in hashed.unreadable.values())
    assert {*hashed.tensors, *hashed.unreadable} == names


# Comparing


def changed(folder: Path, **tensors: torch.Tensor | None) -> list[tuple[str, str, str]]:
    """Return what is told after those tensors were replaced, or taken out."""
    digest = digest_of(folder)
    state = {n: t for n, t in {**STATE, **tensors}.items() if t is not None}
    save_file(state, folder / "model.safetensors")
    found = compare(manifest_of(folder), digest)
    return [(change.name, change.kind, change.why) for change in found.changes]


def test_equal_shapes_swapped_between_names_are_told(tmp_path: Path) -> None:
    """The case that no header shows."""
    state = {"gate": torch.zeros(4, 4), "up": torch.ones(4, 4), "down": torch.full((4, 4), 2.0)}
    save_file(state, tmp_path / "model.safetensors")
    digest = digest_of(tmp_path)
    swapped = {**state, "gate": state["up"], "up": state["gate"]}
    save_file(swapped, tmp_path / "model.safetensors")
    found = compare(manifest_of(tmp_path), digest)
    assert [change.name for change in found.changes] == ["gate", "up"]
    assert found.counts == {"changed": 2} and found.n_same == 1 and not found.is_same


@pytest.mark.parametrize("bit", range(0, 40 * 8, 37))
def test_any_bit_that_flips_is_told(folder: Path, bit: int) -> None:
    flipped = STATE["embed.weight"].clone()
    data: Any = flipped.view(torch.uint8).numpy().reshape(-1)
    data[bit // 8] ^= 1 << bit % 8
    assert changed(folder, **{"embed.weight": flipped}) == [
        ("embed.weight", "changed", "other bytes")
    ]


def test_the_same_bytes_under_another_dtype_or_shape_are_another_tensor(folder: Path) -> None:
    assert changed(folder, scale=STATE["scale"].view(torch.int32)) == [
        ("scale", "changed", "I32 [], the digest has F32 []")
    ]
    assert changed(folder, count=STATE["count"].reshape(3, 1)) == [
        ("count", "changed", "I64 [3, 1], the digest has I64 [3]"),
        ("scale", "changed", "F32 [], the digest has I32 []"),
    ]


def test_what_is_missing_and_what_is_more_is_told(folder: Path) -> None:
    assert changed(folder, scale=None, other=torch.zeros(2)) == [
        ("other", "extra", "not in the digest"),
        ("scale", "missing", "not in the checkpoint"),
    ]


# The file

NAMES = st.text(min_size=1, max_size=12)
ENTRIES = st.builds(
    TensorDigest,
    st.sampled_from(["F32", "BF16", "F4"]),
    st.lists(st.integers(0, 2**63), max_size=4).map(tuple),
    st.text("0123456789abcdef", min_size=64, max_size=64),
)


@settings(max_examples=60, deadline=None)
@given(tensors=st.dictionaries(NAMES, ENTRIES, max_size=6))
def test_a_digest_comes_back_from_its_file_as_it_was(
    tensors: dict[str, TensorDigest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("digest") / "digest.json"
    Digest(tensors).save(path)
    again = Digest.load(path)
    assert again == Digest(tensors)
    assert again.to_text() == path.read_text(encoding="utf-8")


def test_the_digest_of_all_is_what_its_description_says(folder: Path) -> None:
    data = json.loads(digest_of(folder).to_text())
    lines = [
        json.dumps([name, *entry.values()], separators=(",", ":")) + "\n"
        for name, entry in sorted(data["tensors"].items())
    ]
    assert data["sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_lone_surrogates_in_names_survive(tmp_path: Path) -> None:
    digest = Digest({"a\ud800": TensorDigest("F32", (1,), "0" * 64)})
    digest.save(tmp_path / "d.json")
    assert Digest.load(tmp_path / "d.json") == digest


ENTRY = {"dtype": "F32", "shape": [2], "sha256": "0" * 64}


def file_of(tensors: Any, **more: Any) -> str:
    head = {"format": "modelquirks digest", "version": 1, "sha256": "0" * 64}
    return json.dumps({**head, "tensors": tensors, **more})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[]", "is no digest"),
        ("{", "is not JSON"),
        ('{"format": "modelquirks plan"}', "is no digest"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git-LFS pointer"),
        ("[" * 100_000, "nested too deep"),
        (file_of({}, version=2), "is of version 2, this program reads version 1"),
        (file_of({}, version="1"), "is of version '1'"),
        (file_of([]), "has no object 'tensors'"),
        (file_of({}, sha256=5), "has no text 'sha256'"),
        (file_of({}, files={}), "keys that mean nothing: 'files'"),
        (file_of({"a": 1}), "'a' is no object"),
        (file_of({"a": {**ENTRY, "dtype": 4}}), "'a' has a dtype that is no text"),
        (file_of({"a": {**ENTRY, "shape": [-1]}}), "'a' has a shape that is no list of sizes"),
        (file_of({"a": {**ENTRY, "shape": [True]}}), "'a' has a shape that is no list of sizes"),
        (file_of({"a": {**ENTRY, "shape": 3}}), "'a' has a shape that is no list of sizes"),
        (file_of({"a": {**ENTRY, "sha256": "A" * 64}}), "64 hexadecimal digits"),
        (file_of({"a": {**ENTRY, "md5": ""}}), "'a' has keys that mean nothing: 'md5'"),
        (file_of({"a": ENTRY}), "was changed after it was written"),
        (file_of({"a": ENTRY})[:-2] + f', "a": {json.dumps(ENTRY)}' + "}}", "says twice: 'a'"),
    ],
)
def test_what_is_no_digest_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "digest.json").write_text(text)
    with pytest.raises(DigestError, match=r"digest\.json") as caught:
        Digest.load(tmp_path / "digest.json")
    assert said in str(caught.value)


def test_a_digest_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match=r"nowhere\.json' cannot be read"):
        Digest.load(tmp_path / "nowhere.json")


def test_all_faults_come_at_once_and_ten_are_listed(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(file_of({f"t{i}": 1 for i in range(50)}))
    with pytest.raises(DigestError) as caught:
        Digest.load(tmp_path / "d.json")
    assert str(caught.value).count("is no object") == 10
    assert "… and more" in str(caught.value)
