"""Which state and which weights of a DeepSpeed checkpoint, chosen by people."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.cli.command import main
from modelquirks.plugins import deepspeed
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data" / "deepspeed"


def registry() -> Registry:
    found = Registry()
    found.register(deepspeed, name="deepspeed")
    return found


def opened(path: Path, **chosen: str) -> Manifest:
    return open_manifest(path, registry, OpenOptions(**chosen))  # type: ignore[arg-type]


def errors(manifest: Manifest) -> dict[str, str]:
    return {f.code: f.message for f in manifest.findings if f.severity == "error"}


class Emb(nn.Module):
    """One weight of the checkpoints, and its tied name."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 6, dtype=dtype)
        self.head = nn.Linear(6, 13, bias=False, dtype=dtype)
        self.head.weight = self.emb.weight


@pytest.fixture
def two_tags(tmp_path: Path) -> Path:
    """Give a folder with two states that differ in dtype; the last is of bf16."""
    root = tmp_path / "root"
    shutil.copytree(DATA / "zero2_fp32" / "global_step3", root / "A")
    shutil.copytree(DATA / "zero2_bf16" / "global_step3", root / "B")
    (root / "latest").write_text("B")
    return root


def test_masters_are_the_usual_weights_and_training_weights_can_be_had() -> None:
    path = DATA / "zero2_bf16"
    usual, masters, weights = opened(path), opened(path, weights="master"), None
    weights = opened(path, weights="training")
    assert {m.tensors["emb.weight"].dtype for m in (usual, masters)} == {"F32"}
    assert weights.tensors["emb.weight"].dtype == "BF16"
    assert usual.options == masters.options == OpenOptions("master", "global_step3")
    assert weights.options == OpenOptions("training", "global_step3")
    assert not errors(weights)


def test_a_tag_chooses_among_states_and_latest_is_the_usual_one(two_tags: Path) -> None:
    assert opened(two_tags).options.tag == "B"
    chosen = opened(two_tags, tag="A")
    assert chosen.options == OpenOptions("master", "A") and not errors(chosen)
    assert {place.shard.partition("/")[0] for place in chosen.readable.values()} == {"A"}
    assert opened(two_tags / "A", tag="A").options.tag == "A"


def test_a_tag_that_is_not_there_is_refused_with_those_that_are(two_tags: Path) -> None:
    found = errors(opened(two_tags, tag="C"))
    assert [*found] == ["state-unknown"]
    assert "'C'" in found["state-unknown"] and "'A', 'B'" in found["state-unknown"]


def test_a_stored_plan_opens_the_same_state_and_weights(two_tags: Path, tmp_path: Path) -> None:
    model = Emb(torch.bfloat16)
    plan = Dispatcher(registry()).plan(two_tags, model=model, weights="training", device_map=None)
    assert plan.ok, plan.problems
    plan.save(tmp_path / "plan.json")
    (two_tags / "latest").write_text("A")  # the training went on
    loaded = replace(Plan.load(tmp_path / "plan.json"), registry=registry())
    assert loaded.opening == OpenOptions("training", "B")
    loaded.load_into(model)
    truth = load_file(DATA / "zero2_bf16" / "truth.safetensors")["emb.weight"]
    assert torch.equal(model.emb.weight, truth.bfloat16())


def test_plans_without_the_choice_are_read_as_before(two_tags: Path, tmp_path: Path) -> None:
    plan = Dispatcher(registry()).plan(two_tags)
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["execution"]["opening"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert not Plan.load(tmp_path / "plan.json").opening


def test_a_choice_wins_over_plain_weights_beside_the_states(two_tags: Path) -> None:
    save_file({"t": torch.ones(2)}, two_tags / "model.safetensors")
    assert opened(two_tags).format == "safetensors"
    assert opened(two_tags, weights="master").format == "deepspeed"


def test_the_command_line_takes_both(two_tags: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(two_tags), "--weights", "training", "--tag", "B", "--json"]
    assert main(["inspect", *words]) == 0
    checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
    assert checkpoint["chosen"] == {"weights": "training", "tag": "B"}
    assert main(["plan", *words, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["chosen"]["weights"] == "training"
