"""Which weights of a checkpoint can be loaded and how much they are, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelquirks.planner.checkpoint.openoptions import Weights
from modelquirks.planner.dtypes import FLOATS, nbytes, torch_name
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.plugins.deepspeed.assemble import Assembly, tied
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.parameter import Parameter

__all__ = ["can_load", "cannot", "is_doubtful", "listed"]

_DOUBTS = {"rank-swapped", "rank-copied", "order", "group-size", "mixed-saves"}


def is_doubtful(found: Iterable[Finding]) -> bool:
    """Tell whether values of masters may be under wrong names."""
    return any(f.severity == "error" and f.code in _DOUBTS for f in found)


def can_load(
    grid: Grid, masters: Assembly, training: Assembly, *, taken: Weights, doubtful: bool
) -> Finding:
    """Sum up in one finding: which weights can be had, their sizes, and what lacks."""
    texts = [_training_text(grid, training), _master_text(grid, masters, doubtful=doubtful)]
    if taken == "master":
        shared = tied(grid)
        rest = {n: p for n, p in training.parameters.items() if n not in shared}
        whole = {**rest, **masters.parameters}
        more = (
            ", with what has none as it was trained" if len(whole) > len(masters.parameters) else ""
        )
        texts.append(f"taken are the masters{more}: {_size(whole.values())}")
    else:
        texts.append("taken are the training weights")
    return Finding("can-load", "info", f"{'; '.join(texts)}.")


def cannot(grid: Grid, weights: Weights, masters: Assembly) -> Iterator[Finding]:
    """Yield the error if the checkpoint has no such weights at all."""
    if weights == "training" and grid.stage == "3":
        text = (
            "weights 'training' asked for: ZeRO 3 keeps them in no file, the module's tensors in "
            "its model files are placeholders without elements. Take the fp32 masters (leave "
            "--weights out) with --dtype of the training: they are what the training weights were "
            "rounded from. Or give the file that 'save_16bit_model' wrote, if there is one."
        )
        yield Finding("no-training-weights", "error", text)
    if weights == "master" and not (masters.parameters or masters.lost):
        text = (
            "weights 'master' asked for: this checkpoint has none, as ZeRO 0 without bf16 trains "
            "the module's own weights. Leave --weights out to take these."
            if grid.stage == "0"
            else "weights 'master' asked for: no file of masters can be read."
        )
        yield Finding("no-masters", "error", text)


def _training_text(grid: Grid, training: Assembly) -> str:
    if grid.stage == "3":
        return "training weights: no, ZeRO 3 keeps them in no file"
    experts = [name for name in grid.missing if "_expert_" in name]
    if experts:
        return f"training weights: {len(training.parameters)}, lacking {shown(experts)}"
    if training.lost or not training.parameters:
        return f"training weights: {len(training.parameters)}, lacking {_lacking(training)}"
    size = _size(training.parameters.values())
    return (
        f"training weights: yes, all {len(training.parameters)}, {size}, from the model files alone"
    )


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
    size = _size(masters.parameters.values())
    return f"fp32 masters: yes, all {len(masters.parameters)}, {size}"


def _size(parameters: Iterable[Parameter]) -> str:
    """Return bytes and dtypes, ``1.2 KiB of float32``; what is tied counts once."""
    places = {tuple(piece[1:] for piece in p.pieces): p for p in parameters}
    dtypes = sorted({torch_name(p.dtype) for p in places.values() if p.dtype in FLOATS})
    size = show_bytes(sum(nbytes(p.dtype, p.shape) for p in places.values()))
    return f"{size} of {' and '.join(dtypes)}" if dtypes else size


def _lacking(assembly: Assembly) -> str:
    if not assembly.lost:
        return "the model files, which have the names"
    reasons = [f"{name!r} ({reason})" for name, reason in assembly.lost.items()]
    return listed(reasons)


def listed(texts: list[str]) -> str:
    """Return *texts* with commas, at most ten of them."""
    more = f" … and {len(texts) - 10} more" if len(texts) > 10 else ""
    return f"{', '.join(texts[:10])}{more}"
