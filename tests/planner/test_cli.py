"""The command ``modelquirks``, as a process: exit codes, streams, what it imports, what it says.

Golden files hold the reports for people at 80 columns; ``MODELQUIRKS_UPDATE_GOLDEN=1`` rewrites
them.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from modelquirks.planner.cli.command import main

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden"

Shapes = Mapping[str, Sequence[int]]

MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

not_a_model = dict

def broken():
    raise ZeroDivisionError("no layers")
"""

WEIGHTS: Shapes = {
    "embed.weight": (6, 4),
    **{f"layers.{i}.up.weight": (8, 4) for i in range(3)},
    **{f"layers.{i}.down.weight": (4, 8) for i in range(3)},
}


def write_weights(path: Path, shapes: Shapes) -> None:
    """Write a safetensors file of F32 tensors that count upwards."""
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        count = 1
        for length in shape:
            count *= length
        begin = len(data)
        data += struct.pack(f"<{count}f", *range(begin, begin + count))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Done(NamedTuple):
    """What one call came to."""

    returncode: int
    stdout: str
    stderr: str


def environment(**environ: str) -> dict[str, str]:
    """Return the environment of a reader that is no terminal and 80 columns wide."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("MODELQUIRKS_") and key not in ("NO_COLOR", "FORCE_COLOR")
    }
    return {**kept, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environ}


def modelquirks(*words: str, cwd: Path, **environ: str) -> Done:
    """Run the command as a process in *cwd*."""
    done = subprocess.run(
        [sys.executable, "-m", "modelquirks.planner", *words],
        cwd=cwd,
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Give a folder with a checkpoint ``tiny`` and the module ``tinynet`` of its model."""
    (tmp_path / "tiny").mkdir()
    write_weights(tmp_path / "tiny" / "model.safetensors", WEIGHTS)
    (tmp_path / "tinynet.py").write_text(MODULE)
    return tmp_path


Call = Callable[..., Done]


