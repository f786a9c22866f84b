"""From the files of Megatron's ranks to places and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.checkpoint.place_tensors import place_tensors
from modelquirks.planner.checkpoint.torch_content import record_findings
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.megatron.cuts import cut_of, joined
from modelquirks.plugins.megatron.files import Located
from modelquirks.plugins.megatron.naming import (
    Offsets,
    expert_count,
    is_expert,
    layer_counts,
    numbered,
    offsets_of,
)
from modelquirks.plugins.megatron.positions import about_copies, about_positions, folder_name
from modelquirks.plugins.megatron.rank import Grid, Position, Rank, grid_of, position_of, read_rank
from modelquirks.quirks.recipe import Node, RecipeError, Source

__all__ = ["open_ranks"]


class _Slice(NamedTuple):
    """What one rank has of a parameter of the whole model."""

    record: TensorRecord
    rank: Rank


@dataclass(frozen=True, eq=False)
class _Saved:
    """All ranks by position, and what is known of the run."""

    grid: Grid
    ranks: Mapping[Position, Rank]
    args: Mapping[str, Any]


def open_ranks(root: Path, found: Located) -> Opened:
    """Return what the folders of ranks hold; with what is missing or does not fit as findings."""
    ranks = tuple(read_rank(root, found.below, folder) for folder in found.ranks)
    findings = [*found.findings, *(one for rank in ranks for one in rank.findings)]
    if not ranks:
        return Opened("megatron", {}, {}, (), tuple(findings))
    grid = grid_of(ranks)
    saved = _Saved(
        grid,
        {position_of(rank.folder, grid): rank for rank in ranks},
        next((rank.args for rank in ranks if rank.args), {}),
    )
    findings += [
        *_about_grid(saved, ranks),
        *about_copies(ranks),
        *about_positions(saved.ranks, grid),
    ]
    slices, about = _slices(saved)
    recipes, faults = _recipes(slices, saved)
    places, misplaced = _placed(slices, recipes)
    return Opened(
        format="megatron",
        places=places,
        tensors=recipes,
        shards=tuple(rank.content.shard for rank in ranks),
        findings=(*findings, *about, *_about_faults(faults), *misplaced, *_about_rest(ranks)),
    )


def _slices(saved: _Saved) -> tuple[dict[str, dict[int, _Slice]], list[Finding]]:
    """Return by the whole model's names the slices of each parameter, by tensor-parallel rank."""
    counts = [_counts(saved, stage) for stage in range(saved.grid.pipeline)]
    offsets, total = offsets_of(counts)
    found: dict[str, dict[int, _Slice]] = {}
    ordered = sorted(saved.ranks.items(), key=lambda pair: (*pair[0][1:], pair[0].tensor))
    for (tensor, stage, owner), rank in ordered:
        if stage >= saved.grid.pipeline:
            continue
        for offset, tensors in zip(offsets[stage], rank.chunks, strict=False):
            at = Offsets(offset, owner * expert_count(tensors))
            for name, record in tensors.items():
                if owner == 0 or is_expert(name):  # all else is the same on every expert rank
                    slices = found.setdefault(numbered(name, at), {})
                    slices.setdefault(tensor, _Slice(record, rank))
    return found, [*_about_layers(saved, total)]


def _counts(saved: _Saved, stage: int) -> list[dict[str, int]]:
    """Return the layers of each chunk of a stage, by any of its ranks."""
    for position, rank in saved.ranks.items():
        if position.pipeline == stage and rank.chunks:
            return [layer_counts(chunk) for chunk in rank.chunks]
    return []


def _place_name(name: str, rank_number: int, node_count: int) -> str:
    return name if node_count == 1 else f"{name}@{rank_number}"


def _recipes(
    slices: Mapping[str, Mapping[int, _Slice]], saved: _Saved
) -> tuple[dict[str, Node], dict[str, str]]:
    """Return how each parameter is made, and of the others why they cannot be."""
    recipes: dict[str, Node] = {}
    faults: dict[str, str] = {}
    gated = saved.args.get("swiglu") is True or saved.args.get("gated_linear_unit") is True
    for name, held in slices.items():
        try:
            recipes[name] = _whole(name, held, saved, gated=gated)
        except RecipeError as error:
            faults[name] = str(error)
    return recipes, faults


