"""``Grid``: the ranks that wrote the checkpoint and their files, by evidence and not by config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from modelquirks.plugins.deepspeed.files import StateName, list_states
from modelquirks.plugins.deepspeed.saved import SavedState, mapping, read_saved
from modelquirks.plugins.deepspeed.states import (
    ModelState,
    OptimState,
    Stage,
    model_state,
    optim_state,
)

__all__ = ["Grid", "Place", "optim_name", "read_grid"]

_MAX_RANKS = 1 << 14
"""A file that speaks of more is not believed."""

_MAX_EXPERTS = 1 << 18
"""Of all layers: the same."""

Place = tuple[int, int]
"""Data-parallel and model-parallel rank."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The files of one save, by rank."""

    dp: int
    """Data-parallel ranks, sequence-parallel ones included."""
    pp: int
    """Stages of the pipeline."""
    tp: int
    """Slices of tensor parallelism."""
    stage: Stage
    models: Mapping[Place, ModelState]
    """Of ZeRO 3 one a rank, else with the data-parallel rank 0."""
    optims: Mapping[Place, OptimState]
    layers: tuple[SavedState, ...]
    experts: tuple[SavedState, ...]
    missing: tuple[str, ...]
    """Names of files that should be there."""
    extra: tuple[str, ...]
    """Names of files that do not belong to this save."""

    @property
    def mp(self) -> int:
        """Model-parallel ranks."""
        return self.pp * self.tp

    @property
    def saved(self) -> Iterator[SavedState]:
        """All files that are used."""
        yield from (state.saved for state in self.models.values())
        yield from (state.saved for state in self.optims.values())
        yield from self.layers
        yield from self.experts

    def shares(self) -> Iterator[tuple[int, ModelState, OptimState]]:
        """Yield data-parallel rank, facts of the model and file of each share of the optimizer.

        Of those of which both are there.
        """
        for mp in range(self.mp):
            facts = self.facts_of(mp)
            if facts is None or facts.groups is None:
                continue
            for dp in range(self.dp):
                if (optim := self.optims.get((dp, mp))) is not None:
                    yield dp, facts, optim

    def facts_of(self, mp: int) -> ModelState | None:
        """Return the facts of a model-parallel rank, from the first file of it that has any."""
        return self._facts.get(mp)

    @cached_property
    def _facts(self) -> Mapping[int, ModelState]:
        found: dict[int, ModelState] = {}
        for (_, mp), state in sorted(self.models.items(), key=itemgetter(0)):
            if state.saved.readable:
                found.setdefault(mp, state)
        return found


def read_grid(folder: Path, *, universal: bool = False) -> Grid:
    """Read the facts of all files in *folder* and say which ranks wrote it.

    Counts of ranks come from what the model files say, by majority; if none can be read, from the
    names. The stage comes from the files of masters; without them from the form of the model files.
    A *universal* checkpoint has no files of masters.
    """
    listed = list_states(folder)
    zero3 = _is_zero3(listed)
    wanted = "zero3-model" if zero3 else "model"
    models = [model_state(read_saved(folder, n)) for n in listed if n.kind == wanted]
    half = _half(models, listed)
    optims = [
        optim_state(read_saved(folder, n)) for n in listed if n.kind == "optim" and n.half == half
    ]
    ranks = [name for name in listed if name.kind in ("optim", wanted)]
    dp = _count(models, "dp_world_size", [name.dp for name in ranks])
    mp = _count(models, "mp_world_size", [name.mp for name in ranks])
    if dp * mp > _MAX_RANKS:
        dp, mp = _by_names(name.dp for name in ranks), _by_names(name.mp for name in ranks)
    if dp * mp > _MAX_RANKS:
        dp, mp = 1, 1
    pp, tp = _degrees(models, mp, piped=any(n.kind == "layer" for n in listed))
    inside = set(_places(dp, mp))
    states: list[ModelState | OptimState] = [*models, *optims]
    used = {state.saved.name.name for state in states if _place(state) in inside}
    others = ("layer", "expert", "expert-optim")
    extra = [n.name for n in listed if n.name not in used and n.kind not in others]
    stage = _stage(models, optims, zero3=zero3)
    return Grid(
        dp=dp,
        pp=pp,
        tp=tp,
        stage=stage,
        models={_place(s): s for s in models if _place(s) in inside},
        optims={_place(s): s for s in optims if _place(s) in inside},
        layers=tuple(read_saved(folder, n) for n in listed if n.kind == "layer"),
        experts=tuple(read_saved(folder, n) for n in listed if n.kind == "expert"),
        missing=tuple(
            name
            for name in _missing(listed, models, (dp, mp), stage=stage, half=half)
            if not (universal and name.endswith("optim_states.pt"))
        ),
        extra=tuple(extra),
    )


