"""What is read by columns instead of parsed comes out the same: headers of layers, and indexes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.compact_header import Columns, compact_columns
from modelquirks.planner.checkpoint.compact_index import WeightMap, blocks_of, compact_index
from modelquirks.planner.checkpoint.index import read_index
from modelquirks.planner.checkpoint.json_text import parse_json

FILES = ("model-1.safetensors", "model-2.safetensors")


def layer_header(number: int, *names: str, width: int = 2) -> str:
    """Return the header of a layer with tensors of *width* bytes, as the library writes it."""
    entries = {
        f"model.layers.{number}.{name}": {
            "dtype": "U8",
            "shape": [width],
            "data_offsets": [at * width, (at + 1) * width],
        }
        for at, name in enumerate(names)
    }
    return json.dumps(entries, separators=(",", ":"))


def columns_of(text: str, *, n_bytes: int) -> Columns | None:
    return compact_columns(text.encode(), text, data_bytes=n_bytes)


def types_of(columns: Columns) -> dict[str, Any]:
    return dict(zip(columns.block.names, columns.types, strict=True))


@pytest.mark.parametrize("numbers", [(1, 2), (9, 10), (10, 9), (7, 7)])
def test_one_layer_after_another_has_names_of_its_own(numbers: tuple[int, int]) -> None:
    for number in numbers:
        columns = columns_of(layer_header(number, "1.w", "layers.1.w"), n_bytes=4)

        assert columns is not None
        assert types_of(columns) == {
            f"model.layers.{number}.1.w": (2, "U8", (2,)),
            f"model.layers.{number}.layers.1.w": (2, "U8", (2,)),
        }
        assert [*columns.begins] == [0, 2]


@pytest.mark.parametrize(
    ("second", "n_bytes"),
    [
        (layer_header(2, "a.w", "c.w"), 4),
        (layer_header(2, "a.w", "b.w", width=3), 6),
        (layer_header(2, "a.w"), 2),
        (layer_header(2, "a.w", "b.w", "c.w"), 6),
    ],
    ids=["another name", "another width", "fewer", "more"],
)
def test_a_layer_unlike_the_last_is_read_by_itself(second: str, n_bytes: int) -> None:
    assert columns_of(layer_header(1, "a.w", "b.w"), n_bytes=4) is not None

    columns = columns_of(second, n_bytes=n_bytes)

    assert columns is not None
    assert {name: size for name, (size, _, _) in types_of(columns).items()} == {
        name: entry["shape"][0] for name, entry in json.loads(second).items()
    }


def test_a_layer_like_the_last_with_less_data_is_left_to_the_parser() -> None:
    assert columns_of(layer_header(1, "a.w", "b.w"), n_bytes=4) is not None

    assert columns_of(layer_header(2, "a.w", "b.w"), n_bytes=3) is None


def test_a_layer_like_the_last_in_which_two_names_become_one_is_left_to_the_parser() -> None:
    first = layer_header(1, "layers.1.w", "layers.2.w")
    assert columns_of(first, n_bytes=4) is not None

    assert columns_of(first.replace("layers.1.", "layers.2."), n_bytes=4) is None


names = st.text("ab.01", min_size=1, max_size=6)
odd = st.text('ab.01":{},\\é\n \f', min_size=1, max_size=6)


@given(
    weight_map=st.dictionaries(names | odd, st.sampled_from(FILES) | odd, max_size=8),
    metadata=st.dictionaries(names, st.integers() | odd, max_size=2),
    style=st.sampled_from(
        [{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": 1, "ensure_ascii": False}]
    ),
    cut=st.none()
    | st.tuples(st.integers(0, 400), st.sampled_from(["", '"', ",", "}", "\f", "\t"])),
)
def test_an_index_is_what_the_parser_makes_of_it_or_left_to_it(
    weight_map: dict[str, str],
    metadata: dict[str, Any],
    style: dict[str, Any],
    cut: tuple[int, str] | None,
) -> None:
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, **style)
    if cut is not None:
        at, instead = cut[0] % (len(text) + 1), cut[1]
        text = text[:at] + instead + text[at + 1 :]

    found = compact_index(text.encode("utf-8", "surrogatepass"))

    if found is None:
        return
    twice: dict[str, bool] = {}
    assert parse_json(text, duplicates=twice) == {**found, "weight_map": dict(found["weight_map"])}
    assert not twice
    assert [*found["weight_map"]] == [*json.loads(text)["weight_map"]]


@pytest.mark.parametrize(
    "style", [{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": 4, "sort_keys": True}]
)
@pytest.mark.parametrize("n_files", [1, 2, 3000])
def test_an_index_of_the_usual_form_is_not_parsed(style: dict[str, Any], n_files: int) -> None:
    """In several parts, with files in runs and in turn."""
    weight_map = {
        f"model.layers.{n}.weight": f"model-{min(n // 7, n_files - 1)}.safetensors"
        for n in range(3000)
    }
    weight_map |= {f"bias.{n}": f"model-{n % n_files}.safetensors" for n in range(50)}

    found = compact_index(json.dumps({"weight_map": weight_map, "metadata": {}}, **style).encode())

    assert found is not None
    assert isinstance(found["weight_map"], WeightMap)
    assert found == {"weight_map": weight_map, "metadata": {}}


kinds = (
    ["a.w", "b.w"],
    ["a.w", "c.w"],
    ["a.w", "b.w", "layers.2.w"],
    ["a.w"],
    ["b.w", "a.w"],
    ["0.w", "é.w"],
)
STYLES: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":")}]


@given(
    layers=st.lists(
        st.tuples(
            st.sampled_from(["", "m.", "layers.2."]),
            st.integers(0, 12),
            st.sampled_from(kinds),
            st.sampled_from((*FILES, *FILES, "layers.2.bin", "3")),
        ),
        max_size=7,
    ),
    style=st.sampled_from(STYLES),
    edits=st.lists(
        st.tuples(st.integers(0, 2000), st.sampled_from(["", "2", "a", '"', ",", "}", "\n", "\f"])),
        max_size=1,
    ),
)
@settings(deadline=None, max_examples=400)
def test_layers_that_differ_in_a_number_are_what_the_parser_makes_of_them(
    layers: list[tuple[str, int, list[str], str]],
    style: dict[str, Any],
    edits: list[tuple[int, str]],
) -> None:
    entries = [
        (f"{before}layers.{number}.{tail}", file)
        for before, number, tails, file in layers
        for tail in tails
    ]
    one = json.dumps({"weight_map": {}}, **style)
    each = (json.dumps({name: file}, ensure_ascii=False, **style)[1:-1] for name, file in entries)
    comma = style.get("separators", (", ", ""))[0] if "indent" not in style else ","
    text = one.replace("{}", f"{{{comma.join(text.rstrip() for text in each)}}}")  # also twice
    for at, instead in edits:
        text = text[: at % len(text)] + instead + text[at % len(text) + 1 :]

    found = compact_index(text.encode())

    twice: dict[str, bool] = {}
    parsed = parse_json(text, duplicates=twice)
    if found is None:
        plain = bool(entries) and not edits
        assert not plain or twice, "left to the parser for nothing"
        return
    assert parsed == {**found, "weight_map": dict(found["weight_map"])}
    assert not twice
    assert [*found["weight_map"]] == [*json.loads(text)["weight_map"]]


def test_layers_that_differ_in_a_number_are_alike() -> None:
    tails = [f"mlp.experts.{n}.weight" for n in range(600)]
    weight_map = {
        f"h.{layer}.{tail}": f"model-{layer}.safetensors" for layer in range(5) for tail in tails
    }
    weight_map |= {"norm": "model-4.safetensors", "h.7.b": "x", "h.8.b": "y"}

    found = compact_index(json.dumps({"weight_map": weight_map}, indent=2).encode())

    assert found is not None
    blocks = blocks_of(found["weight_map"].runs)
    assert [block.head for block in blocks] == [*(f"h.{n}." for n in range(5)), "", "h.7.", "h.8."]
    assert len({block.tails for block in blocks[:5]}) == 1
    assert blocks[6].tails is blocks[7].tails


def test_names_of_files_in_turn_are_one_block() -> None:
    weight_map = {f"w{n}": FILES[n % 2] for n in range(5000)}

    found = compact_index(json.dumps({"weight_map": weight_map}, indent=2).encode())

    assert found is not None
    assert [len(block) for block in blocks_of(found["weight_map"].runs)] == [5000]


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": "x", "a": "x"}}',
        '{"weight_map": {"a": "x"}, "weight_map": {"b": "x"}}',
        '{"metadata": {"weight_map": {"a": "x"}}, "weight_map": {}}',
        '{"weight_map": {"a": "x",}}',
        '{"weight_map": {"a"\f: "x"}}',
        '{"weight_map": {"a\n": "x"}}',
        '{"weight_map": {"a": "x"}} {}',
        '{"weight_map": {"a": ["x"]}}',
        r'{"weight_map": {"\u0061": "x"}}',
        '{"weight_map": {}}',
    ],
)
def test_an_index_in_which_anything_is_odd_is_left_to_the_parser(text: str) -> None:
    assert compact_index(text.encode()) is None


def test_names_listed_twice_in_an_index_of_the_usual_form_are_found(tmp_path: Path) -> None:
    text = json.dumps({"weight_map": {"a.0": FILES[0], "a.1": FILES[1]}}, indent=2)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(re.sub(r"a\.1", "a.0", text))

    assert "duplicate-name" in {finding.code for finding in read_index(path).findings}
