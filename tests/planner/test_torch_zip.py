"""Files of ``torch.save``: read without torch, right to the byte, and without running anything."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import struct
import tempfile
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelquirks.planner.checkpoint import pickle_machine, state_dict
from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.manifest import StoredTensor, shared_groups
from modelquirks.planner.checkpoint.torch_zip import read_torch
from modelquirks.planner.dtypes import from_torch, to_torch

FILES = Path(__file__).parents[1] / "data" / "files"
SAVED = FILES / "torch-save"


def errors(header: Header) -> dict[str, str]:
    return {one.code: one.message for one in header.findings if one.severity == "error"}


def codes(header: Header) -> set[str]:
    return {one.code for one in header.findings}


def said(header: Header, code: str) -> str:
    (message,) = (one.message for one in header.findings if one.code == code)
    return message


def saved(folder: Path, value: Any, *, legacy: bool = False) -> Path:
    path = folder / "model.pt"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


def tensor_at(path: Path, stored: StoredTensor) -> torch.Tensor:
    """Make the tensor from what was found: the bytes of the file, dtype, shape and stride."""
    assert stored.dtype and stored.shape is not None and stored.begin is not None
    raw = bytearray(path.read_bytes()[stored.begin : stored.end])
    flat = torch.frombuffer(raw, dtype=to_torch(stored.dtype)) if raw else torch.empty(0)
    if stored.stride is None:
        return flat.reshape(stored.shape)
    return flat.as_strided(stored.shape, stored.stride)


def same(path: Path, header: Header, expected: dict[str, torch.Tensor]) -> None:
    """Check names, order, dtypes, shapes and every byte."""
    assert [*header.entries] == [*expected]
    for name, tensor in expected.items():
        stored = header.entries[name]
        assert (stored.dtype, stored.shape) == (from_torch(tensor.dtype), tuple(tensor.shape))
        assert stored.nbytes is not None
        if tensor.numel():
            assert torch.equal(tensor_at(path, stored), tensor)


# ----------------------------------------------------------------------------------- real files

PLAIN = sorted(
    [
        *(FILES / "burn-pt-models").glob("*.pt"),
        *(FILES / "torchtune-assets").glob("*.pt"),
        *(FILES / "peft").glob("*/*.bin"),
        SAVED / "zip.pt",
        SAVED / "legacy.pt",
    ]
)


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_real_files_hold_what_torch_finds_in_them(path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    header = read_torch(path)
    if header.container:
        loaded = loaded[header.container]

    same(path, header, loaded)
    assert errors(header) == {}
    assert header.format == "torch"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("empty.pt", "file-empty", "0 bytes"),
        ("html.pt", "html-page", "web page"),
        ("lfs.pt", "lfs-pointer", "123 bytes"),
        ("script.pt", "torchscript", "TorchScript"),
        ("tar.pt", "wrong-format", "zero bytes"),
        ("trunc_half.pt", "zip-truncated", "cut off"),
        ("comp.pt", "record-compressed", "'a', 'b', 'tied', 'view'"),
    ],
)
def test_real_files_of_other_kinds_and_damaged_ones_are_named(
    name: str, code: str, words: str
) -> None:
    found = errors(read_torch(SAVED / name))

    assert found.keys() == {code}
    assert words in found[code]
    assert repr(name) in found[code]


def test_a_file_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    assert errors(read_torch(tmp_path / "none.pt")).keys() == {"shard-missing"}


def test_ties_and_views_are_told_by_the_place_in_the_storage() -> None:
    """Module tensors of DeepSpeed ZeRO-2 are views of one flat storage."""
    path = FILES / "deepspeed-zero2/global_step3/mp_rank_00_model_states.pt"
    header = read_torch(path)

    same(path, header, torch.load(path, weights_only=True)["module"])
    assert header.container == "deepspeed"
    assert shared_groups(header.entries.values()) == (("emb.weight", "head.weight"),)
    assert "frozen_param_fragments" in said(header, "container")


def test_a_lightning_checkpoint_gives_its_state_dict_and_leaves_the_optimizer() -> None:
    path = SAVED / "lightning.ckpt"
    header = read_torch(path)

    same(path, header, torch.load(path, weights_only=True)["state_dict"])
    assert header.container == "lightning"
    assert "'optimizer_states'" in said(header, "container")


def test_the_state_of_an_optimizer_is_not_taken_for_weights() -> None:
    path = FILES / "deepspeed-zero2/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"

    assert "optimizer" in errors(read_torch(path))["optimizer-state"]


def test_a_whole_module_is_read_without_its_class() -> None:
    header = read_torch(SAVED / "module.pt")

    assert [*header.entries] == ["weight", "bias"]
    assert "torch.nn.modules.linear.Linear" in said(header, "whole-module")


def test_pickles_of_other_things_name_the_classes_that_they_hold() -> None:
    header = read_torch(FILES / "lora-distilbert-imdb/training_args.bin")

    assert not header.entries
    assert "transformers.training_args.TrainingArguments" in said(header, "pickle-objects")


# ------------------------------------------------------------------------- tensors of every kind

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read(tmp_path: Path, dtype: torch.dtype, legacy: bool) -> None:
    value = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    path = saved(tmp_path, {"w": value, "v": value[1:, ::2]}, legacy=legacy)

    header = read_torch(path)

    assert errors(header) == {}
    assert {name: t.dtype for name, t in header.entries.items()} == dict.fromkeys(
        ("w", "v"), from_torch(dtype)
    )
    raw = value.contiguous().view(torch.uint8).reshape(-1)
    stored = header.entries["w"]
    assert path.read_bytes()[stored.begin : stored.end] == bytes(raw.tolist())


def test_pairs_of_four_bit_values_are_counted_as_values(tmp_path: Path) -> None:
    """As in safetensors, where F4 [2, 8] is what torch has as float4_e2m1fn_x2 [2, 4]."""
    value = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    path = saved(tmp_path, {"w": value, "row": value[1]})

    header = read_torch(path)

    found = {name: (t.dtype, t.shape, t.nbytes, t.stride) for name, t in header.entries.items()}
    assert found == {"w": ("F4", (2, 8), 8, None), "row": ("F4", (8,), 4, None)}
    row = header.entries["row"]
    assert path.read_bytes()[row.begin : row.end] == bytes([4, 5, 6, 7])


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Return tensors that are whole, views, transposed, expanded, empty, scalar or shared."""
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t[1],
        lambda t: t[:, 1:3, ::2],
        lambda t: t.transpose(0, 2),
        lambda t: t[0, 0, 0],
        lambda t: t[:, :0],
        lambda t: t[1, 2].expand(2, 5),
        lambda t: t.clone()[2:],
        lambda t: t.to(torch.bfloat16)[1:],
        lambda t: t.reshape(-1)[7:8],
    ]
    chosen = draw(st.lists(st.integers(0, len(views) - 1), max_size=6))
    return {f"layers.{i}.w": views[which](base) for i, which in enumerate(chosen)}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(tensors=state_dicts(), legacy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_views_strides_and_shared_storages_lead_to_the_right_bytes(
    scratch: Path, tensors: dict[str, torch.Tensor], legacy: bool
) -> None:
    path = saved(scratch, tensors, legacy=legacy)

    header = read_torch(path)

    same(path, header, tensors)
    assert errors(header) == {}
    for name, tensor in tensors.items():
        stored = header.entries[name]
        assert (stored.stride is None) == (tensor.is_contiguous() or not tensor.numel())


def test_parameters_subclasses_and_tensors_with_attributes_are_their_plain_tensors(
    tmp_path: Path,
) -> None:
    marked = torch.arange(6.0).reshape(2, 3)
    marked.origin = "here"  # type: ignore[attr-defined]
    value = {"p": nn.Parameter(torch.ones(2)), "b": nn.Buffer(torch.zeros(3)), "m": marked}
    path = saved(tmp_path, value)

    header = read_torch(path)

    same(path, header, {name: torch.as_tensor(t.detach()) for name, t in value.items()})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    value = OrderedDict(a=torch.ones(2, 3), b=torch.zeros(4))
    for legacy in (False, True):
        path = tmp_path / "model.pt"
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)

        same(path, read_torch(path), value)


