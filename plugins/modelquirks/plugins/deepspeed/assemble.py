"""Parameters of the training model from the files of all ranks: masters, and training weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.plugins.deepspeed.accounts import groups_of
from modelquirks.plugins.deepspeed.grid import Grid, optim_name
from modelquirks.plugins.deepspeed.parameter import Fragment, Origin, Parameter, whole_tensor
from modelquirks.plugins.deepspeed.pieces import (
    Cutting,
    from_fragments,
    from_partitions,
    from_shares,
)
from modelquirks.plugins.deepspeed.saved import Shapes
from modelquirks.plugins.deepspeed.slices import joining
from modelquirks.plugins.deepspeed.states import ModelState, OptimState

__all__ = ["Assembly", "masters", "tied", "training"]

_EXPERT = re.compile(r"(\.deepspeed_experts\.)(\d+)(\.)")
_MODULE: tuple[Origin, ...] = ("training", "frozen", "buffer")


@dataclass
class Assembly:
    """What can be had, and what cannot and why, by name."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def masters(grid: Grid) -> Assembly:
    """Return the fp32 masters of the optimizer, and of ZeRO 3 what was frozen and the buffers.

    ``lost`` names the file that each other parameter lacks. A checkpoint of ZeRO 0 in fp32 or
    fp16 has no masters.
    """
    return _over_ranks(grid, lambda mp: _masters_of(grid, mp), ("master", "frozen", "buffer"))


def training(grid: Grid) -> Assembly:
    """Return the weights in the module's dtype, from the files of models, layers and experts.

    ZeRO 3 has only what was frozen and the buffers there.
    """
    if grid.layers:
        return _of_layers(grid)
    found = _over_ranks(grid, lambda mp: _module_of(grid, mp), _MODULE)
    for saved in grid.experts:
        placed = saved.place(saved.value)
        _add_whole(found, placed.tensors, "training", saved.shard.name)
    return found


def tied(grid: Grid) -> dict[str, str]:
    """Return the stored name of each name that shares a parameter: by ``shared_params``.

    Only the file of the first rank has them.
    """
    return {dup: name for model in grid.models.values() for dup, name in model.shared.items()}


def _over_ranks(
    grid: Grid, of_rank: Callable[[int], Mapping[Origin, _Part]], origins: Sequence[Origin]
) -> Assembly:
    """Join the slices of each stage, then put the stages together; the first name counts."""
    found = Assembly()
    for stage in range(grid.pp):
        ranks = [stage * grid.tp + slice_ for slice_ in range(grid.tp)]
        parts = [of_rank(mp) for mp in ranks]
        universal: Mapping[str, Any] = {}
        if facts := next((f for mp in ranks if (f := grid.facts_of(mp))), None):
            universal = facts.universal
        for origin in origins:
            _join(found, [part[origin] for part in parts], origin, universal)
    return found


@dataclass
class _Part:
    """Of one model-parallel rank."""

    fragments: dict[str, Fragment] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def add(self, cutting: Cutting, files: Sequence[str]) -> None:
        self.fragments |= cutting.fragments
        for name, numbers in cutting.lost.items():
            self.lost[name] = ", ".join(files[number] for number in numbers) or "its end"


def _join(
    found: Assembly, parts: Sequence[_Part], origin: Origin, universal: Mapping[str, Any]
) -> None:
    for name in {name: None for part in parts for name in (*part.fragments, *part.lost)}:
        if name in found.parameters:
            continue
        lost = [part.lost.get(name, "") for part in parts if name not in part.fragments]
        if lost:
            found.lost.setdefault(name, next(filter(None, lost), "one of the slices"))
            continue
        fragments = tuple(part.fragments[name] for part in parts)
        how = joining(name, [fragment.shape for fragment in fragments], universal)
        if how is None:
            found.lost.setdefault(name, "how its tensor-parallel slices go together")
            continue
        found.parameters[name] = Parameter(
            name, origin, fragments[0].dtype, how.shape, fragments, how.dim, how.takes
        )
        found.lost.pop(name, None)


