"""Every rule of the safetensors format, held against real bytes and against the library itself."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from modelquirks.planner.checkpoint.compact_header import compact_columns
from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.header_rules import DTYPES
from modelquirks.planner.checkpoint.safetensors_header import (
    MAX_HEADER_BYTES,
    header_digest,
    read_header,
)

DATA = Path(__file__).parents[1] / "data"
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def text_of(header: Any) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def file_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else text_of(header)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def written(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def errors(header: Header) -> dict[str, str]:
    return {one.code: one.message for one in header.findings if one.severity == "error"}


def by_library(path: Path) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]] | None:
    """Return names, dtypes, shapes and metadata by the safetensors library; None: it refuses."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            listed = [(n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()]
            return sorted(listed), dict(file.metadata() or {})
    except SafetensorError:
        return None


def by_us(header: Header) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    return sorted(t[0:1] + t[2:4] for t in header.entries.values()), dict(header.metadata)


def test_a_header_gives_names_dtypes_shapes_and_ranges_from_the_start_of_the_file(
    tmp_path: Path,
) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
        "b": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
    }
    path = written(tmp_path, file_bytes(header, bytes(20)))
    start = 8 + len(text_of(header))

    read = read_header(path, shard="sub/model.safetensors")

    assert [*read.entries.values()] == [
        ("a", "sub/model.safetensors", "BF16", (2, 3), start + 8, start + 20, None),
        ("b", "sub/model.safetensors", "I64", (), start, start + 8, None),
    ]
    assert (read.findings, read.metadata, read.format) == ((), {"format": "pt"}, "safetensors")
    status = path.stat()
    digest = hashlib.sha256(text_of(header)).hexdigest()
    assert read.shard == type(read.shard)(
        "sub/model.safetensors", status.st_size, status.st_mtime_ns, digest
    )
    assert header_digest(path) == digest


