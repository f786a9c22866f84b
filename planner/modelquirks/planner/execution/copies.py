"""Several stored copies of what may be one tensor: compare them, tie those that are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.execution.rowmajor import row_major
from modelquirks.planner.finding import Finding, shown

__all__ = ["bits_equal", "equal", "settle"]

Make = Callable[[LoadItem, Region], torch.Tensor]

_CHUNK = 1 << 23
"""Elements compared in one go."""


def settle(
    items: Sequence[LoadItem],
    groups: Iterable[Sequence[str]],
    *,
    equal: Callable[[LoadItem, LoadItem], bool],
) -> tuple[list[LoadItem], list[Finding]]:
    """Return the items with equal copies of each group tied to the first of them.

    *groups* hold names of which several are stored. Whether they are one tensor no header can
    say, so *equal* compares the values. Copies that differ are all kept, and a warning names
    them.
    """
    by_name = {name: item for item in items for name in item.names}
    notes: list[Finding] = []
    for group in groups:
        members = list(dict.fromkeys(by_name[name].name for name in group if name in by_name))
        kept: list[LoadItem] = []
        for member in map(by_name.__getitem__, members):
            first = next((other for other in kept if equal(other, member)), None)
            if first is None:
                kept.append(member)
                continue
            tied = replace(first, aliases=(*first.aliases, *member.names))
            kept[kept.index(first)] = tied
            by_name.update(dict.fromkeys(tied.names, tied))
            notes.append(_equal_note(first, member))
        if len(kept) > 1:
            notes.append(_unequal_note(kept))
    current = {by_name[item.name].name: by_name[item.name] for item in items}
    return list(current.values()), notes


def equal(one: LoadItem, other: LoadItem, make: Make) -> bool:
    """Tell whether two tensors are equal bit by bit as they would be loaded."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    parts = row_major(one.shape, _CHUNK)
    return all(bits_equal(make(one, part), make(other, part)) for part in parts)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether dtype, shape and every bit agree; two NaNs of the same bits are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    # Eight bytes at a time where that can be, which is six times as fast.
    if not any(t.numel() % 8 or t.storage_offset() % 8 for t in (first, second)):
        first, second = first.view(torch.int64), second.view(torch.int64)
    return torch.equal(first, second)


def _equal_note(first: LoadItem, member: LoadItem) -> Finding:
    return Finding(
        "copies-equal",
        "info",
        f"{shown([first.name, member.name])} are stored twice with equal values: tied to the first",
    )


def _unequal_note(kept: Sequence[LoadItem]) -> Finding:
    return Finding(
        "copies-differ",
        "warning",
        f"{shown(item.name for item in kept)} would be one tensor, but the checkpoint stores "
        "different values: each is kept as stored, and they are not tied",
    )
