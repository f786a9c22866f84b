"""What people see: layout, colours, escapes, and what does not belong on standard output."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelquirks.planner.cli.terminal import Column, Styled, Terminal, note, wants_colour
from modelquirks.planner.wording import clean

PLAIN: Mapping[str, str] = {"COLUMNS": "80"}


class Stream(io.TextIOWrapper):
    """A text stream in memory that is a terminal, or is not, and has an encoding."""

    def __init__(self, *, tty: bool = False, encoding: str = "utf-8") -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding, newline="")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def getvalue(self) -> str:
        self.flush()
        return self.raw_bytes.getvalue().decode(self.encoding)


@pytest.mark.parametrize(
    ("tty", "environ", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (False, {"TERM": "xterm"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_follows_the_usual_variables(
    tty: bool, environ: Mapping[str, str], expected: bool
) -> None:
    assert wants_colour(Stream(tty=tty), environ) is expected


@given(st.text())
def test_clean_leaves_nothing_that_does_not_print(text: str) -> None:
    assert clean(text).isprintable()
    assert not text.isprintable() or clean(text) == text


def test_markup_in_a_name_is_text() -> None:
    out = Stream()
    Terminal(out, PLAIN).table((Column("Name"),), [("[red]x[/red] :smile: [link=a]b",)])
    assert "[red]x[/red] :smile: [link=a]b" in out.getvalue()


def test_styles_write_nothing_where_there_are_no_colours() -> None:
    out = Stream()
    terminal = Terminal(out, PLAIN)
    terminal.say("loud", style="bold red")
    terminal.table((Column("Title"),), [(Styled("cell", "red"),)])
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().startswith("loud\n")


def test_styles_are_seen_where_colours_are_forced() -> None:
    out = Stream()
    Terminal(out, {**PLAIN, "FORCE_COLOR": "1"}).say("loud", style="red")
    assert "\x1b[31m" in out.getvalue()


def test_a_stream_without_unicode_gets_ascii_rules_and_escapes() -> None:
    out = Stream(encoding="ascii")
    Terminal(out, PLAIN).table((Column("Name"),), [("wörter … → 重み",)])
    assert out.getvalue().isascii()
    assert "w\\xf6rter ... -> \\u91cd\\u307f" in out.getvalue()
    assert "-----" in out.getvalue()


def test_numbers_stand_right_and_no_line_ends_in_blanks() -> None:
    out = Stream()
    Terminal(out, PLAIN).table((Column("A"), Column("N", "right")), [("x", "1"), ("y", "1,000")])
    lines = out.getvalue().splitlines()
    assert lines[2:] == ["x      1", "y  1,000"]
    assert all(line == line.rstrip() for line in lines)


def test_a_long_cell_folds_inside_eighty_columns_and_loses_nothing() -> None:
    out = Stream()
    name = "model.layers.*." + "x" * 200
    Terminal(out, PLAIN).table((Column("Name", folds=True), Column("N", "right")), [(name, "7")])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.removesuffix("7").strip() for line in lines[2:]) == name


def test_a_paragraph_never_breaks_a_word() -> None:
    out = Stream()
    name = "a" * 100
    Terminal(out, PLAIN).say(f"see {name} there", indent=2)
    assert [line.strip() for line in out.getvalue().splitlines()] == ["see", name, "there"]


def test_a_note_goes_to_standard_error_and_keeps_the_lines_of_a_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note("warning", "one\n- two\x07")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "modelquirks: warning: one\n- two\\x07\n"


WAIT = (
    "import time\nfrom modelquirks.planner.cli.terminal import progress\nwith progress('Reading'):"
)


def on_terminal(seconds: float, script: str = "", **environ: str) -> str:
    """Return what a process writes to a standard error that is a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script or f"{WAIT} time.sleep({seconds})"],
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **environ},
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 4096):
            written += chunk
    except OSError:  # Linux ends a pseudo-terminal with EIO
        pass
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


def test_progress_is_told_only_past_one_second() -> None:
    assert "Reading" in on_terminal(1.6)
    assert on_terminal(0.1) == ""
    assert on_terminal(1.6, TERM="dumb") == ""


LOAD = """
import time
from modelquirks.planner.cli.loadbar import loading_shown
with loading_shown() as heard:
    if heard is not None:
        heard.begin({"cpu": 2 << 30, "cuda:0": 4 << 30})
        heard.add("cpu", 1 << 30)
    time.sleep(%s)
"""


def test_a_load_is_shown_by_device_only_past_one_second_and_only_on_a_terminal() -> None:
    told = on_terminal(0, LOAD % 1.6)
    assert "cpu" in told
    assert "cuda:0" in told
    assert "1.0/2.0 GiB" in told
    assert on_terminal(0, LOAD % 0.1) == ""
    assert on_terminal(0, LOAD % 1.6, TERM="dumb") == ""
    piped = subprocess.run([sys.executable, "-c", LOAD % 1.3], capture_output=True, check=True)
    assert piped.stderr == b""
