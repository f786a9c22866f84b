"""Writing files that people name."""

from __future__ import annotations

import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all; an OSError names *target*.

    A link at *target* is replaced and not followed, and the name of the file that becomes it cannot
    be known beforehand: the folder may be one that somebody else has filled.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(target)) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
