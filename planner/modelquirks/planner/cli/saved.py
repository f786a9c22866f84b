"""Plans that were saved, as the command line is given them."""

from __future__ import annotations

from pathlib import Path

from modelquirks.planner.checkpoint.json_text import read_json

__all__ = ["is_plan"]


def is_plan(path: Path) -> bool:
    """Tell whether *path* is a file that holds a plan, or at least the report of one."""
    if not path.is_file() or path.suffix != ".json":
        return False
    data, _ = read_json(path)
    return isinstance(data, dict) and "schema" in data
