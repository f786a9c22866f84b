"""Wording: how numbers, names and times are told, in the terminal and in files.

Text comes from checkpoints that anybody may have made: what does not print is written as an escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.placement.memory import show_bytes

__all__ = ["clean", "compact_names", "counted", "ranges", "show_seconds", "show_shape", "summary"]

_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
"""Characters that take no room or are blank, and that Python calls printable all the same: those
of Unicode's Default_Ignorable_Code_Point, and the empty pattern of Braille."""
_INDEX = re.compile("0|[1-9][0-9]*")
"""An index as Python writes it: ``01`` is a word."""


def clean(text: str) -> str:
    r"""Return *text* with every character that does not print, or is not seen, as an escape.

    >>> clean("a\x1b[31m\nb")
    'a\\x1b[31m\\nb'
    """
    if text.isprintable() and (text.isascii() or not _UNSEEN.search(text)):
        return text
    return "".join(
        char if char.isprintable() and not _UNSEEN.match(char) else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "family", "families"), counted(35743, "tensor")
    ('1 family', '35,743 tensors')
    """
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def summary(checkpoint: Mapping[str, Any]) -> str:
    """Return what the checkpoint is, in half a line, from the object of the JSON report."""
    parts = [
        str(checkpoint["format"]),
        counted(checkpoint["tensors"], "tensor"),
        counted(checkpoint["families"], "family", "families"),
        counted(checkpoint["shards"], "file"),
    ]
    if checkpoint["total_bytes"] is not None:
        parts.append(show_bytes(checkpoint["total_bytes"]))
    if chosen := OpenOptions(**checkpoint.get("chosen", {})).told():
        parts.append(chosen)
    return ", ".join(parts)


def show_seconds(seconds: float) -> str:
    """Return a time as people read it.

    >>> show_seconds(0.0123), show_seconds(2.5), show_seconds(1e-7)
    ('12.3 ms', '2.5 s', 'under 0.01 ms')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-5 else "under 0.01 ms"


def show_shape(shape: tuple[int, ...] | None) -> str:
    """Return a shape as people read it.

    >>> show_shape((32, 128)), show_shape(()), show_shape(None)
    ('[32, 128]', '[]', '?')
    """
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def compact_names(names: Sequence[str]) -> list[str]:
    """Return module names, those that differ only in their last index as one, with ranges.

    The root is ``(all)``. Each is where the first of its names was.

    >>> compact_names(["embed", "layers.0", "layers.1", "layers.2", "layers.10", ""])
    ['embed', 'layers.0-2,10', '(all)']
    >>> compact_names(["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"])
    ['layers.{0-1}.up', 'layers.{0-1}.down']
    """
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        segments = name.split(".")
        at = next(
            (n for n in reversed(range(len(segments))) if _INDEX.fullmatch(segments[n])), None
        )
        if at is None:
            found[name, ""] = []
        else:
            around = (".".join(segments[:at]), ".".join(segments[at + 1 :]))
            found.setdefault(around, []).append(int(segments[at]))
    return [_compact(*around, indices) for around, indices in found.items()]


def _compact(before: str, behind: str, indices: Sequence[int]) -> str:
    if not indices:
        return before or "(all)"
    numbers = ranges(indices).replace(", ", ",")
    if not behind:
        return f"{before}.{numbers}" if before else numbers
    middle = numbers if numbers.isdecimal() else f"{{{numbers}}}"
    return f"{before}.{middle}.{behind}" if before else f"{middle}.{behind}"


def ranges(numbers: Iterable[int]) -> str:
    """Return *numbers* as ranges, each once, in order.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