def _masters_of(grid: Grid, mp: int) -> dict[Origin, _Part]:
    found: dict[Origin, _Part] = {"master": _Part(), "frozen": _Part(), "buffer": _Part()}
    facts = grid.facts_of(mp)
    if facts is None or grid.stage == "0":
        return found
    if grid.stage != "3":
        for number, group in enumerate(groups_of(grid, mp)):
            _add_partitions(grid, (mp, number), group, found["master"])
        return found
    optims, files = _ranks_of(grid, mp)
    for number, group in enumerate(facts.groups or ()):
        flat = [_flat(optim, number) for optim in optims]
        found["master"].add(from_shares(group, flat, label=f"mp{mp}g{number}."), files)
    _add_unsharded(grid, mp, facts, found)
    return found


def _ranks_of(grid: Grid, mp: int) -> tuple[list[OptimState | None], list[str]]:
    """Return the files of masters of a model-parallel rank, None if not there, and their names."""
    optims = [grid.optims.get((dp, mp)) for dp in range(grid.dp)]
    half = next((optim.saved.name.half for optim in optims if optim), "")
    return optims, [
        optim_name((dp, mp), half) if optim is None else optim.saved.shard.name
        for dp, optim in enumerate(optims)
    ]


def _add_partitions(grid: Grid, place: tuple[int, int], group: Shapes, found: _Part) -> None:
    """Add a group of ZeRO 1 or 2; *place*: model-parallel rank and number of the group."""
    mp, number = place
    facts = grid.facts_of(mp)
    optims, files = _ranks_of(grid, mp)
    flat = [_flat(optim, number) for optim in optims]
    first = next((optim for optim in optims if optim and optim.saved.readable), None)
    count = _at(first.partitions, number, grid.dp) if first else grid.dp
    paddings: tuple[int, ...] = _at(first.paddings, number, ()) if first else ()
    if count < grid.dp and facts and facts.config.get("use_data_before_expert_parallelism"):
        reason = "the order of ranks under use_data_before_expert_parallelism"
        found.lost |= dict.fromkeys(group, reason)
        return
    for e, ranks in enumerate(_experts(grid.dp, count)):
        parts = [flat[rank] for rank in ranks]
        cutting = from_partitions(group, parts, paddings=paddings, label=f"mp{mp}g{number}.e{e}.")
        named = Cutting(
            {_global(name, group, e): made for name, made in cutting.fragments.items()},
            {_global(name, group, e): lost for name, lost in cutting.lost.items()},
        )
        found.add(named, [files[rank] for rank in ranks])


def _add_unsharded(grid: Grid, mp: int, facts: ModelState, found: dict[Origin, _Part]) -> None:
    """Add the frozen shares of ZeRO 3, in the module's dtype, and the buffers of one rank."""
    models = [grid.models.get((dp, mp)) for dp in range(grid.dp)]
    shares = [model.frozen if model and model.saved.readable else None for model in models]
    files = [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in range(grid.dp)]
    cutting = from_fragments(facts.frozen_shapes or {}, shares, label=f"mp{mp}f.")
    found["frozen"].add(cutting, files)
    for name in facts.buffers:
        stored = (facts.module or {}).get(name)
        file, label = facts.saved.shard.name, _rank_label(grid, mp)
        _whole_into(found["buffer"], name, stored, file, label=label)


def _experts(dp: int, count: int) -> list[list[int]]:
    """Return the ranks over which each expert-parallel rank's group is cut.

    With the default order of ranks; ``use_data_before_expert_parallelism`` changes it.
    """
    if count >= dp or count < 1 or dp % count:
        return [[*range(dp)]]
    size = dp // count
    return [[r for r in range(dp) if r % size == e] for e in range(size)]


def _global(name: str, group: Mapping[str, Any], e: int) -> str:
    """Return the name with the global number of an expert: ``param_shapes`` has rank 0's."""
    found = _EXPERT.search(name)
    if found is None:
        return name
    before = name[: found.end(1)]
    local = {
        int(other[2]) for key in group if key.startswith(before) and (other := _EXPERT.search(key))
    }
    number = e * len(local) + int(found[2])
    return f"{before}{number}{name[found.end(2) :]}"


