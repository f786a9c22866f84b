"""The groups of trained parameters where the model file does not list them.

With bf16 and ZeRO 0, BF16_Optimizer writes masters and DeepSpeed 0.19.8 no ``param_shapes``. Names,
order and sizes are then in the ``param_slice_mappings`` of the ranks, shapes with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.pieces import numel
from modelquirks.plugins.deepspeed.saved import Shapes

__all__ = ["groups_of"]


def groups_of(grid: Grid, mp: int) -> tuple[Shapes, ...]:
    """Return the groups of one model-parallel rank, each in the order of flattening.

    Without ``param_shapes``: by the accounts of all data-parallel ranks; a parameter whose shape
    is not to be had is flat. None if one of these ranks lacks.
    """
    facts = grid.facts_of(mp)
    if facts is not None and facts.groups is not None:
        return facts.groups
    accounts = [
        optim.slices
        for dp in range(grid.dp)
        if (optim := grid.optims.get((dp, mp))) is not None and optim.slices is not None
    ]
    if facts is None or len(accounts) < grid.dp:
        return ()
    shapes = _shapes(grid, mp)
    found: list[Shapes] = []
    for number in range(min(map(len, accounts))):
        sizes: dict[str, int] = {}
        for account in accounts:
            for name, held in sorted(account[number].items(), key=lambda item: item[1].start):
                sizes[name] = sizes.get(name, 0) + held.numel
        found.append({name: _shape(name, size, shapes) for name, size in sizes.items()})
    return tuple(found)


def _shapes(grid: Grid, mp: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a rank, in its module or the files of layers."""
    facts = grid.facts_of(mp)
    found = {
        name: stored.shape
        for name, stored in ((facts.module if facts else None) or {}).items()
        if stored.shape is not None
    }
    for saved in grid.layers:
        if saved.name.mp == mp % grid.tp:
            placed = saved.place(saved.value).tensors
            found |= {f"{saved.name.layer}.{k}": v.shape for k, v in placed.items() if v.shape}
    return found


def _shape(name: str, size: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of *name*; of a tied module, that of the only weight that fits it."""
    if name in shapes and numel(shapes[name]) == size:
        return shapes[name]
    rest = name.split(".", 2)[-1]
    fits = {
        shape
        for other, shape in shapes.items()
        if name.startswith("tied_modules.")
        and other.split(".", 1)[-1] == rest
        and numel(shape) == size
    }
    return fits.pop() if len(fits) == 1 else (size,)
