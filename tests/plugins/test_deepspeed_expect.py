"""What a job expects of a DeepSpeed checkpoint, compared with how it was saved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.cli.command import main
from modelquirks.planner.finding import Finding
from modelquirks.plugins import deepspeed
from modelquirks.plugins.deepspeed.job import Job, job_of
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data" / "deepspeed"


def registry() -> Registry:
    found = Registry()
    found.register(deepspeed, name="deepspeed")
    return found


def compared(case: str, **expect: Any) -> dict[str, Finding]:
    options = OpenOptions(expect=expect)
    found = open_manifest(DATA / case, registry, options).findings
    return {f.code: f for f in found if f.code.startswith("expect-")}


@pytest.mark.parametrize(
    ("case", "expect", "codes"),
    [
        # Each as engine.load_checkpoint of DeepSpeed 0.19.8 was seen to do: nothing is an error
        # that it loads, and nothing that it fails on is none (benchmarks/deepspeed_loads.py).
        ("zero2_fp32", {"dp": "1"}, ["expect-dp"]),
        ("zero3_fp32", {"dp": "1"}, ["expect-dp"]),
        ("zero0_fp32", {"dp": "1"}, []),
        ("autotp2_zero1", {"tp": "1"}, ["expect-tp"]),
        ("autotp2_zero3", {"tp": "1"}, ["expect-tp"]),
        ("moe_ep2_zero2", {"dp": "1", "ep": "1"}, ["expect-dp", "expect-ep"]),
        ("moe_ep2_zero0", {"dp": "1", "ep": "1"}, ["expect-ep"]),
        ("pipeline_pp2_zero1", {"pp": "1"}, ["expect-pp"]),
        ("pipeline_pp2_zero1", {"pp": "1", "dp": "2"}, ["expect-dp", "expect-pp"]),
        ("zero1_fp32", {"zero_stage": "2"}, []),
        ("zero2_fp32", {"zero_stage": "3"}, ["expect-zero-stage"]),
        ("zero3_fp32", {"zero_stage": "2"}, ["expect-zero-stage"]),
        ("zero2_fp32", {"zero_stage": "0"}, ["expect-zero-stage"]),
        ("zero3_fp32", {"zero_stage": "0"}, ["expect-zero-stage"]),
        ("zero0_fp32", {"zero_stage": "2"}, ["expect-zero-stage"]),
        ("zero0_fp32", {"zero_stage": "3"}, ["expect-zero-stage"]),
        ("zero2_fp32", {"dtype": "bf16"}, ["expect-dtype"]),
        ("zero2_bf16", {"dtype": "fp32"}, ["expect-dtype"]),
        ("zero3_fp32", {"dtype": "bf16"}, ["expect-dtype"]),
        ("zero0_fp32", {"dtype": "bf16", "zero_stage": "1"}, ["expect-dtype", "expect-zero-stage"]),
        ("zero1_bf16", {"zero_stage": "2", "dtype": "bfloat16"}, []),
        ("zero2_bf16", {"zero_stage": "1"}, []),
        ("pipeline_pp2_bf16_zero0", {"zero_stage": "0", "pp": "2", "dtype": "bf16"}, []),
        ("universal_from_zero2", {"dp": "1"}, []),
        ("universal_from_zero2", {"zero_stage": "3"}, ["expect-zero-stage"]),
        ("universal_from_zero3", {"zero_stage": "2"}, ["expect-zero-stage"]),
        ("zero3_subgroups", {"zero_stage": "3", "dp": "2", "tp": "1", "pp": "1", "ep": "1"}, []),
    ],
)
def test_what_the_engine_fails_on_is_an_error_beforehand(
    case: str, expect: Mapping[str, str], codes: list[str]
) -> None:
    found = compared(case, **expect)
    assert [code for code, f in found.items() if f.severity == "error"] == codes
    assert ("expect-met" in found) == (not codes)


def test_a_difference_names_both_sides_the_failure_and_the_ways_out() -> None:
    text = compared("zero2_fp32", dp="8")["expect-dp"].message
    assert "saved with dp=2, expected dp=8" in text
    assert "ZeRORuntimeException" in text
    assert "train on dp=2" in text and "load_optimizer_states=False" in text
    assert "ds_to_universal" in text and "load_universal" in text
    text = compared("zero3_fp32", zero_stage="2")["expect-zero-stage"].message
    assert "AssertionError without a text" in text and "modelquirks export" in text


def test_universal_conversion_is_not_recommended_where_it_gives_wrong_values() -> None:
    assert "ds_to_universal" not in compared("zero2_round_robin", dp="8")["expect-dp"].message


def test_zero_1_and_2_load_each_other_and_that_is_said() -> None:
    found = compared("zero1_fp32", zero_stage="2")
    assert found["expect-zero-stage"].severity == "info"
    assert "saved by ZeRO 1 with dp=2, tp=1, pp=1, ep=1, fp32" in found["expect-met"].message


def test_a_config_of_deepspeed_is_read_as_it_is() -> None:
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": 2},
    }
    assert job_of(config)[0] == Job("3", 4, 2, None, None, "bf16", False, False)
    found = compared("zero2_fp32", **config)
    assert [*found] == ["expect-dp", "expect-dtype", "expect-tp", "expect-zero-stage"]


def test_what_the_trainer_fills_in_later_is_not_compared() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    assert job_of(config)[0] == Job(stage="2", universal=False, alignment=False)
    assert [*compared("zero2_bf16", **config)] == ["expect-met"]


def test_the_form_of_the_checkpoint_must_be_what_the_config_asks_for() -> None:
    plain, universal = {"zero_optimization": {"stage": 2}}, {"checkpoint": {"load_universal": True}}
    text = compared("universal_from_zero2", **plain)["expect-universal"].message
    assert "load_universal" in text
    text = compared("zero2_fp32", **plain, **universal)["expect-universal"].message
    assert "'latest_universal' does not exist" in text
    assert [*compared("universal_from_zero2", **plain, **universal)] == ["expect-met"]


def test_another_alignment_of_parameters_is_told() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    assert "expect-alignment" in compared("zero2_param_align", **config)
    config["zero_optimization"]["parameter_alignment"] = True
    assert [*compared("zero2_param_align", **config)] == ["expect-met"]
    text = compared("zero2_fp32", **config)["expect-alignment"].message
    assert "set it to false" in text


@pytest.mark.parametrize(
    ("expect", "told"),
    [
        ({"zero_stag": "3"}, "'zero_stag=3': expected one of zero_stage, dp, tp, pp, ep, dtype"),
        ({"zero_stage": "4"}, "'zero_stage=4': expected 0, 1, 2 or 3"),
        ({"dp": "0"}, "'dp=0': expected a whole number from 1"),
        ({"tp": "two", "dtype": "int8"}, "'dtype=int8': expected fp32, bf16 or fp16"),
    ],
)
def test_expectations_that_mean_nothing_are_refused(expect: dict[str, str], told: str) -> None:
    found = compared("zero2_fp32", **expect)
    assert [*found] == ["expect-unknown"] and told in found["expect-unknown"].message


def test_nothing_is_compared_unasked_and_nothing_of_it_is_kept_in_a_plan() -> None:
    found = open_manifest(DATA / "zero2_fp32", registry).findings
    assert not [f for f in found if f.code.startswith("expect-")]
    manifest = open_manifest(DATA / "zero2_fp32", registry, OpenOptions(expect={"dp": "8"}))
    plan = Dispatcher(registry()).plan(manifest)
    assert not plan.ok and plan.opening == OpenOptions("master", "global_step3")


def test_the_command_line_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(DATA / "zero2_fp32")
    assert main(["inspect", folder, "--expect", "zero_stage=2,dp=2,dtype=fp32"]) == 0
    assert main(["inspect", folder, "--expect", "dp=8"]) == 1
    capsys.readouterr()
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert main(["plan", folder, "--dry-run", "--expect", str(config), "--json"]) == 1
    codes = [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]]
    assert "expect-zero-stage" in codes


def test_the_report_for_people_is_as_it_should_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = os.environ.get("MODELQUIRKS_UPDATE_GOLDEN")
    monkeypatch.chdir(DATA)
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--weights", "training", "--expect", "zero_stage=3,dp=8,tp=1,dtype=fp32"]
    assert main(["inspect", "zero2_bf16", *words]) == 1
    report, golden = capsys.readouterr().out, DATA.parent / "golden" / "inspect_deepspeed.txt"
    if update:
        golden.write_text(report, encoding="utf-8")
    assert report == golden.read_text(encoding="utf-8")
