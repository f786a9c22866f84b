"""Explaining a plan, and planning for what is not here: through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelquirks.planner import Dispatcher
from modelquirks.planner.cli import main
from modelquirks.planner.explain import UnknownName, explain, what_if
from modelquirks.planner.placement.workload import Workload
from modelquirks.planner.plan import Plan


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtral")
    model: Any = MixtralForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def plan_of(folder: Path, **options: Any) -> Plan:
    dispatcher = Dispatcher()
    given: dict[str, Any] = {"max_memory": {0: "6MiB", "cpu": "8MiB", "disk": None}, **options}
    return dispatcher.plan(folder, model=dispatcher.model(folder), **given)


def test_a_tensor_is_explained_from_its_sources_to_the_price_of_other_devices(
    mixtral: Path,
) -> None:
    plan = plan_of(mixtral)
    name = "model.layers.4.mlp.experts.gate_up_proj"
    told = explain(plan, name)
    assert len(told.made_from[name]) == 16
    assert told.n_bytes == 8 * 512 * 128 * 2
    assert (told.device, told.key) == ("cpu", "model.layers.4")
    assert told.reason == "no room on 0; moved to 0 when it runs"
    assert [entry.kind for entry in told.families] == ["made"]
    assert told.seconds is not None
    prices = {other.device: other.seconds for other in told.alternatives}
    assert prices[0] is not None and prices["disk"] is not None
    assert prices[0] == pytest.approx(told.seconds, rel=0.01)  # a layer goes for a layer
    assert prices["disk"] > told.seconds * 1.2


def test_a_plan_that_was_saved_is_explained_as_before(mixtral: Path, tmp_path: Path) -> None:
    plan = plan_of(mixtral, workload=Workload(64), pins=["model.layers.{0..1}=cpu"])
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for name in ("model.layers.1", "lm_head.weight", ""):
        assert explain(loaded, name) == explain(plan, name)
    assert loaded.placement.prediction == plan.placement.prediction
    assert loaded.placement.reserves == plan.placement.reserves
    assert {r.what for r in loaded.placement.reserves} == {"cache", "activations", "streaming"}


def test_more_memory_says_which_modules_move_and_what_that_gains(mixtral: Path) -> None:
    change = what_if(plan_of(mixtral).placement, {0: 9 << 20})
    assert change.before is not None and change.after is not None
    assert change.after < change.before
    assert change.moved == {"model.layers.3": ("cpu", 0), "model.layers.4": ("cpu", 0)}


def test_less_memory_says_why_nothing_fits(mixtral: Path) -> None:
    plan = plan_of(mixtral, max_memory={"cpu": "16MiB", "disk": 0})
    change = what_if(plan.placement, {"cpu": 1 << 20})
    assert change.after is None
    assert "finds no room" in change.findings[0]


def test_an_unknown_name_has_the_nearest_ones(mixtral: Path) -> None:
    with pytest.raises(UnknownName, match=r"nearest names are 'model.layers.4'"):
        explain(plan_of(mixtral), "model.layer.4")


def test_a_given_map_has_no_alternatives_and_says_so(mixtral: Path) -> None:
    plan = plan_of(mixtral, device_map={"": "cpu"})
    assert explain(plan, "lm_head").alternatives == ()
    with pytest.raises(ValueError, match="follows a device map that was given"):
        what_if(plan.placement, {0: 1})


def test_a_given_map_that_leaves_no_room_for_the_cache_is_refused(mixtral: Path) -> None:
    fits = plan_of(mixtral, device_map={"": 0}, max_memory={0: "12MiB"})
    assert fits.ok
    full = plan_of(mixtral, device_map={"": 0}, max_memory={0: "12MiB"}, workload=Workload(2048))
    assert any("for cache and activations" in problem for problem in full.problems)


def test_a_plan_for_another_machine_needs_none_of_its_devices(mixtral: Path) -> None:
    plan = plan_of(mixtral, max_memory=None, machine="2x24gb", workload=Workload(128))
    assert dict(plan.device_map) == {"": 0}
    assert plan.placement.prediction is not None
    assert plan.placement.prediction.machine == "2x24gb"


def test_throughput_takes_the_batch_that_makes_most_tokens(mixtral: Path) -> None:
    workload = Workload(256, objective="throughput")
    plan = plan_of(mixtral, max_memory={0: "64MiB", "cpu": "64MiB"}, workload=workload)
    single = plan_of(mixtral, max_memory={0: "64MiB", "cpu": "64MiB"}, workload=Workload(256))
    most, one = plan.placement.prediction, single.placement.prediction
    assert most is not None and one is not None
    assert most.batch > 1
    assert most.batch / most.seconds > 1 / one.seconds


def test_the_command_explains_a_checkpoint_and_a_change(
    mixtral: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "transformers", "--max-memory", "0=6MiB,cpu=8MiB,disk"]
    names = ["model.embed_tokens", "model.layers.4"]
    assert main(["explain", str(mixtral), *names, *words, "--what-if", "0=9MiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [name["device"] for name in told["names"]] == [0, "cpu"]
    assert told["what_if"]["moved"]["model.layers.3"] == ["cpu", 0]
    assert main(["explain", str(mixtral), "model.layers.4", *words, "--what-if", "0=9MiB"]) == 0
    text = capsys.readouterr().out
    assert "on cpu: no room on 0; moved to 0 when it runs" in text
    assert "from cpu to 0: model.layers.3-4" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--pin", "model.layers.1"], "must be a module and a device"),
        (["--machine", "none"], "is none of"),
        (["--context", "many"], "no whole number"),
        (["--reserve", "0"], "device 0 has no size"),
        (["--objective", "throughput"], "needs a context"),
        (["--kv-dtype", "int3"], "is not known"),
    ],
)
def test_an_option_that_means_nothing_says_what_to_write(
    mixtral: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    try:
        code = main(["plan", str(mixtral), "--dry-run", *words])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    assert code == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_expert_frequencies_come_from_a_file(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "routing.json"
    path.write_text(json.dumps({str(n): [0.5] * 8 for n in range(6)}))
    seconds: list[float] = []
    for more in ([], ["--expert-frequencies", str(path)]):
        words = ["--dry-run", "--model", "transformers", "--max-memory", "cpu=64MiB", "--json"]
        assert main(["plan", str(mixtral), *words, *more]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["placement"]["prediction"]["seconds"])
    assert seconds[1] > seconds[0] * 1.3
