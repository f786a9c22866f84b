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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter, sub
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.header_rules import DTYPES
from modelquirks.planner.checkpoint.json_text import n_controls, parse_json
from modelquirks.planner.checkpoint.lazy_tensors import StoredType
from modelquirks.planner.dtypes import MAX_DIMS
from modelquirks.quirks.block import Block, Tails, heads_of

__all__ = ["Columns", "compact_columns"]

# Everything of an entry is in it, so that nothing is left over between two of them.
_ENTRY = re.compile(r'"([^"]*+)":\{"dtype":"([^]]*+)\],"data_offsets":\[([^]]*+)\]\},')
_CUT = 4
"""Pieces of an entry: what was in front of it, name, ``F32","shape":[2,3`` and ``0,24``."""
_KIND = re.compile(r'([A-Z0-9_]++)","shape":\[([0-9,]*+)')
_SPANS = re.compile(r"(0|[1-9][0-9]{0,18}+),(0|[1-9][0-9]{0,18}+);")
_KEPT, _MAX_KEPT = 3, 1 << 22
"""Headers that are kept to compare others with, and how long one may be."""
_PART = 32_768
"""Characters of a part."""
_METADATA = '{"__metadata__":'
_DECODER = json.JSONDecoder()


class Columns(NamedTuple):
    """The entries of a header, by column."""

    block: Block
    """The names, each once."""
    types: Sequence[StoredType]
    """Bytes, dtype and shape of each tensor."""
    shapes: frozenset[tuple[int, ...]]
    """Those that occur."""
    begins: Sequence[int]
    """Counted from the start of the data."""
    metadata: dict[str, Any]


def compact_columns(raw: bytes, text: str, *, data_bytes: int) -> Columns | None:
    """Return the columns of the header *raw*, decoded *text*, if it keeps every rule, else None.

    *data_bytes* is how many bytes follow the header in the file.
    """
    metadata, body = _split(text)
    columns = _like_the_last(body, data_bytes)
    if columns is None and not n_controls(raw) and "\\" not in body:
        columns = _columns(body, data_bytes)
        if columns is not None and len(body) <= _MAX_KEPT:
            _last[:] = [_Read(body, data_bytes, columns), *_last[: _KEPT - 1]]
    return None if columns is None else columns._replace(metadata=metadata)


class _Cut(NamedTuple):
    """A header in which every name begins with one head."""

    head: str
    pieces: Sequence[str]
    """The text between the heads, with the quotes in front of them."""
    tails: Tails | None
    """None: some name begins with something else."""

    def with_head(self, head: str) -> str:
        """Return the text as it is with another head."""
        return f'"{head}'.join(self.pieces)


@dataclass
class _Read:
    """A header that was read."""

    body: str
    data_bytes: int
    columns: Columns
    _known: _Cut | None = None

    def cut(self, head: str) -> _Cut:
        """Return the text cut at *head*."""
        cut = self._known
        if cut is None or cut.head != head:
            # A dot is nowhere but in names, so that a quote before a head is that of a name.
            pieces, names = self.body.split(f'"{head}'), self.columns.block.names
            whole = len(pieces) == len(names) + 1 and not pieces[0]
            tails = Block.cut(head, names).tails if whole else None
            cut = self._known = _Cut(head, pieces, tails)  # at once: there may be other threads
        return cut


_last: list[_Read] = []
"""Headers that were like none before: often a file holds a layer, and the next one too."""


def _like_the_last(body: str, data_bytes: int) -> Columns | None:
    """Return the columns of *body* if it differs from another in the number of a layer only.

    The number is told by the first name.
    """
    for last in _last:
        heads = heads_of(_first_name(last.body), _first_name(body))
        if heads is None or last.data_bytes != data_bytes:
            continue
        longer = len(last.columns.block) * (len(heads[1]) - len(heads[0]))
        if len(body) != len(last.body) + longer:  # nothing is compared that cannot be equal
            continue
        cut = last.cut(heads[0])
        if cut.tails is not None and cut.with_head(heads[1]) == body:
            return last.columns._replace(block=Block(heads[1], cut.tails))
    return None


def _first_name(body: str) -> str:
    return body[1 : body.find('"', 1)]


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
    known = [*kinds.values()]
    if None in known or not names or len({*names, "__metadata__"}) != len(names) + 1:
        return None
    begins = _begins(";".join(spans), (*map(itemgetter(0), types),), data_bytes)
    shapes = frozenset(kind[2] for kind in known if kind is not None)
    return None if begins is None else Columns(Block("", Tails(names)), types, shapes, begins, {})


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