def test_a_quantised_sparse_or_conjugated_tensor_or_an_array_is_named_and_left_out(
    tmp_path: Path,
) -> None:
    value = {
        "good": torch.ones(2),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "array": np.ones(3),
    }
    header = read_torch(saved(tmp_path, value))

    assert [*header.entries] == ["good"]
    message = said(header, "tensor-unreadable")
    assert all(f"'{name}'" in message for name in ("sparse", "meta", "conj", "array"))


# ------------------------------------------------------------------------------------ containers

W = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("value", "container", "names"),
    [
        ({"a.w": W}, "", ["a.w"]),
        ({"state_dict": {"a.w": W}, "epoch": 3}, "state_dict", ["a.w"]),
        ({"model_state_dict": {"w": W}, "optimizer": {"m": W}}, "model_state_dict", ["w"]),
        ({"model": {"w": W}, "ema": {"w": W}, "step": torch.tensor(3)}, "model", ["w"]),
        ({"params_ema": {"w": W}}, "params_ema", ["w"]),
        ({"model": {"state_dict": {"a.w": W}}, "args": None}, "model.state_dict", ["a.w"]),
        ({"module": {"w": W}, "ds_version": "0.19.8"}, "deepspeed", ["w"]),
        ({"state_dict": {"w": W}, "pytorch-lightning_version": "2.6"}, "lightning", ["w"]),
        ({"theirs": {"a.w": W}, "config": {"n": 1}}, "theirs", ["a.w"]),
        ({"enc": {"w": W}, "dec": {"w": W}}, "", ["enc.w", "dec.w"]),
        ({"enc": {"w": W}}, "", ["enc.w"]),
        ({"model": {"w": W}, "head.w": W}, "", ["model.w", "head.w"]),
        ({"layers": [{"w": W}, {"w": W}]}, "", ["layers.0.w", "layers.1.w"]),
        ({0: W, 7: W}, "", ["0", "7"]),
        (defaultdict(dict, a={"w": W}), "", ["a.w"]),
        ({"state_dict": {}, "w": W}, "", ["w"]),
    ],
)
def test_the_weights_are_found_in_what_they_are_wrapped_in(
    tmp_path: Path, value: Any, container: str, names: list[str]
) -> None:
    header = read_torch(saved(tmp_path, value))

    assert (header.container, [*header.entries]) == (container, names)
    assert ("container" in codes(header)) == bool(container)


