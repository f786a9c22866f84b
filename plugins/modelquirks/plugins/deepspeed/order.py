"""Does each rank's own account of what it holds agree with the shapes in the model file?

ZeRO 1 and 2 and BF16_Optimizer write ``param_slice_mappings``, a witness of its own; ZeRO 3 writes
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.pieces import addresses
from modelquirks.plugins.deepspeed.states import Address, ModelState, OptimState
from modelquirks.plugins.deepspeed.universal import is_round_robin

__all__ = ["check_order"]

_MAX_COMPARED = 2_000_000
"""Names that are gone through to find the rank whose file it is; 1000 ranks of 2000 parameters."""

Account = tuple[Mapping[str, Address], ...]


def check_order(grid: Grid) -> Iterator[Finding]:
    """Yield the files whose account is another rank's, or no rank's."""
    for dp, facts, optim in grid.shares():
        if optim.slices is not None:
            yield from _of_rank(grid, facts, optim, dp)


def _of_rank(grid: Grid, facts: ModelState, optim: OptimState, dp: int) -> Iterator[Finding]:
    slices = optim.slices or ()
    expected = _account(grid, facts, optim, dp)
    if slices == expected:
        return
    file = optim.saved.name.name
    if is_round_robin(optim.config):
        text = (
            f"{file!r} was trained with 'round_robin_gradients', where its 'param_slice_mappings' "
            "are wrong (DeepSpeed 0.19.8); the order of 'param_shapes' is taken, which is right."
        )
        yield Finding("round-robin", "info", text)
        return
    n_names = sum(map(len, facts.groups or ()))
    others = [r for r in range(grid.dp) if r != dp][: _MAX_COMPARED // max(1, n_names)]
    owner = next((r for r in others if _account(grid, facts, optim, r) == slices), None)
    if owner is not None:
        text = f"{file!r} says that it holds the part of rank {owner}, not of rank {dp}."
        yield Finding("rank-swapped", "error", text)
        return
    names = [*dict.fromkeys(name for pair in _pairs(slices, expected) for name in _unlike(*pair))]
    text = (
        f"{file!r} and {facts.saved.name.name!r} disagree where {len(names)} parameters lie: "
        f"{shown(names)}. They are of different runs, or one of them was changed."
    )
    yield Finding("order", "error", text)


def _account(grid: Grid, facts: ModelState, optim: OptimState, dp: int) -> Account:
    found: list[Mapping[str, Address]] = []
    for number, group in enumerate(facts.groups or ()):
        count = optim.partitions[number] if number < len(optim.partitions) else grid.dp
        count = max(1, min(count, grid.dp))
        paddings = optim.paddings[number] if number < len(optim.paddings) else ()
        part = dp // (grid.dp // count)  # ranks of experts are taken in turn
        found.append(addresses(group, count=count, part=part, paddings=paddings))
    return tuple(found)


def _pairs(
    one: Sequence[Mapping[str, Address]], other: Sequence[Mapping[str, Address]]
) -> Iterator[tuple[Mapping[str, Address], Mapping[str, Address]]]:
    for number in range(max(len(one), len(other))):
        yield (
            one[number] if number < len(one) else {},
            other[number] if number < len(other) else {},
        )


def _unlike(one: Mapping[str, Address], other: Mapping[str, Address]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
