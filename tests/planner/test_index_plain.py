"""An index that is its own ``weight_map``, as accelerate reads it too."""

from pathlib import Path

import pytest

from modelquirks.planner.checkpoint.index import Index, read_index


def index_of(folder: Path, text: str) -> Index:
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(text, encoding="utf-8")
    return read_index(path)


def test_names_and_files_without_a_weight_map_around_them_are_an_index(tmp_path: Path) -> None:
    index = index_of(tmp_path, '{"b": "two.bin", "a": "one.bin", "c": "two.bin"}')
    assert dict(index.weight_map) == {"b": "two.bin", "a": "one.bin", "c": "two.bin"}
    assert (index.shards, index.format, index.is_index) == (("two.bin", "one.bin"), "torch", True)
    assert [finding.code for finding in index.findings] == ["total-size-absent"]


def test_a_name_that_occurs_twice_in_it_is_found(tmp_path: Path) -> None:
    index = index_of(tmp_path, '{"a": "one.bin", "b": "two.bin", "a": "two.bin"}')
    (finding,) = [finding for finding in index.findings if finding.severity == "error"]
    assert (finding.code, "'a'" in finding.message) == ("duplicate-name", True)


@pytest.mark.parametrize(
    "text", ["{}", '{"a": "one"}', '{"a": "one.bin", "b": 2}', '{"weight_map": "one.bin"}']
)
def test_other_json_is_no_index(tmp_path: Path, text: str) -> None:
    index = index_of(tmp_path, text)
    assert [finding.code for finding in index.findings] == ["weight-map-missing"]
    assert not index.is_index