def test_values_beside_the_tensors_are_left_out_and_named(tmp_path: Path) -> None:
    header = read_torch(saved(tmp_path, {"w": W, "version": "x", "nothing": None}))

    assert said(header, "not-tensors").endswith("left out: 'version'.")


def test_nested_names_that_collide_are_an_error(tmp_path: Path) -> None:
    header = read_torch(saved(tmp_path, {"a.b": W, "a": {"b": W, "c": W}}))

    assert "'a.b'" in errors(header)["duplicate-name"]


def test_a_single_tensor_is_read_under_an_empty_name(tmp_path: Path) -> None:
    header = read_torch(saved(tmp_path, W))

    assert [*header.entries] == [""]


# ---------------------------------------------------------------------------------- broken files


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """Write the zip file *path* again, each record changed or (None) left out."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records:
            if (new := change(name, content)) is not None:
                archive.writestr(name, new)
    return path


Change = Callable[[str, bytes], bytes | None]
RECORDS: list[tuple[Change, str]] = [
    (lambda name, old: old[:-1] if name.endswith("data/0") else old, "record-size"),
    (lambda name, old: old + b"x" if name.endswith("data/0") else old, "record-size"),
    (lambda name, old: None if name.endswith("data/0") else old, "record-missing"),
    (lambda name, old: b"big" if name.endswith("byteorder") else old, "big-endian"),
    (lambda name, old: None if name.endswith("data.pkl") else old, "wrong-format"),
    (lambda name, old: old[:-9] if name.endswith("data.pkl") else old, "pickle-invalid"),
]


@pytest.mark.parametrize(
    ("change", "code"),
    RECORDS,
    ids=["short", "long", "missing", "big-endian", "no pickle", "pickle cut"],
)
def test_a_record_that_is_not_as_it_should_be_is_an_error(
    tmp_path: Path, change: Change, code: str
) -> None:
    """Torch maps such files into memory and gives garbage, or says that it is out of range."""
    path = rewritten(saved(tmp_path, {"w": W, "v": torch.zeros(5)}), change)

    header = read_torch(path)

    assert errors(header).keys() == {code}
    if header.entries:
        assert header.entries["w"].begin is None
        assert header.entries["v"].begin is not None
        assert "'w'" in errors(header)[code]


def test_a_file_written_again_without_compression_is_read(tmp_path: Path) -> None:
    """The alignment of torch is lost, and each local header has its own length."""
    value = {"w": W, "v": torch.zeros(5)}
    path = rewritten(saved(tmp_path, value), lambda _, old: old)

    same(path, read_torch(path), value)


def test_a_record_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": W})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("model/data/0", b"x" * 24)

    assert "twice" in errors(read_torch(path))["zip-invalid"]


def test_a_directory_that_points_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": W})
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("model/data/0").header_offset
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 4] = b"XXXX"
    path.write_bytes(raw)

    assert "'w'" in errors(read_torch(path))["record-misplaced"]


def test_a_tensor_that_reaches_beyond_its_storage_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2, 3)})
    path = rewritten(path, lambda _, old: old.replace(b"K\x02K\x03\x86", b"K\x02K\x09\x86", 1))

    header = read_torch(path)

    assert "'w'" in errors(header)["tensor-beyond-storage"]
    assert header.entries["w"].begin is None


def test_a_legacy_file_that_is_cut_off_keeps_the_tensors_before_the_cut(tmp_path: Path) -> None:
    value = {"a": torch.ones(4), "b": torch.zeros(100)}
    path = saved(tmp_path, value, legacy=True)
    path.write_bytes(path.read_bytes()[:-1])

    header = read_torch(path)

    assert "cut off" in errors(header)["data-truncated"]
    places = {name: t.begin for name, t in header.entries.items()}
    assert sorted(place is None for place in places.values()) == [False, True]


def test_a_legacy_file_with_a_wrong_count_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(4)}, legacy=True)
    path.write_bytes(path.read_bytes().replace(struct.pack("<q", 4), struct.pack("<q", 5)))

    assert "5 elements" in errors(read_torch(path))["record-size"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "little-endian"),
        (b"M\xe9\x03.", b"M\xe8\x03.", "unknown version"),
    ],
)
def test_a_legacy_file_of_another_machine_or_version_is_an_error(
    tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    path = saved(tmp_path, {"a": torch.ones(4)}, legacy=True)
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))

    assert words in errors(read_torch(path))["pickle-invalid"]


def test_a_storage_that_is_given_two_sizes_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": W, "b": W.t()})

    def last_six_is_seven(name: str, old: bytes) -> bytes:
        before, six, behind = old.rpartition(b"K\x06")
        return before + b"K\x07" + behind if name.endswith("data.pkl") and six else old

    header = read_torch(rewritten(path, last_six_is_seven))

    assert "two sizes" in errors(header)["pickle-invalid"]


def test_a_bare_pickle_and_a_safetensors_file_are_told_apart(tmp_path: Path) -> None:
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps({"a": 1}))

    assert "pickle" in errors(read_torch(bare))["wrong-format"]
    safe = FILES / "modelsaver-f32-tiny/model.safetensors"
    assert "safetensors" in errors(read_torch(safe))["wrong-format"]


@given(
    edits=st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=6)), min_size=1, max_size=4),
    name=st.sampled_from(["zip.pt", "legacy.pt", "module.pt", "lightning.ckpt"]),
)
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_never_raises(
    scratch: Path, edits: list[tuple[int, bytes]], name: str
) -> None:
    raw = bytearray((SAVED / name).read_bytes())
    for at, put in edits:
        raw[at % len(raw) : at % len(raw) + len(put)] = put
    path = scratch / "damaged.pt"
    path.write_bytes(raw)

    header = read_torch(path)

    assert header.readable or errors(header)
    for stored in header.entries.values():
        assert stored.begin is None or 0 <= stored.begin <= (stored.end or 0) <= len(raw)


# --------------------------------------------------------------------------------------- attacks


SYSTEM = vars(os)["system"]


def zipped(folder: Path, pickled: bytes) -> Path:
    """Return a file of torch.save with that pickle in it."""
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickled)
    return path


def marker(folder: Path) -> str:
    return str(folder / "executed")


class Calls:
    """Pickles as a call of *function* with *args*."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def attacks(folder: Path) -> dict[str, bytes]:
    target = marker(folder).encode()
    command = b"touch " + target
    code = b"open(%r,'w').close()" % target.decode()
    short = bytes([0x8C, len(command)]) + command
    return {
        "REDUCE of os.system": pickle.dumps(Calls(SYSTEM, command.decode()), 2),
        "REDUCE of builtins.eval": pickle.dumps(Calls(eval, code.decode()), 2),
        "REDUCE of builtins.exec, protocol 5": pickle.dumps(Calls(exec, code.decode()), 5),
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command + b"'\no.",
        "NEWOBJ": b"\x80\x02cos\nsystem\nS'" + command + b"'\n\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\nS'" + command + b"'\n\x85}\x92.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + short + b"\x85R.",
        "a name made while loading": b"\x80\x04K\x01\x8c\x06system\x93" + short + b"\x85R.",
        "a dotted name through torch": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93"
        + short
        + b"\x85R.",
        "an extension code": b"\x80\x02\x82\x01" + b"S'x'\n\x85R.",
        "BUILD with __setstate__": b"\x80\x02ccollections\nOrderedDict\n)R}U\x0c__setstate__"
        b"cos\nsystem\nsbS'" + command + b"'\nb.",
        "inside a list beside tensors": pickle.dumps([1, Calls(SYSTEM, command.decode())], 2),
    }


