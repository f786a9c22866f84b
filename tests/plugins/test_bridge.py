"""The bridge: checkpoints of transformers' models by transformers' own rules, as recipes.

The judge is ``from_pretrained(None, config=…, state_dict=…)``, the public road: what it makes of
the same tensors is right, except where it is silently wrong.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from modelquirks.planner import Dispatcher
from modelquirks.planner.model.build import empty_weights
from modelquirks.planner.plan import Plan
from modelquirks.plugins.bridge import internals
from modelquirks.plugins.bridge.families import by_family, digits_in
from modelquirks.quirks.recipe import Opaque, Stack
from modelquirks.quirks.registry import Registry

Tensors = dict[str, torch.Tensor]
_TEXT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def config(name: str, **more: Any) -> Any:
    return getattr(transformers, name)(**{**_TEXT, **more})


def model_of(class_name: str, settings: Any) -> Any:
    """Return a model of random weights, each different from all others."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(settings).eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


of_the_tested_version = pytest.mark.skipif(
    bool(os.environ.get("VERSIONS_ROW")), reason="benchmarks/versions.py tries other versions"
)


def stored(model: Any, folder: Path) -> Tensors:
    """Return what ``save_pretrained`` stores; ``folder`` then has its config.json."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def planned(tensors: Tensors, settings: Any, folder: Path, **options: Any) -> tuple[Plan, Any]:
    """Return the plan and the empty model for a checkpoint of these tensors."""
    folder.mkdir(exist_ok=True)
    settings.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    dispatcher = Dispatcher()
    model = dispatcher.model(folder)
    return dispatcher.plan(folder, model=model, device_map={"": "cpu"}, **options), model


def by_transformers(class_name: str, settings: Any, tensors: Tensors) -> Any:
    model_class = getattr(transformers, class_name)
    return model_class.from_pretrained(None, config=settings, state_dict=tensors)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def per_expert(name: str) -> Any:
    return config(name, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=2)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "per expert to stacked": ("Qwen3MoeForCausalLM", lambda: per_expert("Qwen3MoeConfig")),
    "renamed and stacked": (
        "MixtralForCausalLM",
        lambda: config("MixtralConfig", num_local_experts=4),
    ),
    "renamed only": (
        "GraniteMoeForCausalLM",
        lambda: config("GraniteMoeConfig", num_local_experts=4),
    ),
    "tied": ("Qwen2ForCausalLM", lambda: config("Qwen2Config", tie_word_embeddings=True)),
    "fused gate and up": ("Phi3ForCausalLM", lambda: config("Phi3Config")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_is_loaded_as_transformers_loads_it(case: str, tmp_path: Path) -> None:
    class_name, make = CASES[case]
    tensors = stored(model_of(class_name, make()), tmp_path)
    plan, model = planned(tensors, make(), tmp_path / "ours")
    assert plan.ok, plan.refusal()
    plan.execute(model)
    assert_same(model, by_transformers(class_name, make(), tensors))


def renamed_keys(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    for old, new in rules:
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize(
    "rules",
    [
        [(r"^model\.", "")],
        [(r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta")],
        [(r"^bert\.", ""), (r"LayerNorm\.weight", "LayerNorm.gamma")],
    ],
    ids=["without the base prefix", "legacy names", "both"],
)
def test_old_forms_of_names_are_taken_as_transformers_takes_them(
    rules: list[tuple[str, str]], tmp_path: Path
) -> None:
    bert = "gamma" in str(rules)
    class_name = "BertForMaskedLM" if bert else "LlamaForCausalLM"
    config_name = "BertConfig" if bert else "LlamaConfig"
    make = partial(config, config_name)
    tensors = renamed_keys(stored(model_of(class_name, make()), tmp_path), *rules)
    plan, model = planned(tensors, make(), tmp_path / "ours")
    assert plan.ok, plan.refusal()
    plan.execute(model)
    assert_same(model, by_transformers(class_name, make(), tensors))


def test_a_head_model_s_file_loads_into_the_base_model_and_says_what_is_left(
    tmp_path: Path,
) -> None:
    settings = config("LlamaConfig", architectures=["LlamaModel"])
    tensors = stored(model_of("LlamaForCausalLM", config("LlamaConfig")), tmp_path)
    plan, model = planned(tensors, settings, tmp_path / "ours")
    assert type(model).__name__ == "LlamaModel"
    assert plan.ok, plan.refusal()
    assert plan.audit.unexpected == ("lm_head.weight",)
    plan.execute(model)
    assert_same(model, by_transformers("LlamaModel", settings, tensors))


def test_experts_are_one_stack_over_all_layers(tmp_path: Path) -> None:
    """By family: three layers of twelve experts are two recipes, not two for each layer."""
    tensors = stored(model_of("Qwen3MoeForCausalLM", per_expert("Qwen3MoeConfig")), tmp_path)
    plan, _ = planned(tensors, per_expert("Qwen3MoeConfig"), tmp_path / "ours")
    made = [recipe for recipe in plan.recipes if "experts" in recipe.target]
    assert {recipe.target for recipe in made} == {
        "model.layers.{S0}.mlp.experts.gate_up_proj",
        "model.layers.{S0}.mlp.experts.down_proj",
    }
    (down,) = (r.node for r in made if "down" in r.target)
    assert isinstance(down, Stack)
    assert down.count == 12
    assert "transformers" in [quirk.name for quirk in plan.quirks]


def test_experts_of_which_some_lack_the_prefix_are_stacked_by_number(tmp_path: Path) -> None:
    """transformers 5.24 sorts whole names, so that ``layers…`` comes before ``model.layers…``."""
    settings = config("MixtralConfig", num_local_experts=4)
    right = model_of("MixtralForCausalLM", settings)
    tensors = stored(right, tmp_path)
    mixed = renamed_keys(tensors, (r"^model\.(.*experts\.[23]\.)", r"\1"))
    theirs = by_transformers("MixtralForCausalLM", settings, mixed)
    assert torch.equal(  # silently
        theirs.model.layers[0].mlp.experts.down_proj[0],
        right.model.layers[0].mlp.experts.down_proj[2],
    )
    plan, model = planned(mixed, settings, tmp_path / "ours")
    assert plan.ok, plan.refusal()
    plan.execute(model)
    assert_same(model, right)


@pytest.mark.parametrize("odd", ["x", "1x", "1.1"])
def test_an_expert_without_a_number_is_refused_where_transformers_puts_it_last(
    odd: str, tmp_path: Path
) -> None:
    """transformers 5.24 stacks every name that fits, in the order of the names: 0, 2, 3, x."""
    settings = config("MixtralConfig", num_local_experts=4)
    right = model_of("MixtralForCausalLM", settings)
    renamed = renamed_keys(stored(right, tmp_path), (r"experts\.1\.", f"experts.{odd}."))
    plan, _ = planned(renamed, settings, tmp_path / "ours")
    assert not plan.ok
    assert "model.layers.0.mlp.experts.down_proj" in plan.audit.missing
    assert f"experts.{odd}.w2.weight' and '" in plan.refusal(), plan.refusal()


def test_experts_of_which_one_is_named_by_another_word_are_refused(tmp_path: Path) -> None:
    """transformers 5.24 stacks them in the order of the words: e0, e2, e3, f1."""
    settings = config("MixtralConfig", num_local_experts=4)
    right = model_of("MixtralForCausalLM", settings)
    renames = [(r"experts\.([0-9])\.", r"experts.e\1."), (r"experts\.e1\.", "experts.f1.")]
    plan, _ = planned(renamed_keys(stored(right, tmp_path), *renames), settings, tmp_path / "ours")
    assert not plan.ok
    assert "model.layers.0.mlp.experts.down_proj" in plan.audit.missing
    assert "experts.f1.w2.weight' and '" in plan.refusal(), plan.refusal()


def test_experts_numbered_within_words_are_stacked_by_number(tmp_path: Path) -> None:
    settings = config("MixtralConfig", num_local_experts=12)
    right = model_of("MixtralForCausalLM", settings)
    renamed = renamed_keys(stored(right, tmp_path), (r"experts\.([0-9]+)\.", r"experts.e\1_of."))
    plan, model = planned(renamed, settings, tmp_path / "ours")
    plan.load_into(model)
    assert_same(model, right)


@pytest.mark.parametrize(
    ("third", "told"),
    [("e4", "experts.e2.w2.weight' and '"), ("e01", "w2.weight' and '"), ("e2_1", "e2_1_of.w2")],
)
def test_a_gap_or_a_number_twice_within_words_is_refused(
    third: str, told: str, tmp_path: Path
) -> None:
    """transformers 5.24 stacks them in the order of the names, in silence."""
    settings = config("MixtralConfig", num_local_experts=4)
    right = model_of("MixtralForCausalLM", settings)
    end = "_of" if "_" in third else ""
    renames = [
        (r"experts\.([0-9])\.", rf"experts.e\1{end}."),
        (rf"experts\.e3{end}\.", f"experts.{third}{end}."),
    ]
    plan, _ = planned(renamed_keys(stored(right, tmp_path), *renames), settings, tmp_path / "ours")
    assert not plan.ok
    assert "model.layers.0.mlp.experts.down_proj" in plan.audit.missing
    assert told in plan.refusal(), plan.refusal()


def test_a_number_written_with_a_zero_is_not_taken_for_another_expert(tmp_path: Path) -> None:
    settings = config("MixtralConfig", num_local_experts=4)
    right = model_of("MixtralForCausalLM", settings)
    renamed = renamed_keys(stored(right, tmp_path), (r"experts\.3\.", "experts.01."))
    plan, _ = planned(renamed, settings, tmp_path / "ours")
    assert not plan.ok
    assert "experts.01.w2.weight'" in plan.refusal(), plan.refusal()


def test_what_keeps_transformers_from_making_a_tensor_is_named(tmp_path: Path) -> None:
    settings = config("MixtralConfig", num_local_experts=4, num_hidden_layers=2)
    right = stored(model_of("MixtralForCausalLM", settings), tmp_path)
    lacking, turned = (f"model.layers.{n}.block_sparse_moe.experts.0.w1.weight" for n in (0, 1))
    del right[lacking]
    right[turned] = right[turned].T.contiguous()
    plan, _ = planned(right, settings, tmp_path / "ours")
    assert f"(not there: '{lacking}')" in plan.refusal(), plan.refusal()
    assert f"(unlike its siblings: '{turned}')" in plan.refusal()


def test_a_gap_in_the_experts_is_refused_where_transformers_renumbers(tmp_path: Path) -> None:
    """transformers 5.24 stacks what it finds in the order of the numbers: 7 becomes 3."""
    settings = config("MixtralConfig", num_local_experts=4)
    tensors = stored(model_of("MixtralForCausalLM", settings), tmp_path)
    gap = renamed_keys(tensors, (r"experts\.3\.", "experts.7."))
    theirs = by_transformers("MixtralForCausalLM", settings, gap)
    assert torch.equal(  # silently
        theirs.model.layers[0].mlp.experts.down_proj[3],
        gap["model.layers.0.block_sparse_moe.experts.7.w2.weight"],
    )
    plan, _ = planned(gap, settings, tmp_path / "ours")
    assert not plan.ok
    assert "block_sparse_moe.experts.3.w1.weight" in plan.refusal()


@pytest.mark.parametrize("lacking", [{0}, {0, 1, 2}], ids=["in one layer", "in every layer"])
def test_an_expert_that_lacks_a_matrix_is_refused_with_the_reason(
    lacking: set[int], tmp_path: Path
) -> None:
    tensors = stored(model_of("Qwen3MoeForCausalLM", per_expert("Qwen3MoeConfig")), tmp_path)
    for layer in lacking:
        del tensors[f"model.layers.{layer}.mlp.experts.5.up_proj.weight"]
    plan, _ = planned(tensors, per_expert("Qwen3MoeConfig"), tmp_path / "ours")
    assert not plan.ok
    assert plan.audit.missing == tuple(
        f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in sorted(lacking)
    )
    told = plan.refusal()
    assert "mlp.experts.5.up_proj.weight" in told or "are joined along dimension 1" in told


def test_experts_that_are_numbered_from_one_are_refused(tmp_path: Path) -> None:
    """transformers 5.24 takes number 1 for number 0, and says nothing."""
    settings = config("MixtralConfig", num_local_experts=4)
    tensors = stored(model_of("MixtralForCausalLM", settings), tmp_path)
    shifted = {
        re.sub(r"experts\.(\d)", lambda m: f"experts.{int(m[1]) + 1}", name): tensor
        for name, tensor in tensors.items()
    }
    plan, _ = planned(shifted, settings, tmp_path / "ours")
    assert not plan.ok
    assert "block_sparse_moe.experts.0.w1.weight" in plan.refusal()


def test_two_stored_keys_for_one_parameter_are_refused(tmp_path: Path) -> None:
    """transformers 5.24 takes the first in its order and says nothing."""
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    tensors["norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    plan, _ = planned(tensors, settings, tmp_path / "ours")
    assert not plan.ok
    assert "norm.weight" in plan.refusal()


def test_what_transformers_ignores_is_extra_and_not_unexpected(tmp_path: Path) -> None:
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    plan, _ = planned(tensors, settings, tmp_path / "ours")
    assert plan.ok
    assert plan.audit.unexpected == ()
    (extra,) = (e for e in plan.audit.stored if e.kind == "extra")
    assert "transformers ignores it" in extra.reason


@pytest.mark.parametrize("device", ["cpu", "disk"])
@pytest.mark.parametrize("road", ["ours", "accelerate"])
def test_what_the_model_computes_itself_is_computed(road: str, device: str, tmp_path: Path) -> None:
    """Sinusoidal positions are in no checkpoint of Marian; on meta they would have no values."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
    settings = transformers.MarianConfig(
        vocab_size=48, decoder_vocab_size=48, decoder_ffn_dim=48, encoder_attention_heads=4,
        decoder_attention_heads=4, pad_token_id=0, decoder_start_token_id=0,
        max_position_embeddings=20, **sizes,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MarianMTModel(settings).save_pretrained(tmp_path)
    assert "model.encoder.embed_positions.weight" not in load_file(tmp_path / "model.safetensors")
    dispatcher = Dispatcher()
    model: Any = dispatcher.model(tmp_path)
    if road == "accelerate":
        with init_empty_weights():
            model = transformers.MarianMTModel(settings)
        model.eval().tie_weights()
    plan = dispatcher.plan(tmp_path, model=model, device_map={"": device})
    assert plan.ok, plan.refusal()
    assert not [f for f in plan.all_findings if f.code == "no-value"]
    plan.execute(model)
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        ours = model(input_ids=tokens, decoder_input_ids=tokens).logits
        assert torch.equal(ours, theirs(input_ids=tokens, decoder_input_ids=tokens).logits)


def test_packed_experts_are_made_plain_and_stacked_by_the_rules_of_transformers(
    tmp_path: Path,
) -> None:
    settings = per_expert("Qwen3MoeConfig")
    reference = model_of("Qwen3MoeForCausalLM", settings)
    tensors = stored(reference, tmp_path)
    packed: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            packed[name] = plain[name] = tensor
            continue
        codes = tensor.to(torch.float8_e4m3fn)
        scale = torch.full((1, 1), 0.25 + len(packed) / 1000)
        packed |= {name: codes, f"{name}_scale_inv": scale}
        plain[name] = codes.float() * scale
    settings.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    refused, _ = planned(packed, settings, tmp_path / "ours")
    assert not refused.ok
    assert "--dequantize" in refused.refusal()
    plan, model = planned(packed, settings, tmp_path / "ours", dequantize=True)
    assert plan.ok, plan.refusal()
    assert plan.audit.unexpected == ()
    plan.execute(model)
    assert_same(model, by_transformers("Qwen3MoeForCausalLM", per_expert("Qwen3MoeConfig"), plain))


def test_original_names_of_a_family_load_into_the_class_of_transformers(tmp_path: Path) -> None:
    """Rules by hand come after those of the library, and its rules see what they give."""
    settings = config("Qwen2Config", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    tensors = stored(model_of("Qwen2ForCausalLM", settings), tmp_path)
    old = renamed_keys(tensors, (r"^model\.layers\.(\d+)\.", r"model.blocks.\1."))
    plan, model = planned(
        old, settings, tmp_path / "ours", aliases=["model.blocks.{i}.**=layers.{i}.**"]
    )
    assert plan.ok, plan.refusal()  # the alias left out the prefix, which the library adds
    plan.execute(model)
    assert_same(model, by_transformers("Qwen2ForCausalLM", settings, tensors))


class Wrapped(nn.Module):
    """A user's own module around two models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = transformers.MixtralForCausalLM(config("MixtralConfig", num_local_experts=4))
        self.two = transformers.BertModel(config("BertConfig"))
        self.own = nn.Linear(3, 5)


def test_models_inside_another_module_have_their_rules(tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = Wrapped()
    tensors: Tensors = {}
    for path in ("one", "two"):
        part = stored(getattr(reference, path), tmp_path / path)
        tensors |= {f"{path}.{name}": tensor for name, tensor in part.items()}
    tensors |= {f"own.{name}": tensor for name, tensor in reference.own.state_dict().items()}
    save_file(tensors, tmp_path / "all.safetensors")
    with empty_weights():
        model = Wrapped()
    plan = Dispatcher().plan(tmp_path / "all.safetensors", model=model, device_map={"": "cpu"})
    assert plan.ok, plan.refusal()
    plan.execute(model)
    assert_same(model, reference)


class Reversed(ConversionOps):
    """An operation that no recipe can say: it looks at values."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        ((name, tensors),) = input_dict.items()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {name: tensor.flip(0) * (2 if tensor.max().item() > 0 else 3)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


@pytest.fixture
def rules_of_llama(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    """Give the function that lets transformers have other rules for Llama."""
    tables: Any = conversion_mapping
    tables.get_checkpoint_conversion_mapping("llama")  # fill the table
    source = inspect.getsource(tables.get_model_conversion_mapping)
    by_type = "conversion_mapping(class_name)" not in source  # up to 5.8 at least

    def put(rules: list[Any]) -> None:
        table = tables._checkpoint_conversion_mapping_cache
        monkeypatch.setitem(table, "llama" if by_type else "LlamaForCausalLM", rules)

    return put


def test_what_cannot_be_traced_is_left_to_transformers(
    tmp_path: Path, rules_of_llama: Callable[[list[Any]], None]
) -> None:
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    rules_of_llama(
        [WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Reversed()])]
    )
    plan, model = planned(tensors, settings, tmp_path / "ours")
    assert plan.ok, plan.refusal()
    opaque = [recipe for recipe in plan.recipes if isinstance(recipe.node, Opaque)]
    assert sorted(r.target for r in opaque) == [
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)
    ]
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").execute(model)
    assert_same(model, by_transformers("LlamaForCausalLM", settings, tensors))


