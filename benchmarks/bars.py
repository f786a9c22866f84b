"""``bars``: measured times as bars, in a small picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log10
from typing import NamedTuple

__all__ = ["Bar", "bars"]

_LABEL, _LONGEST, _LINE = 190, 340, 17


class Bar(NamedTuple):
    """One time."""

    who: str
    seconds: float
    note: str = ""
    """Behind the seconds."""


def bars(groups: Mapping[str, Sequence[Bar]], *, logarithmic: bool = False) -> str:
    """Return a picture of the times, a group under each title.

    The longest bar of a group is as long as that of another; *logarithmic*: a hundredth of its
    time is half as long.
    """
    rows = [*_rows(groups, logarithmic=logarithmic)]
    height = 10 + _LINE * len(rows)
    lines = [row.replace("{y}", str(10 + _LINE * n)) for n, row in enumerate(rows)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#222">\n'
        f'<rect width="760" height="{height}" fill="#fff"/>'
    )
    return "\n".join((head, *lines, "</svg>\n"))


def _rows(groups: Mapping[str, Sequence[Bar]], *, logarithmic: bool) -> Iterator[str]:
    for title, listed in groups.items():
        yield _at(f'<text x="8" y="12" font-weight="bold">{escape(title)}</text>')
        slowest = max(bar.seconds for bar in listed)
        for bar in listed:
            share = bar.seconds / slowest
            if logarithmic:
                share = max(0.0, 1 + log10(share) / 4) if share else 0.0
            width = max(1, round(_LONGEST * share))
            colour = "#2a7" if bar.who.startswith(("ours", "modelquirks")) else "#89a"
            yield _at(
                f'<text x="20" y="12">{escape(bar.who)}</text>'
                f'<rect x="{_LABEL}" y="1" width="{width}" height="13" fill="{colour}"/>'
                f'<text x="{_LABEL + width + 6}" y="12">{_told(bar)}</text>'
            )


def _at(content: str) -> str:
    return f'<g transform="translate(0 {{y}})">{content}</g>'


def _told(bar: Bar) -> str:
    seconds = f"{bar.seconds:.2f} s" if bar.seconds >= 1 else f"{bar.seconds * 1e3:.1f} ms"
    return escape(", ".join(filter(None, (seconds, bar.note))))
