"""Plans that were saved, as the command line is given them."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["is_plan"]


def is_plan(path: Path) -> bool:
    """Tell whether *path* is a file that holds a plan, or at least the report of one."""
    if not path.is_file() or path.suffix != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "schema" in data
