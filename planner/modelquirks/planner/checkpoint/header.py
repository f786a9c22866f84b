"""``Header``: what one weight file says it holds, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, cast

from modelquirks.planner.checkpoint.file_kind import Look
from modelquirks.planner.checkpoint.manifest import Format, Shard, StoredTensor
from modelquirks.planner.finding import Finding

__all__ = ["Header", "stored_tensors", "unread"]

# A NamedTuple's own constructor is a Python function; this stays in C, at a third of the time.
_make: Any = partial(tuple.__new__, StoredTensor)


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file, and what is wrong with it.

    A tensor whose entry is broken is here too: what its entry says and cannot be believed is
    None, and an error among the findings names it.
    """

    shard: Shard
    format: Format = "unknown"
    """By content, not by name; ``unknown``: nothing that is read here."""
    entries: Mapping[str, StoredTensor] = field(default_factory=dict)
    """By name, in the order of the file; offsets count from the start of the file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    container: str = ""

    @property
    def readable(self) -> bool:
        """Whether the names in the file are known."""
        return self.shard.digest is not None


def stored_tensors(
    names: Iterable[str],
    shards: Iterable[str],
    dtypes: Iterable[str | None] = repeat(None),
    shapes: Iterable[tuple[int, ...] | None] = repeat(None),
    begins: Iterable[int | None] = repeat(None),
    ends: Iterable[int | None] = repeat(None),
    strides: Iterable[tuple[int, ...] | None] = repeat(None),
) -> Iterable[StoredTensor]:
    """Return tensors made from columns, as fast as can be; the shortest column ends it."""
    columns = zip(names, shards, dtypes, shapes, begins, ends, strides, strict=False)
    return cast(Iterable[StoredTensor], map(_make, columns))


def unread(name: str, seen: Look, *findings: Finding) -> Header:
    """Return the header of a file in which nothing could be read."""
    absent = seen.kind == "absent"
    shard = Shard(name, None if absent else seen.size_bytes, seen.mtime_ns or None, None)
    return Header(shard, findings=findings)
