"""Pickles that would run programs, in every place where a pickle is read: nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from modelquirks.planner.checkpoint import pickle_machine
from modelquirks.planner.checkpoint.torch_zip import read_torch

SYSTEM = vars(os)["system"]
STORAGE = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x06tQ"


class Calls:
    """Pickles as a call of *function* with *args*, and of a state to put in."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def text(word: bytes) -> bytes:
    """Return the opcode that pushes a short text."""
    return b"\x8c" + bytes([len(word)]) + word


def within(inner: bytes, *, as_zip: bool) -> bytes:
    """Return the pickle of a tensor that holds another pickle, as plain pickles of tensors do."""
    content = inner
    if as_zip:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", inner)
        content = buffer.getvalue()
    load = b"ctorch.storage\n_load_from_bytes\n"
    return b"\x80\x04" + load + b"B" + len(content).to_bytes(4, "little") + content + b"\x85R."


def roads(target: str) -> dict[str, bytes]:
    """Return pickles by the opcodes that lead to the call, which would make the file *target*."""
    command = f"touch {target}".encode()
    arg = b"X" + len(command).to_bytes(4, "little") + command
    evil = pickle.dumps(Calls(SYSTEM, command.decode()), 2)
    call = b"cos\nsystem\n" + arg + b"\x85R"
    return {
        "GLOBAL and REDUCE": b"cos\nsystem\n" + arg + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04" + text(b"posix") + text(b"system") + b"\x93" + arg + b"\x85R.",
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + arg + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n](X\x05\x00\x00\x00touchX"
        + len(target).to_bytes(4, "little") + target.encode() + b"e\x85\x81.",
        "BUILD with __setstate__": b"\x80\x02ctypes\nSimpleNamespace\n)R}X\x0c\x00\x00\x00"
        b"__setstate__cos\nsystem\nsb" + arg + b"b.",
        "a call in the arguments of a call": b"ccollections\nOrderedDict\n(]" + call + b"atR.",
        "a call as the key of a dictionary": b"}" + call + b"Ns.",
        "a call in a persistent identifier": b"\x80\x02(X\x07\x00\x00\x00storage" + call + b"tQ.",
        "a name kept in the memo": b"cos\nsystem\nq\x00" + b"0Nq\x01" + b"0h\x00" + arg + b"\x85R.",
        "a memo that is overwritten": b"ccollections\nOrderedDict\nq\x000cos\nsystem\nq\x000h\x00"
        + arg + b"\x85R.",
        "getattr of a module": b"c__builtin__\ngetattr\n(cos\n__dict__\nX\x06\x00\x00\x00systemtR.",
        "a rebuild function of torch": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nN"
        + arg + b"\x85NtR.",
        "a parameter whose state is a call": b"ctorch._utils\n_rebuild_parameter_with_state\n("
        + call + b"\x88}" + call + b"tR.",
        "a pickle within": within(evil, as_zip=False),
        "a file within": within(evil, as_zip=True),
        "a file within a file": within(within(evil, as_zip=True), as_zip=True),
    }  # fmt: skip


REAL = [
    *("GLOBAL and REDUCE", "STACK_GLOBAL", "INST", "OBJ", "BUILD with __setstate__"),
    *("a call in the arguments of a call", "a call as the key of a dictionary"),
    *("a name kept in the memo", "a memo that is overwritten"),
]
"""Those that Python alone executes, without torch's own classes or identifiers."""


# ---------------------------------------------------------------------------------------- places


def as_zip(path: Path, pickled: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickled)
        archive.writestr(f"{path.stem}/byteorder", "little")