ATTACKS = [*attacks(Path("x"))]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_pickle_that_would_run_a_program_runs_nothing_and_is_an_error(
    tmp_path: Path, name: str
) -> None:
    path = zipped(tmp_path, attacks(tmp_path)[name])

    header = read_torch(path)

    assert not os.path.exists(marker(tmp_path))
    if name == "an extension code":
        assert "extension 1" in said(header, "pickle-objects")
    else:
        assert "Nothing of it was run" in errors(header)["pickle-code"]


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    for name, pickled in attacks(tmp_path).items():
        if name in (
            "an extension code",
            "a name made while loading",
            "a dotted name through torch",
        ):
            continue
        if name == "BUILD with __setstate__":
            continue
        with suppress(TypeError, pickle.UnpicklingError):  # NEWOBJ wants a class
            pickle.loads(pickled)
        if not name.startswith("NEWOBJ"):
            assert os.path.exists(marker(tmp_path)), name
            os.remove(marker(tmp_path))


def test_an_attack_beside_weights_leaves_the_weights_readable(tmp_path: Path) -> None:
    value = {"state_dict": {"w": W}, "extra": Calls(SYSTEM, f"touch {marker(tmp_path)}")}
    header = read_torch(saved(tmp_path, value))

    assert not os.path.exists(marker(tmp_path))
    assert [*header.entries] == ["w"]
    assert "system" in errors(header)["pickle-code"]


