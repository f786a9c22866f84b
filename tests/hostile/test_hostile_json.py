"""JSON that readers understand differently, and numbers that are none: told, not believed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner import Dispatcher
from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.registry import Registry

HUGE = "1" + "0" * 400
DIGITS = "9" * 5000


def header(folder: Path, text: str, data: int = 8) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + bytes(data))
    return path


ENTRY = '{"w":{"dtype":"F32","shape":%s,"data_offsets":%s}}'
HEADERS = {
    "a bool as a size": ENTRY % ("[true,2]", "[0,8]"),
    "a fraction as a size": ENTRY % ("[2.0]", "[0,8]"),
    "a fraction as an offset": ENTRY % ("[2]", "[0,8.0]"),
    "a bool as an offset": ENTRY % ("[2]", "[false,8]"),
    "NaN as a size": ENTRY % ("[NaN]", "[0,8]"),
    "Infinity as a size": ENTRY % ("[Infinity]", "[0,8]"),
    "a text as a size": ENTRY % ('["2"]', "[0,8]"),
    "a negative size": ENTRY % ("[-2]", "[0,8]"),
    "sizes that multiply past all": ENTRY % (f"[{1 << 40},{1 << 40},0]", "[0,8]"),
    "a number of 400 digits": ENTRY % (f"[{HUGE}]", "[0,8]"),
    "a number of 5,000 digits": ENTRY % (f"[{DIGITS}]", "[0,8]"),
    "a key twice": '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"I32",'
    '"shape":[2],"data_offsets":[0,8]}}',
    "a field twice": '{"w":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    "minus zero": ENTRY % ("[2]", "[-0,8]"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_readers_understand_differently_is_an_error(
    tmp_path: Path, name: str
) -> None:
    found = read_header(header(tmp_path, HEADERS[name]))
    assert [f for f in found.findings if f.severity == "error"]


SIZES = {
    "NaN": "NaN", "Infinity": "Infinity", "minus": "-1", "a bool": "true", "a text": '"8"',
    "400 digits": HUGE, "a list": "[8]", "a fraction": "8.5", "an exponent": "1e400",
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_a_size_in_an_index_that_cannot_be_true_is_not_used(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata":{"total_size":' + SIZES[name] + '},"weight_map":{"w":"a.safetensors"}}'
    )
    manifest = open_manifest(tmp_path)
    assert manifest.declared_bytes is None
    assert manifest.total_bytes == 8
    assert "total-size-invalid" in {f.code for f in manifest.findings}


INDEXES = {
    "a tensor in two files": '{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}',
    "two weight_maps": '{"weight_map":{"w":"a.safetensors"},"weight_map":{"w":"b.safetensors"}}',
    "a bool as a file": '{"weight_map":{"w":true}}',
    "a list as a file": '{"weight_map":{"w":["a.safetensors"]}}',
    "a number as a file": '{"weight_map":{"w":' + HUGE + "}}",
    "5,000 digits": '{"weight_map":{"w":' + DIGITS + "}}",
    "NaN as a file": '{"weight_map":{"w":NaN}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_readers_understand_differently_is_an_error(
    tmp_path: Path, name: str
) -> None:
    for file in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{file}.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(INDEXES[name])
    assert [f for f in open_manifest(path).findings if f.severity == "error"]


CONFIGS = {
    "NaN": '{"model_type":NaN,"vocab_size":NaN}',
    "Infinity": '{"num_hidden_layers":Infinity,"hidden_size":-Infinity}',
    "bools": '{"num_hidden_layers":true,"tie_word_embeddings":1,"architectures":true}',
    "fractions": '{"num_hidden_layers":2.5,"vocab_size":1e400,"head_dim":0.0}',
    "400 digits": '{"num_hidden_layers":' + HUGE + ',"vocab_size":' + HUGE + "}",
    "minus": '{"num_hidden_layers":-1,"hidden_size":-1,"num_attention_heads":0}',
    "lists": '{"model_type":["x"],"architectures":[["x"]],"quantization_config":[1]}',
    "objects": '{"model_type":{"a":1},"architectures":{"a":1},'
    '"quantization_config":{"quant_method":{}}}',
    "texts": '{"architectures":"abc","num_hidden_layers":"2","text_config":"x"}',
    "deep": '{"text_config":' * 500 + "1" + "}" * 500,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_may_say_anything_and_the_plan_says_what_it_can(
    tmp_path: Path, name: str, empty: Registry
) -> None:
    save_file({"layers.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(CONFIGS[name])
    model = torch.nn.Module()
    model.register_module("layers", torch.nn.ModuleList([torch.nn.Linear(1, 2, bias=False)]))
    for options in ({}, {"model": model}):
        plan = Dispatcher(empty).plan(tmp_path, max_memory={"cpu": "1GiB"}, **options)  # type: ignore[arg-type]
        json.dumps(plan.to_json())


@pytest.fixture(scope="module")
def empty() -> Registry:
    return Registry.load()


def test_keys_of_a_config_that_are_there_twice_are_named(tmp_path: Path) -> None:
    """One reader takes the first and checks it, another takes the last and runs it."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type":"llama","a":1,"model_type":"evil"}')
    manifest = open_manifest(tmp_path)
    (finding,) = (f for f in manifest.findings if f.code == "config-duplicate")
    assert "'model_type'" in finding.message
    assert manifest.config["model_type"] == "evil"