def _flat(optim: OptimState | None, number: int) -> StoredTensor | None:
    return optim.flat[number] if optim and number < len(optim.flat) else None


def _at(values: Sequence[Any], number: int, default: Any) -> Any:
    return values[number] if number < len(values) else default


def _module_of(grid: Grid, mp: int) -> dict[Origin, _Part]:
    found: dict[Origin, _Part] = {origin: _Part() for origin in _MODULE}
    facts = grid.facts_of(mp)
    if facts is None:
        return found
    if grid.stage == "3":
        _add_unsharded(grid, mp, facts, found)
        return found
    trained = {name for group in facts.groups or () for name in group} | {*facts.shared}
    for name, stored in (facts.module or {}).items():
        is_trained = facts.groups is None or name in trained
        origin: Origin = "training" if is_trained else "frozen"
        origin = "buffer" if name in facts.buffers else origin
        file, label = facts.saved.shard.name, _rank_label(grid, mp)
        _whole_into(found[origin], name, stored, file, label=label)
    return found


def _rank_label(grid: Grid, mp: int) -> str:
    """Return what tells a slice from those of other ranks; nothing where there are none."""
    return f"@mp{mp}" if grid.mp > 1 else ""


def _whole_into(
    part: _Part, name: str, stored: StoredTensor | None, file: str, *, label: str = ""
) -> None:
    """Add a stored tensor that is all of *name*, with *label* behind its name as a piece."""
    fragment = whole_tensor(stored, name=f"{name}{label}") if stored is not None else None
    if fragment is None:
        part.lost[name] = file
    else:
        part.fragments[name] = fragment


def _add_whole(
    found: Assembly, tensors: Mapping[str, StoredTensor], origin: Origin, file: str
) -> None:
    part = _Part()
    for name, stored in tensors.items():
        _whole_into(part, name, stored, file)
    _join(found, [part], origin, {})


def _of_layers(grid: Grid) -> Assembly:
    """Return the weights of a pipeline: ``{layer}.{name in its file}``, slices joined."""
    found = Assembly()
    universal = next((m.universal for m in grid.models.values() if m.universal), {})
    for _, slices in _by_layer(grid):
        parts: list[_Part] = []
        for saved in slices:
            part = _Part()
            label = f"@tp{saved.name.mp}" if len(slices) > 1 else ""
            for name, stored in saved.place(saved.value).tensors.items():
                whole = f"{saved.name.layer}.{name}"
                _whole_into(part, whole, stored, saved.shard.name, label=label)
            parts.append(part)
        _join(found, parts, "training", universal)
    _name_tied(grid, found)
    return found


def _by_layer(grid: Grid) -> Iterator[tuple[int, list[Any]]]:
    for layer in sorted({saved.name.layer for saved in grid.layers}):
        slices = [saved for saved in grid.layers if saved.name.layer == layer]
        yield layer, sorted(slices, key=lambda saved: saved.name.mp)


def _name_tied(grid: Grid, found: Assembly) -> None:
    """Give tied weights their own name, ``tied_modules.{key}.…``, where only one fits.

    A file has them under the first layer that uses them.
    """
    groups = [group for mp in range(grid.mp) for group in groups_of(grid, mp)]
    wanted = {name: shape for group in groups for name, shape in group.items()}
    homeless = [name for name in wanted if name not in found.parameters]
    unknown = [name for name in found.parameters if wanted and name not in wanted]
    for name in homeless:
        rest = name.split(".", 2)[-1]
        fits = [
            other
            for other in unknown
            if other.split(".", 1)[-1] == rest and found.parameters[other].shape == wanted[name]
        ]
        if len(fits) == 1:
            found.parameters[name] = found.parameters.pop(fits[0])._replace(name=name)
            unknown.remove(fits[0])
        else:
            layer = name.split(".", 1)[0]
            file = f"layer_{int(layer):02d}-model_states.pt" if layer.isdecimal() else "its layer"
            found.lost.setdefault(name, file)
