"""Which weights of a checkpoint can be loaded, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.deepspeed.assemble import Assembly
from modelquirks.plugins.deepspeed.grid import Grid

__all__ = ["can_load", "listed"]


def can_load(
    grid: Grid, found: Iterable[Finding], masters: Assembly, training: Assembly
) -> Finding:
    """Sum up in one finding: which weights can be had, and which files or parameters lack."""
    wrong = {finding.code for finding in found if finding.severity == "error"}
    doubtful = wrong & {"rank-swapped", "rank-copied", "order", "group-size", "mixed-saves"}
    texts = [_training_text(grid, training), _master_text(grid, masters, doubtful=bool(doubtful))]
    return Finding("can-load", "info", f"{'; '.join(texts)}.")


def _training_text(grid: Grid, training: Assembly) -> str:
    if grid.stage == "3":
        return "training weights: no, ZeRO 3 keeps them in no file"
    experts = [name for name in grid.missing if "_expert_" in name]
    if experts:
        return f"training weights: {len(training.parameters)}, lacking {shown(experts)}"
    if training.lost or not training.parameters:
        return f"training weights: {len(training.parameters)}, lacking {_lacking(training)}"
    return f"training weights: yes, all {len(training.parameters)}, from the model files alone"


def _master_text(grid: Grid, masters: Assembly, *, doubtful: bool) -> str:
    if grid.stage == "0":
        return "fp32 masters: none, the training weights are all there is"
    if not masters.parameters:
        return f"fp32 masters: no, lacking {_lacking(masters)}"
    if doubtful:
        return "fp32 masters: not to be trusted, values may be under wrong names"
    if masters.lost:
        return (
            f"fp32 masters: {len(masters.parameters)} of "
            f"{len(masters.parameters) + len(masters.lost)}, lacking {_lacking(masters)}"
        )
    return f"fp32 masters: yes, all {len(masters.parameters)}"


def _lacking(assembly: Assembly) -> str:
    if not assembly.lost:
        return "the model files, which have the names"
    reasons = [f"{name!r} ({reason})" for name, reason in assembly.lost.items()]
    return listed(reasons)


def listed(texts: list[str]) -> str:
    """Return *texts* with commas, at most ten of them."""
    more = f" … and {len(texts) - 10} more" if len(texts) > 10 else ""
    return f"{', '.join(texts[:10])}{more}"
