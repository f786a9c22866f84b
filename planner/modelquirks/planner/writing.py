"""Writing files that people name."""

from __future__ import annotations

from pathlib import Path

from modelquirks.planner import wholefile
from modelquirks.planner.finding import Finding
from modelquirks.planner.tell import tell

__all__ = ["write_whole"]


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all, safe on the disk; an OSError names *target*.

    What dead processes left unfinished beside it is removed, and that is logged.
    """
    try:
        cleared = wholefile.clear_partials(target)
        wholefile.write_whole(target, [text.encode("utf-8")])
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(target)) from error
    words = (f"{str(path)!r}, which a process left that died, was removed" for path in cleared)
    tell(Finding("partial-cleared", "info", text) for text in words)