@pytest.mark.parametrize("threads", ["there is room", "there is none"])
def test_the_digest_of_a_large_header_is_that_of_its_bytes(
    threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made by a thread beside the parsing, where the system has one."""
    started: list[object] = []

    def start(self: threading.Thread) -> None:
        started.append(self)
        if threads == "there is none":
            raise RuntimeError("can't start new thread")
        as_ever(self)

    as_ever = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    header = {f"layers.{n}.w": entry(data_offsets=[8 * n, 8 * n + 8]) for n in range(3000)}
    read = read_header(written(tmp_path, file_bytes(header, bytes(8 * 3000))))
    assert read.shard.digest == hashlib.sha256(text_of(header)).hexdigest()
    assert len(read.entries) == 3000
    assert len(started) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_format_is_known(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [8, 3], "data_offsets": [0, 3 * DTYPES[dtype]]}
    path = written(tmp_path, file_bytes({"w": entry}, bytes(3 * DTYPES[dtype])))

    read = read_header(path)

    assert read.findings == ()
    assert read.entries["w"].nbytes == 3 * DTYPES[dtype]
    assert by_library(path) == by_us(read)


BROKEN: dict[str, tuple[bytes, str, str]] = {
    "no bytes": (b"", "file-empty", "0 bytes"),
    "seven bytes": (b"1234567", "header-too-short", "7 bytes"),
    "a git-LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4792272488\n",
        "lfs-pointer",
        "4,792,272,488 bytes",
    ),
    "a web page": (b"\n<!DOCTYPE html><title>Sign in</title>", "html-page", "web page"),
    "zeros": (bytes(600), "wrong-format", "zero bytes"),
    "a zip file": (b"PK\x03\x04" + bytes(60), "wrong-format", "torch.save"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + bytes(60), "gguf-unsupported", "GGUF"),
    "JSON text": (b'{"a": "some text that is long enough"}', "wrong-format", "JSON"),
    "a header behind the end": (file_bytes(b"{}", length=3), "header-cut", "needs 11"),
    "a header above the limit": (
        file_bytes(b"{}", length=MAX_HEADER_BYTES + 1),
        "header-too-long",
        "100,000,001",
    ),
    "a length of 2^63": (file_bytes(b"{}", length=1 << 63), "header-too-long", "model.safetensors"),
    "a length of 0": (file_bytes(b"", b"{}" * 8), "header-cut", "model.safetensors"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "header-not-json", "UTF-8"),
    "a byte order mark": (file_bytes(b"\xef\xbb\xbf{}"), "header-not-json", "BOM"),
    "not JSON": (file_bytes(b"{'a':1}"), "header-not-json", "column 2"),
    "text behind the JSON": (file_bytes(b"{}\0\0"), "header-not-json", "other text"),
    "a JSON list": (file_bytes(b"[]"), "header-not-json", "not an object"),
    "JSON nested too deep": (file_bytes(b'{"a":' + b"[" * 100_000), "header-not-json", "deep"),
    "NaN": (file_bytes(b'{"a":NaN}'), "header-not-json", "NaN"),
    "a number of 5,000 digits": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "header-not-json", ""),
    "half a surrogate pair": (file_bytes(b'{"\\ud800":1}'), "header-not-json", "surrogate"),
}


@pytest.mark.parametrize(("content", "code", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_without_a_usable_header_says_what_it_is(
    tmp_path: Path, content: bytes, code: str, words: str
) -> None:
    read = read_header(written(tmp_path, content))

    assert [one.code for one in read.findings] == [code]
    assert words in read.findings[0].message
    assert "'model.safetensors'" in read.findings[0].message
    assert (dict(read.entries), read.shard.digest, read.readable) == ({}, None, False)


def test_a_file_that_is_not_there_or_cannot_be_opened_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()

    assert errors(read_header(tmp_path / "none.safetensors")).keys() == {"shard-missing"}
    assert "a folder" in errors(read_header(tmp_path / "folder.safetensors"))["not-a-file"]


def entry(**changed: Any) -> dict[str, Any]:
    return {**ENTRY, **changed}


FAULTS: dict[str, tuple[Any, int, str, str]] = {
    "an entry that is a list": (
        {"w": ["F32", [2], [0, 8]]},
        8,
        "entry-invalid",
        "'w' (a JSON list",
    ),
    "an entry without shape": (
        {"w": {"dtype": "F32", "data_offsets": [0, 8]}},
        8,
        "entry-invalid",
        "'w' (without shape)",
    ),
    "an unknown dtype": ({"w": entry(dtype="F128")}, 8, "dtype-unknown", "'w' ('F128')"),
    "complex128": ({"w": entry(dtype="C128")}, 8, "dtype-unknown", "'w' ('C128')"),
    "a dtype that is a number": ({"w": entry(dtype=32)}, 8, "dtype-unknown", "'w' (32)"),
    "a negative length": ({"w": entry(shape=[-2])}, 8, "shape-invalid", "'w' ([-2])"),
    "a fraction as length": ({"w": entry(shape=[2.0])}, 8, "shape-invalid", "'w' ([2.0])"),
    "a bool as length": ({"w": entry(shape=[True, 2])}, 8, "shape-invalid", "'w' ([True, 2])"),
    "a shape that is a string": ({"w": entry(shape="")}, 8, "shape-invalid", "'w' ('')"),
    "a length above 64 bits": ({"w": entry(shape=[0, 1 << 64])}, 0, "shape-invalid", "'w'"),
    "65 dimensions": ({"w": entry(shape=[2] + [1] * 64)}, 8, "shape-invalid", "'w' (65 dim"),
    "a product above 64 bits": (
        {"w": entry(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0])},
        0,
        "size-mismatch",
        "'w' (F32",
    ),
    "a range for another shape": (
        {"w": entry(shape=[3])},
        8,
        "size-mismatch",
        "'w' (F32 [3] takes 12 bytes, its range has 8)",
    ),
    "half a byte": (
        {"w": entry(dtype="F4", shape=[3], data_offsets=[0, 2])},
        2,
        "sub-byte",
        "'w' (F4 [3] takes 12 bits)",
    ),
    "three offsets": (
        {"w": entry(data_offsets=[0, 4, 8])},
        8,
        "offsets-invalid",
        "'w' ([0, 4, 8])",
    ),
    "offsets backwards": ({"w": entry(data_offsets=[8, 0])}, 8, "offsets-invalid", "'w' ([8, 0])"),
    "a fraction as offset": ({"w": entry(data_offsets=[0, 8.0])}, 8, "offsets-invalid", "'w'"),
    "data that is cut off": (
        {"w": ENTRY},
        7,
        "data-truncated",
        "'w' (needs 8 bytes of data, of 7)",
    ),
    "bytes behind the data": ({"w": ENTRY}, 11, "data-trailing", "(3 bytes of 11)"),
    "a first offset above 0": (
        {"w": entry(data_offsets=[4, 12])},
        12,
        "data-hole",
        "'w' (4 bytes from 0)",
    ),
    "a hole": (
        {"v": ENTRY, "w": entry(data_offsets=[12, 20])},
        20,
        "data-hole",
        "'w' (4 bytes from 8)",
    ),
    "two names for the same bytes": ({"v": ENTRY, "w": ENTRY}, 8, "data-overlap", "'w'"),
    "an empty tensor inside another": (
        {"v": ENTRY, "w": entry(shape=[0], data_offsets=[4, 4])},
        8,
        "data-overlap",
        "'w'",
    ),
    "metadata that is a number": (
        {"__metadata__": {"epoch": 3}, "w": ENTRY},
        8,
        "metadata-invalid",
        "'epoch' (3, not a string)",
    ),
    "metadata that is a list": ({"__metadata__": [], "w": ENTRY}, 8, "metadata-invalid", "a list"),
    "minus zero": (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}',
        8,
        "entry-invalid",
        "'-0'",
    ),
    "a further field that is nested": ({"w": entry(more=[[]])}, 8, "entry-invalid", "field 'more'"),
}


@pytest.mark.parametrize(("header", "n_data", "code", "words"), FAULTS.values(), ids=FAULTS)
def test_a_broken_rule_is_an_error_that_names_file_and_tensor(
    tmp_path: Path, header: Any, n_data: int, code: str, words: str
) -> None:
    path = written(tmp_path, file_bytes(header, bytes(n_data)))

    found = errors(read_header(path))

    assert "'model.safetensors'" in found[code]
    assert words in found[code]


@pytest.mark.parametrize(
    ("header", "n_data"),
    [(header, n_data) for header, n_data, _, _ in FAULTS.values()],
    ids=FAULTS,
)
def test_the_library_refuses_the_same_files(
    tmp_path: Path, header: Any, n_data: int, request: pytest.FixtureRequest
) -> None:
    """It takes entries that are lists, extra fields of any kind, and shapes that torch cannot."""
    case = request.node.callspec.id
    read = ("an entry that is a list", "a further field that is nested", "65 dimensions")
    expected_readable = case in read
    path = written(tmp_path, file_bytes(header, bytes(n_data)))

    assert (by_library(path) is not None) == expected_readable


def test_a_fault_in_one_entry_hides_neither_the_others_nor_their_names(tmp_path: Path) -> None:
    header = {
        "no-dtype": {"shape": [2], "data_offsets": [0, 8]},
        "odd-dtype": entry(dtype="F128", data_offsets=[8, 16]),
        "odd-shape": entry(shape=["x"], data_offsets=[16, 24]),
        "no-range": entry(data_offsets=None),
        "good": entry(data_offsets=[24, 32]),
    }
    read = read_header(written(tmp_path, file_bytes(header, bytes(32))))

    assert errors(read).keys() == {
        "entry-invalid",
        "dtype-unknown",
        "shape-invalid",
        "offsets-invalid",
    }
    seen = {name: (t.dtype, t.shape, t.nbytes) for name, t in read.entries.items()}
    assert seen == {
        "no-dtype": (None, (2,), 8),
        "odd-dtype": (None, (2,), 8),
        "odd-shape": ("F32", None, 8),
        "no-range": ("F32", (2,), None),
        "good": ("F32", (2,), 8),
    }


def test_many_tensors_with_one_fault_are_one_finding_with_ten_names(tmp_path: Path) -> None:
    header = {f"w{i}": entry(dtype="X", data_offsets=[8 * i, 8 * i + 8]) for i in range(47)}

    read = read_header(written(tmp_path, file_bytes(header, bytes(8 * 47))))

    (finding,) = read.findings
    assert finding.message.count("('X')") == 10
    assert finding.message.endswith("… and 37 more.")


def test_names_are_shown_so_that_they_cannot_garble_a_terminal(tmp_path: Path) -> None:
    path = written(
        tmp_path, file_bytes({"\x1b[2J\nw": entry(dtype="X")}, bytes(8)), "a\nb.safetensors"
    )

    (message,) = errors(read_header(path)).values()

    assert message.isprintable()


ACCEPTED: dict[str, tuple[bytes, int]] = {
    "no tensors": (b"{}", 0),
    "null metadata": (b'{"__metadata__":null}', 0),
    "white space around": (b" \n\t" + text_of({"w": ENTRY}) + b"  \n", 8),
    "white space inside": (json.dumps({"w": ENTRY}, indent=1).encode(), 8),
    "an empty name": (text_of({"": ENTRY}), 8),
    "a name with escapes": (b'{"a\\"\\u00e9\\n":' + text_of(ENTRY) + b"}", 8),
    "a name with colons": (text_of({"unet:99:up": ENTRY}), 8),
    "metadata with colons and quotes": (
        text_of({"__metadata__": {"a:b": '{"c": ":"}'}, "w": ENTRY}),
        8,
    ),
    "fields in another order": (
        b'{"w":{"data_offsets":[0,8],"dtype":"F32","shape":[2]}}',
        8,
    ),
    "metadata at the end": (text_of({"w": ENTRY, "__metadata__": {"a": "b"}}), 8),
    "an order other than that of the data": (
        text_of({"v": entry(data_offsets=[8, 16]), "w": ENTRY}),
        16,
    ),
    "empty tensors": (
        text_of(
            {
                "v": entry(shape=[0], data_offsets=[0, 0]),
                "w": ENTRY,
                "x": entry(shape=[0, 1 << 63], data_offsets=[8, 8]),
            }
        ),
        8,
    ),
}


@pytest.mark.parametrize(("raw", "n_data"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_the_library_accepts_is_read_alike(tmp_path: Path, raw: bytes, n_data: int) -> None:
    path = written(tmp_path, file_bytes(raw, bytes(n_data)))

    read = read_header(path)

    assert errors(read) == {}
    assert by_us(read) == by_library(path)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (b'{"w":%b,"w":%b}' % (text_of(ENTRY), text_of(ENTRY)), "'w'"),
        (b'{"w":%b,"w":%b}' % (text_of(ENTRY), text_of(entry(dtype="I32"))), "'w'"),
        (b'{"__metadata__":{"k":"1","k":"2"},"w":%b}' % text_of(ENTRY), "'k'"),
        (b'{"w":{"dtype":"F32","x":1,"x":2,"shape":[2],"data_offsets":[0,8]}}', "'x'"),
    ],
    ids=["name, equal entries", "name, other dtype", "metadata", "field"],
)
def test_a_key_that_occurs_twice_is_an_error_though_the_library_takes_the_last(
    tmp_path: Path, raw: bytes, key: str
) -> None:
    path = written(tmp_path, file_bytes(raw, bytes(8)))

    assert key in errors(read_header(path))["duplicate-name"]
    assert by_library(path) is not None


def test_a_dtype_written_as_an_object_is_an_error_though_the_library_reads_it(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, file_bytes({"w": entry(dtype={"F32": None})}, bytes(8)))

    assert errors(read_header(path)).keys() == {"dtype-unknown"}
    assert by_library(path) is not None


def test_unknown_fields_with_plain_values_are_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, file_bytes({"w": entry(note="x")}, bytes(8)))

    read = read_header(path)

    assert [(one.code, one.severity) for one in read.findings] == [("entry-extra", "warning")]
    assert by_us(read) == by_library(path)


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.safetensors")), ids=lambda path: path.name)
def test_real_files_are_read_as_the_library_reads_them(path: Path) -> None:
    read = read_header(path)

    if expected := by_library(path):
        assert (by_us(read), read.findings) == (expected, ())
    else:
        assert errors(read)


# ------------------------------------------------------------------------------------- properties


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzzed.safetensors"


NAMES = st.text(min_size=0, max_size=8) | st.sampled_from(["a", "b", "model.w", "x:y", "a-0"])


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Return a good header, whose entries need not be in the order of the data, and its bytes."""
    names = draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), max_size=5, unique=True))
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if math.prod(shape) * DTYPES[dtype] % 8:
            shape.append(8)
        size = math.prod(shape) * DTYPES[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    ordered = {name: entries[name] for name in draw(st.permutations(names))}
    metadata = draw(st.none() | st.dictionaries(NAMES, st.text(max_size=6), max_size=2))
    return {**({} if metadata is None else {"__metadata__": metadata}), **ordered}, end


@given(made=headers(), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_good_header_is_read_as_the_library_reads_it_however_it_is_written(
    scratch: Path, made: tuple[dict[str, Any], int], indent: int | None, ascii_only: bool
) -> None:
    header, n_data = made
    raw = json.dumps(header, indent=indent, ensure_ascii=ascii_only).encode()
    scratch.write_bytes(file_bytes(raw, bytes(n_data)))

    read = read_header(scratch)

    assert errors(read) == {}
    assert by_us(read) == by_library(scratch)
    assert [*read.entries] == [name for name in header if name != "__metadata__"]


@given(made=headers())
@settings(max_examples=100, deadline=None)
def test_the_fast_path_and_the_careful_one_agree(
    scratch: Path, made: tuple[dict[str, Any], int]
) -> None:
    header, n_data = made
    fast = read_file(scratch, text_of(header), n_data)
    careful = read_file(scratch, text_of(header) + b"\n", n_data)

    moved = {
        name: t._replace(begin=(t.begin or 0) - 1, end=(t.end or 0) - 1)
        for name, t in careful.entries.items()
    }
    assert (fast.entries, fast.metadata, fast.findings) == (moved, careful.metadata, ())


def read_file(path: Path, raw: bytes, n_data: int) -> Header:
    path.write_bytes(file_bytes(raw, bytes(n_data)))
    return read_header(path)


def test_the_fast_path_is_taken_for_what_the_library_writes() -> None:
    raw = (DATA / "files/burn-pt-models/multi_layer.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length]

    columns = compact_columns(header, header.decode(), data_bytes=len(raw) - 8 - length)

    assert columns is not None
    assert len(columns.types) == 9


PIECES = (
    b'" { } [ ] , : 0 1 -0 -1 1.0 1e3 null true NaN "F32" "F4" "__metadata__" \\u0041 \\ud800'
    b' "dtype" "shape" [1] \xff \x00 99999999999999999999 "x":1,'
).split(b" ")


@given(
    made=headers(),
    edits=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 4), st.sampled_from([b"", b" ", *PIECES])),
        min_size=1,
        max_size=3,
    ),
    more=st.sampled_from([0, 0, 0, 1, -1]),
)
@settings(max_examples=250, deadline=None)
def test_a_file_that_the_library_refuses_always_has_an_error(
    scratch: Path,
    made: tuple[dict[str, Any], int],
    edits: list[tuple[int, int, bytes]],
    more: int,
) -> None:
    header, n_data = made
    raw = bytearray(text_of(header))
    for at, dropped, put in edits:
        raw[at % (len(raw) + 1) : at % (len(raw) + 1) + dropped] = put
    scratch.write_bytes(file_bytes(bytes(raw), bytes(max(0, n_data + more))))

    read, expected = read_header(scratch), by_library(scratch)

    if expected is None:
        assert errors(read)
    elif not errors(read):
        assert by_us(read) == expected
    else:  # stricter on purpose: see the tests above
        assert errors(read).keys() <= {"duplicate-name", "entry-invalid", "dtype-unknown"}


@given(content=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_at_all_give_a_header_or_an_error(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)

    read = read_header(scratch)

    assert read.readable or errors(read)
