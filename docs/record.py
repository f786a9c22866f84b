"""Record the picture of README.md: commands and what they print, as an SVG that needs no network.

    python docs/record.py [OUT.svg]

Run it again when what the commands print has changed. Needs transformers, and bash.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "python with_accelerate.py wrapped 2>&1 | cut -c1-80",
    "modelquirks plan wrapped --model transformers | tail -n 4",
    "modelquirks plan other-head --model transformers | tail -n 5",
    "modelquirks inspect cut-off | tail -n 4",
)
WIDTH = 84


def main(out: Path) -> None:
    """Run the commands where the broken checkpoints are, and write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        maker = ROOT / "examples" / "broken_checkpoints.py"
        subprocess.run([sys.executable, maker, folder], check=True, capture_output=True)
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold"))
            console.print(Text.from_ansi(printed(command, Path(folder))))
    svg = console.export_svg(title="modelquirks", clear=False)
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)  # they would be fetched
    out.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def printed(command: str, folder: Path) -> str:
    """Return what a shell prints."""
    here = (
        f"modelquirks() {{ '{sys.executable}' -m modelquirks.planner \"$@\"; }}\n"
        f"python() {{ '{sys.executable}' '{ROOT}/examples/'\"$@\"; }}\n"
    )
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
    run = ["bash", "-c", here + command]
    return subprocess.run(
        run, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images" / "terminal.svg")
