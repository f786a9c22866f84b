"""Safetensors headers as the library itself writes them, read at the speed of C.

A checkpoint can have 200,000 tensors. Nearly every header is written by one library, without
spaces and with the fields in one order, so that one expression cuts the text into the columns of a
table, and columns can be checked as a whole, in half the time of a JSON parser. Whatever is written
otherwise, or breaks a rule, is left to the parser that can say what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter, sub
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.header_rules import DTYPES
from modelquirks.planner.checkpoint.json_text import has_controls, parse_json
from modelquirks.planner.checkpoint.lazy_tensors import StoredType
from modelquirks.planner.dtypes import MAX_DIMS

__all__ = ["Columns", "compact_columns"]

# Everything of an entry is in it, so that nothing is left over between two of them.
_ENTRY = re.compile(r'"([^"]*+)":\{"dtype":"([^]]*+)\],"data_offsets":\[([^]]*+)\]\},')
_CUT = 4
"""Pieces of an entry: what was in front of it, name, ``F32","shape":[2,3`` and ``0,24``."""
_KIND = re.compile(r'([A-Z0-9_]++)","shape":\[([0-9,]*+)')
_SPANS = re.compile(r"(0|[1-9][0-9]{0,18}+),(0|[1-9][0-9]{0,18}+);")
_NUMBER = re.compile(r"(?<![A-Za-z_])[A-Za-z_]++\.[0-9]++\.")
_MAX_KEPT = 1 << 22
_PART = 32_768
"""Characters of a part."""
_METADATA = '{"__metadata__":'
_DECODER = json.JSONDecoder()


class Columns(NamedTuple):
    """The entries of a header, by column."""

    types: Mapping[str, StoredType]
    """Bytes, dtype and shape of each tensor by its name."""
    begins: Sequence[int]
    """Counted from the start of the data."""
    metadata: dict[str, Any]


def compact_columns(raw: bytes, text: str, *, data_bytes: int) -> Columns | None:
    """Return the columns of the header *raw*, decoded *text*, if it keeps every rule, else None.

    *data_bytes* is how many bytes follow the header in the file.
    """
    metadata, body = _split(text)
    columns = _like_the_last(body, data_bytes)
    if columns is None and not has_controls(raw) and "\\" not in body:
        columns = _columns(body, data_bytes)
    if columns is None:
        return None
    if len(body) <= _MAX_KEPT:
        _last[:] = [_Read(body, data_bytes, columns)]
    return columns._replace(metadata=metadata)


class _Read(NamedTuple):
    """A header that was read."""

    body: str
    data_bytes: int
    columns: Columns


_last: list[_Read] = []
"""The last header, if it is of a usual size: often a file holds a layer, and the next one too."""


def _like_the_last(body: str, data_bytes: int) -> Columns | None:
    """Return the columns of *body* if it differs from the last one in the number of a layer only.

    The number is told by the first name. A dot is nowhere but in names, so that what is true of the
    whole text is true of them.
    """
    for last in _last:
        pairs = zip(_first_numbers(last.body), _first_numbers(body), strict=False)
        old, new = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        if not old or last.data_bytes != data_bytes or last.body.replace(old, new) != body:
            return None
        names = "\n".join(last.columns.types).replace(old, new).split("\n")
        types = dict(zip(names, last.columns.types.values(), strict=True))
        return last.columns._replace(types=types) if len(types) == len(names) else None
    return None


def _first_numbers(body: str) -> list[str]:
    """Return ``layers.1.`` and the like in the first name."""
    return _NUMBER.findall(body, 0, body.find('"', 1))


def _columns(body: str, data_bytes: int) -> Columns | None:
    names: list[str] = []
    types: list[Any] = []
    spans: list[str] = []
    kinds = _Kinds()
    for part in _parts(body):
        pieces = _ENTRY.split(part)
        count = len(pieces) // _CUT
        if pieces[0::_CUT].count("") != count + 1:
            return None
        names += pieces[1::_CUT]
        types += map(kinds.__getitem__, pieces[2::_CUT])
        spans += pieces[3::_CUT]
    if None in kinds.values() or not names:
        return None
    by_name = dict(zip(names, types, strict=True))
    if len(by_name) != len(names) or "__metadata__" in by_name:
        return None
    begins = _begins(";".join(spans), (*map(itemgetter(0), types),), data_bytes)
    return None if begins is None else Columns(by_name, begins, {})


class _Kinds(dict[str, StoredType | None]):
    """Dtype and shape as they are written → what they mean, or None: needs a closer look."""

    def __missing__(self, written: str) -> StoredType | None:
        found = self[written] = _described(written)
        return found


def _parts(body: str) -> Iterator[str]:
    """Cut the entries into parts that, cut again, stay in the cache of a processor."""
    end = 0
    while end < len(body):
        begin, end = end, body.find('},"', end + _PART) + 2
        if end < 2:
            end = len(body)
        yield body[begin:end]


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


@lru_cache(maxsize=1024)
def _described(written: str) -> StoredType | None:
    """Return bytes, dtype and shape of ``F32","shape":[2,3``; None: needs a closer look."""
    found = _KIND.fullmatch(written)
    if found is None or (dtype := found[1]) not in DTYPES:
        return None
    try:
        shape = tuple(json.loads(f"[{found[2]}]"))
    except ValueError:
        return None
    if len(shape) > MAX_DIMS or any(length >> 31 for length in shape):
        return None
    bits = math.prod(shape) * DTYPES[dtype]
    return (bits // 8, dtype, shape) if bits % 8 == 0 else None


@lru_cache(maxsize=4)  # a file holds a layer, and most layers are alike
def _begins(spans: str, sizes: tuple[int, ...], data_bytes: int) -> Sequence[int] | None:
    """Return where the tensors begin if their ranges cover the data without gap or overlap."""
    bounds = [*accumulate(sizes, initial=0)]
    if bounds[-1] != data_bytes:
        return None
    ordered = ";".join(map(",".join, pairwise(map(str, bounds))))
    if spans == ordered:  # one after another, as the library writes them
        bounds.pop()
        return bounds
    found: list[tuple[str, str]] = _SPANS.findall(f"{spans};")
    starts, stops = zip(*found, strict=True) if found else ((), ())
    if len("".join((*starts, *stops))) + len(",;") * len(found) != len(spans) + 1:
        return None
    begins, ends = [*map(int, starts)], [*map(int, stops)]
    if [*map(sub, ends, begins)] != [*sizes]:
        return None
    ordered_spans = sorted(zip(begins, ends, strict=True))
    if [*map(itemgetter(0), ordered_spans), data_bytes] != [0, *map(itemgetter(1), ordered_spans)]:
        return None
    return begins
