"""Plans as files: what is kept, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, PlanError


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model = make_model()
    model.get_buffer("1.running_mean").fill_(3.0)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def plan_file(checkpoint: Path, tmp_path: Path) -> Path:
    plan = Dispatcher().plan(
        checkpoint, model=make_model(), device_map={"0": "cpu", "1": "cpu", "2": "disk"}
    )
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def fresh() -> nn.Module:
    model = make_model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_plan_comes_back_from_its_file_as_it_was(checkpoint: Path, plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    again = plan_file.with_name("again.json")
    plan.save(again)
    assert json.loads(again.read_text()) == json.loads(plan_file.read_text())
    assert plan.ok and plan.root == checkpoint


def test_plan_is_executed_later_from_its_file_alone(checkpoint: Path, plan_file: Path) -> None:
    model = Plan.load(plan_file).execute(fresh())
    expected = make_model()
    expected.load_state_dict(load_file(checkpoint / "model.safetensors"))
    rows = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(rows), expected(rows))


def test_plan_is_executed_elsewhere_on_a_copy(checkpoint: Path, plan_file: Path) -> None:
    moved = shutil.copytree(checkpoint, checkpoint.with_name("copy"), copy_function=shutil.copy)
    shutil.rmtree(checkpoint)
    model = Plan.load(plan_file, checkpoint=moved).execute(fresh())
    assert model.get_buffer("1.running_mean").tolist() == [3.0] * 8


def test_header_that_changed_is_refused_and_the_file_named(
    checkpoint: Path, plan_file: Path
) -> None:
    shard = checkpoint / "model.safetensors"
    save_file(load_file(shard), shard, metadata={"format": "np"})
    with pytest.raises(PlanError, match=r"model\.safetensors"):
        Plan.load(plan_file).execute(fresh())


def test_rewritten_values_are_refused_by_the_time_of_the_file(
    checkpoint: Path, plan_file: Path
) -> None:
    """The header is the same, so only the time of the file can tell."""
    shard = checkpoint / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 255
    shard.write_bytes(data)
    os.utime(shard, ns=(0, 10**18))
    with pytest.raises(PlanError, match=r"model\.safetensors"):
        Plan.load(plan_file).execute(fresh())


def test_rewritten_values_are_refused_also_if_the_plan_was_made_by_a_relative_path(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    Dispatcher().plan("checkpoint", model=make_model(), device_map={"": "cpu"}).save("plan.json")
    os.utime(checkpoint / "model.safetensors", ns=(0, 10**18))
    with pytest.raises(PlanError, match=r"model\.safetensors"):
        Plan.load("plan.json").execute(fresh())


def test_file_that_is_gone_is_refused(checkpoint: Path, plan_file: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    with pytest.raises((PlanError, ValueError), match=r"model\.safetensors"):
        Plan.load(plan_file).execute(fresh())


def test_another_model_is_refused_with_the_names_that_differ(plan_file: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))
    before = other.state_dict()["0.weight"].clone()
    with pytest.raises(PlanError, match=r"2\.bias"):
        Plan.load(plan_file).execute(other)
    assert torch.equal(other.state_dict()["0.weight"], before)


def test_plan_that_is_not_usable_is_not_executed(checkpoint: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2), nn.Linear(2, 2))
    plan = Dispatcher().plan(checkpoint, model=model, device_map={"": "cpu"})
    with pytest.raises(PlanError, match=r"3\.weight"):
        plan.execute(model)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 99, "execution": {}}', '{"schema": 1, "execution": {}}', "\x00"],
)
def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


def test_keys_of_the_report_are_the_promised_ones(checkpoint: Path) -> None:
    report = Dispatcher().plan(checkpoint, model=make_model(), device_map={"": "cpu"}).to_json()
    assert {"schema", "checkpoint", "model", "quirks", "audit", "placement", "ok"} <= set(report)
    assert {"format", "tensors", "families", "shards", "total_bytes", "findings"} <= set(
        report["checkpoint"]
    )
    assert set(report["model"]) == {"source", "tensors"}
    assert {
        "model_tensors", "accounted", "coverage", "missing", "unexpected", "mismatched",
        "duplicates", "ties", "suggestions",
    } <= set(report["audit"])  # fmt: skip
    assert {"device_map", "memory", "solver"} <= set(report["placement"])
    assert set(report["placement"]["memory"]["cpu"]) == {"capacity_bytes", "used_bytes"}
    assert json.loads(json.dumps(report)) == report


SEVENS = {name: torch.full_like(tensor, 7) for name, tensor in make_model().state_dict().items()}


def test_file_that_came_since_and_would_be_read_instead_is_refused(
    checkpoint: Path, plan_file: Path
) -> None:
    """The files of the plan are as they were, but a folder is read by its index first."""
    save_file(SEVENS, checkpoint / "new.safetensors")
    index = {"weight_map": dict.fromkeys(SEVENS, "new.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match=r"would be read from 'new\.safetensors'"):
        Plan.load(plan_file).execute(fresh())


def test_index_that_gives_a_tensor_to_another_file_since_is_refused(tmp_path: Path) -> None:
    save_file(make_model().state_dict(), tmp_path / "a.safetensors")
    save_file({"0.weight": SEVENS["0.weight"], "x": torch.ones(1)}, tmp_path / "b.safetensors")
    places = dict.fromkeys(SEVENS, "a.safetensors") | {"x": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    model = fresh()
    plan = Dispatcher().plan(index, model=model, device_map={"": "cpu"})
    index.write_text(json.dumps({"weight_map": places | {"0.weight": "b.safetensors"}}))
    with pytest.raises(PlanError, match="other places in the same files"):
        plan.execute(model)


Change = Callable[[dict[str, Any]], object]


def edited(plan_file: Path, change: Change) -> Path:
    data = json.loads(plan_file.read_text())
    change(data)
    plan_file.write_text(json.dumps(data))
    return plan_file


def test_recipe_taken_out_of_the_file_is_refused_by_the_names_it_made(plan_file: Path) -> None:
    """A model with values of its own would otherwise keep them."""
    edited(plan_file, lambda data: data["execution"]["recipes"].pop(0))
    with pytest.raises(PlanError, match=r"in the audit without a recipe: '0\.weight'"):
        Plan.load(plan_file).execute(fresh())


def test_files_taken_out_of_the_file_are_refused(plan_file: Path) -> None:
    edited(plan_file, lambda data: data["execution"]["shards"].clear())
    with pytest.raises(PlanError, match=r"would be read from 'model\.safetensors'"):
        Plan.load(plan_file).execute(fresh())


DAMAGES: list[tuple[Change, str]] = [
    (lambda d: d["execution"]["devices"].update({"0": [1]}), r"device_map\['0'\] is \[1\]"),
    (lambda d: d["execution"]["devices"].update({"0": True}), r"device_map\['0'\] is True"),
    (lambda d: d["execution"]["aliases"].update({"0.weight": 5}), "aliases.* is 5"),
    (lambda d: d["execution"]["compare"].append([["a"]]), "compare.* is .'a'"),
    (lambda d: d["execution"]["shards"][0].update(name=5), r"shards\[0\]\.name is 5"),
    (lambda d: d["execution"]["options"].update(dispatch="no"), "options.dispatch is 'no'"),
    (lambda d: d["execution"]["recipes"][0].update(members=[[]]), "has not one index each"),
    (lambda d: d["execution"]["recipes"][0].update(variables=["z"]), "names of the recipe"),
    (lambda d: d["execution"]["recipes"][0].update(target="{S0"), "names of the recipe"),
    (lambda d: d["execution"]["recipes"][0]["node"].update(name="{q}"), "names of the recipe"),
    (lambda d: d["checkpoint"].update(findings=[{"x": 1}]), "damaged"),
    (lambda d: d["checkpoint"].pop("findings"), "findings"),
    (lambda d: d.update(checkpoint=None), "damaged"),
]


@pytest.mark.parametrize(("change", "told"), DAMAGES)
def test_damaged_plan_is_refused_when_it_is_read(
    plan_file: Path, change: Change, told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        Plan.load(edited(plan_file, change))
