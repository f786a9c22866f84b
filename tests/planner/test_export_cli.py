"""``modelquirks export``: what people see, what programs get, and how it ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from modelquirks.planner.cli.command import main

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "export.txt"
STATE = {
    "emb.weight": torch.arange(35.0).reshape(7, 5),
    "norm.weight": torch.ones(5),
    "layers.0.weight": torch.zeros(6, 5, dtype=torch.bfloat16),
}
MODULE = """
from torch import nn

def net():
    model = nn.Module()
    model.embed = nn.Embedding(7, 5)
    model.norm = nn.RMSNorm(5)
    return model
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Give what runs the command where there are a checkpoint ``in`` and ``exportnet.py``."""
    (tmp_path / "in").mkdir()
    torch.save({**STATE, "head.weight": STATE["emb.weight"]}, tmp_path / "in/pytorch_model.bin")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (tmp_path / "exportnet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> Done:
        try:
            code = main(["export", *words])
        except SystemExit as exit:
            code = int(str(exit.code))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


def steady(text: str) -> str:
    """Return *text* without what is another number in every run."""
    text = re.sub(r"Steps: .*?\.\n", "Steps: …\n", text, flags=re.DOTALL)
    return re.sub(r"exported to \S+/out", "exported to …/out", text)


def test_the_report_reads_well(call: Call) -> None:
    done = call("in", "out", "--dtype", "bf16", "--shard-size", "80")
    assert (done.code, done.err) == (0, "")
    text = steady(done.out)
    if os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_programs_get_it_as_json(call: Call) -> None:
    done = call("in", "out", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert report["checkpoint"]["format"] == "torch"
    assert report["export"]["tensors"] == 3
    assert report["export"]["files"] == {
        "model.safetensors": Path("out/model.safetensors").stat().st_size
    }
    assert report["export"]["ties"] == {"head.weight": "emb.weight"}
    assert {*report["export"]["seconds_by_step"]} == {"plan", "write", "read back"}


def test_the_names_of_a_model_are_taken_on_demand(call: Call) -> None:
    done = call("in", "out", "--model", "exportnet:net", "--alias", "emb.**=embed.**")
    assert done.code == 0, done.err
    assert {*load_file("out/model.safetensors")} == {"embed.weight", "norm.weight"}
    assert "'layers.0.weight'" in done.out


def test_what_cannot_be_is_told_on_standard_error(call: Call) -> None:
    refused = call("in", "out", "--model", "exportnet:net")
    assert (refused.code, refused.out) == (1, "")
    assert "1 missing: 'embed.weight'" in refused.err
    assert not Path("out").exists()
    assert call("in", "out").code == 0
    again = call("in", "out", "--json")
    assert again.code == 1
    assert "is not empty" in json.loads(again.out)["error"]
    assert "--overwrite" in again.err
    assert call("in", "out", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["in"], "required: OUT"),
        (["in", "out", "--shard-size", "5Gb"], "bits or bytes"),
        (["in", "out", "--shard-size", "0"], "shard size 0 is too little"),
        (["in", "out", "--memory", "1MB"], "load memory 1000000 is too little"),
        (["in", "out", "--dequantize"], "'dequantize' need a model"),
        (["nowhere", "out"], "'nowhere' is not a file or folder that exists"),
    ],
)
def test_a_bad_call_says_what_is_wrong_with_it(call: Call, words: list[str], said: str) -> None:
    done = call(*words)
    assert done.code == 2
    assert said in done.err
    assert not Path("out").exists()


def test_a_choice_that_a_format_has_not_is_refused(call: Call) -> None:
    done = call("in", "out", "--weights", "master")
    assert done.code == 1
    assert "'master'" in done.err
