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
from itertools import chain, groupby, repeat
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.json_text import n_controls, parse_json
from modelquirks.quirks.block import Block, Tails, all_different, heads_of

__all__ = ["Run", "WeightMap", "blocks_of", "compact_index", "runs_of"]

_KEY = b'"weight_map"'
_START = re.compile(_KEY + rb"[ \t\n\r]*:[ \t\n\r]*\{[ \t\n\r]*")
_BETWEEN = re.compile(rb'"[^"]*"([ \t\n\r]*:[ \t\n\r]*)"[^"]*"(?:([ \t\n\r]*,[ \t\n\r]*)")?')
_ENTRY = re.compile(rb'"([^"]*)"[ \t\n\r]*:[ \t\n\r]*"([^"]*)"')
_CUT = 4  # "name": "file", cut at each quote
_PART = 32_768
"""Bytes of a part."""
_KEPT, _TRIES = 3, 2
"""Runs that are kept to compare others with, and how often all may be compared for nothing."""


class Run(NamedTuple):
    """Names that follow each other and are in one file."""

    file: str
    names: list[str]
    block: Block | None = None
    """The names, where others are like them but for a number."""


class WeightMap(Mapping[str, str]):
    """Names to files, each name once; looked up in a dict that is made when first needed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Take the runs in the order of the index."""
        self.runs = runs
        self._names = [*chain.from_iterable(run.names for run in runs)]

    @cached_property
    def _files(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for run in self.runs:
            found |= dict.fromkeys(run.names, run.file)
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


def runs_of(weight_map: Mapping[str, str]) -> Sequence[Run]:
    """Return the runs of an index, however it was read."""
    if isinstance(weight_map, WeightMap):
        return weight_map.runs
    return [*_runs([*weight_map], weight_map.values())]


def blocks_of(runs: Iterable[Run]) -> list[Block]:
    """Return the names of *runs* as blocks: one for all between two that are like others."""
    found: list[Block] = []
    plain: list[str] = []
    for run in runs:
        if run.block is None:
            plain += run.names
            continue
        found += [Block("", Tails(plain)), run.block] if plain else [run.block]
        plain = []
    return [*found, Block("", Tails(plain))] if plain else found


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
        runs = _Entries.read(raw, begin, end)
    except UnicodeDecodeError:
        return None
    # The key is nowhere else, so that it is here where the entries were.
    if not isinstance(document, dict) or document.get("weight_map") != {}:
        return None
    if runs is None or twice or rest.count(_KEY) > 1:
        return None
    document["weight_map"] = WeightMap(runs)
    return document if all_different(blocks_of(runs)) else None


class _Entries:
    """``"name": "file", "name": "file"``, written with one kind of space throughout."""

    def __init__(self, raw: bytes, end: int, colon: str, comma: str) -> None:
        self._raw, self._end = raw, end
        self._colon, self._comma = colon, comma
        self._found: list[Run] = []
        self._kept: list[int] = []
        """Runs to compare others with, by their numbers."""
        self._patience = _TRIES * end
        """Bytes that may still be compared for nothing."""

    @classmethod
    def read(cls, raw: bytes, begin: int, end: int) -> list[Run] | None:
        """Return the runs in a part of *raw*, None if there is anything else."""
        first = _BETWEEN.match(raw, begin, end)
        if first is None:
            return None
        self = cls(raw, end, first[1].decode(), (first[2] or b",").decode())
        while begin < end:
            begin = self._like_another(begin) or self._part(begin)
            if begin < 0:
                return None
        return self._found

    def _like_another(self, begin: int) -> int:
        """Take a run that differs from another in a number; return its end, 0 if it is none."""
        first = _ENTRY.match(self._raw, begin, self._end)
        if first is None or self._patience < 0:
            return 0
        name, file = first[1].decode(), first[2].decode()
        if self._found and self._found[-1].file == file:
            return 0
        for other in self._kept:
            heads = heads_of(self._found[other].names[0], name)
            tails = None if heads is None else self._cut(other, heads[0])
            if heads is None or tails is None or n_controls(first[2]):
                continue
            block = Block(heads[1], tails)
            text = self._text(file, block.names)
            if self._raw.startswith(text, begin) and (end := self._next(begin + len(text))):
                self._found.append(Run(file, [*block.names], block))
                return end
            self._patience -= len(text)
        return 0

    def _next(self, at: int) -> int:
        """Return where the entry begins that follows one that ends at *at*, 0 if none does."""
        if at == self._end:
            return at
        comma = self._comma.encode()
        return at + len(comma) if self._raw.startswith(comma + b'"', at) else 0

    def _text(self, file: str, names: Sequence[str]) -> bytes:
        """Return entries as they are written, but for what is between the last one and another."""
        end = f'"{self._colon}"{file}"'
        between = f'{end}{self._comma}"'
        return f'"{between.join(names)}{end}'.encode()

    def _part(self, begin: int) -> int:
        """Take a part that stays in the cache of a processor; return its end, -1 to give up."""
        at = self._raw.find(f'"{self._comma}"'.encode(), begin + _PART, self._end)
        end = at + 1 if at >= 0 else self._end
        raw = self._raw[begin:end]
        part = raw.decode()
        runs = _one_file(part, self._colon, self._comma)
        runs = runs or _several_files(part, self._colon, self._comma)
        if runs is None or n_controls(raw) != self._n_controls(runs):
            return -1
        begin = self._next(end)
        if len(runs) > 1:  # the last one may be like another as a whole
            last = runs.pop()
            begin = end - len(self._text(last.file, last.names))
        for run in runs:
            self._add(run)
        return begin

    def _n_controls(self, runs: Iterable[Run]) -> int:
        """Return how many control characters are between names and files: none is in one."""
        count = sum(len(run.names) for run in runs)
        colon, comma = (n_controls(text.encode()) for text in (self._colon, self._comma))
        return count * colon + (count - 1) * comma

    def _cut(self, number: int, head: str) -> Tails | None:
        """Return what the names of a run have behind *head*, None if one does not begin so."""
        run = self._found[number]
        if run.block is None and all(map(str.startswith, run.names, repeat(head))):
            run = self._found[number] = run._replace(block=Block.cut(head, run.names))
        block = run.block
        return block.tails if block is not None and block.head == head else None

    def _add(self, run: Run) -> None:
        last = self._found[-1] if self._found else None
        if last is not None and last.file == run.file and last.block is None:
            last.names.extend(run.names)
        else:
            self._kept = [len(self._found), *self._kept[: _KEPT - 1]]
            self._found.append(run)


def _one_file(part: str, colon: str, comma: str) -> list[Run] | None:
    """Return the entries of *part* if all are of the file of the first one."""
    first = part.split('"', _CUT)
    if len(first) <= _CUT or first[0]:
        return None
    file = first[3]
    end = f'"{colon}"{file}"'
    names = part[1 : -len(end)].split(f'{end}{comma}"')
    whole = part.endswith(end) and part.count('"') == _CUT * len(names)
    return [Run(file, names)] if whole else None


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
        yield Run(file, [*names[begin:end]])