ADAPTERS = {
    "a key twice": '{"peft_type":"LORA","r":8,"r":16}',
    "NaN": '{"peft_type":"LORA","r":8,"lora_alpha":NaN}',
    "Infinity": '{"peft_type":"LORA","r":8,"lora_alpha":Infinity}',
    "a bool as a rank": '{"peft_type":"LORA","r":true}',
    "a fraction as a rank": '{"peft_type":"LORA","r":2.5}',
    "a rank of 400 digits": '{"peft_type":"LORA","r":' + HUGE + "}",
    "a rank of 0": '{"peft_type":"LORA","r":0}',
    "a rank below 0": '{"peft_type":"LORA","r":-8}',
    "a list as a kind": '{"peft_type":["LORA"],"r":8}',
    "repeats in repeats": '{"peft_type":"LORA","r":8,"target_modules":"(([a-z_.0-9])+)+x"}',
    "very many repeats": '{"peft_type":"LORA","r":8,"target_modules":"' + ".*" * 30 + 'x"}',
    "a rank by such a name": '{"peft_type":"LORA","r":8,"rank_pattern":{"(.*)*x":4}}',
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapters_config_that_means_nothing_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"base_model.model.w.lora_A.weight": torch.zeros(8, 2)},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(ADAPTERS[name])
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        open_adapter(tmp_path)


# ----------------------------------------------------------------------------------------- plans


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    save_file(model.state_dict(), folder / "model.safetensors")
    path = tmp_path / "plan.json"
    Dispatcher().plan(folder, model=model, max_memory={"cpu": "1GiB"}).save(path)
    return path


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def node(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["execution"]["recipes"][0]["node"]
    return found


def first(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["execution"]["recipes"][0]
    return found


def opaque(data: dict[str, Any], **settings: Any) -> None:
    recipe = data["execution"]["recipes"][0]
    recipe["node"] = {"op": "opaque", "scheme": "transformers.converter", "of": [node(data)],
                      "dtype": "F32", "shape": [2, 2], "settings": settings}  # fmt: skip


def stacked(data: dict[str, Any], count: int) -> None:
    inner = {"op": "stack", "of": node(data), "over": "a", "count": count}
    data["execution"]["recipes"][0]["node"] = {
        "op": "stack", "of": inner, "over": "b", "count": count,
    }  # fmt: skip


def shard(data: dict[str, Any], name: str) -> None:
    data["execution"]["shards"][0]["name"] = name


def hub(data: dict[str, Any], **changes: str) -> None:
    data["execution"]["hub"] = {
        "repository": "org/name", "revision": "main", "commit": "0" * 40, "path": "", **changes,
    }  # fmt: skip


REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above the folder": lambda d: shard(d, "../../../etc/passwd"),
    "an absolute file": lambda d: shard(d, "/etc/passwd"),
    "a file of Windows": lambda d: shard(d, "C:\\x"),
    "a file with a NUL": lambda d: shard(d, "a\0b"),
    "a commit that is a path": lambda d: hub(d, commit="../../../etc"),
    "a repository that is a path": lambda d: hub(d, repository="../../x"),
    "a revision that is a path": lambda d: hub(d, revision="../../../etc/passwd"),
    "a path that leads out": lambda d: hub(d, path="a/../../b"),
    "a field of a format": lambda d: node(d).update(name="{a.__class__}"),
    "an index of a format": lambda d: node(d).update(name="{a[0]}"),
    "a conversion of a format": lambda d: node(d).update(name="{a!r}"),
    "a width of a format": lambda d: node(d).update(name="{a:>9999999999}"),
    "a width of the target": lambda d: first(d).update(target="{a:>9999999999}"),
    "reads without end": lambda d: stacked(d, 1 << 40),
    "a bool as a size": lambda d: d["execution"]["shards"][0].update(size_bytes=True),
    "a fraction as a size": lambda d: d["execution"]["shards"][0].update(size_bytes=1.5),
    "NaN as a size": lambda d: d["execution"]["shards"][0].update(size_bytes=float("nan")),
    "Infinity as a size": lambda d: d["execution"]["shards"][0].update(size_bytes=float("inf")),
    "an unknown operation": lambda d: node(d).update(op="import"),
    "an operation with more in it": lambda d: node(d).update(code="import os"),
    "a severity that there is not": lambda d: d["execution"]["findings"].append(
        {"code": "x", "severity": "fatal", "message": "x"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_of_an_attacker_is_refused_when_it_is_read(plan_file: Path, name: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(edited(plan_file, REFUSED[name]))


def test_a_plan_with_a_key_twice_is_refused(plan_file: Path) -> None:
    text = plan_file.read_text()
    plan_file.write_text(text.replace('"schema": 1,', '"schema": 1, "ok": true,', 1))
    with pytest.raises(PlanError, match="'ok'"):
        Plan.load(plan_file)


def test_a_plan_nested_without_end_is_refused(plan_file: Path) -> None:
    deep = '{"op":"cast","dtype":"F32","of":' * 900
    plan_file.write_text(deep + "1" + "}" * 900)
    with pytest.raises(PlanError):
        Plan.load(plan_file)


def test_a_plan_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "plan.json")


CLASSES = [
    "os.system",
    "pipeline",
    "AutoModel",
    "Trainer",
    "__builtins__",
    "utils",
    "x\0y",
    "torch",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_recipe_of_a_plan_names_models_of_transformers_and_nothing_else(
    plan_file: Path, name: str, tmp_path: Path
) -> None:
    """An opaque recipe holds a class and a config: only models are built, and no code of others."""
    settings = {"class": name, "config": '{"auto_map":{"AutoModel":"canary.X"}}', "converter": 0,
                "first": "0.weight", "sources": "{}", "target": "0.weight"}  # fmt: skip
    plan = Plan.load(edited(plan_file, lambda data: opaque(data, **settings)))
    with pytest.raises((PlanError, RuntimeError), match="no model"):
        plan.execute(torch.nn.Sequential(torch.nn.Linear(2, 2)))
