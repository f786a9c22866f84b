"""Do the flat groups have the lengths that the shapes of their parameters ask for?"""

from __future__ import annotations

from collections.abc import Iterator

from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.pieces import (
    group_numel,
    numel,
    partition_length,
    share_length,
)
from modelquirks.plugins.deepspeed.saved import Shapes
from modelquirks.plugins.deepspeed.states import ModelState, OptimState

__all__ = ["check_sizes"]


def check_sizes(grid: Grid) -> Iterator[Finding]:
    """Yield the groups of each rank that have another length, and files with too few groups."""
    for dp, facts, optim in grid.shares():
        if optim.saved.readable:
            yield from _of_rank(grid, facts, optim, dp)


def _of_rank(grid: Grid, facts: ModelState, optim: OptimState, dp: int) -> Iterator[Finding]:
    groups, file = facts.groups or (), optim.saved.name.name
    if len(optim.flat) != len(groups):
        text = (
            f"{file!r} has {len(optim.flat)} groups of masters, {facts.saved.name.name!r} lists "
            f"{len(groups)}: they are of different runs."
        )
        yield Finding("group-size", "error", text)
        return
    for number, (flat, group) in enumerate(zip(optim.flat, groups, strict=True)):
        found = None if flat is None else numel(flat.shape or ())
        expected = _lengths(grid, optim, group, number=number, dp=dp)
        if found not in expected:
            text = (
                f"{file!r} has {found or 0:,} elements in group {number}, where its {len(group)} "
                f"parameters (from {next(iter(group), '')!r}) take "
                f"{' or '.join(f'{length:,}' for length in expected)}: it is another rank's or "
                "another run's file."
            )
            yield Finding("group-size", "error", text)


def _lengths(
    grid: Grid, optim: OptimState, group: Shapes, *, number: int, dp: int
) -> tuple[int, ...]:
    """Return the lengths that are right: with the padding at the end, and without."""
    if grid.stage == "3":
        return (sum(share_length(shape, grid.dp) for shape in group.values()),)
    count = optim.partitions[number] if number < len(optim.partitions) else grid.dp
    paddings = optim.paddings[number] if number < len(optim.paddings) else ()
    total = group_numel(group, paddings)
    length = partition_length(total, max(count, 1))
    # Ranks of experts are taken in turn, so that the last partition of each is with the last ranks.
    last = dp >= grid.dp - grid.dp // max(count, 1)
    if not last:
        return (length,)
    return (max(0, length - (length * count - total)), length)
