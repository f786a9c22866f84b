"""``Structure``: what a DeepSpeed checkpoint is and holds, from names and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelquirks.planner.checkpoint.openoptions import Weights
from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.assemble import masters, tied, training
from modelquirks.plugins.deepspeed.checks import check, eased
from modelquirks.plugins.deepspeed.expect import compare
from modelquirks.plugins.deepspeed.files import Folder, locate
from modelquirks.plugins.deepspeed.grid import Grid, read_grid
from modelquirks.plugins.deepspeed.loads import can_load, cannot, is_doubtful
from modelquirks.plugins.deepspeed.moments import optimizer_state
from modelquirks.plugins.deepspeed.parameter import Parameter
from modelquirks.plugins.deepspeed.universal import read_universal

__all__ = ["Structure", "read_structure"]


@dataclass(frozen=True, eq=False)
class Structure:
    """One saved state. The parameters are those whose bytes are all there."""

    folder: Folder
    grid: Grid
    masters: Mapping[str, Parameter]
    """In fp32; of ZeRO 3 and universal ones also what was frozen, and the buffers."""
    training: Mapping[str, Parameter]
    """In the module's dtype, complete for all but ZeRO 3."""
    ties: Mapping[str, str]
    """Name under which each name that shares a parameter is stored."""
    lost_masters: Mapping[str, str]
    """By name: the file that lacks, or what else is not known."""
    lost_training: Mapping[str, str]
    weights: Weights
    """Which of them are taken; the findings are about these."""
    findings: tuple[Finding, ...]

    def best(self) -> dict[str, Parameter]:
        """Return every tensor of the model as exactly as it is stored: masters, then the rest.

        A tied name gives the parameter that it shares. Where the training weights were asked for,
        only these.
        """
        masters = self.masters if self.weights == "master" else {}
        found = {**self.training, **masters}
        for duplicate, name in self.ties.items():
            if name in found:
                found[duplicate] = found[name]
        return found


def read_structure(
    path: str | Path,
    *,
    tag: str | None = None,
    weights: Weights | None = None,
    expect: Mapping[str, Any] | None = None,
) -> Structure:
    """Read the names and headers of a checkpoint; nothing in it is executed.

    *path* is the folder with ``latest`` in it, or that of a tag. *weights* are the masters, unless
    there are none. *expect* is compared with how it was saved. Raises CheckpointError if
    there is no such state; what is wrong with its files are findings.
    """
    folder = locate(Path(path), tag)
    grid = read_grid(folder.path, universal=folder.universal)
    if folder.universal:
        whole, universal_findings = read_universal(folder.path, grid)
    else:
        whole, universal_findings = masters(grid), ()
    trained = training(grid)
    has_masters = any(p.origin == "master" for p in whole.parameters.values())
    taken: Weights = weights or ("master" if has_masters or whole.lost else "training")
    found = (
        *universal_findings,
        *check(grid, tag=folder.tag, masters=whole, training=trained, universal=folder.universal),
    )
    doubtful = is_doubtful(found)
    if taken == "training":
        found = eased(found, grid, tag=folder.tag, training=trained, universal=folder.universal)
    return Structure(
        folder=folder,
        grid=grid,
        masters=whole.parameters,
        training=trained.parameters,
        ties=tied(grid),
        lost_masters=whole.lost,
        lost_training=trained.lost,
        weights=taken,
        findings=(
            *folder.findings,
            *found,
            *cannot(grid, taken, whole),
            *(() if expect is None else compare(grid, folder, expect)),
            optimizer_state(grid, folder),
            can_load(grid, whole, trained, taken=taken, doubtful=doubtful),
        ),
    )
