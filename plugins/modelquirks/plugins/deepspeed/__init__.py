"""Training checkpoints of DeepSpeed, read without DeepSpeed and without running their pickles.

Rules and names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/constants.py``);
what they give was compared bit for bit with checkpoints that it wrote.
:func:`modelquirks.plugins.deepspeed.structure.read_structure` says what a saved state is and holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.quirks.hookspecs import hookimpl

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.opened import Opened
    from modelquirks.planner.checkpoint.openoptions import OpenOptions

__all__ = ["modelquirks_open"]


@hookimpl
def modelquirks_open(path: Path, names: Sequence[str], options: OpenOptions) -> Opened | None:
    """Open the folder of a saved state, or one with such folders in it."""
    del names  # a folder with states has no other name that could be told
    if not path.is_dir():
        return None
    from modelquirks.plugins.deepspeed.files import has_states  # records need no planner
    from modelquirks.plugins.deepspeed.opening import open_state

    return open_state(path, options) if has_states(path) else None
