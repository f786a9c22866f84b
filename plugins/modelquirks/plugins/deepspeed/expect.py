"""How a job is going to load a checkpoint, compared with how it was saved: what will go wrong.

The consequences are what ``engine.load_checkpoint`` of DeepSpeed 0.19.8 was seen to do
(``benchmarks/deepspeed_loads.py --changes``); it compares little of this itself, and often fails
without a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.files import Folder, list_states
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.job import Job, alignment_of, job_of
from modelquirks.plugins.deepspeed.saved import mapping
from modelquirks.plugins.deepspeed.states import ModelState, Stage
from modelquirks.plugins.deepspeed.universal import is_round_robin

__all__ = ["compare"]

_PARTITIONED = ("1", "2", "bf16")
"""Stages that load each other: DeepSpeed does not compare which of them it was."""
_WEIGHTS_ONLY = "load the weights only (load_optimizer_states=False)"
_EXPORT = (
    "load the weights into the model before deepspeed.initialize (Dispatcher.plan, or `modelquirks "
    "export` first), which starts the optimizer anew"
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
    alignment: Any
    """``parameter_alignment`` of the config."""


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
        stage=_saved_stage(grid, folder, config),
        dp=grid.dp,
        tp=grid.tp,
        pp=grid.pp,
        ep=_expert_ranks(grid, folder, models),
        dtype=_dtype(grid, config),
        universal=folder.universal,
        round_robin=is_round_robin(config),
        alignment=alignment_of(config),
    )


def _saved_stage(grid: Grid, folder: Folder, config: Mapping[str, Any]) -> Stage:
    """Return the stage; a universal checkpoint has no files that tell 1 from 2, nor need it."""
    if not folder.universal or grid.stage == "3":
        return grid.stage
    return "2" if mapping(config.get("zero_optimization")).get("stage") == 2 else "1"


def _told(saved: Saved) -> str:
    ep = "" if saved.ep is None else f", ep={saved.ep}"
    form = "universal, from " if saved.universal else "by "
    sizes = f"dp={saved.dp}, tp={saved.tp}, pp={saved.pp}{ep}"
    return f"{form}{_stage(saved.stage)} with {sizes}, {saved.dtype or 'unknown dtype'}"


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


def _check_form(saved: Saved, job: Job) -> Iterator[Finding]:
    if saved.universal and job.universal is False:
        yield _finding(
            "expect-universal",
            "this is a universal checkpoint, which the job's config does not ask for",
            "FileNotFoundError; without a file 'latest' nothing is loaded, and no error told",
            ['"checkpoint": {"load_universal": true} in the config'],
        )
    if job.universal and not saved.universal:
        yield _finding(
            "expect-universal",
            "the job's config asks for a universal checkpoint, which this is not",
            "ValueError, 'latest_universal' does not exist",
            ["take load_universal out of the config", "convert it with ds_to_universal"],
        )


def _check_stage(saved: Saved, job: Job) -> Iterator[Finding]:
    if job.stage is None or saved.stage == "unknown" or _alike(saved, job):
        return
    was, will = saved.stage, f"ZeRO {job.stage}"
    if was in _PARTITIONED and job.stage in _PARTITIONED:
        text = f"saved by {_stage(was)}, expected {will}: loads, DeepSpeed does not compare them."
        yield Finding("expect-zero-stage", "info", text)
        return
    ways = [f"train with {_stage(was)}"]
    if "3" in (was, job.stage):
        failure = "AssertionError without a text, by every way of engine.load_checkpoint"
        ways.append(_EXPORT)
    elif was == "0":
        failure = "FileNotFoundError of the files of masters, which ZeRO 0 does not write"
        ways.append(_WEIGHTS_ONLY)
    else:
        failure = "AttributeError, 'NoneType' object has no attribute 'copy'"
        ways.append(_WEIGHTS_ONLY)
    yield _finding("expect-zero-stage", f"saved by {_stage(was)}, expected {will}", failure, ways)


def _check_data_parallel(saved: Saved, job: Job) -> Iterator[Finding]:
    if job.dp in (None, saved.dp) or saved.universal or saved.stage == "0":
        return  # universal ones are made for that, and ZeRO 0 has nothing that is cut
    if saved.stage == "3":
        failure = "RuntimeError, 'The size of tensor a …', also without the optimizer"
        ways = [f"train on dp={saved.dp}", *_universal(saved), _EXPORT]
    else:
        failure = "ZeRORuntimeException, 'used a DP world size of …'"
        ways = [f"train on dp={saved.dp}", _WEIGHTS_ONLY, *_universal(saved)]
    yield _finding("expect-dp", f"saved with dp={saved.dp}, expected dp={job.dp}", failure, ways)


def _check_model_parallel(saved: Saved, job: Job) -> Iterator[Finding]:
    if saved.universal:
        return
    if job.tp not in (None, saved.tp):
        yield _finding(
            "expect-tp",
            f"saved with tp={saved.tp}, expected tp={job.tp}",
            "AssertionError of a key or a count of files, also without the optimizer",
            [f"train with tp={saved.tp}", _EXPORT],
        )
    if job.pp not in (None, saved.pp):
        yield _finding(
            "expect-pp",
            f"saved with pp={saved.pp}, expected pp={job.pp}",
            "ZeRORuntimeException of the DP world size, or RuntimeError of 'parameter_alignment'",
            [f"train with pp={saved.pp}", _WEIGHTS_ONLY],
        )


def _check_experts(saved: Saved, job: Job) -> Iterator[Finding]:
    if None not in (job.ep, saved.ep) and job.ep != saved.ep:
        yield _finding(
            "expect-ep",
            f"saved with ep={saved.ep}, expected ep={job.ep}",
            "ValueError of a parameter group's size, or ZeRORuntimeException of the DP world size",
            [f"train with ep={saved.ep}", _WEIGHTS_ONLY],
        )


def _check_dtype(saved: Saved, job: Job) -> Iterator[Finding]:
    if None in (job.dtype, saved.dtype) or job.dtype == saved.dtype or saved.universal:
        return
    if saved.stage == "0" and job.stage in (None, "0") and job.dtype != "bf16":
        return
    halves = {"bf16": "bf16_zero_pp_rank_…"}
    wanted = halves.get(job.dtype or "", "zero_pp_rank_…")
    yield _finding(
        "expect-dtype",
        f"saved in {saved.dtype}, expected {job.dtype}",
        f"FileNotFoundError of {wanted!r}: the name tells whether bf16 was enabled",
        [f"train in {saved.dtype}", f"{_WEIGHTS_ONLY}, which rounds the masters", _EXPORT],
    )


def _check_alignment(saved: Saved, job: Job) -> Iterator[Finding]:
    if saved.universal or saved.stage not in ("1", "2") or job.alignment in (None, saved.alignment):
        return
    yield _finding(
        "expect-alignment",
        f"saved with parameter_alignment={saved.alignment}, expected {job.alignment}",
        "RuntimeError of the 'parameter-alignment layout'",
        [f"set it to {json.dumps(saved.alignment)}", _WEIGHTS_ONLY],
    )


_CHECKS = (
    _check_form,
    _check_stage,
    _check_data_parallel,
    _check_model_parallel,
    _check_experts,
    _check_dtype,
    _check_alignment,
)


def _alike(saved: Saved, job: Job) -> bool:
    """Tell whether the stage is the same; without ZeRO, bf16 has the bf16 optimizer, too."""
    return saved.stage == job.stage or (saved.stage == "bf16" and job.stage in ("0", "1"))


def _stage(stage: str) -> str:
    return "the bf16 optimizer (ZeRO 0 or 1)" if stage == "bf16" else f"ZeRO {stage}"


def _universal(saved: Saved) -> list[str]:
    if saved.round_robin:
        return []  # ds_to_universal puts the values under wrong names then
    convert = "convert it (python -m deepspeed.checkpoint.ds_to_universal)"
    return [f'{convert} and set "checkpoint": {{"load_universal": true}}']


def _finding(code: str, differs: str, failure: str, ways: list[str]) -> Finding:
    text = f"{differs}: engine.load_checkpoint fails ({failure}). Ways out: {'; or '.join(ways)}."
    return Finding(code, "error", text)