def _whole(name: str, held: Mapping[int, _Slice], saved: _Saved, *, gated: bool) -> Node:
    size = saved.grid.tensor
    first = held[min(held)].record
    if size == 1:
        return Source(name)
    if is_expert(name) and saved.args.get("expert_tensor_parallel_size") not in (None, size):
        raise RecipeError("experts are cut over another number of ranks than the rest")
    cut = cut_of(name, first.shape, gated=gated)
    if cut is None:
        raise RecipeError("how its slices go together is not known")
    if cut == "whole":
        return Source(_place_name(name, min(held), 1))
    if absent := [number for number in range(size) if number not in held]:
        raise RecipeError(f"the slices of tensor ranks {absent} are missing")
    shapes = {piece.record.shape for piece in held.values()}
    if len(shapes) > 1:
        raise RecipeError(f"its slices have different shapes: {sorted(shapes)}")
    nodes = [Source(_place_name(name, number, size)) for number in range(size)]
    return joined(nodes, first.shape, cut)


def _placed(
    slices: Mapping[str, Mapping[int, _Slice]], recipes: Mapping[str, Node]
) -> tuple[dict[str, StoredTensor], list[Finding]]:
    by_rank: dict[Rank, dict[str, TensorRecord]] = {}
    for name, node in recipes.items():
        held = slices[name]
        if node == Source(name):
            number = min(held)
            by_rank.setdefault(held[number].rank, {})[name] = held[number].record
            continue
        for number, piece in held.items():
            records = by_rank.setdefault(piece.rank, {})
            records[_place_name(name, number, len(held))] = piece.record
    places: dict[str, StoredTensor] = {}
    findings: list[Finding] = []
    for rank, records in by_rank.items():
        shard = rank.content.shard.name
        placed, beyond = place_tensors(shard, records, begins=rank.content.begins)
        places |= placed
        findings += (*beyond, *record_findings(shard, rank.content.faults, records))
    return places, findings


def _about_grid(saved: _Saved, ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    tensor, pipeline, expert = saved.grid
    text = f"saved by {tensor} tensor, {pipeline} pipeline and {expert} expert ranks"
    iterations = {rank.iteration for rank in ranks if rank.iteration is not None}
    if len(iterations) == 1:
        text += f", iteration {next(iter(iterations))}"
    yield Finding("grid", "info", f"{text}; parameters come out as on one rank.")
    if len(iterations) > 1:
        text = f"the ranks are of different iterations, {sorted(iterations)}: not of one save."
        yield Finding("mixed-saves", "error", text)
    wanted = (
        Position(t, p, e) for p in range(pipeline) for e in range(expert) for t in range(tensor)
    )
    absent = [
        f"{_told(position)} ({folder_name(position, saved.grid)!r})"
        for position in wanted
        if position not in saved.ranks
    ]
    if absent:
        text = (
            f"{len(absent)} ranks are missing: {'; '.join(absent[:10])}. Their layers and slices "
            "cannot be loaded; copy their folders here."
        )
        yield Finding("shard-missing", "error", text)
    beyond = [
        rank.folder.name
        for position, rank in saved.ranks.items()
        if position.tensor >= tensor or position.pipeline >= pipeline or position.expert >= expert
    ]
    if beyond:
        text = (
            f"these folders are of ranks that the run did not have, and not read: {shown(beyond)}."
        )
        yield Finding("extra-shards", "warning", text)
    if not saved.args:
        text = (
            "the files hold no arguments of the run ('args'): the grid is taken from the names of "
            "the folders, and the MLP to be without a gate."
        )
        yield Finding("arguments-missing", "warning", text)


def _told(position: Position) -> str:
    return f"tensor {position.tensor}, pipeline {position.pipeline}, expert {position.expert}"


def _about_layers(saved: _Saved, total: Mapping[str, int]) -> Iterator[Finding]:
    wanted = saved.args.get("num_layers")
    found = next((n for stack, n in total.items() if not stack.startswith("mtp")), None)
    if type(wanted) is int and found is not None and found != wanted:
        text = (
            f"the stages have {found} layers together, and the model has {wanted} by the arguments "
            "of the run: layers may be under wrong numbers."
        )
        yield Finding("layers-differ", "error", text)


def _about_faults(faults: Mapping[str, str]) -> Iterator[Finding]:
    if faults:
        told = "; ".join(f"{name!r}: {why}" for name, why in [*faults.items()][:10])
        more = f" … and {len(faults) - 10} more" if len(faults) > 10 else ""
        text = f"{len(faults)} parameters cannot be put together, and are left out: {told}{more}."
        yield Finding("slices-unknown", "error", text)


def _about_rest(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    rest = sorted({key for rank in ranks for key in rank.rest})
    if rest:
        text = f"the state of the optimizer ({shown(rest)}) is not loaded."
        yield Finding("not-loaded", "info", text)
