"""What people read in a terminal: whole at 80 and 50 columns, without colour, in golden files."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelquirks.planner.cli.command import main
from modelquirks.planner.cli.terminal import folded

MODULE = """
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value_projection = nn.Linear(64, 192, bias=False)
        self.output_projection = nn.Linear(64, 64, bias=False)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = Attention()
        self.feed_forward_up = nn.Linear(64, 256, bias=False)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(Block() for _ in range(12))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = Inner()
        self.head = nn.Linear(64, 500, bias=False)
"""

Read = Callable[..., str]


@pytest.fixture
def read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Read:
    """Give a function that runs a command in a folder with a checkpoint and its model."""
    shapes = {"module.language_model.token_embedding.weight": (500, 64), "module.head.bias": (500,)}
    for layer in range(12):
        block = f"module.language_model.layers.{layer}"
        shapes[f"{block}.self_attention.query_key_value_projection.weight"] = (192, 64)
        shapes[f"{block}.self_attention.output_projection.weight"] = (64, 64)
        shapes[f"{block}.feed_forward_up.weight"] = (256, 64)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "checkpoint").mkdir()
    data = struct.pack("<Q", len(text)) + text + bytes(at)
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(data)
    (tmp_path / "widenet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "widenet", raising=False)
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(width: int, *words: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        main(words)
        return capsys.readouterr().out

    return run


PLAN = ("checkpoint", "--dry-run", "--model", "widenet:Net", "--max-memory",
        "0=900KiB,cpu=800KiB,disk")  # fmt: skip
COMMANDS = {
    "inspect": ("inspect", "checkpoint"),
    "plan": ("plan", *PLAN),
    "explain": ("explain", "checkpoint", "language_model.layers.3", "head", "--what-if",
                "0=1MiB", *PLAN[2:]),
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 50])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_keeps_to_the_width_and_has_no_colour(
    read: Read, golden: Callable[[str, str], bool], command: str, width: int
) -> None:
    text = read(width, *COMMANDS[command])
    assert golden(f"narrow_{command}_{width}.txt", text)
    assert "\x1b" not in text
    for line in text.splitlines():
        # Only what is to be copied may be longer: a name, or an option with one.
        assert len(line) <= width or re.fullmatch(r" *(--[a-z]+ )?\S+", line)
        assert line == line.rstrip()


def test_no_color_wins_over_a_wish_for_colours(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in read(80, *COMMANDS["inspect"])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in read(80, *COMMANDS["inspect"])


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a b c", 3, ["a b", "c"]),
        ("layers.*.mlp.up_proj.weight", 14, ["layers.*.mlp.", "up_proj.weight"]),
        ("layers.2-4,6-10,12-16", 11, ["layers.2-4,", "6-10,12-16"]),
        ("model.abcdefghij", 6, ["model.", "abcdef", "ghij"]),
        ("", 5, [""]),
    ],
)
def test_a_name_is_broken_behind_a_dot_where_it_can_be(
    text: str, width: int, lines: list[str]
) -> None:
    assert folded(text, width) == lines