def as_legacy(path: Path, pickled: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = (0x1950A86A20F9469CFC6C, 1001, facts)
    start = b"".join(pickle.dumps(part, 2) for part in parts)
    path.write_bytes(start + pickled + pickle.dumps([], 2))


def as_tar(path: Path, pickled: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    none = pickle.dumps(0, 2)
    parts = {"storages": none + pickle.dumps([], 2), "tensors": none, "pickle": pickled}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def plain(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "pytorch_model.bin", pickled)


def legacy(folder: Path, pickled: bytes) -> None:
    as_legacy(folder / "model.pt", pickled)


def tar(folder: Path, pickled: bytes) -> None:
    as_tar(folder / "model.pth", pickled)


def bare(folder: Path, pickled: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"\x80\x02" + pickled.removeprefix(b"\x80\x02"))


def lightning(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "last.ckpt", pickled)


def adapter(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "adapter_model.bin", pickled)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def deepspeed(folder: Path, pickled: bytes) -> None:
    state = folder / "global_step1"
    as_zip(state / "mp_rank_00_model_states.pt", pickled)
    as_zip(state / "zero_pp_rank_0_mp_rank_00_optim_states.pt", pickled)
    (folder / "latest").write_text("global_step1")


def universal(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "zero" / "optimizer_state.pt", pickled)
    as_zip(folder / "zero" / "a.weight" / "fp32.pt", pickled)
    as_zip(folder / "mp_rank_00_model_states.pt", pickled)


def dcp(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "__0_0.distcp", pickled)
    (folder / ".metadata").write_bytes(pickled)


def dcp_of_lightning(folder: Path, pickled: bytes) -> None:
    dcp(folder, pickled)
    as_zip(folder / "meta.pt", pickled)


def fsdp(folder: Path, pickled: bytes) -> None:
    for rank in range(2):
        as_zip(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", pickled)


def megatron(folder: Path, pickled: bytes) -> None:
    as_zip(folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", pickled)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def meta_llama(folder: Path, pickled: bytes) -> None:
    for rank in range(2):
        as_zip(folder / f"consolidated.{rank:02d}.pth", pickled)


PLACES: Mapping[str, Callable[[Path, bytes], None]] = {
    place.__name__: place
    for place in (
        *(plain, legacy, tar, bare, lightning, adapter, deepspeed, universal, dcp),
        *(dcp_of_lightning, fsdp, megatron, meta_llama),
    )
}


def test_no_pickle_in_any_place_runs_anything(tmp_path: Path, watched: Any) -> None:
    """Each road in each place; Python's own audit hook tells what was called and opened."""
    area, marks = tmp_path / "area", tmp_path / "marks"
    marks.mkdir()
    cases: list[tuple[str, str, Path]] = []
    for place, make in PLACES.items():
        for number, (road, pickled) in enumerate(roads(str(marks / "ran")).items()):
            folder = area / f"{place}-{number}"
            make(folder, pickled)
            cases.append((place, road, folder))

    answers = watched(*(folder for _, _, folder in cases))

    assert [*marks.iterdir()] == []
    for (place, road, folder), answer in zip(cases, answers, strict=True):
        assert answer.strange(area) == [], (place, road)
        assert answer.touched(below=tmp_path, but=[folder]) == [], (place, road)
        assert answer.of("write") == [], (place, road)
        assert answer.errors, (place, road)


@pytest.mark.parametrize("road", [*roads("x")])
def test_the_error_says_what_would_have_run(tmp_path: Path, road: str) -> None:
    as_zip(tmp_path / "model.pt", roads("x")[road])

    (told,) = (f for f in read_torch(tmp_path / "model.pt").findings if f.code == "pickle-code")

    assert "Nothing of it was run" in told.message
    named = ("os.system", "posix.system", "subprocess.Popen", "getattr", "builtins.getattr")
    assert any(name in told.message for name in named)


def test_the_pickles_are_real_attacks(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    code = (
        "import contextlib, pickle, sys\n"
        "for path in sys.argv[1:]:\n"
        "    with contextlib.suppress(Exception):\n"
        "        pickle.loads(open(path, 'rb').read())\n"
        "import os, time\n"
        "time.sleep(0.2)\n"
    )
    paths: list[str] = []
    for number, road in enumerate(REAL):
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(roads(str(tmp_path / f"ran-{number}"))[road])
        paths.append(str(path))
    subprocess.run([sys.executable, "-c", code, *paths], check=True, capture_output=True)
    ran = {path.name for path in tmp_path.glob("ran-*")}
    assert ran == {f"ran-{n}" for n in range(len(REAL))}


# ------------------------------------------------------------------- rebuilding with odd arguments


def tensor(numbers: bytes) -> bytes:
    """Return a file's pickle with one tensor: offset, shape and stride as given."""
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + numbers
    return b"\x80\x02}X\x01\x00\x00\x00w" + call + b"\x89ccollections\nOrderedDict\n)RtRs."


def long(number: int) -> bytes:
    raw = number.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + raw


ARGUMENTS = {
    "a stride that leads far out": b"K\x00" + long(2) + b"\x85" + long(1 << 62) + b"\x85",
    "an offset far out": long(1 << 62) + b"K\x02\x85K\x01\x85",
    "a negative stride": b"K\x00K\x02\x85" + long(-1) + b"\x85",
    "a negative offset": long(-4) + b"K\x02\x85K\x01\x85",
    "a negative size": b"K\x00" + long(-2) + b"\x85K\x01\x85",
    "more elements than can be counted": b"K\x00" + long(1 << 40) * 2 + b"\x86K\x00K\x00\x86",
    "a bool as a size": b"K\x00\x88\x85K\x01\x85",
    "a fraction as a size": b"K\x00G\x40\x00\x00\x00\x00\x00\x00\x00\x85K\x01\x85",
    "fewer strides than sizes": b"K\x00K\x02K\x03\x86K\x01\x85",
    "a text as a shape": b"K\x00X\x02\x00\x00\x0012K\x01\x85",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_tensor_with_hostile_numbers_has_no_place_and_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", tensor(ARGUMENTS[name]))
        archive.writestr("model/data/0", bytes(24))

    header = read_torch(path)

    assert all(entry.begin is None for entry in header.entries.values())
    named = [f for f in header.findings if "'w'" in f.message]
    assert {f.code for f in named} <= {"tensor-unreadable", "tensor-beyond-storage"}
    assert named


def test_an_expanded_tensor_takes_no_more_than_it_says(tmp_path: Path) -> None:
    """A stride of 0 makes of 4 bytes as many as one likes: that is told before it is made."""
    from modelquirks.planner.export.exportreport import ExportError
    from modelquirks.planner.export.perform import export

    torch.save({"w": torch.zeros(1).expand(1 << 45)}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ExportError, match="free"):
        export(tmp_path / "pytorch_model.bin", tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


# ------------------------------------------------------------------------------------------ sizes


def shared(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = ["x"]
    for _ in range(depth):
        value = wrap(value)
    return value


BOMBS: Mapping[str, Callable[[], bytes]] = {
    "lists of one list": lambda: pickle.dumps(shared(64, lambda v: [v, v]), 2),
    "tuples of one tuple": lambda: pickle.dumps(shared(64, lambda v: (v, v)), 2),
    "names of names of names": lambda: pickle.dumps(
        shared(12, lambda v: {"n" * 5000 + str(n): v for n in range(40)}), 2
    ),
    "a very long name over very many": lambda: pickle.dumps(
        {"n" * 1_000_000: dict.fromkeys(map(str, range(1000)), 0)}, 2
    ),
    "a number of 20,000 digits as a name": lambda: pickle.dumps({1 << 66_000: [0]}, 2),
    "a text copied again and again": lambda: (
        b"\x80\x02]X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"q\x000"
        + b"ctorch\nSize\nq\x010" + b"h\x01h\x00\x85Ra" * 3000 + b"."
    ),
    "a list copied again and again": lambda: (
        b"\x80\x02(" + b"K\x00K\x00\x86" * 5000 + b"lq\x000ccollections\nOrderedDict\nq\x010]"
        + b"h\x01h\x00\x85Ra" * 3000 + b"."
    ),
}  # fmt: skip


IN_PLACES = [
    *((name, place) for name in BOMBS for place in ("plain", "dcp")),
    *(("names of names of names", place) for place in ("legacy", "tar", "fsdp", "deepspeed")),
    ("names of names of names", "megatron"),
]


@pytest.mark.parametrize(("name", "place"), IN_PLACES)
def test_a_small_pickle_that_would_take_all_memory_is_refused_at_once(
    tmp_path: Path, name: str, place: str, opened: Callable[[Path], Any]
) -> None:
    PLACES[place](tmp_path / "x", BOMBS[name]())

    findings = opened(tmp_path / "x")

    assert any(finding.severity == "error" for finding in findings)


def test_the_version_of_a_legacy_file_may_be_anything(tmp_path: Path) -> None:
    """Shown in the message: a list of lists of one list, and a number of 20,000 digits."""
    for version in (shared(64, lambda v: [v, v]), 1 << 66_000):
        parts = (0x1950A86A20F9469CFC6C, version, {}, {}, [])
        path = tmp_path / "model.pt"
        path.write_bytes(b"".join(pickle.dumps(part, 2) for part in parts))

        (finding,) = read_torch(path).findings

        assert finding.code == "pickle-invalid"


def test_texts_with_odd_escapes_say_nothing_on_the_terminal() -> None:
    """Python warns of them, quoting what is in the file; here warnings are errors."""
    pickled = io.BytesIO(b"S'\\o\\w'\n.")
    found = pickle_machine.load(pickled, rebuild={}, persistent=lambda name: name)
    assert found.value == "\\o\\w"
