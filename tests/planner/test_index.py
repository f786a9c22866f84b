"""Indexes as they are found: whole, odd, broken and hostile."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.index import Index, format_of, read_index
from modelquirks.planner.checkpoint.json_text import has_duplicates, parse_json

DATA = Path(__file__).parents[1] / "data"
SHARD = "model-00001-of-00002.safetensors"


def written(folder: Path, content: Any, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def codes(index: Index) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in index.findings]


def test_an_index_gives_names_files_and_the_declared_size_in_its_order(tmp_path: Path) -> None:
    weight_map = {"b": "two.safetensors", "a": SHARD, "c": "two.safetensors"}
    path = written(tmp_path, {"metadata": {"total_size": 40}, "weight_map": weight_map})

    index = read_index(path)

    assert [*index.weight_map.items()] == [*weight_map.items()]
    assert index.shards == index.inside == ("two.safetensors", SHARD)
    assert (index.format, index.declared_bytes, index.findings) == ("safetensors", 40, ())


UNREADABLE = {
    "absent": (None, "file-unreadable", "No such file"),
    "empty": (b"", "file-empty", "0 bytes"),
    "a git-LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 35838\n",
        "lfs-pointer",
        "35,838 bytes",
    ),
    "a web page": (b"<!doctype html><p>Not found", "html-page", "web page"),
    "not JSON": (b"// an index\n{}", "not-json", "line 1, column 1"),
    "cut off": (b'{"weight_map": {"a": "x', "not-json", "unterminated"),
    "two documents": (b'{"weight_map": {}}\n{"weight_map": {}}', "json-glued", "from line 2"),
    "text behind": (b'{"weight_map": {}}\nEOF', "json-trailing-text", "from line 2"),
    "not UTF-8": (b'{"\xff": 1}', "not-json", "UTF-8"),
    "nested too deep": (b'{"a":' + b"[" * 100_000, "json-too-deep", "deep"),
    "a number of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "not-json", "4300 digits"),
    "a list": (b"[1]", "weight-map-missing", "no 'weight_map'"),
    "no weight_map": (b'{"metadata": {}}', "weight-map-missing", "no 'weight_map'"),
    "weight_map a list": (b'{"weight_map": ["a"]}', "weight-map-missing", "a list as"),
    "weight_map empty": (b'{"weight_map": {}}', "weight-map-empty", "no tensor"),
}


@pytest.mark.parametrize(("content", "code", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_index_that_cannot_be_used_says_why(
    tmp_path: Path, content: bytes | None, code: str, words: str
) -> None:
    path = tmp_path / "model.safetensors.index.json"
    if content is not None:
        written(tmp_path, content)

    index = read_index(path)

    found = {one.code: one for one in index.findings if one.severity == "error"}
    assert found.keys() == {code}
    assert words in found[code].message
    assert "'model.safetensors.index.json'" in found[code].message
    assert (dict(index.weight_map), index.shards) == ({}, ())


@pytest.mark.parametrize(
    ("slug", "code"),
    [
        ("codefuse-34b-lfs-index", "lfs-pointer"),
        ("lumina-not-json", "not-json"),
        ("kimi2-pcl-empty", "weight-map-empty"),
    ],
)
def test_real_indexes_that_are_broken_are_named(slug: str, code: str) -> None:
    index = read_index(DATA / "manifests" / slug / "index.json")

    assert (code, "error") in codes(index)


@pytest.mark.parametrize(
    ("slug", "n_names", "n_shards", "format", "size"),
    [
        ("gpt-oss-20b", 459, 3, "safetensors", 13761264768),
        ("gemma-2b-it-flax", 164, 2, "flax", 5012344832),
        ("bloom-176b-bin-hugesize", 845, 72, "torch", None),
        ("wizardlm-2-8x22b", 1739, 59, "safetensors", 281241268224),
    ],
)
def test_real_indexes_are_read(
    slug: str, n_names: int, n_shards: int, format: str, size: int | None
) -> None:
    index = read_index(DATA / "manifests" / slug / "index.json")

    assert (len(index.weight_map), len(index.shards)) == (n_names, n_shards)
    assert (index.format, index.declared_bytes) == (format, size)


SIZES: dict[str, tuple[str, int | None, str, str]] = {
    "absent": ("{}", None, "total-size-absent", "info"),
    "null": ('{"total_size": null}', None, "total-size-absent", "info"),
    "metadata a list": ("[]", None, "total-size-absent", "info"),
    "0": ('{"total_size": 0}', None, "total-size-invalid", "warning"),
    "negative": ('{"total_size": -1}', None, "total-size-invalid", "warning"),
    "a string": ('{"total_size": "8"}', None, "total-size-invalid", "warning"),
    "a bool": ('{"total_size": true}', None, "total-size-invalid", "warning"),
    "a list": ('{"total_size": [8]}', None, "total-size-invalid", "warning"),
    "a whole float": ('{"total_size": 8.0}', 8, "total-size-invalid", "info"),
    "a fraction": ('{"total_size": 8.5}', None, "total-size-invalid", "warning"),
    "NaN": ('{"total_size": NaN}', None, "total-size-invalid", "warning"),
    "infinite": ('{"total_size": Infinity}', None, "total-size-invalid", "warning"),
    "minus infinite": ('{"total_size": -1e999}', None, "total-size-invalid", "warning"),
    "72 digits": (f'{{"total_size": {"9" * 72}}}', None, "total-size-invalid", "warning"),
}


@pytest.mark.parametrize(("metadata", "size", "code", "severity"), SIZES.values(), ids=SIZES)
def test_a_total_size_that_is_odd_is_a_finding_and_used_only_where_it_can_be_true(
    tmp_path: Path, metadata: str, size: int | None, code: str, severity: str
) -> None:
    text = f'{{"metadata": {metadata}, "weight_map": {{"a": "{SHARD}"}}}}'

    index = read_index(written(tmp_path, text.encode()))

    assert codes(index) == [(code, severity)]
    assert index.declared_bytes == size
    assert [*index.weight_map] == ["a"]


def test_a_number_of_72_digits_is_not_printed_in_full() -> None:
    (finding,) = read_index(DATA / "manifests/bloom-176b-bin-hugesize/index.json").findings

    assert "a number of 72 digits" in finding.message
    assert len(finding.message) < 200


@pytest.mark.parametrize(
    "shard",
    [
        *("/etc/passwd", "../other/model.safetensors", "sub/../../x.safetensors", ".."),
        *("C:\\weights\\x.safetensors", "c:x.safetensors", "sub\\x.safetensors", "\\\\host\\x"),
        *("", ".", "./", "a\0b.safetensors"),
    ],
)
def test_a_path_that_leaves_the_folder_is_an_error_and_never_opened(
    tmp_path: Path, shard: str
) -> None:
    index = read_index(written(tmp_path, {"weight_map": {"a": shard, "b": SHARD}}))

    assert ("shard-path", "error") in codes(index)
    assert index.inside == (SHARD,)
    assert [*index.weight_map] == ["a", "b"]


def test_a_file_in_a_folder_below_is_allowed_and_spelled_in_one_way(tmp_path: Path) -> None:
    weight_map = {"a": "./sub//x.safetensors", "b": "sub/x.safetensors"}

    index = read_index(written(tmp_path, {"weight_map": weight_map}))

    assert index.inside == ("sub/x.safetensors",)
    assert {*index.weight_map.values()} == {"sub/x.safetensors"}


@pytest.mark.parametrize("value", [None, 7, [SHARD], {"file": SHARD}, True])
def test_values_that_are_no_strings_are_an_error_and_the_rest_is_kept(
    tmp_path: Path, value: Any
) -> None:
    index = read_index(written(tmp_path, {"weight_map": {"a": value, "b": SHARD}}))

    assert ("weight-map-invalid", "error") in codes(index)
    assert "'a'" in index.findings[0].message
    assert dict(index.weight_map) == {"b": SHARD}


def test_a_name_that_occurs_twice_is_an_error_if_the_files_differ(tmp_path: Path) -> None:
    text = b'{"weight_map": {"a": "x.bin", "b": "x.bin", "b": "x.bin", "a" : "y.bin"}}'

    index = read_index(written(tmp_path, text))

    assert ("duplicate-name", "error") in codes(index)
    assert ("duplicate-entry", "warning") in codes(index)
    messages = {one.code: one.message for one in index.findings}
    assert "'a'" in messages["duplicate-name"]
    assert "'b'" in messages["duplicate-entry"]


def test_names_with_colons_are_no_duplicates(tmp_path: Path) -> None:
    weight_map = {"unet:1:up": SHARD, "text:2": SHARD}
    content = {"metadata": {"total_size": 8}, "weight_map": weight_map}

    assert read_index(written(tmp_path, content)).findings == ()


@pytest.mark.parametrize(
    ("shard", "format"),
    [
        ("model.safetensors", "safetensors"),
        ("pytorch_model.bin", "torch"),
        ("consolidated.00.pth", "torch"),
        ("epoch=1.ckpt", "torch"),
        ("flax_model.msgpack", "flax"),
        ("model.gguf", "gguf"),
        ("model.h5", "unknown"),
    ],
)
def test_the_format_is_that_of_the_files(tmp_path: Path, shard: str, format: str) -> None:
    assert format_of(shard) == format
    assert read_index(written(tmp_path, {"weight_map": {"a": shard}})).format == format


# ------------------------------------------------------------------------------------- properties


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


PAIRS = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=5)


@given(pairs=PAIRS, ascii_only=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_key_that_occurs_twice_goes_unsuspected(
    pairs: list[tuple[str, str]], ascii_only: bool
) -> None:
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=ascii_only)

    text = "{" + ",".join(f"{quoted(key)}:{quoted(value)}" for key, value in pairs) + "}"
    value: dict[str, str] = json.loads(text)
    duplicates: dict[str, bool] = {}
    parse_json(text, duplicates=duplicates)

    strings = [*value, *value.values()]
    suspected = has_duplicates(text.encode("utf-8", "replace"), n_keys=len(value), strings=strings)

    assert len(duplicates) == len({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
    assert suspected or not duplicates


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@given(metadata=ANYTHING, weight_map=ANYTHING)
@settings(max_examples=200, deadline=None)
def test_any_json_gives_an_index_or_an_error(scratch: Path, metadata: Any, weight_map: Any) -> None:
    content = {"metadata": metadata, "weight_map": weight_map}

    index = read_index(written(scratch, content))

    assert index.weight_map or any(one.severity == "error" for one in index.findings)
    assert all(isinstance(shard, str) for shard in index.weight_map.values())


@given(content=st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_an_index_or_an_error(scratch: Path, content: bytes) -> None:
    index = read_index(written(scratch, content))

    assert index.weight_map or any(one.severity == "error" for one in index.findings)
