"""Checkpoints of Megatron-LM: a folder for each tensor, pipeline and expert rank, or torch_dist.

``latest_checkpointed_iteration.txt`` names ``iter_0000010`` or ``release``, in which there are
``mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt``. How slices go together, and which layer of a stage is
which of the model, follows from the names of parameters and from the arguments that were saved
along. Tensors come out as Megatron has them on one rank, under its names.

The ``torch_dist`` format is torch.distributed.checkpoint with the layers of a decoder stacked; they
are taken apart again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.plugins.megatron.records import RECORDS
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import ModelQuirks

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.opened import Opened
    from modelquirks.planner.checkpoint.openoptions import OpenOptions

__all__ = ["RECORDS", "modelquirks_open", "modelquirks_records"]


@hookimpl
def modelquirks_open(path: Path, names: Sequence[str], options: OpenOptions) -> Opened | None:
    """Open a folder of Megatron: with the tracker, of one iteration, or of torch_dist."""
    from modelquirks.planner.checkpoint.openoptions import OpenOptions  # records need no planner
    from modelquirks.plugins.megatron.dist import open_dist
    from modelquirks.plugins.megatron.files import located
    from modelquirks.plugins.megatron.opening import open_ranks

    if not path.is_dir():
        return None
    found = located(path, names, options.tag)
    if found is None:
        return None
    opened = open_dist(path, found) if found.is_dist else open_ranks(path, found)
    return replace(opened, chosen=OpenOptions(tag=found.below or None))


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of megatron-core's names."""
    return RECORDS
