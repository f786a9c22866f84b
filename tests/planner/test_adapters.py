"""Adapters planned with their base: names, sizes and what is said of whatever does not fit."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.changes import read_name
from modelquirks.planner.adapter.config import config_of
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.planner.dispatcher import OptionError
from modelquirks.planner.plan import Plan, PlanError

DATA = Path(__file__).parents[1] / "data"
ADAPTERS = DATA / "peft"


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden)


class Decoder(nn.Module):
    def __init__(self, hidden: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))


class Model(nn.Module):
    """A model with the names and sizes that the adapters are for."""

    def __init__(self, hidden: int = 16, vocabulary: int = 32, layers: int = 1) -> None:
        super().__init__()
        self.model = Decoder(hidden, vocabulary, layers)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(Model(), tmp_path / "base")


def saved(model: nn.Module, folder: Path) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def plan(base: Path, adapter: Path, model: nn.Module | None = None, **options: Any) -> Plan:
    options.setdefault("merge_adapter", True)
    model = Model() if model is None else model
    return Dispatcher().plan(base, model=model, adapter=adapter, device_map=None, **options)


def codes(plan: Plan) -> list[str]:
    return [f.code for f in plan.all_findings if f.severity == "error"]


def said(plan: Plan, code: str) -> str:
    return next(f.message for f in plan.all_findings if f.code == code)


Tensors = Mapping[str, torch.Tensor]


def changed(
    folder: Path,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], Tensors] = lambda tensors: tensors,
    **config: Any,
) -> Path:
    """Return a copy of an adapter with other tensors, or other fields in its config."""
    shutil.copytree(ADAPTERS / name, folder)
    tensors = dict(change(load_file(folder / "adapter_model.safetensors")))
    save_file(tensors, folder / "adapter_model.safetensors")
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    return folder


# What is made of it


def test_a_weight_is_the_base_and_the_scaled_product(base: Path) -> None:
    model = Model()
    plan(base, ADAPTERS / "lora", model).execute(model)
    stored = load_file(base / "model.safetensors")
    lora = load_file(ADAPTERS / "lora" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(model.state_dict()[f"{name}.weight"], stored[f"{name}.weight"] + b @ a * 2.0)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])


def test_a_plan_says_which_weights_are_changed_and_how(base: Path) -> None:
    facts = plan(base, ADAPTERS / "rslora_rank_pattern").adapter
    assert facts is not None
    assert [(c.family, c.weights, c.change) for c in facts.changes] == [
        (
            "model.layers.*.self_attn.k_proj.weight",
            1,
            "merged with a LoRA of rank 2, scaling 2.828",
        ),
        ("model.layers.*.self_attn.q_proj.weight", 1, "merged with a LoRA of rank 4, scaling 4"),
    ]


def test_a_saved_plan_knows_its_adapter_and_refuses_another(base: Path, tmp_path: Path) -> None:
    adapter = changed(tmp_path / "adapter", "lora")
    made = plan(base, adapter)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.adapter == made.adapter
    model = Model()
    loaded.execute(model)
    doubled = {name: 2 * t for name, t in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(doubled, adapter / "adapter_model.safetensors")
    with pytest.raises(PlanError, match=r"adapter_model.safetensors' was written again"):
        Plan.load(tmp_path / "plan.json").execute(Model())
    shutil.rmtree(adapter)
    with pytest.raises(PlanError, match="the adapter of the plan is not there any more"):
        Plan.load(tmp_path / "plan.json").execute(Model())


def test_an_adapter_in_several_files_is_read_by_its_index(base: Path, tmp_path: Path) -> None:
    whole = load_file(ADAPTERS / "lora" / "adapter_model.safetensors")
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(ADAPTERS / "lora" / "adapter_config.json", folder)
    files = {name: f"adapter_model-0000{n}-of-00004.safetensors" for n, name in enumerate(whole, 1)}
    for name, file in files.items():
        save_file({name: whole[name]}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    one, other = Model(), Model()
    plan(base, ADAPTERS / "lora", one).execute(one)
    plan(base, folder, other).execute(other)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())
    (folder / "adapter_model.safetensors.index.json").unlink()
    plan(base, folder, other).execute(other)


def test_without_a_model_the_names_and_shapes_of_the_base_are_compared(base: Path) -> None:
    fits = Dispatcher().plan(base, adapter=ADAPTERS / "lora", merge_adapter=True)
    assert fits.ok and fits.adapter is not None and len(fits.adapter.changes) == 2
    misfit = Dispatcher().plan(base, adapter=ADAPTERS / "target_parameters_moe")
    assert "adapter-target" in codes(misfit)


# What does not fit, and what it is called


def test_the_prefix_of_a_wrapper_is_named_with_the_alias_that_mends_it(
    base: Path, tmp_path: Path
) -> None:
    """Trained on the inner model, loaded into the one with a head."""
    adapter = changed(
        tmp_path / "adapter",
        "lora",
        lambda tensors: {n.replace(".model.model.", ".model."): t for n, t in tensors.items()},
    )
    found = plan(base, adapter)
    assert codes(found) == ["adapter-prefix"]
    assert "--alias 'adapter:**=model.**'" in said(found, "adapter-prefix")
    assert plan(base, adapter, aliases=["adapter:**=model.**"]).ok


def test_names_without_pefts_prefix_are_taken_and_told_of(base: Path) -> None:
    found = plan(base, ADAPTERS / "broken_wrong_prefix")
    assert found.ok
    assert "PEFT itself would load none" in said(found, "adapter-prefix")


def test_another_head_is_named(base: Path, tmp_path: Path) -> None:
    adapter = changed(
        tmp_path / "adapter",
        "lora",
        lambda tensors: {**tensors, "base_model.model.score.weight": torch.zeros(3, 16)},
        modules_to_save=["score"],
        task_type="SEQ_CLS",
    )
    found = plan(base, adapter)
    assert codes(found) == ["adapter-head"]
    assert "another head: the adapter brings 'score.weight'" in said(found, "adapter-head")


def test_another_number_of_labels_is_another_head(tmp_path: Path) -> None:
    model = Model()
    model.score = nn.Linear(16, 2, bias=False)
    adapter = changed(
        tmp_path / "adapter",
        "lora",
        lambda tensors: {**tensors, "base_model.model.score.weight": torch.zeros(3, 16)},
        modules_to_save=["score"],
    )
    found = plan(saved(model, tmp_path / "base"), adapter, model)
    assert "another head: the adapter's is [3, 16], the base's [2, 16]" in said(
        found, "adapter-head"
    )


@pytest.mark.parametrize("name", ["modules_to_save", "lora_embedding"])
def test_another_vocabulary_is_named(tmp_path: Path, name: str) -> None:
    model = Model(vocabulary=40)
    found = plan(saved(model, tmp_path / "base"), ADAPTERS / name, model)
    assert "adapter-vocabulary" in codes(found)
    assert "'model.embed_tokens.weight': another vocabulary: the adapter's is [32, 16]" in said(
        found, "adapter-vocabulary"
    )


def test_a_trained_row_outside_of_the_table_is_another_vocabulary(
    base: Path, tmp_path: Path
) -> None:
    adapter = changed(
        tmp_path / "adapter", "trainable_token_indices", trainable_token_indices=[1, 32]
    )
    assert codes(plan(base, adapter)) == ["adapter-vocabulary"]


def test_an_adapter_in_the_place_of_a_base_is_named_with_the_command(base: Path) -> None:
    found = Dispatcher().plan(ADAPTERS / "lora", model=Model(), device_map=None)
    assert "adapter-as-base" in codes(found)
    assert "modelquirks plan BASE --adapter" in said(found, "adapter-as-base")
    both = plan(ADAPTERS / "lora", ADAPTERS / "dora")
    assert "is an adapter itself" in said(both, "adapter-as-base")


def test_an_adapter_alone_says_what_it_is_and_for_which_base(tmp_path: Path) -> None:
    folder = changed(tmp_path / "adapter", "dora", base_model_name_or_path="acme/base-7b")
    (told,) = [f.message for f in open_manifest(folder).findings if f.code == "adapter"]
    assert "an adapter (LORA)" in told
    assert f"modelquirks plan acme/base-7b --adapter {folder} --merge" in told


def test_a_base_in_the_place_of_an_adapter_is_named(base: Path) -> None:
    (base / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no adapter but a whole model"):
        plan(base, base)


def test_folders_of_several_adapters_are_listed(base: Path) -> None:
    with pytest.raises(CheckpointError, match="holds adapters in the folders 'bias_all', 'bin'"):
        plan(base, ADAPTERS)


def test_a_missing_half_is_named(base: Path) -> None:
    found = plan(base, ADAPTERS / "broken_missing_B")
    assert codes(found) == ["adapter-pair"]
    assert "'model.layers.0.self_attn.q_proj.weight': there is no lora_B" in said(
        found, "adapter-pair"
    )


def test_whole_weights_in_the_place_of_an_adapter_are_named(base: Path, tmp_path: Path) -> None:
    def whole(_: dict[str, torch.Tensor]) -> Tensors:
        stored = load_file(base / "model.safetensors")
        return {f"base_model.model.{name}": tensor for name, tensor in stored.items()}

    found = plan(base, changed(tmp_path / "adapter", "lora", whole))
    assert codes(found) == ["adapter-incomplete"]
    assert "for which the adapter has no tensors: 'model.layers.0.self_attn.q_proj'" in said(
        found, "adapter-incomplete"
    )


def test_a_missing_magnitude_is_named(base: Path, tmp_path: Path) -> None:
    adapter = changed(tmp_path / "adapter", "lora", use_dora=True)
    assert "lora_magnitude_vector (DoRA)" in said(plan(base, adapter), "adapter-pair")


def test_what_zero_3_left_behind_is_told_as_such(base: Path) -> None:
    assert "under ZeRO-3" in said(plan(base, ADAPTERS / "broken_zero3_empty"), "adapter-empty")
    assert "adapter-empty" in codes(plan(base, ADAPTERS / "broken_no_tensors"))


def test_ranks_that_disagree_are_named(base: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> Tensors:
        return {n: t[:, :1].clone() if ".lora_B." in n else t for n, t in tensors.items()}

    found = plan(base, changed(tmp_path / "one", "lora", cut))
    assert "lora_A has rank 2 and lora_B rank 1" in said(found, "adapter-rank")
    found = plan(base, changed(tmp_path / "two", "lora", r=4))
    assert "has rank 2, adapter_config.json says 4" in said(found, "adapter-rank")


def test_a_model_of_another_size_is_named(tmp_path: Path) -> None:
    model = Model(hidden=24)
    found = plan(saved(model, tmp_path / "base"), ADAPTERS / "lora", model)
    assert "trained on a model of another size" in said(found, "adapter-size")


def test_targets_that_are_not_there_come_with_the_nearest(base: Path, tmp_path: Path) -> None:
    adapter = changed(
        tmp_path / "adapter",
        "lora",
        lambda tensors: {n.replace("q_proj", "query"): t for n, t in tensors.items()},
    )
    told = said(plan(base, adapter), "adapter-target")
    assert "'model.layers.0.self_attn.query.weight'" in told
    assert "the nearest names are " in told and "'model.layers.0.self_attn.q_proj.weight'" in told


def test_layers_that_the_adapter_lacks_are_named(tmp_path: Path) -> None:
    model = Model(layers=2)
    folder = saved(model, tmp_path / "base")
    found = plan(folder, ADAPTERS / "lora", model)
    assert codes(found) == ["adapter-incomplete"]
    assert "'model.layers.1.self_attn.q_proj'" in said(found, "adapter-incomplete")
    assert plan(folder, ADAPTERS / "layers_to_transform", model).ok


def test_tensors_that_the_config_does_not_name_are_told(base: Path, tmp_path: Path) -> None:
    adapter = changed(tmp_path / "adapter", "lora", target_modules=["v_proj"])
    found = plan(base, adapter)
    assert "'model.layers.0.self_attn.q_proj.weight'" in said(found, "adapter-untargeted")


@pytest.mark.parametrize("name", ["ia3", "lokr", "prompt_tuning", "prefix_tuning", "ptuning"])
def test_other_methods_are_not_merged_and_named(base: Path, name: str) -> None:
    found = plan(base, ADAPTERS / name)
    assert "adapter-method" in codes(found)


@pytest.mark.parametrize(
    "config",
    [{"init_lora_weights": "pissa"}, {"use_qalora": True}, {"layer_replication": [[0, 1]]}],
)
def test_variants_that_are_no_plain_lora_are_not_merged(
    base: Path, tmp_path: Path, config: Mapping[str, Any]
) -> None:
    adapter = changed(tmp_path / "adapter", "lora", **config)
    found = plan(base, adapter)
    assert next(iter(config)) in said(found, "adapter-method")


def test_several_adapters_in_one_file_are_refused(base: Path, tmp_path: Path) -> None:
    def named(tensors: dict[str, torch.Tensor]) -> Tensors:
        return {
            name.replace(".weight", f".{adapter}.weight"): tensor.clone()
            for name, tensor in tensors.items()
            for adapter in ("default", "other")
        }

    found = plan(base, changed(tmp_path / "adapter", "lora", named))
    assert "'default', 'other'" in said(found, "adapter-several")


def test_a_model_without_places_is_refused_unless_it_is_merged(base: Path) -> None:
    found = plan(base, ADAPTERS / "lora", merge_adapter=False)
    assert codes(found) == ["adapter-model"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"merge_adapter": True}, "no adapter to merge"),
        ({"adapter": [ADAPTERS / "lora", ADAPTERS / "dora"]}, "one at a time"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    base: Path, options: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        Dispatcher().plan(base, **options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "holds a JSON list"),
        ('{"r": "8"}', "'r' is '8'"),
        ('{"rank_pattern": {"q": 0}}', "rank 0 of 'q'"),
        ('{"alpha_pattern": {"q": "x"}}', "alpha 'x' of 'q'"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    shutil.copy(ADAPTERS / "lora" / "adapter_model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=said):
        open_adapter(tmp_path)


# Models that were saved with an adapter in them


def inside(names: Sequence[str], folder: Path) -> Path:
    """Save the weights of the model, the names of the adapted layer being *names*."""
    weights = Model().state_dict()
    weight = weights.pop("model.layers.0.self_attn.q_proj.weight")
    head = "model.layers.0.self_attn.q_proj."
    halves = {f"{head}lora_A.default.weight": weight[:2], f"{head}lora_B.default.weight": weight.T}
    whole = {f"{head}{name}": weight for name in names}
    folder.mkdir()
    tensors = {n: t.clone().contiguous() for n, t in {**weights, **whole, **halves}.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_full_model_with_its_adapter_inside_is_told_as_such(tmp_path: Path) -> None:
    folder = inside(["base_layer.weight"], tmp_path / "full")
    found = Dispatcher().plan(folder, model=Model(), device_map=None)
    assert "a full model that was saved with its adapter inside" in said(found, "adapter-left-out")


def test_what_a_merge_left_over_is_told_as_such(tmp_path: Path) -> None:
    found = Dispatcher().plan(
        inside(["weight"], tmp_path / "merged"), model=Model(), device_map=None
    )
    assert "left over from a merge, or never merged" in said(found, "adapter-left-out")


# Names and strengths


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("base_model.model.a.q.lora_A.weight", ("a.q", "linear", "a", 0, "")),
        ("base_model.model.a.q.lora_B.default.weight", ("a.q", "linear", "b", 0, "default")),
        ("module.base_model.model.a.q.lora_B.bias", ("a.q", "linear", "b_bias", 0, "")),
        ("a.e.base_layer.lora_A.weight", ("a.e", "linear", "a", 1, "")),
        ("a.q.lora_magnitude_vector", ("a.q", "linear", "magnitude", 0, "")),
        ("a.q.lora_magnitude_vector.x.weight", ("a.q", "linear", "magnitude", 0, "x")),
        ("e.lora_embedding_A", ("e", "embedding", "a", 0, "")),
        ("e.token_adapter.trainable_tokens_delta", ("e", "rows", "rows", 0, "")),
        ("e.base_layer.weight", ("e", "whole", "weight", 1, "")),
        ("h.modules_to_save.default.out.bias", ("h.out", "whole", "bias", 0, "")),
        ("h.original_module.weight", ("h", "former", "weight", 0, "")),
        ("a.k.ia3_l", ("a.k", "other", "ia3_l", 0, "")),
    ],
)
def test_names_are_taken_apart(name: str, read: tuple[object, ...]) -> None:
    assert read_name(name)[:5] == read


def test_patterns_of_ranks_fit_the_end_of_a_name_and_rslora_divides_by_the_root() -> None:
    config = config_of(
        {
            **{"r": 4, "lora_alpha": 8, "use_rslora": True},
            **{"rank_pattern": {"layers.0.q": 16, "q": 9}, "alpha_pattern": {"q": 3}},
        }
    )
    assert config.strength("m.layers.0.q") == (16, 3, 0.75)
    assert config.strength("m.layers.10.q") == (9, 3, 1.0)
    assert config.strength("m.layers.0.xq") == (4, 8, 4.0)


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"target_modules": ["q"]}, ["a.q", "q"], ["a.xq", "a.q.b"]),
        ({"target_modules": r".*\.(q|k)"}, ["a.q"], ["q", "a.q.b"]),
        (
            {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h"},
            ["a.h.1.q"],
            ["a.h.0.q", "a.q"],
        ),
        ({"target_modules": ["q"], "exclude_modules": ["b.q"]}, ["a.q"], ["b.q"]),
    ],
)
def test_targets_are_found_as_peft_finds_them(
    fields: Mapping[str, Any], yes: Sequence[str], no: Sequence[str]
) -> None:
    config = config_of(fields)
    assert all(map(config.targeted, yes)) and not any(map(config.targeted, no))


# At the command line


UPDATE_GOLDEN = bool(os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"))


def agrees(name: str, text: str) -> bool:
    """Compare with a golden file, which is the text as it should be."""
    path = DATA / "golden" / name
    if UPDATE_GOLDEN:
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Give a function that runs the command beside ``base`` and ``adapter``."""
    shutil.copytree(ADAPTERS / "rslora_rank_pattern", base.parent / "adapter")
    monkeypatch.chdir(base.parent)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    module = ModuleType("adapted")
    module.make = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "adapted", module)

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = int(main(words))
        except SystemExit as exit:
            code = int(str(exit.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


SHOWN = ("--model", "adapted:make", "--max-memory", "cpu=1GiB,disk=0", "--machine", "24gb+64gb")


def test_a_plan_with_an_adapter_is_shown_as_people_read_it(call: Call) -> None:
    code, out, _ = call("plan", "base", "--dry-run", "--adapter", "adapter", "--merge", *SHOWN)
    assert code == 0
    assert agrees("plan_adapter.txt", out)


def test_a_plan_with_an_adapter_is_loaded_from_its_file(call: Call) -> None:
    words = ("--adapter", "adapter", "--merge", *SHOWN)
    code, out, _ = call("plan", "base", "--dry-run", "-o", "plan.json", "--json", *words)
    assert code == 0
    told = json.loads(out)["adapter"]
    assert (told["method"], told["merged"], told["tensors"]) == ("LoRA", True, 4)
    code, out, _ = call("execute", "plan.json", "--model", "adapted:make")
    assert code == 0 and "equal to the files" in out


def test_an_export_writes_the_merged_weights(call: Call, base: Path) -> None:
    words = ("--model", "adapted:make", "--adapter", "adapter", "--merge")
    code, _, err = call("export", "base", "out", *words)
    assert (code, err) == (0, "")
    model = Model()
    plan(base, base.parent / "adapter", model).execute(model)
    written = load_file(base.parent / "out" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in model.state_dict().items())


def test_an_export_does_not_leave_an_adapter_beside(call: Call) -> None:
    code, _, err = call("export", "base", "out", "--model", "adapted:make", "--adapter", "adapter")
    assert code == 2 and "--merge" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--merge",), "--merge needs the adapter"),
        (("--adapter", "adapter", "--adapter", "adapter"), "given 2 times"),
        (("--adapter", "nowhere"), "'nowhere' is not a file or folder that exists"),
    ],
)
def test_bad_calls_say_why(call: Call, words: Sequence[str], why: str) -> None:
    code, _, err = call("plan", "base", "--dry-run", *words)
    assert code == 2 and why in err


def test_a_model_for_an_adapter_alone_is_refused_with_the_command(call: Call) -> None:
    code, _, err = call("plan", "adapter")
    assert code == 2
    assert "modelquirks plan BASE --adapter adapter --merge" in err
