"""What is wrong with a checkpoint, from names and headers, before any tensor is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeVar

from modelquirks.planner.checkpoint.fingerprint import copies_among
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.deepspeed.assemble import Assembly
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.loads import listed
from modelquirks.plugins.deepspeed.order import check_order
from modelquirks.plugins.deepspeed.saved import Shapes
from modelquirks.plugins.deepspeed.sizes import check_sizes
from modelquirks.plugins.deepspeed.states import ModelState, OptimState

__all__ = ["check", "eased"]

_State = TypeVar("_State", ModelState, OptimState, ModelState | OptimState)


def check(
    grid: Grid, *, tag: str, masters: Assembly, training: Assembly, universal: bool = False
) -> tuple[Finding, ...]:
    """Return what is wrong, with the names of files and parameters.

    Source of the questions: what ``engine.load_checkpoint`` and ``zero_to_fp32.py`` of DeepSpeed
    0.19.8 pass over in silence, or answer without a name. *universal*: there are no ranks to check.
    """
    found = [
        *_of_files(grid),
        *_missing(grid, training),
        *_extra(grid),
        *_written_as(grid),
        *_copies(grid),
        *_one_save(grid, tag),
    ]
    if not universal:
        found += (*_stages(grid), *check_sizes(grid), *check_order(grid), *_excluded(grid))
    return (*found, *_uncovered(grid, masters, training))


def eased(
    found: Iterable[Finding],
    grid: Grid,
    *,
    tag: str,
    training: Assembly,
    universal: bool = False,
) -> tuple[Finding, ...]:
    """Return *found* with what concerns only the masters as warnings: they are not wanted."""
    missing = tuple(name for name in grid.missing if not name.endswith("optim_states.pt"))
    without = replace(grid, optims={}, missing=missing)
    nothing = Assembly()
    needed = check(without, tag=tag, masters=nothing, training=training, universal=universal)
    errors = [finding for finding in needed if finding.severity == "error"]
    rest = [finding for finding in found if finding not in errors]
    return (*errors, *(f._replace(severity="warning") if f[1] == "error" else f for f in rest))


def _of_files(grid: Grid) -> Iterator[Finding]:
    for saved in grid.saved:
        yield from saved.findings
    for model in grid.models.values():
        yield from model.findings
    for optim in grid.optims.values():
        yield from optim.findings
    for saved in (*grid.layers, *grid.experts):
        yield from saved.place(saved.value).findings


def _missing(grid: Grid, training: Assembly) -> Iterator[Finding]:
    masters = [name for name in grid.missing if name.endswith("optim_states.pt")]
    others = [name for name in grid.missing if not name.endswith("optim_states.pt")]
    whole = grid.stage != "3" and training.parameters and not training.lost and not others
    instead = "; or take the weights as they were trained (--weights training)" if whole else ""
    for names, way in ((others, ""), (masters, instead)):
        if names:
            text = (
                f"missing of {grid.dp} data-parallel by {grid.mp} model-parallel ranks: "
                f"{shown(names)}. Copy them from the machines that wrote them{way}."
            )
            yield Finding("rank-missing", "error", text)
    layers = {reason for reason in training.lost.values() if reason.startswith("layer_")}
    absent = sorted(layers - {saved.name.name for saved in grid.layers})
    if absent:
        names = [name for name, reason in training.lost.items() if reason in absent]
        text = f"missing files of layers: {shown(absent)}, with {shown(names)}."
        yield Finding("layer-missing", "error", text)


def _extra(grid: Grid) -> Iterator[Finding]:
    if grid.extra:
        text = (
            f"{len(grid.extra)} files are of another save than the rest, and are left out: "
            f"{shown(grid.extra)} (this one has {grid.dp} data-parallel by {grid.mp} "
            "model-parallel ranks). Move them away before DeepSpeed loads this folder."
        )
        yield Finding("stale-files", "warning", text)


def _written_as(grid: Grid) -> Iterator[Finding]:
    """Compare names with those under which ``torch.save`` wrote: it puts them into zip files."""
    wrong = [
        f"{saved.name.name!r} was written as {saved.written_as.name!r}"
        for saved in grid.saved
        if saved.written_as is not None
        and saved.written_as._replace(half="", name="") != saved.name._replace(half="", name="")
    ]
    if wrong:
        text = f"files have changed names: {listed(wrong)}. Give them back the names they had."
        yield Finding("rank-swapped", "error", text)


def _copies(grid: Grid) -> Iterator[Finding]:
    saved = [optim.saved for optim in grid.optims.values() if any(optim.flat)]
    for names in copies_among(replace(one.shard, name=one.name.name) for one in saved):
        text = f"{shown(names)} are one and the same file: ranks differ in what they hold."
        yield Finding("rank-copied", "error", text)


def _one_save(grid: Grid, tag: str) -> Iterator[Finding]:
    models, optims = [*grid.models.values()], [*grid.optims.values()]
    yield from _equal(models, "global_steps", lambda m: m.number("global_steps"))
    yield from _equal(models, "global_samples", lambda m: m.number("global_samples"))
    yield from _equal(models, "dp_world_size", lambda m: m.number("dp_world_size"))
    yield from _equal(models, "mp_world_size", lambda m: m.number("mp_world_size"))
    by_rank: dict[int, list[ModelState]] = {}
    for (_, mp), model in sorted(grid.models.items(), key=itemgetter(0)):
        by_rank.setdefault(mp, []).append(model)
    for alike in by_rank.values():
        yield from _equal(alike, "param_shapes", lambda m: m.groups and _order(m.groups))
    both: list[ModelState | OptimState] = [*models, *optims]
    yield from _equal(both, "ds_version", _version)
    yield from _equal(both, "ds_config", lambda state: _text(state.config) or None)
    yield from _equal(optims, "step of the optimizer", lambda optim: optim.step)
    steps = next((n for m in models if (n := m.number("global_steps")) is not None), None)
    named = re.fullmatch(r"global_step(\d+)", tag)
    if named and steps is not None and int(named[1]) != steps:
        text = f"the tag {tag!r} holds files of step {steps}: a folder that was renamed or reused."
        yield Finding("tag-step", "warning", text)


def _order(groups: tuple[Shapes, ...]) -> str:
    """Return names and shapes in their order, which is that of the weights in ZeRO 3."""
    return "; ".join(", ".join(f"{n} {[*shape]}" for n, shape in g.items()) for g in groups)


def _version(state: ModelState | OptimState) -> str | None:
    value = state.facts.get("ds_version") if isinstance(state, ModelState) else state.version
    return value if isinstance(value, str) and value else None


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=repr) if config else ""


def _equal(states: Iterable[_State], key: str, of: Callable[[_State], object]) -> Iterator[Finding]:
    """Say which files differ from most in what *of* gives; None is no opinion."""
    said = [(state, value) for state in states if (value := of(state)) is not None]
    usual = Counter(str(value) for _, value in said).most_common(1)
    odd = [(state, value) for state, value in said if str(value) != usual[0][0]]
    if odd:
        values = [f"{state.saved.name.name!r}: {str(value)[:60]}" for state, value in odd]
        text = (
            f"{key!r} differs between files of one save: {listed(values)}; the others have "
            f"{usual[0][0][:60]}. They are of different runs or steps."
        )
        yield Finding("mixed-saves", "error", text)


def _stages(grid: Grid) -> Iterator[Finding]:
    said = {o.saved.name.name: o.stage for o in grid.optims.values() if o.saved.readable}
    odd = [f"{name!r} is of ZeRO {stage}" for name, stage in said.items() if stage != grid.stage]
    if odd:
        text = f"the files of masters disagree: {listed(odd)}, the others are of {grid.stage}."
        yield Finding("mixed-saves", "error", text)
    asked = next((_asked(m) for m in grid.models.values() if _asked(m)), "")
    if asked and grid.stage in "123" and asked != grid.stage:
        text = f"the config says ZeRO {asked}, the files are of ZeRO {grid.stage}; the files count."
        yield Finding("stage-config", "info", text)


def _asked(model: ModelState) -> str:
    zero = model.config.get("zero_optimization")
    return str(zero.get("stage", "")) if isinstance(zero, dict) else ""


def _excluded(grid: Grid) -> Iterator[Finding]:
    """ZeRO 2 and 3 list what is frozen, be it nothing; no list means that it was left out."""
    left_out = [
        model.saved.name.name
        for model in grid.models.values()
        if model.saved.readable and model.frozen_shapes is None
    ]
    if left_out and grid.stage in "23":
        text = (
            f"{shown(left_out)}: saved with exclude_frozen_parameters=True. The frozen parameters "
            "are not in this checkpoint; take them from the model that the training began with."
        )
        yield Finding("frozen-excluded", "warning", text)


def _uncovered(grid: Grid, masters: Assembly, training: Assembly) -> Iterator[Finding]:
    """Compare the names of the module with those that can be had."""
    ties = {name for model in grid.models.values() for name in model.shared}
    known = {*masters.parameters, *masters.lost, *ties}
    if grid.stage != "3":
        known |= {*training.parameters, *training.lost}
    nowhere = [
        name
        for mp in range(grid.mp)
        if (facts := grid.facts_of(mp)) is not None
        for name in facts.module or ()
        if name not in known
    ]
    if nowhere:
        text = (
            f"{len(nowhere)} names of the module have no weights: {shown(nowhere)}. They are tied "
            "names, told only by the file of rank 0, or frozen ones that were left out."
        )
        yield Finding("parameter-missing", "error", text)
    if grid.stage in ("1", "bf16"):
        frozen = [
            n for n, p in training.parameters.items() if p.origin == "frozen" and n not in ties
        ]
        if frozen:
            text = (
                f"{len(frozen)} parameters were not trained and have no fp32 master: "
                f"{shown(frozen)}; they are taken from the model file. zero_to_fp32.py leaves "
                "them out without a word."
            )
            yield Finding("frozen-no-master", "info", text)
