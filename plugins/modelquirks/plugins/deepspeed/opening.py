"""From the structure of a saved state to places and recipes, for the planner."""

from __future__ import annotations

from pathlib import Path

from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.checkpoint.opened import Opened, shard_of
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.files import list_states
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.offers import stored_pieces
from modelquirks.plugins.deepspeed.parameter import recipe
from modelquirks.plugins.deepspeed.structure import read_structure

__all__ = ["open_state"]


def open_state(root: Path, options: OpenOptions = AS_USUAL) -> Opened:
    """Return what the state in *root*, or in the one below it that it names, holds.

    Of each tensor the fp32 master, if there is one and nothing else was asked for. Where several
    states are there and none is named, an error lists them.
    """
    try:
        structure = read_structure(
            root, tag=options.tag, weights=options.weights, expect=options.expect
        )
    except CheckpointError as error:
        unknown = Finding("state-unknown", "error", str(error))
        return Opened("deepspeed", {}, {}, (), (unknown,), chosen=options)
    below = structure.folder.path.relative_to(root).as_posix()
    prefix = "" if below == "." else f"{below}/"
    found = {name: p for name, p in structure.best().items() if any(True for _ in p.pieces)}
    places = {
        name: place._replace(shard=f"{prefix}{place.shard}")
        for name, place in stored_pieces(found.values()).items()
    }
    files = {place.shard for place in places.values()}
    files |= {f"{prefix}{state.name}" for state in list_states(structure.folder.path)}
    return Opened(
        format="deepspeed",
        places=places,
        tensors={name: recipe(parameter) for name, parameter in found.items()},
        shards=tuple(shard_of(root, file) for file in sorted(files)),
        findings=structure.findings,
        container=_container(structure.grid),
        chosen=OpenOptions(structure.weights, below if prefix else options.tag, options.expect),
    )


def _container(grid: Grid) -> str:
    """Return ``lightning`` if its DeepSpeed strategy saved this: the names are a LightningModule's.

    Source: ``DeepSpeedStrategy.save_checkpoint`` of lightning 2.6 gives its whole state to
    ``engine.save_checkpoint`` as ``client_state``.
    """
    told = any("pytorch-lightning_version" in model.facts for model in grid.models.values())
    return "lightning" if told else ""