def test_building_a_model_to_convert_with_changes_nothing_for_other_threads(
    tmp_path: Path,
    rules_of_llama: Callable[[list[Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading threads make other weights meanwhile."""
    settings = config("LlamaConfig", dtype="bfloat16", vocab_size=50)
    tensors = stored(model_of("LlamaForCausalLM", settings).bfloat16(), tmp_path)
    rules_of_llama(
        [WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Reversed()])]
    )
    plan, model = planned(tensors, settings, tmp_path / "ours")
    seen: list[tuple[torch.dtype, bool]] = []
    usual = transformers.LlamaModel.__init__

    def look() -> None:
        seen.append((torch.get_default_dtype(), nn.Linear(1, 1).weight.is_meta))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        usual(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", init)
    plan.execute(model)
    assert {*seen} == {(torch.float32, False)}


def test_a_digit_that_a_rule_means_literally_renames_that_index_alone(
    tmp_path: Path, rules_of_llama: Callable[[list[Any]], None]
) -> None:
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    rules_of_llama(
        [
            WeightRenaming(r"layers\.1\.mlp\.up_proj", "layers.1.mlp.gate_proj"),
            WeightRenaming(r"layers\.1\.mlp\.old_gate", "layers.1.mlp.up_proj"),
        ]
    )
    old = renamed_keys(
        tensors,
        (r"layers\.1\.mlp\.up_proj", "layers.1.mlp.old_gate"),
        (r"layers\.1\.mlp\.gate_proj", "layers.1.mlp.up_proj"),
    )
    plan, model = planned(old, settings, tmp_path / "ours")
    assert plan.ok, plan.refusal()
    plan.execute(model)
    assert_same(model, by_transformers("LlamaForCausalLM", settings, old))


def test_rules_are_read_from_a_version_that_has_no_group_renames_and_returns_errors_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.0 did; the others up to 5.13 have no group renames."""
    core = importlib.import_module("transformers.core_model_loading")
    convert = WeightConverter.convert

    def with_errors(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = convert(self, *args, **kwargs)
        return made if isinstance(made, tuple) else (made, None)

    settings = per_expert("Qwen3MoeConfig")
    tensors = stored(model_of("Qwen3MoeForCausalLM", settings), tmp_path)
    monkeypatch.setattr(WeightConverter, "convert", with_errors)
    monkeypatch.delattr(core, "GroupWeightRename", raising=False)
    plan, _ = planned(tensors, settings, tmp_path / "ours")
    assert plan.ok, plan.refusal()
    assert "transformers" in [quirk.name for quirk in plan.quirks]


def test_a_version_that_lacks_what_the_bridge_needs_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {**internals._NEEDED, "transformers.nowhere": ("thing",)}
    monkeypatch.setattr(internals, "_NEEDED", needed)
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    plan, model = planned(tensors, settings, tmp_path / "ours")
    told = [f.message for f in plan.all_findings if "transformers.nowhere" in f.message]
    assert len(told) == 1
    assert "only the rules of the other plugins are used" in told[0]
    assert plan.ok
    plan.execute(model)


@of_the_tested_version
def test_another_version_than_the_tested_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    assert not [f for f in planned(tensors, settings, tmp_path / "a")[0].all_findings
                if f.code == "library-problem"]  # fmt: skip
    monkeypatch.setattr(internals, "version", lambda: "5.99.1")
    monkeypatch.setattr("modelquirks.plugins.bridge.rules.version", lambda: "5.99.1")
    plan, _ = planned(tensors, settings, tmp_path / "b")
    (told,) = (f for f in plan.all_findings if f.code == "library-problem")
    assert "5.99.1" in told.message
    assert internals.TESTED in told.message
    assert plan.ok


@of_the_tested_version
def test_the_tables_are_those_of_the_tested_version() -> None:
    assert transformers.__version__.startswith(f"{internals.TESTED}.")
    assert internals.lacking() == ()


def test_the_record_says_how_the_model_is_cut_among_ranks() -> None:
    model = model_of("LlamaForCausalLM", config("LlamaConfig"))
    found = Registry.load().library(model, [name for name, _ in model.named_parameters()])
    assert found is not None
    cuts = {cut.modules: cut.style for cut in found[0].record.parallel}
    assert cuts["model.layers.*.self_attn.q_proj"] == "colwise"
    assert cuts["model.layers.*.self_attn.o_proj"] == "rowwise"


def test_without_its_rules_the_names_of_transformers_stay_unknown(tmp_path: Path) -> None:
    settings = config("LlamaConfig")
    tensors = stored(model_of("LlamaForCausalLM", settings), tmp_path)
    bare = renamed_keys(tensors, (r"^model\.", ""))
    plan, _ = planned(bare, settings, tmp_path / "ours", no_quirks=["transformers"])
    assert not plan.ok
    assert "transformers" not in [quirk.name for quirk in plan.quirks]


# Rules of every kind that transformers has: a literal digit, an index kept, dropped, computed.
_RULES: list[tuple[str, Callable[[re.Match[str]], str]]] = [
    (r"proj\.0\.", lambda m: "proj.1."),
    (r"layers\.(\d+)\.norm", lambda m: f"layers.{m[1]}.ln"),
    (r"layers\.(\d+)\.b", lambda m: f"layers.{int(m[1]) // 2}.b"),
    (r"experts\.(\d+)\.w", lambda m: "experts.w"),
    (r"shift\.(\d+)", lambda m: f"shift.{int(m[1]) + 1}"),
    (r"^h\.(\d)\.", lambda m: f"one.{m[1]}."),
]
_TEMPLATES = (
    "layers.{0}.norm.proj.{1}.x",
    "layers.{0}.b",
    "layers.{0}.experts.{1}.w",
    "h.{0}.shift.{1}",
    "proj.{0}.conv1d",
)


@settings(max_examples=300, deadline=None)
@given(
    template=st.sampled_from(_TEMPLATES),
    chosen=st.lists(st.sampled_from(_RULES), max_size=4),
    members=st.lists(
        st.tuples(st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=12, unique=True
    ),
)
def test_a_family_is_renamed_as_each_of_its_names_would_be(
    template: str,
    chosen: list[tuple[str, Callable[[re.Match[str]], str]]],
    members: list[tuple[int, int]],
) -> None:
    def apply(name: str) -> tuple[tuple[str], None]:
        for pattern, new in chosen:
            name = re.sub(pattern, new, name, count=1)
        return (name,), None

    n_slots = len(re.findall(r"\{\d\}", template))
    cut = list(dict.fromkeys(member[:n_slots] for member in members))
    literals = digits_in(pattern for pattern, _ in chosen) | {"1"}
    outcomes = by_family(template, cut, apply, literals)
    found: Mapping[tuple[int, ...], str] = {
        member: outcome.templates[0].format(*member)
        for outcome in outcomes
        for member in outcome.members
    }
    assert found == {member: apply(template.format(*member))[0][0] for member in cut}
