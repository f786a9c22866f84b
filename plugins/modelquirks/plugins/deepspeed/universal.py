"""Universal checkpoints: one folder a parameter, already put together.

Source: ``checkpoint/ds_to_universal.py`` of DeepSpeed 0.19.8. From ZeRO 1 and 2 a file holds
``{"param": tensor, …}``, from ZeRO 3 the tensor alone and flat, without frozen parameters, buffers
and tied names, which are in the model files that were copied beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.fingerprint import copies_among
from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.deepspeed.assemble import Assembly, masters, training
from modelquirks.plugins.deepspeed.files import StateName
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.parameter import Fragment, Origin, Parameter
from modelquirks.plugins.deepspeed.pieces import numel
from modelquirks.plugins.deepspeed.saved import Placed, SavedState, Shapes, mapping, read_saved

__all__ = ["read_universal"]


def read_universal(folder: Path, grid: Grid) -> tuple[Assembly, tuple[Finding, ...]]:
    """Return the parameters under ``zero/``, and with ZeRO 3 what is in the model files only.

    ``round_robin_gradients`` makes ``ds_to_universal`` write wrong values (0.19.8): an error.
    """
    found = Assembly()
    findings: list[Finding] = [*_round_robin(grid)]
    facts = [f for mp in range(grid.mp) if (f := grid.facts_of(mp))]
    shapes: Shapes = {k: v for f in facts for group in f.groups or () for k, v in group.items()}
    frozen = {name for f in facts for name in f.frozen_shapes or ()}
    buffers = {name for f in facts for name in f.buffers}
    files: list[Shard] = []
    for path in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        name, shard = path.name, f"zero/{path.name}/fp32.pt"
        state = read_saved(path, StateName("fp32.pt", "model"), shard=shard)
        files.append(replace(state.shard, name=shard))
        placed = _placed(name, state)
        findings += placed.findings
        fragment = _fragment(placed.tensors.get(name), shapes.get(name) if grid.tp == 1 else None)
        if fragment is None:
            found.lost[name] = shard
            continue
        origin: Origin = "frozen" if name in frozen else "master"
        origin = "buffer" if name in buffers else origin
        found.parameters[name] = Parameter(
            name, origin, fragment.dtype, fragment.shape, (fragment,)
        )
    for name, parameter in masters(grid).parameters.items():
        found.parameters.setdefault(name, parameter)
    for name, parameter in training(grid).parameters.items():
        if parameter.origin == "buffer":  # whole numbers are floats under 'zero', and may be wrong
            found.parameters[name] = parameter
            found.lost.pop(name, None)
    lacking = [name for name in shapes if name not in found.parameters and name not in found.lost]
    found.lost |= {name: f"zero/{name}/fp32.pt" for name in lacking}
    if lacking:
        text = f"'zero' has no folder for {len(lacking)} trained parameters: {shown(lacking)}."
        findings.append(Finding("parameter-missing", "error", text))
    for names in copies_among(files):
        text = f"{shown(names)} are one and the same file: these parameters have equal values."
        findings.append(Finding("equal-files", "info", text))
    return found, tuple(findings)


def _placed(name: str, state: SavedState) -> Placed:
    placed = state.place({name: state.value.get("param")})
    return Placed(placed.tensors, (*state.findings, *placed.findings))


def _fragment(stored: StoredTensor | None, shape: tuple[int, ...] | None) -> Fragment | None:
    if stored is None or stored.begin is None or stored.dtype is None or stored.shape is None:
        return None
    flat = len(stored.shape) == 1 and shape is not None and numel(shape) == stored.shape[0]
    return Fragment(stored.dtype, shape if flat and shape else stored.shape, (stored,))


def _round_robin(grid: Grid) -> tuple[Finding, ...]:
    for model in grid.models.values():
        if is_round_robin(model.config):
            text = (
                f"{model.saved.shard.name!r} was trained with 'round_robin_gradients': "
                "ds_to_universal then puts the values of parameters under wrong names. Read the "
                "checkpoint that it was made from."
            )
            return (Finding("round-robin-universal", "error", text),)
    return ()


def is_round_robin(config: Mapping[str, object]) -> bool:
    """Tell whether a run's config asks for ``round_robin_gradients``."""
    return mapping(config.get("zero_optimization")).get("round_robin_gradients") is True