@pytest.fixture
def call(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Give a function that runs the command in this process: torch is imported only once."""
    monkeypatch.chdir(home)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tinynet", raising=False)

    def run(*words: str) -> Done:
        try:
            code = main(words)
        except SystemExit as exit:
            code = int(str(exit.code))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


UPDATE_GOLDEN = bool(os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"))
"""Read now: the tests run without any variable of ours."""


def agrees(name: str, text: str) -> bool:
    """Compare with a golden file, which is the text as it should be."""
    path = GOLDEN / name
    if UPDATE_GOLDEN:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


# What is imported


def imported(*words: str, cwd: Path) -> set[str]:
    """Return the roots of all modules that one command imports."""
    script = (
        "import sys\n"
        "from modelquirks.planner.cli.command import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [["--help"], ["inspect", "--help"], ["plan", "--help"], ["export", "--help"]],
)
def test_help_imports_neither_torch_nor_accelerate_nor_rich(home: Path, words: list[str]) -> None:
    roots = imported(*words, cwd=home)
    assert "modelquirks" in roots
    assert not roots & {"torch", "accelerate", "transformers", "rich", "numpy"}


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "tiny"],
        ["inspect", "tiny", "--json"],
        ["plan", "tiny", "--dry-run"],
        ["plan", "tiny", "--dry-run", "--json", "--max-memory", "0=1GiB,cpu=1GiB,disk"],
        ["inspect", "tiny", "--html", "tiny.html"],
        ["plan", "tiny", "--dry-run", "--html", "tiny.html"],
        ["diff", "tiny", "tiny", "--html", "tiny.html"],
        ["plugins", "list"],
    ],
)
def test_what_needs_no_model_imports_no_torch(home: Path, words: list[str]) -> None:
    assert not imported(*words, cwd=home) & {"torch", "accelerate", "transformers"}


# Calls


@pytest.mark.parametrize(
    "command",
    [(), ("inspect",), ("plan",), ("diff",), ("execute",), ("export",), ("plugins",)],
)
def test_every_command_has_help(home: Path, command: tuple[str, ...]) -> None:
    done = modelquirks(*command, "--help", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: modelquirks")


def test_version_is_that_of_the_distribution(home: Path) -> None:
    done = modelquirks("--version", cwd=home)
    assert (done.returncode, done.stdout) == (0, "modelquirks 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["insect"], "invalid choice: 'insect'"),
        (["inspect"], "required: CHECKPOINT"),
        (["plan", "tiny", "--dry"], "unrecognized arguments: --dry"),
        (["plan", "tiny", "--dry-run", "--max-memory", "0=24Gb"], "bits or bytes"),
        (["plan", "tiny", "--dry-run", "--max-memory", "cpu"], "has no size"),
        (["plan", "tiny", "--dry-run", "--device-map", "best"], "'best' is none of auto"),
        (["plan", "tiny", "--dry-run", "--device-map", "tinynet.py"], "'tinynet.py' is not JSON"),
        (["plan", "tiny", "--dry-run", "--dtype", "bf61"], "dtype 'bf61' is not known"),
        (["plan", "tiny", "--dry-run", "--min-coverage", "90"], "not between 0 and 1"),
        (["plan", "tiny", "--dry-run", "--min-coverage", "most"], "'most' is not between 0 and 1"),
        (["plan", "tiny", "--dry-run", "--model", "./tinynet.py:Net"], "--model tinynet:Net"),
        (["plan", "tiny", "--dry-run", "-o", "nowhere/plan.json"], "'nowhere/plan.json': No such"),
        (["plan", "tiny", "--dry-run", "--alias", "module.**"], "on both sides of '='"),
        (["plan", "tiny", "--dry-run", "--alias", "a..b=c"], "an empty segment"),
        (["plan", "tiny", "--dry-run", "--model", "tinynet"], "must be 'module:factory'"),
        (["plan", "tiny", "--dry-run", "--model", "nowhere:f"], "No module named 'nowhere'"),
        (["plan", "tiny", "--dry-run", "--model", "tinynet:broken"], "ZeroDivisionError"),
        (["plan", "tiny", "--dry-run", "--model", "tinynet:not_a_model"], "gave a dict"),
        (["plan", "tiny"], "no plugin builds a model for 'tiny'"),
        (["inspect", "nothing"], "'nothing'"),
        (["plan", "nothing", "--dry-run"], "'nothing'"),
        (["inspect", ""], "'' names no checkpoint"),
        (["execute", "tinynet.py"], "cannot be read as a plan"),
        (["execute", "nothing"], "'nothing' cannot be read: No such file"),
    ],
)
def test_a_bad_call_is_two_with_the_reason_on_standard_error(
    call: Call, words: list[str], said: str
) -> None:
    done = call(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tie_of_a_name_that_is_not_there_is_a_bad_call_with_what_was_meant(call: Call) -> None:
    words = ("--dry-run", "--model", "tinynet:Net", "--tie", "embed.weight=ebmed.weight")
    done = call("plan", "tiny", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("modelquirks: error: tie 'embed.weight=ebmed.weight': ")
    assert "nearest names are 'embed.weight'" in done.stderr


def test_a_report_is_no_plan_and_the_error_says_how_to_save_one(home: Path, call: Call) -> None:
    report = call("plan", "tiny", "--dry-run", "--json", "--max-memory", "cpu=1KiB").stdout
    (home / "report.json").write_text(report)
    done = call("execute", "report.json", "--model", "tinynet:Net")
    assert done.returncode == 2
    assert "'report.json' is only a report, as --json prints it" in done.stderr
    assert "-o FILE" in done.stderr


def test_a_plan_that_cannot_be_saved_leaves_nothing_behind(home: Path, call: Call) -> None:
    (home / "folder").mkdir()
    done = call("plan", "tiny", "--dry-run", "-o", "folder")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'folder': " in done.stderr
    assert not list(home.glob("*.part"))


def test_what_may_be_missing_cannot_come_from_the_meta_device(home: Path, call: Call) -> None:
    shapes = {name: shape for name, shape in WEIGHTS.items() if "1.up" not in name}
    write_weights(home / "tiny" / "model.safetensors", shapes)
    waiver = ("--allow-missing", "layers.1.up.weight")
    done = call("plan", "tiny", "--model", "tinynet:Net", *waiver)
    assert done.returncode == 1
    assert "'layers.1.up.weight'" in done.stderr
    assert "build the model on a real device" in done.stderr


def test_debug_shows_where_it_happened(home: Path) -> None:
    words = ("plan", "tiny", "--dry-run", "--model", "tinynet:broken")
    done = modelquirks(*words, cwd=home, MODELQUIRKS_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "in broken" in done.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback(home: Path) -> None:
    shapes = {f"w{i}.a{i}": (1,) for i in range(5000)}
    write_weights(home / "tiny" / "model.safetensors", shapes)
    process = subprocess.Popen(
        [sys.executable, "-m", "modelquirks.planner", "inspect", "tiny", "--all"],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"tiny\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_it_makes_no_difference_who_meets_the_reader_that_has_seen_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``Console.on_broken_pipe`` of rich 15 ends with 1, which is a verdict here."""

    def run(args: argparse.Namespace) -> int:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    monkeypatch.setattr("modelquirks.planner.cli.inspect.run", run)
    assert main(["inspect", "tiny"]) == 141


# inspect


def test_inspect_reads_well(home: Path) -> None:
    done = modelquirks("inspect", "tiny", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert agrees("inspect.txt", done.stdout)


@pytest.mark.parametrize("words", [["inspect"], ["plan", "--dry-run", "--max-memory", "0=24GiB"]])
def test_a_real_index_without_its_files_reads_well(words: list[str]) -> None:
    done = modelquirks(*words, "gpt-oss-20b", cwd=DATA / "manifests")
    assert (done.returncode, done.stderr) == (0, "")
    assert agrees(f"gpt_oss_{words[0]}.txt", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_inspect_json_is_the_checkpoint_and_nothing_else(home: Path) -> None:
    done = modelquirks("inspect", "tiny", "--json", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {"schema", "checkpoint"}
    assert report["schema"] == 1
    checkpoint = report["checkpoint"]
    assert checkpoint["format"] == "safetensors"
    assert (checkpoint["tensors"], checkpoint["families"], checkpoint["shards"]) == (7, 3, 1)
    assert checkpoint["total_bytes"] == 864
    assert checkpoint["findings"] == []


def test_inspect_is_one_when_some_of_it_is_missing(home: Path) -> None:
    weight_map = {**dict.fromkeys(WEIGHTS, "model.safetensors"), "lost.weight": "gone.safetensors"}
    index = home / "tiny" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    done = modelquirks("inspect", "tiny", cwd=home)
    assert done.returncode == 1
    assert "gone.safetensors" in done.stdout
    assert "error" in done.stdout


@pytest.mark.parametrize("words", [["inspect"], ["plan", "--dry-run"]])
def test_a_checkpoint_of_which_nothing_can_be_read_is_two(home: Path, words: list[str]) -> None:
    (home / "tiny" / "model.safetensors").write_bytes(b"")
    done = modelquirks(*words, "tiny", cwd=home)
    assert done.returncode == 2
    assert "model.safetensors" in done.stdout
    assert "'tiny' holds no tensor that can be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_tries_to_paint_the_terminal_is_shown_as_it_is(home: Path) -> None:
    name = "\x1b[31m[bold]evil\n:smile:"
    write_weights(home / "tiny" / "model.safetensors", {name: (2,)})
    done = modelquirks("inspect", "tiny", cwd=home)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31m[bold]evil\\n:smile:" in done.stdout


def test_output_for_an_encoding_without_our_characters_is_ascii(home: Path) -> None:
    write_weights(home / "tiny" / "model.safetensors", {"重み.0": (2,), "重み.1": (2,)})
    done = modelquirks("inspect", "tiny", cwd=home, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\\u91cd\\u307f.*" in done.stdout


def test_a_long_list_says_how_to_see_the_rest(home: Path) -> None:
    shapes = {f"w{i}.weight": (1,) for i in range(250)}
    write_weights(home / "tiny" / "model.safetensors", shapes)
    done = modelquirks("inspect", "tiny", cwd=home)
    assert "… and 150 more families (--all lists them)" in done.stdout
    assert "w249.weight" not in done.stdout
    assert "w249.weight" in modelquirks("inspect", "tiny", "--all", cwd=home).stdout


# plugins


def test_plugins_list_names_the_distribution_of_each(home: Path) -> None:
    done = modelquirks("plugins", "list", "--json", cwd=home)
    report = json.loads(done.stdout)
    shipped = [p for p in report["plugins"] if p["distribution"] == "modelquirks"]
    assert {"gpt_oss", "moe", "wrappers"} <= {p["name"] for p in shipped}
    assert {p["status"] for p in shipped} == {"loaded"}
    assert done.returncode == 0


def test_a_plugin_that_fails_is_named_and_the_rest_goes_on(home: Path) -> None:
    path = os.pathsep.join(
        [str(DATA / "broken_plugins" / "raises_on_import"), os.environ.get("PYTHONPATH", "")]
    )
    done = modelquirks("plugins", "list", cwd=home, PYTHONPATH=path)
    assert done.returncode == 1
    assert "acme_importer (acme-importer 0.3) is not used" in done.stderr
    assert "failed" in done.stdout
    assert "gpt_oss" in done.stdout


def test_a_conflict_of_two_plugins_is_one_and_names_both(home: Path) -> None:
    path = os.pathsep.join(
        [str(DATA / "broken_plugins" / "twins"), os.environ.get("PYTHONPATH", "")]
    )
    done = modelquirks("plugins", "list", "--json", cwd=home, PYTHONPATH=path)
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "acme_left (acme-left 1.0) and by acme_right (acme-right 2.0)" in problem


def test_no_plugin_leaves_one_out(home: Path) -> None:
    done = modelquirks("plugins", "list", "--json", "--no-plugin", "moe", cwd=home)
    status = {p["name"]: p["status"] for p in json.loads(done.stdout)["plugins"]}
    assert status["moe"] == "disabled"


# plan


def test_a_dry_run_without_a_model_reads_well(home: Path) -> None:
    words = ("--dry-run", "--max-memory", "0=400,cpu=1KiB,disk")
    done = modelquirks("plan", "tiny", *words, cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert agrees("plan_without_model.txt", done.stdout)


def test_a_dry_run_with_a_model_reads_well(call: Call) -> None:
    words = ("--dry-run", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB")
    done = call("plan", "tiny", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert agrees("plan.txt", done.stdout)


def test_a_plan_that_cannot_be_used_says_why_and_what_would_mend_it(home: Path, call: Call) -> None:
    shapes = {f"net.{name}": shape for name, shape in WEIGHTS.items() if "1.up" not in name}
    write_weights(home / "tiny" / "model.safetensors", shapes)
    words = ("--dry-run", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB")
    done = call("plan", "tiny", *words)
    assert (done.returncode, done.stderr) == (1, "")
    assert agrees("plan_unusable.txt", done.stdout)
    assert "  --alias 'net.**=**'" in done.stdout.splitlines()
    mended = call("plan", "tiny", *words, "--alias", "net.**=**")
    assert mended.returncode == 1
    assert "layers.1.up.weight" in mended.stdout
    waived = ("--alias", "net.**=**", "--allow-missing", "layers.{i}.up.weight")
    assert call("plan", "tiny", *words, *waived).returncode == 0


def test_plan_json_has_the_keys_that_programs_rely_on(call: Call) -> None:
    words = ("--dry-run", "--json", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB")
    done = call("plan", "tiny", *words)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert {"schema", "checkpoint", "model", "quirks", "audit", "placement", "ok"} <= set(report)
    assert report["model"] == {"source": "tinynet:Net", "tensors": 7}
    assert report["audit"]["accounted"] == report["audit"]["model_tensors"] == 7
    assert report["placement"]["device_map"] == {"": "cpu"}
    assert report["placement"]["memory"]["cpu"] == {"capacity_bytes": 1024, "used_bytes": 864}
    assert report["ok"] is True


def test_without_dry_run_the_plan_is_executed_and_verified(call: Call) -> None:
    words = ("--model", "tinynet:Net", "--max-memory", "cpu=500,disk")
    done = call("plan", "tiny", *words, "--json")
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)["loaded"]
    assert loaded["verification"]["ok"] is True
    assert loaded["tensors"] == 7
    assert sum(loaded["bytes_by_device"].values()) == 864
    told = call("plan", "tiny", *words)
    assert "Verified: 7 names in place" in told.stdout


def test_every_byte_is_compared_and_copied_where_that_is_asked_for(call: Call) -> None:
    words = ("plan", "tiny", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB")
    done = call(*words, "--json", "--verify", "full", "--copy", "--load-memory", "32MiB")
    assert (done.returncode, done.stderr) == (0, "")  # no progress where there is no terminal
    loaded = json.loads(done.stdout)["loaded"]
    assert loaded["bytes_made"] == loaded["verification"]["sampled_bytes"] == 864
    assert set(loaded["seconds_by_step"]) == {"check", "make", "dispatch", "verify"}
    assert loaded["peak_bytes"] > 10_000_000
    assert "864 B made at" in call(*words, "--copy").stdout
    assert "nothing made: all are views of the files" in call(*words).stdout


def test_load_memory_that_is_no_size_is_a_bad_call(call: Call) -> None:
    done = call("plan", "tiny", "--load-memory", "1MiB", "--dry-run")
    assert done.returncode == 2
    assert "--load-memory: '1MiB' is too little: give at least 16MiB" in done.stderr


def test_a_saved_plan_is_executed_later_and_elsewhere(home: Path, call: Call) -> None:
    plan = ("--dry-run", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB", "-o", "plan.json")
    assert call("plan", "tiny", *plan).returncode == 0
    later = ("execute", "plan.json", "--model", "tinynet:Net")
    assert "Verified" in call(*later).stdout
    (home / "tiny").rename(home / "moved")
    moved = call(*later, "--checkpoint", "moved")
    assert moved.returncode == 0, moved.stderr
    assert "Verified" in moved.stdout


def test_a_saved_plan_refuses_files_that_have_changed(home: Path, call: Call) -> None:
    plan = ("--dry-run", "--model", "tinynet:Net", "--max-memory", "cpu=1KiB", "-o", "plan.json")
    assert call("plan", "tiny", *plan).returncode == 0
    write_weights(home / "tiny" / "model.safetensors", {**WEIGHTS, "new.weight": (2,)})
    done = call("execute", "plan.json", "--model", "tinynet:Net")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.endswith("is not the one the plan was made for:")
    assert second.startswith("- 'model.safetensors'")
    assert "Traceback" not in done.stderr


def test_a_device_map_is_read_from_a_file(home: Path, call: Call) -> None:
    (home / "map.json").write_text(json.dumps({"embed": "cpu", "layers": "disk"}))
    words = ("--dry-run", "--json", "--model", "tinynet:Net", "--device-map", "map.json")
    report = json.loads(call("plan", "tiny", *words).stdout)
    assert report["placement"]["solver"] == "given"
    assert report["placement"]["device_map"] == {"embed": "cpu", "layers": "disk"}
    (home / "map.json").write_text(json.dumps({"embed": "cpu"}))
    done = call("plan", "tiny", *words)
    assert done.returncode == 1
    assert "layers.0.down" in done.stdout
