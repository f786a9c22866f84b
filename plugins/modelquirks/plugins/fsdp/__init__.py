"""Sharded state dicts that each rank saved by itself with ``torch.save``, without metadata.

``pytorch_model_fsdp_0_rank1.bin`` (accelerate 1.15, ``save_fsdp_model`` with ``use_dcp=False``, and
``LOCAL_STATE_DICT``), ``model_world_size_8_rank_0.pt`` (verl), ``model_rank_0.pth``… Every piece
says itself where it belongs; only those of ``LOCAL_STATE_DICT`` do not.
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
    """Open a folder with a file of shares a rank."""
    from modelquirks.plugins.fsdp.opening import open_ranks  # records need no planner
    from modelquirks.plugins.fsdp.series import series_in

    if not path.is_dir():
        return None
    series = series_in(names)
    return open_ranks(path, series) if series.weights else None
