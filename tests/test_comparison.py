"""docs/comparison.md: its table is what the benchmark finds, tried on some of its cells."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Yield the modules of the benchmark."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        names = ("comparison", "comparison_cases", "comparison_judge", "comparison_gguf")
        yield SimpleNamespace(**{n.rpartition("_")[2]: importlib.import_module(n) for n in names})
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def root(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    bench.cases.make(folder)
    return folder


def shown(table: str = "<!-- table:") -> dict[str, dict[str, str]]:
    """Return a table of the page: title → loader → cell."""
    between = PAGE.partition(table)[2].partition("<!-- end of table -->")[0]
    rows = [line.strip("| ").split(" | ") for line in between.splitlines() if line[:2] == "| "]
    (_, *loaders), *body = rows
    return {title: dict(zip(loaders, cells, strict=True)) for title, *cells in body}


def test_the_table_has_every_case_and_every_loader(bench: Any) -> None:
    assert [*shown()] == [case.title for case in bench.cases.CASES]
    assert all([*by] == [*bench.judge.LOADERS] for by in shown().values())


def test_no_cell_of_ours_is_wrong_where_headers_tell(bench: Any) -> None:
    for case in bench.cases.CASES:
        cell = shown()[case.title]["modelquirks"]
        expected = {"none": "**wrong, silent**", "right": "right", "refused": "refused, named"}
        assert cell == expected[case.best], case.title


@pytest.mark.parametrize(
    ("title", "loader"),
    [
        ("nothing is wrong", "accelerate"),
        ("one tensor is not stored", "accelerate"),
        ("one tensor is not stored", "accelerate, model built"),
        ("one tensor is not stored", "transformers"),
        ("one tensor is not stored", "modelquirks"),
        ("an older `model.safetensors` beside", "transformers"),
        ("an older `model.safetensors` beside", "modelquirks"),
        ("a tie, stored once", "accelerate, model built"),
    ],
)
def test_a_cell_is_what_is_found_now(title: str, loader: str, bench: Any, root: Path) -> None:
    (case,) = [case for case in bench.cases.CASES if case.title == title]
    assert bench.judge.judged(case, loader, root).cell == shown()[title][loader]


def test_our_half_of_the_table_of_gguf_files_is_what_is_found_now(
    bench: Any, tmp_path: Path
) -> None:
    """The half of llama.cpp needs its library: by the command on the page."""
    table = shown("<!-- gguf table:")
    assert [*table] == [*bench.gguf.EDITS]
    for title in table:
        path = bench.gguf.made(title, tmp_path / "model.gguf")
        assert bench.gguf.told(bench.gguf.by_us(path)) == table[title]["modelquirks"], title


def test_what_is_said_of_the_zoo_is_said_where_it_was_seen() -> None:
    zoo = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    for number in re.findall(r"of ([\d,]+) classes that transformers|alone fails on (\d+)", PAGE):
        assert next(filter(None, number)) in zoo
