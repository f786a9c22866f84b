"""How a job is going to load a checkpoint, compared with how it was saved: what will go wrong.

The consequences are what ``engine.load_checkpoint`` of DeepSpeed 0.19.8 was seen to do
(``benchmarks/deepspeed_loads.py --changes``); it compares little of this itself, and often fails
without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.files import Folder, list_states
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.job import Job, job_of
from modelquirks.plugins.deepspeed.saved import mapping
from modelquirks.plugins.deepspeed.states import ModelState, Stage
from modelquirks.plugins.deepspeed.universal import is_round_robin

__all__ = ["compare"]

_PARTITIONED = ("1", "2", "bf16")
"""Stages that load each other: DeepSpeed does not compare which of them it was."""
_EXPORT = (
    "write the weights with `modelquirks export` (or plan and execute them) into the model before "
    "deepspeed.initialize, which starts the optimizer anew"
)


class Saved(NamedTuple):
    """How the checkpoint was saved; None: the files do not say."""

    stage: Stage
    dp: int
    tp: int
    pp: int
    ep: int | None
    dtype: str | None
    universal: bool
    round_robin: bool


def compare(grid: Grid, folder: Folder, expect: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return a finding for each difference, ``expect-met`` if there is none."""
    job, faults = job_of(expect)
    if faults:
        text = f"what is expected cannot be understood: {'; '.join(faults)}."
        return (Finding("expect-unknown", "error", text),)
    saved = _saved(grid, folder)
    found = [finding for check in _CHECKS for finding in check(saved, job)]
    if all(finding.severity == "info" for finding in found):
        said = {key: value for key, value in job._asdict().items() if value is not None}
        told = ", ".join(f"{key}={value}" for key, value in said.items()) or "nothing that is known"
        text = f"the job can load this as it is: expected {told}; saved {_told(saved)}."
        found.append(Finding("expect-met", "info", text))
    return tuple(found)


def _saved(grid: Grid, folder: Folder) -> Saved:
    models = [model for model in grid.models.values() if model.saved.readable]
    config: Mapping[str, Any] = models[0].config if models else {}
    return Saved(
        stage=grid.stage,
        dp=grid.dp,
        tp=grid.tp,
        pp=grid.pp,
        ep=_expert_ranks(grid, folder, models),
        dtype=_dtype(grid, config),
        universal=folder.universal,
        round_robin=is_round_robin(config),
    )


def _told(saved: Saved) -> str:
    stage = "the bf16 optimizer (ZeRO 1)" if saved.stage == "bf16" else f"ZeRO {saved.stage}"
    ep = "" if saved.ep is None else f", ep={saved.ep}"
    form = "universal, from " if saved.universal else "by "
    sizes = f"dp={saved.dp}, tp={saved.tp}, pp={saved.pp}{ep}"
    return f"{form}{stage} with {sizes}, {saved.dtype or 'unknown dtype'}"


def _expert_ranks(grid: Grid, folder: Folder, models: list[ModelState]) -> int | None:
    """Return the expert-parallel ranks: by how far the groups of experts are cut, or the files."""
    if not any(model.facts.get("num_experts") for model in models):
        return 1
    counts = {n for optim in grid.optims.values() for n in optim.partitions if 0 < n <= grid.dp}
    if counts:
        return grid.dp // min(counts)
    ranks = {name.dp for name in list_states(folder.path) if name.kind == "expert-optim"}
    return max(ranks) + 1 if ranks else None


def _dtype(grid: Grid, config: Mapping[str, Any]) -> str | None:
    if any(optim.saved.name.half == "bf16_" for optim in grid.optims.values()):
        return "bf16"
    if not config:
        return None
    halves = (half for half in ("bf16", "fp16") if mapping(config.get(half)).get("enabled") is True)
    return next(halves, "fp32")
