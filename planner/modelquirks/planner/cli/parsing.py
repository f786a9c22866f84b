"""Texts of arguments, read so that argparse says what is wrong with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelquirks.planner.checkpoint.json_text import JsonProblem, read_json
from modelquirks.planner.cli.command import CallError

__all__ = ["checked", "read_json_file"]


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return *parse* as argparse wants it: it keeps the text of a ValueError only this way."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def read_json_file(path: str, other: str = "") -> Any:
    """Return the JSON of a file; CallError if there is none, *other* saying what it is not."""
    value, _ = read_json(Path(path))
    if isinstance(value, JsonProblem):
        what = f"is {other}a file that can be read: it " if value.code in _NO_FILE else ""
        raise CallError(f"{path!r} {what}{value.text}")
    return value


_NO_FILE = ("file-unreadable",)
