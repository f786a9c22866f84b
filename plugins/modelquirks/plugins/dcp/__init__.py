"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP writes them: a file a rank.

``.metadata`` says how each tensor is cut into chunks and where in the ``*.distcp`` files each lies;
every chunk is a file of ``torch.save`` within them. A tensor is the grid of its chunks. The writer
for Hugging Face's layout puts chunks into safetensors files (``shard-00001-model-…``) instead, and
where they belong into the header.

Neither the framework nor any class of the pickle is imported, and the weights stay where they are.
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
    """Open a folder of DCP, one of accelerate with such a folder below it, or a file of either."""
    from modelquirks.plugins.dcp.layouts import open_layout  # asking for records needs no planner

    return open_layout(path, names)
