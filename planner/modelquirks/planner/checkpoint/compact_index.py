"""The ``weight_map`` of an index as ``json.dumps`` writes it, read at the speed of C.

An index of 208,550 names has 24 MB. Nearly every one is written with one kind of space between its
entries, and most files come in one run, so that cutting the text at what stands between two names
of a file gives the names in a fraction of the time of a JSON parser. Whatever is written otherwise
is left to that parser.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from itertools import chain, groupby
from typing import Any

from modelquirks.planner.checkpoint.json_text import has_controls, parse_json

__all__ = ["Run", "WeightMap", "compact_index", "runs_of"]

Run = tuple[str, list[str]]
"""A file, and the names that follow each other and are in it."""

_KEY = b'"weight_map"'
_START = re.compile(_KEY + rb"[ \t\n\r]*:[ \t\n\r]*\{[ \t\n\r]*")
_BETWEEN = re.compile(rb'"[^"]*"([ \t\n\r]*:[ \t\n\r]*)"[^"]*"(?:([ \t\n\r]*,[ \t\n\r]*)")?')
_ENTRY = re.compile(r'"[^"]*"\s*:\s*"([^"]*)"')
_CUT = 4  # "name": "file", cut at each quote
_PART = 32_768
"""Bytes of a part."""


class WeightMap(Mapping[str, str]):
    """Names to files, each name once; looked up in a dict that is made when first needed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Take the runs in the order of the index."""
        self.runs = runs
        self._names = [*chain.from_iterable(names for _, names in runs)]

    @cached_property
    def _files(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for file, names in self.runs:
            found |= dict.fromkeys(names, file)
        return found

    def __getitem__(self, name: str) -> str:
        """Return the file of one tensor."""
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Tell whether the index has that name."""
        return name in self._files

    def values(self) -> ValuesView[str]:
        """Return the file of each name."""
        return self._files.values()

    def items(self) -> ItemsView[str, str]:
        """Return names and files."""
        return self._files.items()


def runs_of(weight_map: Mapping[str, str]) -> Iterable[Run]:
    """Return the runs of an index, however it was read."""
    if isinstance(weight_map, WeightMap):
        return weight_map.runs
    return _runs([*weight_map], weight_map.values())


def compact_index(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in *raw*, with a :class:`WeightMap`; None to have it parsed.

    Nothing is lost by it: no key occurs twice in what is returned.
    """
    start = _START.search(raw)
    if start is None or b"\\" in raw:
        return None
    begin = start.end()
    end = raw.rfind(b'"', begin, raw.find(b"}", begin)) + 1
    rest = raw[:begin] + raw[end:]
    twice: dict[str, bool] = {}
    try:
        document = parse_json(rest.decode("utf-8-sig"), duplicates=twice)
        runs = _entries(raw, begin, end)
    except UnicodeDecodeError:
        return None
    # The key is nowhere else, so that it is here where the entries were.
    if not isinstance(document, dict) or document.get("weight_map") != {}:
        return None
    if runs is None or twice or rest.count(_KEY) > 1:
        return None
    weight_map = document["weight_map"] = WeightMap(runs)
    return document if len({*weight_map}) == len(weight_map) else None


def _entries(raw: bytes, begin: int, end: int) -> list[Run] | None:
    """Return the runs of ``"name": "file", "name": "file"``, None if it is anything else."""
    first = _BETWEEN.match(raw, begin, end)
    if first is None:
        return None
    colon, comma = first[1].decode(), (first[2] or b",").decode()
    found: list[Run] = []
    for part in _parts(raw, begin, end, comma):
        runs = _one_file(part, colon, comma) or _several_files(part, colon, comma)
        if runs is None:
            return None
        for file, names in runs:
            if has_controls(f"{file}{''.join(names)}".encode()):
                return None
            if found and found[-1][0] == file:
                found[-1][1].extend(names)
            else:
                found.append((file, names))
    return found


def _parts(raw: bytes, begin: int, end: int, comma: str) -> Iterator[str]:
    """Cut the entries into parts that stay in the cache of a processor."""
    between = f'"{comma}"'.encode()
    while (at := raw.find(between, begin + _PART, end)) >= 0:
        yield raw[begin : at + 1].decode()
        begin = at + len(between) - 1
    yield raw[begin:end].decode()


def _one_file(part: str, colon: str, comma: str) -> list[Run] | None:
    """Return the entries of *part* if all are of the file of the first one."""
    first = _ENTRY.match(part)
    if first is None:
        return None
    file = first[1]
    end = f'"{colon}"{file}"'
    names = part[1 : -len(end)].split(f'{end}{comma}"')
    return [(file, names)] if part.endswith(end) and '"' not in "".join(names) else None


def _several_files(part: str, colon: str, comma: str) -> list[Run] | None:
    pieces = part.split('"')
    count = len(pieces) // _CUT
    if len(pieces) != _CUT * count + 1 or pieces[0] or pieces.pop():
        return None
    if pieces[2::_CUT].count(colon) != count or pieces[4::_CUT].count(comma) != count - 1:
        return None
    return [*_runs(pieces[1::_CUT], pieces[3::_CUT])]


def _runs(names: Sequence[str], files: Iterable[str]) -> Iterator[Run]:
    end = 0
    for file, run in groupby(files):
        begin, end = end, end + len([*run])
        yield file, [*names[begin:end]]
