"""``Order``: in which order a pass needs its weights, as an earlier one did, and what comes next.

The weights of a pass are cut into chunks, about a block of the model each. Once a pass comes to a
chunk, the background prepares the next two: it reads what is a view of its file into the system's
page cache, if it is not there, and makes what must be computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from modelquirks.planner.execution.ahead import Ahead
from modelquirks.planner.execution.background import in_background
from modelquirks.planner.execution.reader import Span, expect

__all__ = ["Chunk", "Need", "Order", "Step", "Track"]

_AHEAD = 2
"""Chunks that are expected, after the one at hand."""
_LEAST_BYTES, _MOST_BYTES = 1 << 24, 1 << 28
"""Of a chunk, unless one module takes more: smaller ones are not worth the thread's attention."""
_WORTH_BYTES = 1 << 18
"""Of a weight that is made in the background: a smaller one is made faster than handed over."""

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
"""A path up to the first number in it, such as ``model.layers.7``."""


class Need(NamedTuple):
    """What a weight takes."""

    key: str
    """The same for every name of it."""
    nbytes: int
    is_made: bool
    """Whether it is computed, and no view of a file or tensor in memory."""
    spans: tuple[Span, ...]
    """Where in the files it comes from."""


class Step(Protocol):
    """The weights of one module, which a pass needs at the same time."""

    prefix: str
    """Path of the module, with a dot behind it."""

    @property
    def ahead(self) -> Ahead | None:
        """What makes its weights ahead of time."""
        ...

    def needs(self) -> Sequence[Need]:
        """Return what its weights take."""
        ...

    def count(self, nbytes: int) -> None:
        """Count bytes of views as having been read."""
        ...


class Chunk(NamedTuple):
    """Weights that are needed one after the other."""

    made: Mapping[str, int]
    """Bytes of those to be made, by key."""
    spans: Sequence[Span]
    """Where the others are: places in files, merged."""


class Order:
    """The steps of a pass, in chunks."""

    def __init__(self, steps: Sequence[Step]) -> None:
        """Expect *steps* in this order."""
        self.steps = list(steps)
        self.ahead = next((step.ahead for step in steps if step.ahead is not None), None)
        self.chunks: list[Chunk] = []
        self.starts: dict[Any, int] = {}
        """Number of the chunk that begins with a step."""
        if self.ahead is not None and self.ahead.limit:
            for group in _groups(self.steps):
                self.starts.setdefault(group[0], len(self.chunks))
                self.chunks.append(_chunk(group))
        if len(self.chunks) == 1 and not self.chunks[0].made:
            self.starts.clear()  # there is no next one

    def next(self, start: int) -> Sequence[int]:
        """Return the numbers of the chunks to be expected once the pass is at one."""
        return range(start, min(start + 1 + _AHEAD, len(self.chunks)))


class Track:
    """One pass of one thread: what it went through, and what it makes the background do."""

    def __init__(self, order: Order | None) -> None:
        """Begin a pass that is expected to follow *order*."""
        self.seen: list[Step] = []
        self.viewed_bytes = 0
        """Of weights that are views, as often as they were put into their modules."""
        self._order = order
        self.starts: Mapping[Any, int] = {} if order is None else order.starts
        self._expected: frozenset[int] = frozenset()
        self._told: set[int] = set()

    def cross(self, start: int) -> None:
        """Come to a chunk: expect it and the next, and no longer those that were before."""
        order = self._order
        if order is None or order.ahead is None:
            return
        now = frozenset(order.next(start))
        order.ahead.drop(_made(order, self._expected - now))
        new = sorted(now - self._expected)
        self._expected = now
        spans = [
            span
            for i in new
            if i not in self._told and i != start
            for span in order.chunks[i].spans
        ]
        self._told.update(new)
        if spans:
            in_background(lambda: expect(spans))
        for i in new:
            if order.chunks[i].made:
                order.ahead.want(order.chunks[i].made)

    def end(self) -> None:
        """Expect nothing more."""
        if self.viewed_bytes:
            self.seen[-1].count(self.viewed_bytes)
        order = self._order
        if self._expected and order is not None and order.ahead is not None:
            order.ahead.drop(_made(order, self._expected))


def _made(order: Order, chunks: frozenset[int]) -> Iterator[str]:
    for i in chunks:
        yield from order.chunks[i].made


def _groups(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yield the steps chunk by chunk: a block, or several small ones, or a part of a large one."""
    group: list[Step] = []
    block, nbytes = "", 0
    for step in steps:
        needs = step.needs()
        if not needs:
            continue
        found = _BLOCK.match(step.prefix)
        here = found[0] if found else step.prefix
        if nbytes >= _MOST_BYTES or (here != block and nbytes >= _LEAST_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(step)
        block = here
        nbytes += sum(need.nbytes for need in needs)
    if group:
        yield group


def _chunk(group: Sequence[Step]) -> Chunk:
    needs = [need for step in group for need in step.needs()]
    views = [need for need in needs if not need.is_made]
    made = {need.key: need.nbytes for need in needs if need.is_made and need.nbytes >= _WORTH_BYTES}
    return Chunk(made, _merged(sorted({span for need in views for span in need.spans})))


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.path == span.path and span.begin <= last.end:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged
