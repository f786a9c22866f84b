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


# ---- which weights


def said(manifest: Manifest, code: str) -> tuple[str, str]:
    (found,) = [f for f in manifest.findings if f.code == code]
    return found.severity, found.message


def test_the_sizes_of_both_are_told_and_which_are_taken() -> None:
    _, text = said(opened(DATA / "zero2_bf16"), "can-load")
    # 177 trained elements and 40 frozen ones; 3 of a buffer in fp32, and a counter of 8 bytes.
    assert "training weights: yes, all 12, 454 B of bfloat16 and float32" in text
    assert "fp32 masters: yes, all 7, 708 B of float32" in text
    assert (
        "the masters, with what has none as it was trained: 808 B of bfloat16 and float32." in text
    )
    _, text = said(opened(DATA / "zero2_bf16", weights="training"), "can-load")
    assert text.endswith("taken are the training weights.")


@pytest.mark.parametrize("case", ["zero3_fp32", "zero3_bf16", "universal_from_zero3"])
def test_training_weights_of_zero_3_are_refused_with_the_reason(case: str) -> None:
    manifest = opened(DATA / case, weights="training")
    severity, text = said(manifest, "no-training-weights")
    assert severity == "error"
    assert "ZeRO 3 keeps them in no file" in text and "--dtype" in text


def test_masters_that_there_are_none_of_are_refused() -> None:
    assert opened(DATA / "zero0_fp32").options.weights == "training"
    assert "ZeRO 0" in errors(opened(DATA / "zero0_fp32", weights="master"))["no-masters"]
    assert not errors(opened(DATA / "zero0_fp32", weights="training"))


def test_training_weights_do_not_need_the_files_of_masters(tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "zero2_bf16", tmp_path / "copy"))
    lost = next(root.rglob("*_rank_1_mp_rank_00_optim_states.pt"))
    lost.unlink()
    usual, training = opened(root), opened(root, weights="training")
    assert lost.name in errors(usual)["rank-missing"]
    assert "--weights training" in errors(usual)["rank-missing"]
    assert not errors(training)
    severity, text = said(training, "rank-missing")
    assert severity == "warning" and lost.name in text


@pytest.mark.parametrize("damage", ["swapped", "copied", "cut", "other"])
def test_damaged_masters_are_a_warning_to_those_who_take_training_weights(
    damage: str, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(DATA / "zero2_bf16", tmp_path / "copy"))
    first, second = sorted(root.rglob("*_optim_states.pt"))
    one, two = first.read_bytes(), second.read_bytes()
    other = next((DATA / "zero1_bf16").rglob("*_rank_1_mp_rank_00_optim_states.pt"))
    contents = {
        "swapped": (two, one),
        "copied": (one, one),
        "cut": (one, two[:-300]),
        "other": (one, other.read_bytes()),
    }
    first.write_bytes(contents[damage][0])
    second.write_bytes(contents[damage][1])
    assert errors(opened(root))
    training = opened(root, weights="training")
    assert not errors(training)
    assert {f.code for f in training.findings if f.severity == "warning"} >= {*errors(opened(root))}


def test_damaged_model_files_are_an_error_to_everybody(tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "zero2_bf16", tmp_path / "copy"))
    next(root.rglob("*_model_states.pt")).unlink()
    assert "rank-missing" in errors(opened(root, weights="training"))


# ---- the optimizer's state


@pytest.mark.parametrize(
    "case",
    ["zero0_fp32", "zero1_bf16", "zero2_fp32", "zero2_cpuadam", "zero3_fp32", "moe_ep2_zero0"],
)
def test_the_state_of_the_optimizer_is_told_and_not_loaded(case: str) -> None:
    severity, text = said(opened(DATA / case), "not-loaded")
    assert severity == "info"
    assert "'exp_avg', 'exp_avg_sq'" in text and "complete. It is not loaded" in text
    assert "not complete" not in text


def test_the_bytes_of_the_optimizer_are_counted() -> None:
    # 180 elements with padding, two moments of 4 bytes, and a step for each of 2 groups and ranks.
    _, text = said(opened(DATA / "zero2_fp32"), "not-loaded")
    assert f"{(2 * 180 * 4 + 4 * 4) / 1024:.1f} KiB in 2 files, complete" in text


def test_the_state_of_a_rank_that_is_missing_is_not_complete(tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "zero2_fp32", tmp_path / "copy"))
    lost = next(root.rglob("*_rank_1_mp_rank_00_optim_states.pt"))
    lost.unlink()
    _, text = said(opened(root), "not-loaded")
    assert f"not complete: '{lost.name}' is missing" in text


def test_universal_checkpoints_without_moments_say_so() -> None:
    # Only fp32.pt of each parameter was kept of these.
    _, text = said(opened(DATA / "universal_from_zero3"), "not-loaded")
    assert "no state of the optimizer is here" in text


def test_moments_of_universal_checkpoints_are_counted(tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "universal_from_zero3", tmp_path / "copy"))
    for path in root.rglob("fp32.pt"):
        shutil.copy(path, path.with_name("exp_avg.pt"))
    assert "('exp_avg')" in said(opened(root), "not-loaded")[1]
    assert "complete" in said(opened(root), "not-loaded")[1]


@pytest.mark.parametrize(("tag", "truth"), [("A", "truth_A"), ("B", "truth"), (None, "truth")])
def test_each_of_two_states_gives_its_own_weights(tag: str | None, truth: str) -> None:
    # engine.load_checkpoint of DeepSpeed 0.19.8 takes those of 'latest' for the tag that is given.
    root = DATA / "zero3_two_tags"
    model = Emb(torch.float32)
    plan = Dispatcher(registry()).plan(root, model=model, tag=tag, device_map=None)
    plan.execute(model)
    stored = load_file(root / f"{truth}.safetensors")["emb.weight"]
    assert torch.equal(model.emb.weight, stored)


def test_other_weights_beside_the_states_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(DATA / "zero3_fp32", folder, ignore=shutil.ignore_patterns("truth.*"))
    clean = open_manifest(folder)
    shutil.copyfile(DATA / "zero3_fp32" / "truth.safetensors", folder / "adapter_model.safetensors")

    (found,) = [f for f in open_manifest(folder).findings if f not in clean.findings]

    assert found.code == "rival-weights"
    assert found.severity == "warning"
    assert "Not taken: 'adapter_model.safetensors'" in found.message
    assert "deepspeed checkpoint" in found.message