def test_harmless_objects_beside_weights_are_a_warning(tmp_path: Path) -> None:
    value = {"model": {"w": W}, "args": argparse.Namespace(lr=0.1), "seen": {1, 2}}
    header = read_torch(saved(tmp_path, value))

    assert [*header.entries] == ["w"]
    assert "'argparse.Namespace'" in said(header, "pickle-objects")
    assert errors(header) == {}


def self_containing() -> bytes:
    value: dict[str, Any] = {}
    value["again"] = value
    return pickle.dumps(value)


def doubling() -> bytes:
    value: Any = [1]
    for _ in range(60):
        value = {"a": value, "b": value}
    return pickle.dumps(value)


def deep() -> bytes:
    return b"\x80\x02" + b"}U\x01a" * 50_000 + b"N" + b"s" * 50_000 + b"."


def tuple_keys() -> bytes:
    """A tuple of pairs of pairs, 60 deep, as a key: hashing it would take 2^60 steps."""
    return b"\x80\x02})" + b"2\x86" * 60 + b"Ns."


@pytest.mark.parametrize(
    "pickled",
    [
        self_containing(),
        doubling(),
        deep(),
        tuple_keys(),
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"L" + b"9" * 10_000 + b"L\n.",
        b"(" * 100_000 + b".",
        b"0.",
        b"",
        b"\x80\xff.",
        b"h\x05.",
    ],
    ids=[
        *("contains itself", "doubles", "deep", "tuple keys", "2^62 bytes", "2^40 characters"),
        *("2^31 digits", "10,000 digits", "marks", "underflow", "empty", "protocol", "memo"),
    ],
)
def test_a_pickle_that_is_a_bomb_or_broken_is_refused_at_once(
    tmp_path: Path, pickled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "_MAX_NODES", 100_000)
    header = read_torch(zipped(tmp_path, pickled))

    if pickled == tuple_keys():  # can be read: the key is replaced before it is hashed
        assert errors(header) == {}
    else:
        assert errors(header).keys() == {"pickle-invalid"}


