"""Safetensors headers as the library itself writes them, read at the speed of C.

A checkpoint can have 200,000 tensors. Nearly every header is written by one library, without
spaces and with the fields in one order, so that one regular expression reads it faster than a
JSON parser does and checks the types on the way. Whatever is written otherwise, or breaks a rule,
is left to the parser that can say what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from operator import itemgetter, sub
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.header_rules import DTYPES
from modelquirks.planner.checkpoint.json_text import parse_json

__all__ = ["Columns", "compact_columns"]

_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*+)":\{"dtype":"([A-Z][A-Z0-9_]*+","shape":\[[0-9,]*+)\],'
    r'"data_offsets":\[(0|[1-9][0-9]{0,18}+),(0|[1-9][0-9]{0,18}+)\]\},'
)
_AROUND = len('"":{"dtype":"],"data_offsets":[,]},')
_METADATA = '{"__metadata__":'
_DECODER = json.JSONDecoder()


class Columns(NamedTuple):
    """The entries of a header, by column."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    begins: list[int]
    """Counted from the start of the file."""
    ends: list[int]
    metadata: dict[str, Any]


def compact_columns(text: str, *, data_start: int, data_bytes: int) -> Columns | None:
    """Return the columns of a header that keeps every rule, else None."""
    metadata, body = _split(text)
    if _ENTRY.match(body) is None:
        return None
    rows: list[tuple[str, str, str, str]] = _ENTRY.findall(body)
    names, kinds, starts, stops = zip(*rows, strict=True)
    matched = sum(len("".join(column)) for column in (names, kinds, starts, stops))
    if matched + _AROUND * len(rows) != len(body):  # something is between the entries
        return None
    distinct = {*names}
    if len(distinct) != len(names) or "__metadata__" in distinct:
        return None
    table = {kind: _described(kind) for kind in {*kinds}}
    sizes, dtypes, shapes = zip(*map(table.__getitem__, kinds), strict=True)
    offsets = _offsets(starts, stops, data_start, data_bytes)
    if offsets is None or [*sizes] != [*map(sub, offsets[1], offsets[0])]:
        return None
    return Columns(names, dtypes, shapes, *offsets, metadata)


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Return the metadata, and the entries with a comma behind each; ``""`` to give up."""
    text, start = text.rstrip(" "), 1
    metadata: Any = {}
    if text.startswith(_METADATA):
        try:
            metadata, end = _DECODER.raw_decode(text, len(_METADATA))
        except (ValueError, RecursionError):
            return {}, ""
        twice: dict[str, bool] = {}
        checked = parse_json(text[len(_METADATA) : end], strict=True, duplicates=twice)
        if twice or checked != metadata or not isinstance(metadata, dict):
            return {}, ""
        if not {*map(type, metadata.values())} <= {str}:
            return {}, ""
        start = end + 1
    whole = text[:1] == "{" and text[-1:] == "}" and text[start - 1 : start] in ("{", ",")
    return metadata, f"{text[start:-1]}," if whole else ""


def _described(kind: str) -> tuple[int | None, str, tuple[int, ...]]:
    """Return bytes, dtype and shape of ``F32","shape":[2,3``; no bytes: needs a closer look."""
    dtype, _, numbers = kind.partition('","shape":[')
    try:
        shape = tuple(json.loads(f"[{numbers}]"))
    except ValueError:
        return None, dtype, ()
    if dtype not in DTYPES or len(shape) > 64 or any(length >> 31 for length in shape):
        return None, dtype, shape
    bits = math.prod(shape) * DTYPES[dtype]
    return (bits // 8 if bits % 8 == 0 else None), dtype, shape


def _offsets(
    starts: tuple[str, ...], stops: tuple[str, ...], data_start: int, data_bytes: int
) -> tuple[list[int], list[int]] | None:
    """Return begins and ends in the file if the ranges cover the data without gap or overlap."""
    if stops[-1] == str(data_bytes) and starts == ("0", *stops[:-1]):  # in the order of the file
        bounds = [data_start, *[data_start + int(stop) for stop in stops]]
        return bounds[:-1], bounds[1:]
    begins, ends = [*map(int, starts)], [*map(int, stops)]
    ordered = sorted(zip(begins, ends, strict=True))
    if [*map(itemgetter(0), ordered), data_bytes] != [0, *map(itemgetter(1), ordered)]:
        return None
    return [data_start + begin for begin in begins], [data_start + end for end in ends]
