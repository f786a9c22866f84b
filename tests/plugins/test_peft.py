"""Adapters, held against what peft makes of them: every weight to the bit."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modelquirks.planner import Dispatcher
from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.places import AdapterPlacesError, with_places
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.model.build import empty_weights
from modelquirks.planner.plan import Plan
from modelquirks.plugins.peft import modelquirks_schemes
from modelquirks.quirks.recipe import Merge, Part, RecipeError, Region, Source, TensorType

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

ADAPTERS = Path(__file__).parents[1] / "data" / "peft"
SCHEMES = {scheme.name: scheme for scheme in modelquirks_schemes()}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MERGED: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "dora": {},
    "rslora_rank_pattern": {},
    "bias_all": {},
    "bin": {},
    "layers_to_transform": {"num_hidden_layers": 2},
    "lora_embedding": {},
    "lora_embedding_save_true": {},
    "lora_embedding_tied": {"tie_word_embeddings": True},
    "modules_to_save": {},
    "modules_to_save_tied_ensure": {"tie_word_embeddings": True},
    "trainable_token_indices": {},
}
OTHERS = ("ia3", "lokr", "prompt_tuning", "prefix_tuning", "ptuning")

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def peft() -> Any:
    """Give the library that is the judge here."""
    return pytest.importorskip("peft")


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Give the library that the models come from."""
    return pytest.importorskip("transformers")


@pytest.fixture
def llama(tmp_path: Path, transformers: Any) -> Make:
    """Give the function that saves a base for the adapters and returns its folder."""

    def make(dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        sizes = {
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        }
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))
        model.to(dtype).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return make


def empty(folder: Path, transformers: Any, dtype: torch.dtype) -> Any:
    """Return the model of *folder* without weights."""
    kind = transformers.AutoConfig.from_pretrained(folder)
    with empty_weights():
        return getattr(transformers, kind.architectures[0])(kind).to(dtype)


def loaded(folder: Path, transformers: Any, dtype: torch.dtype) -> Any:
    """Return the model of *folder* as transformers loads it."""
    kind = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, kind.architectures[0]).from_pretrained(folder, dtype=dtype)


def differing(expected: torch.nn.Module, found: torch.nn.Module) -> list[str]:
    """Return the names whose tensors are not the same to the bit, or are on one side only."""
    want, have = expected.state_dict(), found.state_dict()
    alike = {name for name in want.keys() & have.keys() if torch.equal(want[name], have[name])}
    return sorted((want.keys() | have.keys()) - alike)


def merged_otherwise(base: Path, adapter: Path, peft: Any, transformers: Any) -> list[str]:
    """Return the tensors that are others than PEFT merges, in fp32."""
    start = loaded(base, transformers, torch.float32)
    expected = peft.PeftModel.from_pretrained(start, adapter).merge_and_unload()
    model = empty(base, transformers, torch.float32)
    plan = Dispatcher().plan(base, model=model, adapter=adapter, merge_adapter=True)
    return differing(expected, plan.execute(model))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", MERGED)
def test_merged_weights_are_those_of_merge_and_unload(
    llama: Make, peft: Any, transformers: Any, name: str, dtype: torch.dtype
) -> None:
    base = llama(dtype, **MERGED[name])
    expected = peft.PeftModel.from_pretrained(
        loaded(base, transformers, dtype), ADAPTERS / name
    ).merge_and_unload()
    model = empty(base, transformers, dtype)

    plan = Dispatcher().plan(base, model=model, adapter=ADAPTERS / name, merge_adapter=True)

    assert not differing(expected, plan.execute(model))


@pytest.mark.parametrize("name", [*(n for n in MERGED if "token" not in n), *OTHERS])
def test_a_peft_model_is_filled_from_base_and_adapter(
    llama: Make, peft: Any, transformers: Any, name: str
) -> None:
    base = llama(**MERGED.get(name, {}))
    expected = peft.PeftModel.from_pretrained(
        loaded(base, transformers, torch.float32), ADAPTERS / name
    )
    model = with_places(empty(base, transformers, torch.float32), open_adapter(ADAPTERS / name))

    plan = Dispatcher().plan(base, model=model, adapter=ADAPTERS / name)
    plan.execute(model)

    ids = torch.arange(12).view(2, 6)
    assert not differing(expected, model)
    with torch.no_grad():
        assert torch.equal(expected.eval()(ids).logits, model.eval()(ids).logits)


def test_a_model_into_which_the_adapter_was_put_without_a_wrapper_is_filled(
    llama: Make, transformers: Any, peft: Any
) -> None:
    """As ``add_adapter`` of transformers does it: no name has the prefix."""
    base, name = llama(), ADAPTERS / "lora"
    config = peft.PeftConfig.from_pretrained(name)
    expected = peft.inject_adapter_in_model(config, loaded(base, transformers, torch.float32))
    peft.set_peft_model_state_dict(expected, peft.load_peft_weights(str(name)))
    model = peft.inject_adapter_in_model(config, loaded(base, transformers, torch.float32))

    Dispatcher().plan(base, model=model, adapter=name, device_map=None).execute(model)

    assert not differing(expected, model)