def test_a_rebuild_of_itself_is_no_endless_loop(tmp_path: Path) -> None:
    """The arguments are a list that contains itself as the arguments of a further call."""
    call = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    endless = b"]q\x00(" + call + b"Nh\x00Ne0"
    path = zipped(tmp_path, b"\x80\x02" + endless + call + b"(" + call + b"Nh\x00NtR.")

    header = read_torch(path)

    assert said(header, "tensor-unreadable")
    assert not header.entries


def test_a_tensor_of_a_million_dimensions_is_not_computed_with(tmp_path: Path) -> None:
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x06tQ"
    many = b"(" + b"J\xff\xff\xff\x7f" * 1_000_000 + b"t"
    call = b"ctorch._utils\n_rebuild_tensor\n(" + storage + b"K\x00" + many + b"q\x00h\x00tR"

    header = read_torch(zipped(tmp_path, b"\x80\x02" + call + b"."))

    assert said(header, "tensor-unreadable")


def test_a_pickle_of_too_many_steps_or_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped(tmp_path, pickle.dumps(list(range(1000))))
    monkeypatch.setattr(pickle_machine, "MAX_OPCODES", 900)
    assert "900 steps" in errors(read_torch(path))["pickle-invalid"]

    monkeypatch.undo()
    monkeypatch.setattr(pickle_machine, "MAX_BYTES", 900)
    assert "900 bytes" in errors(read_torch(path))["pickle-invalid"]


@given(pickled=st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_as_a_pickle_give_a_value_or_the_one_error(pickled: bytes) -> None:
    try:
        pickle_machine.load(io.BytesIO(pickled), rebuild={}, persistent=lambda name: name)
    except pickle_machine.PickleProblem as problem:
        assert str(problem).startswith("has a")


def test_every_opcode_is_known_to_the_machine() -> None:
    machine = pickle_machine
    handled = {*machine._STEPS, *machine._PUSH}
    handled |= machine._PUSH_ARGUMENT | machine._GET | machine._PUT | machine._NOTHING

    assert handled == {opcode.name for opcode in pickletools.opcodes} - {"STOP"}


PLAIN_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=PLAIN_VALUES, protocol=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_come_back_as_they_were(value: Any, protocol: int) -> None:
    pickled = io.BytesIO(pickle.dumps(value, protocol) + b"behind")

    loaded = pickle_machine.load(pickled, rebuild=KNOWN, persistent=lambda name: name)

    assert loaded.value == value
    assert pickled.read() == b"behind"


def encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


# How protocols 0 to 2 write bytes.
KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): encoded,
    ("builtins", "bytes"): bytes,
}
