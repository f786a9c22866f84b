"""Writing files that people name."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_whole"]


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all; an OSError names *target*."""
    partial = target.with_name(target.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(target)) from error
