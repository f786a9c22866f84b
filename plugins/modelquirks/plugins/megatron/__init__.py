"""Checkpoints of Megatron-LM: a folder for each tensor, pipeline and expert rank, or torch_dist.

``latest_checkpointed_iteration.txt`` names ``iter_0000010`` or ``release``, in which there are
``mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt``. How slices go together, and which layer of a stage is
which of the model, follows from the names of parameters and from the arguments that were saved
along. Tensors come out as Megatron has them on one rank, under its names.

The ``torch_dist`` format is torch.distributed.checkpoint with the layers of a decoder stacked; they
are taken apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.quirks.hookspecs import hookimpl

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.opened import Opened

__all__ = ["modelquirks_open"]


@hookimpl
def modelquirks_open(path: Path, names: Sequence[str]) -> Opened | None:
    """Open a folder of Megatron: with the tracker, of one iteration, or of torch_dist."""
    from modelquirks.plugins.megatron.dist import open_dist  # records need no planner
    from modelquirks.plugins.megatron.files import located
    from modelquirks.plugins.megatron.opening import open_ranks

    if not path.is_dir():
        return None
    found = located(path, names)
    if found is None:
        return None
    return open_dist(path, found) if found.is_dist else open_ranks(path, found)