def test_trained_rows_beside_the_base_need_a_model_with_weights(
    llama: Make, peft: Any, transformers: Any
) -> None:
    base, name = llama(), ADAPTERS / "trainable_token_indices"
    with pytest.raises(AdapterPlacesError, match="trainable_tokens_original"):
        with_places(empty(base, transformers, torch.float32), open_adapter(name))
    expected = peft.PeftModel.from_pretrained(loaded(base, transformers, torch.float32), name)
    model = peft.get_peft_model(
        loaded(base, transformers, torch.float32), peft.PeftConfig.from_pretrained(name)
    )

    Dispatcher().plan(base, model=model, adapter=name, device_map=None).execute(model)

    assert not differing(expected, model)


@pytest.mark.parametrize("name", ["lora", "dora", "lora_embedding", "trainable_token_indices"])
def test_merged_weights_on_disk_are_made_when_they_are_needed(
    llama: Make, peft: Any, transformers: Any, name: str, tmp_path: Path
) -> None:
    base = llama(torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(
        loaded(base, transformers, torch.bfloat16), ADAPTERS / name
    ).merge_and_unload()
    model = empty(base, transformers, torch.bfloat16)
    plan = Dispatcher().plan(
        base, model=model, adapter=ADAPTERS / name, merge_adapter=True, device_map={"": "disk"}
    )
    plan.save(tmp_path / "plan.json")

    Plan.load(tmp_path / "plan.json").execute(model)

    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(expected.eval()(ids).logits, model.eval()(ids).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "plan.json"]


def randomised(model: Any, folder: Path) -> Path:
    """Save the adapter of a PEFT model with random values in *folder*."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_lie_the_other_way_round_are_merged(
    peft: Any, transformers: Any, tmp_path: Path, dtype: torch.dtype, dora: bool
) -> None:
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(dtype)
    gpt2.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, use_dora=dora
    )
    adapter = randomised(peft.get_peft_model(gpt2, config), tmp_path / "adapter")
    model = empty(tmp_path / "base", transformers, dtype)
    expected = peft.PeftModel.from_pretrained(
        loaded(tmp_path / "base", transformers, dtype), adapter
    ).merge_and_unload()

    plan = Dispatcher().plan(tmp_path / "base", model=model, adapter=adapter, merge_adapter=True)

    assert not differing(expected, plan.execute(model))


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Conv2d(3, 8, 3)
        self.narrow = torch.nn.Conv2d(8, 6, 1)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_are_merged(peft: Any, tmp_path: Path, dtype: torch.dtype, dora: bool) -> None:
    torch.manual_seed(0)
    base = Convolutions().to(dtype)
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    config = peft.LoraConfig(r=2, target_modules=["wide", "narrow"], use_dora=dora)
    adapter = randomised(peft.get_peft_model(base, config), tmp_path / "adapter")
    expected = Convolutions().to(dtype)
    expected.load_state_dict(load_file(tmp_path / "model.safetensors"))
    expected = peft.PeftModel.from_pretrained(expected, adapter).merge_and_unload()
    model = Convolutions().to(dtype)

    plan = Dispatcher().plan(
        tmp_path / "model.safetensors",
        model=model,
        adapter=adapter,
        merge_adapter=True,
        device_map=None,
    )

    assert not differing(expected, plan.execute(model))


def mixtral(transformers: Any) -> Any:
    """Return the model that the adapter of parameters is for."""
    sizes = {
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_experts_are_merged_though_the_base_stores_them_one_by_one(
    peft: Any, transformers: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mixtral(transformers).to(dtype).save_pretrained(tmp_path)
    adapter = ADAPTERS / "target_parameters_moe"
    expected = peft.PeftModel.from_pretrained(
        loaded(tmp_path, transformers, dtype), adapter
    ).merge_and_unload()
    model = empty(tmp_path, transformers, dtype)

    plan = Dispatcher().plan(tmp_path, model=model, adapter=adapter, merge_adapter=True)

    assert not differing(expected, plan.execute(model))


def test_experts_that_are_square_are_turned_as_the_model_says(
    peft: Any, transformers: Any, tmp_path: Path
) -> None:
    sizes = {
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    oss = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    oss.save_pretrained(tmp_path / "base")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=names)
    adapter = randomised(peft.get_peft_model(oss, config), tmp_path / "adapter")
    assert merged_otherwise(tmp_path / "base", adapter, peft, transformers) == []


def test_a_head_with_a_bias_of_its_own_and_biases_of_lora_are_merged(
    peft: Any, transformers: Any, tmp_path: Path
) -> None:
    sizes = {
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_labels": 3},
        **{"num_hidden_layers": 2, "num_attention_heads": 2},
    }
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    bert.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=3, target_modules=["query", "value"], lora_bias=True
    )
    adapter = randomised(peft.get_peft_model(bert, config), tmp_path / "adapter")
    assert merged_otherwise(tmp_path / "base", adapter, peft, transformers) == []


def test_an_embedding_retrained_alone_is_told_from_the_head_it_was_tied_to(
    llama: Make, peft: Any, transformers: Any
) -> None:
    """PEFT leaves the head as in the base: the alias that the message names does the same."""
    base, name = llama(tie_word_embeddings=True), ADAPTERS / "modules_to_save_tied"
    expected = peft.PeftModel.from_pretrained(
        loaded(base, transformers, torch.float32), name
    ).merge_and_unload()
    tied = empty(base, transformers, torch.float32)
    refused = Dispatcher().plan(base, model=tied, adapter=name, merge_adapter=True)
    alias = "model.embed_tokens.weight=lm_head.weight"
    assert any(alias in problem for problem in refused.problems)
    kind = transformers.AutoConfig.from_pretrained(base)
    kind.tie_word_embeddings = False
    with empty_weights():
        model = transformers.LlamaForCausalLM(kind)

    plan = Dispatcher().plan(base, model=model, adapter=name, merge_adapter=True, aliases=[alias])

    assert not differing(expected, plan.execute(model))


def test_a_vocabulary_that_grew_comes_from_the_adapter(
    llama: Make, peft: Any, transformers: Any, tmp_path: Path
) -> None:
    base = llama()
    grown = loaded(base, transformers, torch.float32)
    grown.resize_token_embeddings(40)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    adapter = randomised(peft.get_peft_model(grown, config), tmp_path / "adapter")
    expected = loaded(base, transformers, torch.float32)
    expected.resize_token_embeddings(40)
    expected = peft.PeftModel.from_pretrained(expected, adapter).merge_and_unload()
    kind = transformers.AutoConfig.from_pretrained(base)
    with empty_weights():
        small = transformers.LlamaForCausalLM(kind)
    kind.vocab_size = 40
    with empty_weights():
        model = transformers.LlamaForCausalLM(kind)

    plan = Dispatcher().plan(base, model=model, adapter=adapter, merge_adapter=True)
    refused = Dispatcher().plan(base, model=small, adapter=adapter, merge_adapter=True)

    assert not differing(expected, plan.execute(model))
    assert any("another vocabulary" in problem for problem in refused.problems)


# Regions: what is made for one is what it is in the whole


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    """Return regions of *shape*."""
    return st.tuples(
        *(
            st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
                lambda pair: (min(pair[0], pair[1] - 1), pair[1])
            )
            for n in shape
        )
    )


@st.composite
def merges(draw: st.DrawFn) -> tuple[Merge, dict[str, torch.Tensor], list[Region]]:
    """Return a merge, its tensors by name, and regions of it."""
    n_out, n_in, rank = (
        draw(st.integers(1, 200)),
        draw(st.integers(1, 200)),
        draw(st.integers(1, 9)),
    )
    turned, dora = draw(st.booleans()), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))
    shape = (n_in, n_out) if turned else (n_out, n_in)
    weight = torch.randn(shape).to(draw(st.sampled_from(FLOATS)))
    tensors = {"w": weight, "a": torch.randn(rank, n_in), "b": torch.randn(n_out, rank)}
    parts = [Part("weight", Source("w")), Part("a", Source("a")), Part("b", Source("b"))]
    if dora:
        tensors["m"] = torch.rand(n_out) + 0.1
        parts.append(Part("magnitude", Source("m")))
    node = Merge("lora", tuple(parts), (("scaling", 1.7), ("transposed", turned)))
    return node, tensors, [draw(boxes(shape)) for _ in range(3)]


def made(node: Merge, tensors: Mapping[str, torch.Tensor], region: Region | None) -> torch.Tensor:
    """Return what *node* gives, having read only what it asked for."""

    def read(name: str, of: Region | None) -> torch.Tensor:
        return tensors[name] if of is None else tensors[name][tuple(slice(*b) for b in of)]

    def types(name: str) -> TensorType:
        return TensorType(from_torch(tensors[name].dtype), tuple(tensors[name].shape))

    return evaluate(node, {}, read=read, types=types, schemes=SCHEMES, region=region)


@given(merges())
@settings(max_examples=60, deadline=None)
def test_a_region_has_the_values_that_the_whole_has_there(
    case: tuple[Merge, dict[str, torch.Tensor], list[Region]],
) -> None:
    node, tensors, regions = case
    whole = made(node, tensors, None)
    for region in regions:
        assert torch.equal(made(node, tensors, region), whole[tuple(slice(*b) for b in region)])


def test_a_region_of_experts_has_the_values_that_the_whole_has_there() -> None:
    torch.manual_seed(0)
    shapes = {"w": (4, 70, 130), "a": (12, 130), "b": (70, 12)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    parts = tuple(Part(r, Source(n)) for r, n in (("weight", "w"), ("a", "a"), ("b", "b")))
    node = Merge("lora_experts", parts, (("scaling", 0.5),))
    whole = made(node, tensors, None)
    for expert, rows, columns in itertools.product((0, 3), ((0, 1), (60, 70)), ((5, 6), (0, 130))):
        region = ((expert, expert + 1), rows, columns)
        cut = whole[tuple(slice(*b) for b in region)]
        assert torch.equal(made(node, tensors, region), cut)


def test_a_region_needs_its_rows_of_b_and_not_all_of_them() -> None:
    types = {
        "weight": TensorType("BF16", (4096, 1024)),
        "a": TensorType("F32", (8, 1024)),
        "b": TensorType("F32", (4096, 8)),
    }
    found = SCHEMES["lora"].regions(((100, 200), (0, 1024)), types, {"scaling": 1.0})
    assert found == {
        "weight": ((100, 200), (0, 1024)),
        "a": ((0, 8), (0, 1024)),
        "b": ((64, 256), (0, 8)),
    }


def misfits() -> Iterator[tuple[str, dict[str, tuple[int, ...]], str]]:
    """Yield shapes that do not go together, and what is said of them."""
    yield "lora", {"weight": (4, 6), "a": (2, 6), "b": (4, 3)}, "ranks disagree"
    yield "lora", {"weight": (4, 6), "a": (2, 7), "b": (4, 2)}, r"is for \[4, 7\]"
    yield "lora", {"weight": (4, 6), "a": (2,), "b": (4, 2)}, "no pair"
    yield "lora", {"weight": (4, 6), "a": (2, 6), "b": (4, 2), "magnitude": (6,)}, "magnitudes"
    yield "lora_experts", {"weight": (3, 4, 6), "a": (4, 6), "b": (4, 4)}, "no LoRA"
    yield "lora_bias", {"weight": (4,), "b": (5,)}, r"is \[5\]"
    yield "trained_rows", {"weight": (4, 6), "rows": (1, 6)}, "2 rows"


@pytest.mark.parametrize(("scheme", "shapes", "said"), list(misfits()))
def test_parts_that_do_not_fit_are_refused_before_anything_is_read(
    scheme: str, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    types = {role: TensorType("F32", shape) for role, shape in shapes.items()}
    with pytest.raises(RecipeError, match=said):
        SCHEMES[scheme].infer(types, {"scaling": 1.0, "indices": "1,2"})


def test_a_packed_base_is_made_plain_and_then_merged(tmp_path: Path) -> None:
    """The change is put on what the base's own recipe gives."""
    data, name = ADAPTERS.parent / "gptq", "b4a32"
    stored = load_file(data / "v2.safetensors")
    packed = {n: tensor for n, tensor in stored.items() if n.startswith(f"{name}.")}
    (tmp_path / "base").mkdir()
    save_file(packed, tmp_path / "base" / "model.safetensors")
    shutil.copy(data / "v2.json", tmp_path / "base" / "config.json")
    plain = load_file(data / "v2_plain.safetensors")[f"{name}.weight"]
    a, b = torch.randn(2, 96), torch.randn(64, 2)
    (tmp_path / "adapter").mkdir()
    head = f"base_model.model.{name}"
    save_file(
        {f"{head}.lora_A.weight": a, f"{head}.lora_B.weight": b},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": [name]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(96, 64, bias=False, dtype=torch.float16))

    plan = Dispatcher().plan(
        tmp_path / "base",
        model=model,
        adapter=tmp_path / "adapter",
        merge_adapter=True,
        dequantize=True,
        device_map=None,
    )
    plan.execute(model)

    assert torch.equal(model.state_dict()[f"{name}.weight"], (plain + b @ a * 0.5).half())


@pytest.mark.parametrize("role", ["a", "b"])
def test_integers_are_no_change_of_a_weight(role: str) -> None:
    parts = {
        "weight": TensorType("F32", (6, 4)),
        "a": TensorType("F32", (2, 4)),
        "b": TensorType("F32", (6, 2)),
    }
    assert SCHEMES["lora"].infer(parts, {}) == parts["weight"]
    with pytest.raises(RecipeError, match=f"'{role}' is I32"):
        SCHEMES["lora"].infer({**parts, role: TensorType("I32", parts[role].shape)}, {})
