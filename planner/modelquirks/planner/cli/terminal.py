"""The terminal: how a result is laid out for people, and what goes to which stream.

Standard output carries the result and nothing else; whatever else there is to say goes to
standard error. Text comes from checkpoints that anybody may have made, so nothing in it is
markup, and characters that do not print are shown as escapes.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from modelquirks.planner.wording import clean

if TYPE_CHECKING:
    from threading import Event

    from rich.box import Box
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.text import Text

__all__ = ["Cell", "Column", "Styled", "Terminal", "folded", "note", "progress", "wants_colour"]

_PLAIN = str.maketrans({"…": "...", "→": "->", "\u00d7": "x", "≥": ">=", "≤": "<="})
_PIECE = re.compile(r"[^.,/ ]*[.,/]|[^.,/ ]+")
"""What a long word may be broken into."""
_PROGRESS_AFTER_S = 1.0


class Styled(NamedTuple):
    """Text with a style of rich (``bold``, ``red``…), seen only where colours are."""

    text: str
    style: str
    indent: int = 0
    """Columns that every line of it is moved to the right."""


Cell = str | Styled


class Column(NamedTuple):
    """One column of a table. Text of a column that folds may take several lines.

    Names are broken behind a dot, where they can be.
    """

    title: str
    align: Literal["left", "right"] = "left"
    folds: bool = False


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Tell whether *stream* gets colours: NO_COLOR, then FORCE_COLOR, then what it is."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def note(level: Literal["error", "warning", "hint"], text: str) -> None:
    """Write *text* to standard error; the lines of a list stay lines."""
    lines = f"modelquirks: {level}: {text}".splitlines()
    told = "\n".join(_encodable(line.rstrip(), sys.stderr) for line in lines if line.strip())
    print(told, file=sys.stderr, flush=True)


@contextmanager
def progress(text: str) -> Generator[None]:
    """Show people that something goes on, on standard error, once it has taken a second."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    import threading

    done = threading.Event()
    thread = threading.Thread(target=_spin, args=(text, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Terminal:
    """A stream that people read: paragraphs and tables, as wide as it is."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] | None = None) -> None:
        """Write to *stream* as it and *environ* (the process's own by default) allow."""
        self._stream = stream
        self._environ = os.environ if environ is None else environ

    def say(
        self,
        text: str = "",
        *,
        style: str = "",
        indent: int = 0,
        hanging: int = 2,
        wraps: bool = True,
    ) -> None:
        """Write a paragraph, indented; lines after the first stand *hanging* columns further in.

        A word is never broken, and without *wraps* nothing is: it can be copied.
        """
        told = _encodable(text, self._stream)
        wrapped = textwrap.fill(
            told,
            self._console.width if wraps else indent + len(told) + 1,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_long_words=False,
            break_on_hyphens=False,
        )
        self._write(self._text(Styled(wrapped, style), is_clean=True), is_wrapped=True)

    @property
    def width(self) -> int:
        """Columns that fit beside each other."""
        return self._console.width

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
        """Write *rows* under the titles of *columns*; a table without titles has no head."""
        from rich.table import Table

        table = Table(
            box=self._box,
            show_header=any(column.title for column in columns),
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold",
        )
        for column in columns:
            table.add_column(
                column.title, justify=column.align, no_wrap=not column.folds, overflow="fold"
            )
        for row in rows:
            table.add_row(*map(self._cell, row, [column.folds for column in columns]))
        self._write(table)

    def _cell(self, cell: Cell, folds: bool) -> RenderableType:
        from rich.padding import Padding

        text = _Folding(self._text(cell)) if folds else self._text(cell)
        indent = cell.indent if isinstance(cell, Styled) else 0
        return Padding(text, (0, 0, 0, indent)) if indent else text

    def _text(self, cell: Cell, *, is_clean: bool = False) -> Text:
        from rich.text import Text

        styled = cell if isinstance(cell, Styled) else Styled(cell, "")
        text = styled.text if is_clean else _encodable(styled.text, self._stream)
        return Text(text, styled.style)

    def _write(self, renderable: RenderableType, *, is_wrapped: bool = False) -> None:
        """Write without the blanks that rich pads lines with."""
        with self._console.capture() as capture:
            self._console.print(renderable, soft_wrap=is_wrapped)
        lines = capture.get().splitlines()
        self._stream.write("".join(f"{line.rstrip()}\n" for line in lines))

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        colour = wants_colour(self._stream, self._environ)
        return Console(
            file=self._stream,
            color_system="standard" if colour else None,
            force_terminal=colour,
            no_color=not colour,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
            _environ=self._environ,
        )

    @cached_property
    def _box(self) -> Box:
        """Rules under the titles and nothing else."""
        from rich.box import Box

        rule = "─" if _is_unicode(self._stream) else "-"
        blank = "    \n"
        return Box(f"{blank * 2} {rule * 2} \n{blank * 5}", ascii=rule == "-")


def folded(text: str, width: int) -> list[str]:
    """Return *text* in lines of at most *width*: words whole, long names in whole segments.

    >>> folded("see model.layers.*.mlp.up_proj.weight", 22)
    ['see', 'model.layers.*.mlp.', 'up_proj.weight']
    """
    lines = [""]
    for word in text.split(" "):
        space = " " if lines[-1] else ""
        if len(lines[-1]) + len(space) + len(word) <= width:
            lines[-1] += space + word
            continue
        if lines[-1]:
            lines.append("")
        for piece in _PIECE.findall(word):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
            while len(lines[-1]) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


class _Folding:
    """Text for a column that folds, as rich asks for it."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in folded(self._text.plain, max(1, options.max_width)):
            yield Text(line, self._text.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        pieces = _PIECE.findall(self._text.plain.replace(" ", ""))
        least = max((len(piece) for piece in pieces), default=0)
        return Measurement(min(least, options.max_width), min(len(self._text), options.max_width))


def _spin(text: str, done: Event) -> None:
    if done.wait(_PROGRESS_AFTER_S):
        return
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

    with Status(Text(clean(text)), console=Console(stderr=True)):
        done.wait()


def _is_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "utf-8").lower().startswith("utf")


def _encodable(text: str, stream: TextIO) -> str:
    """Return *text* with nothing in it that *stream* cannot write or that does not print."""
    text = clean(text)
    if _is_unicode(stream):
        return text
    encoding = stream.encoding
    return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
