"""``modelquirks digest``: what people see, what programs get, and how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner.cli.command import main
from modelquirks.planner.digest.digest import Digest

DATA = Path(__file__).parents[1] / "data"
STATE = {
    "embed.weight": torch.arange(35.0).reshape(7, 5),
    "norm.weight": torch.ones(5),
    **{f"layers.{i}.weight": torch.full((6, 5), i, dtype=torch.bfloat16) for i in range(3)},
}
MODULE = """
import torch
from torch import nn

def net():
    model = nn.Module()
    model.embed = nn.Embedding(7, 5)
    model.norm = nn.RMSNorm(5)
    model.layers = nn.ModuleList(nn.Linear(5, 6, bias=False).bfloat16() for _ in range(3))
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
    """Give what runs a command where there are a checkpoint ``in`` and ``digestnet.py``."""
    (tmp_path / "in").mkdir()
    save_file(STATE, tmp_path / "in" / "model.safetensors")
    (tmp_path / "digestnet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> Done:
        try:
            code = main(words)
        except SystemExit as exit:
            code = int(str(exit.code))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


def write(**tensors: torch.Tensor | None) -> None:
    """Write the checkpoint with other tensors; neither size nor time of the file tell."""
    path = Path("in/model.safetensors")
    before = path.stat()
    given = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
    save_file({n: t for n, t in {**STATE, **given}.items() if t is not None}, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_reports_read_well(call: Call, golden: Callable[[str, str], bool]) -> None:
    told = [
        call("digest", "in", "-o", "digest.json"),
        call("digest", "in", "--check", "digest.json"),
    ]
    assert [(done.code, done.err) for done in told] == [(0, "")] * 2
    write(
        embed_weight=torch.zeros(7, 5),
        norm_weight=None,
        layers_1_weight=torch.zeros(6, 5),
        head_weight=torch.zeros(1),
    )
    told.append(call("digest", "in", "--check", "digest.json"))
    assert (told[2].code, told[2].err) == (1, "")
    assert golden("digest.txt", "\n".join(done.out for done in told))


def test_a_digest_goes_to_standard_output_if_no_file_is_named(call: Call) -> None:
    done = call("digest", "in")
    assert (done.code, done.err) == (0, "")
    Path("digest.json").write_text(done.out)
    found = Digest.load("digest.json").tensors["norm.weight"].sha256
    assert found == hashlib.sha256(STATE["norm.weight"].numpy().tobytes()).hexdigest()


def test_programs_get_it_as_json(call: Call) -> None:
    written = json.loads(call("digest", "in", "-o", "digest.json", "--json").out)
    assert written["digest"]["sha256"] == Digest.load("digest.json").sha256
    assert (written["digest"]["tensors"], written["digest"]["bytes"]) == (5, 340)
    same = json.loads(call("digest", "in", "--check", "digest.json", "--json").out)
    assert same["comparison"] == {"same": True, "tensors": 5, "bytes": 340, "changes": []}
    write(norm_weight=torch.zeros(5))
    done = call("digest", "in", "--check", "digest.json", "--json")
    assert done.code == 1
    assert json.loads(done.out)["comparison"]["changes"] == [
        {"name": "norm.weight", "kind": "changed", "why": "other bytes"}
    ]


def test_ten_thousand_differences_are_counted_and_a_hundred_listed(call: Call) -> None:
    save_file({f"t{i:05}": torch.zeros(1) for i in range(10_000)}, "in/model.safetensors")
    assert call("digest", "in", "-o", "digest.json").code == 0
    save_file({f"u{i:05}": torch.zeros(1) for i in range(10_000)}, "in/model.safetensors")
    done = call("digest", "in", "--check", "digest.json")
    assert "10,000 missing, 10,000 extra; 0 tensors are as digest.json says." in done.out
    assert "… and 19,900 more tensors (--all lists them)" in done.out


def test_names_that_would_write_to_the_terminal_are_escaped(call: Call) -> None:
    save_file({"a\x1b[31mb": torch.zeros(1)}, "in/model.safetensors")
    assert call("digest", "in", "-o", "digest.json").code == 0
    save_file({"a\x1b[31mb": torch.ones(1)}, "in/model.safetensors")
    done = call("digest", "in", "--check", "digest.json")
    assert "\x1b" not in done.out + done.err
    assert r"a\x1b[31mb" in done.out


def test_nobody_vouches_for_a_damaged_checkpoint(call: Call) -> None:
    assert call("digest", "in", "-o", "digest.json").code == 0
    path = Path("in/model.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    done = call("digest", "in", "-o", "other.json")
    assert (done.code, done.out) == (1, "")
    assert "'in' is damaged, so no digest was made of it:\n- " in done.err
    assert not Path("other.json").exists()
    checked = call("digest", "in", "--check", "digest.json")
    assert checked.code == 1
    assert "unreadable" in checked.out and "error" in checked.out


def test_an_index_alone_has_no_bytes(call: Call) -> None:
    shutil.rmtree("in")
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    Path("model.safetensors.index.json").write_text(json.dumps(index))
    done = call("digest", "model.safetensors.index.json")
    assert (done.code, done.out) == (1, "")
    assert "no digest was made of it" in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], 2, "'nowhere' is not a file or folder that exists"),
        (["in", "--check", "nowhere.json"], 2, "'nowhere.json' cannot be read"),
        (["in", "--check", "digestnet.py"], 2, "'digestnet.py' is not JSON"),
        (["in", "--check", "a", "-o", "b"], 2, "not allowed with argument"),
        (["in", "-o", "nowhere/digest.json"], 2, "'nowhere/digest.json': No such file"),
    ],
)
def test_a_bad_call_says_what_is_wrong_with_it(
    call: Call, words: list[str], code: int, said: str
) -> None:
    done = call("digest", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_the_weights_of_a_training_checkpoint_are_chosen_as_elsewhere(call: Call) -> None:
    folder = str(DATA / "deepspeed" / "zero2_bf16")
    assert call("digest", folder, "-o", "masters.json").code == 0
    assert call("digest", folder, "--check", "masters.json", "--weights", "master").code == 0
    done = call("digest", folder, "--check", "masters.json", "--weights", "training")
    assert done.code == 1
    assert re.search(r"BF16 \[.*\], the\s+digest has F32", done.out)


def test_base_and_adapter_have_one_digest(call: Call) -> None:
    assert call("digest", "in", "--adapter", str(DATA / "peft" / "lora"), "-o", "d.json").code == 0
    names = Digest.load("d.json").tensors.keys()
    assert names > STATE.keys()
    assert any(name.startswith("adapter:base_model.") for name in names)


LOADS = ("--model", "digestnet:net", "--device-map", "sequential", "--max-memory", "cpu=1GiB")


def test_a_plan_is_loaded_if_the_digest_vouches_for_it(call: Call) -> None:
    assert call("digest", "in", "-o", "digest.json").code == 0
    checked = ("--verify", "full", "--digest", "digest.json")
    done = call("plan", "in", *LOADS, "-o", "plan.json", *checked)
    assert done.code == 0, done.err
    flat = " ".join(done.out.split())
    assert "the 5 stored tensors that the plan reads, 340 B, have the bytes" in flat
    write(layers_1_weight=torch.zeros(6, 5, dtype=torch.bfloat16))
    for again in (("plan", "in", *LOADS), ("execute", "plan.json", *LOADS[:2])):
        refused = call(*again, *checked)
        assert refused.code == 1
        assert "1 tensor of the 5 that the plan reads" in refused.err
        assert "- 'layers.1.weight': other bytes" in refused.err
        assert "Verified" not in refused.out


def test_a_bad_digest_is_told_before_a_model_is_built(call: Call) -> None:
    done = call("plan", "in", "--model", "not_there:net", "--digest", "digestnet.py")
    assert (done.code, done.out) == (2, "")
    assert "'digestnet.py' is not JSON" in done.err