def optim_name(place: Place, half: str) -> str:
    """Return the name of a rank's file of masters."""
    return f"{half}zero_pp_rank_{place[0]}_mp_rank_{place[1]:02d}_optim_states.pt"


def _is_zero3(listed: Iterable[StateName]) -> bool:
    """Tell by names: model files of single ranks, and as many as of the other form or more."""
    kinds = Counter(name.kind for name in listed)
    return kinds["zero3-model"] > 0 and kinds["zero3-model"] >= kinds["model"]


def _half(models: Iterable[ModelState], listed: Iterable[StateName]) -> str:
    """Return the prefix of the files of masters that belong to the model files.

    Both spellings in one folder are of two saves; the model file tells which dtype it was.
    """
    found = Counter(name.half for name in listed if name.kind == "optim")
    if len(found) < 2:
        return next(iter(found), "")
    for model in models:
        if model.saved.readable:
            enabled = mapping(model.config.get("bf16")).get("enabled")
            return "bf16_" if enabled is True else ""
    return found.most_common(1)[0][0]


def _count(models: Iterable[ModelState], key: str, ranks: Iterable[int]) -> int:
    said = Counter(n for model in models if (n := model.number(key)) and n <= _MAX_RANKS)
    return said.most_common(1)[0][0] if said else _by_names(ranks)


def _by_names(ranks: Iterable[int]) -> int:
    return min(max(ranks, default=0) + 1, _MAX_RANKS)


def _degrees(models: Iterable[ModelState], mp: int, *, piped: bool) -> Place:
    """Return stages and slices; their product is *mp*."""
    for model in models:
        degrees = mapping(model.facts.get("checkpoint_parallel_dimensions"))
        pp, tp = degrees.get("pp_degree"), degrees.get("tp_degree")
        if type(pp) is int and type(tp) is int and pp > 0 and pp * tp == mp:
            return pp, tp
    return (mp, 1) if piped else (1, mp)


def _stage(models: Iterable[ModelState], optims: Iterable[OptimState], *, zero3: bool) -> Stage:
    said: Counter[Stage] = Counter(optim.stage for optim in optims if optim.saved.readable)
    if said:
        return said.most_common(1)[0][0]
    if zero3:
        return "3"
    readable = [model for model in models if model.saved.readable]
    # ZeRO 0 has the optimizer inside; the others list the shapes of what their files should hold.
    trained = any(model.groups is not None for model in readable)
    return "unknown" if trained or not readable else "0"


def _place(state: ModelState | OptimState) -> Place:
    return state.saved.name.dp, state.saved.name.mp


def _places(dp: int, mp: int) -> Iterator[Place]:
    return ((d, m) for m in range(mp) for d in range(dp))


def _missing(
    listed: Iterable[StateName],
    models: Iterable[ModelState],
    sizes: Place,
    *,
    stage: Stage,
    half: str,
) -> Iterator[str]:
    """Yield the names of the grid that are not in *listed*."""
    dp, mp = sizes
    there = {(name.kind, name.dp, name.mp) for name in listed if name.half in ("", half)}
    optims = {(n.dp, n.mp) for n in listed if n.kind == "optim" and n.half == half}
    for d, m in _places(dp, mp):
        if stage == "3" and ("zero3-model", d, m) not in there:
            yield f"zero_pp_rank_{d}_mp_rank_{m:02d}_model_states.pt"
        if stage != "3" and d == 0 and ("model", 0, m) not in there:
            yield f"mp_rank_{m:02d}_model_states.pt"
        if stage != "0" and (d, m) not in optims:
            yield optim_name((d, m), half)
    yield from _missing_experts(listed, models)


def _missing_experts(listed: Iterable[StateName], models: Iterable[ModelState]) -> Iterator[str]:
    there = {(name.layer, name.expert) for name in listed if name.kind == "expert"}
    counts = next((m.facts.get("num_experts") for m in models if m.saved.readable), None)
    totals = [n for n in (counts if isinstance(counts, list) else []) if type(n) is int]
    if sum(max(total, 0) for total in totals) > _MAX_EXPERTS:
        return
    for layer, count in enumerate(totals):
        for expert in range(count):
            if (layer, expert) not in there and (-1, expert) not in there:
                yield f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
