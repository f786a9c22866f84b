"""Wording: how numbers, names and times are told, in the terminal and in files.

Text comes from checkpoints that anybody may have made: what does not print is written as an escape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelquirks.planner.placement.memory import show_bytes

__all__ = ["clean", "compact_names", "counted", "show_seconds", "show_shape", "summary"]


def clean(text: str) -> str:
    r"""Return *text* with every character that does not print written as an escape.

    >>> clean("a\x1b[31m\nb")
    'a\\x1b[31m\\nb'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


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
    """Return module names with neighbours of one list as a range; the root is ``(all)``.

    >>> compact_names(["embed", "layers.0", "layers.1", "layers.2", "layers.10", ""])
    ['embed', 'layers.0-2', 'layers.10', '(all)']
    """
    runs: list[tuple[str, int | None, int | None]] = []
    for name in names:
        head, _, last = name.rpartition(".")
        if not last.isdecimal():
            runs.append((name, None, None))
        elif runs and runs[-1][0] == head and runs[-1][2] == int(last) - 1:
            runs[-1] = (head, runs[-1][1], int(last))
        else:
            runs.append((head, int(last), int(last)))
    return [_run(*run) for run in runs]


def _run(head: str, first: int | None, last: int | None) -> str:
    if first is None:
        return head or "(all)"
    prefix = f"{head}." if head else ""
    return f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
