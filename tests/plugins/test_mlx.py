"""MLX and Metal, against weights made by MLX and against transformers' own dequantiser."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.integrations.metal_quantization import (
    _affine_dequantize_tensor,
    _affine_quantize_tensor,
)

from modelquirks.planner.dtypes import from_torch
from modelquirks.plugins.mlx import Mlx
from modelquirks.quirks import RecipeError, Settings, TensorType

DATA = Path(__file__).parents[1] / "data" / "mlx"
TENSORS, PLAIN = (load_file(DATA / f"modes{end}.safetensors") for end in ("", "_plain"))
CONFIG: dict[str, Any] = json.loads((DATA / "modes.json").read_text())
UP = "layers.0.switch_mlp.up_proj"

Tensors = dict[str, torch.Tensor]
Load = Callable[..., Tensors]
Find = Callable[..., Any]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]


def module(name: str) -> Tensors:
    start = name.removesuffix("weight")
    return {k.removeprefix(start): t for k, t in TENSORS.items() if k.startswith(start)}


def types_of(parts: Tensors) -> dict[str, TensorType]:
    return {role: TensorType(from_torch(t.dtype), tuple(t.shape)) for role, t in parts.items()}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_each_mode_equals_mlx_within_the_rounding_of_its_dtype(name: str, loaded: Load) -> None:
    made = loaded(TENSORS, [name], CONFIG)[name]
    theirs = PLAIN[name]
    assert made.shape == theirs.shape
    if theirs.dtype == torch.float32:  # one product and one sum: a rounding each
        torch.testing.assert_close(made, theirs, rtol=1e-6, atol=1e-6)
    elif name.endswith("p4.weight") or name.endswith("p8.weight"):
        assert torch.equal(made.to(theirs.dtype), theirs)  # exact in bfloat16
    else:  # MLX rounds the product as well, which is as large as the offset
        step = torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
        torch.testing.assert_close(made, theirs, rtol=0, atol=step)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_metal_equals_transformers_to_the_bit(bits: int, dtype: torch.dtype, loaded: Load) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(bits))
    packed, scales, offsets = _affine_quantize_tensor(weight, 64, bits)
    scales, offsets = scales.to(dtype), offsets.to(dtype)
    theirs = _affine_dequantize_tensor(packed, scales, offsets, 64, bits).to(dtype)
    stored = {"a.b.weight": packed, "a.b.scales": scales, "a.b.qbiases": offsets}
    said = {"quant_method": "metal", "bits": bits, "group_size": 64}
    made = loaded(stored, ["a.b.weight"], {"quantization_config": said})
    assert torch.equal(made["a.b.weight"], theirs)


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PLAIN)))
    scheme, parts, said = Mlx(), module(name), Mlx().settings(CONFIG, name)
    shape = PLAIN[name].shape
    every = tuple((0, size) for size in shape)
    whole = scheme.evaluate(parts, every, torch.float32, said)
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    regions = scheme.regions(tuple(region), types_of(parts), said)
    cut = {r: t[tuple(slice(*bounds) for bounds in regions[r])] for r, t in parts.items()}
    got = scheme.evaluate(cut, tuple(region), torch.float32, said)
    assert torch.equal(got, whole[tuple(slice(*bounds) for bounds in region)])


def test_a_region_of_an_expert_reads_its_words_and_groups_only() -> None:
    parts = {
        "weight": TensorType("U32", (8, 16, 32)),
        "scales": TensorType("BF16", (8, 16, 4)),
        "biases": TensorType("BF16", (8, 16, 4)),
    }
    said: Settings = {"mode": "affine", "bits": 4, "group_size": 64}
    got = Mlx().regions(((2, 3), (0, 16), (70, 100)), parts, said)
    groups = ((2, 3), (0, 16), (1, 2))
    assert got == {"weight": ((2, 3), (0, 16), (8, 16)), "scales": groups, "biases": groups}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "'quantization' of config.json does not say how many bits"),
        ({"bits": 4}, "how many group_size"),
        ({"bits": 7, "group_size": 64}, "has 7 bits in groups of 64"),
        ({"mode": "nf4"}, "mode 'nf4' by config.json"),
        ({"mode": "mxfp4", "group_size": 64}, "4 bits in groups of 64"),
        ({"bits": 4, "group_size": 64, "layers.0.up": False}, "says that it is plain"),
        (
            {"bits": 4, "group_size": 64, "a.layers.0.up": {"bits": 8}, "b.layers.0.up": {}},
            "several modules that",
        ),
    ],
)
def test_what_config_json_leaves_open_or_forbids_is_refused(
    said: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        Mlx().settings({"quantization": said}, "layers.0.up.weight")


def test_bits_of_a_module_are_found_under_the_prefix_that_mlx_gives_it() -> None:
    own = {"language_model.model.layers.1.mlp.gate": {"bits": 8, "group_size": 32}}
    config = {"quantization": {"bits": 4, "group_size": 64, **own}}
    names = ("model.language_model.layers.1.mlp.gate", "model.language_model.layers.11.mlp.gate")
    said = [Mlx().settings(config, f"{name}.weight") for name in names]
    assert [(s["bits"], s["group_size"]) for s in said] == [(8, 32), (4, 64)]


def test_wrong_bits_show_in_the_headers_and_are_refused_with_both() -> None:
    parts = types_of(module("layers.0.b8.weight"))
    said: Settings = {"mode": "affine", "bits": 4, "group_size": 32}
    with pytest.raises(RecipeError, match=r"group_size is 256, by config\.json 4 times 32"):
        Mlx().infer(parts, said)


@pytest.mark.parametrize(
    ("role", "kind", "reason"),
    [
        ("weight", TensorType("U8", (3, 8, 8)), "weight must be U32"),
        ("scales", TensorType("U8", (3, 8, 1)), "scales must be F16, BF16, F32"),
        ("biases", TensorType("F16", (3, 8, 2)), "biases must be as scales"),
        ("weight", TensorType("U32", (8, 8)), "alike but for the last dimension"),
    ],
)
def test_companions_that_do_not_fit_are_refused(role: str, kind: TensorType, reason: str) -> None:
    said: Settings = {"mode": "affine", "bits": 4, "group_size": 64}
    with pytest.raises(RecipeError, match=reason):
        Mlx().infer({**types_of(module(f"{UP}.weight")), role: kind}, said)


def test_modules_left_plain_are_given_as_they_are_and_no_scales_are_looked_for(
    offers: Find,
) -> None:
    names = ["a.0.up.weight", "a.0.up.scales", "a.0.up.biases", "a.0.gate.weight"]
    config = {"quantization": {"bits": 4, "group_size": 64, "a.0.gate": False}}
    wanted = ["a.0.up.weight", "a.0.gate.weight"]
    best = offers(names, config, known=wanted).best
    assert [type(best[name].logical.node).__name__ for name in wanted] == ["Dequantize", "Source"]


def test_a_module_that_keeps_the_packed_form_is_given_the_companions(offers: Find) -> None:
    best = offers(TENSORS, CONFIG, known=list(TENSORS)).best
    assert {type(best[name].logical.node).__name__ for name in TENSORS} == {"Source"}


def test_every_quantised_weight_of_a_real_checkpoint_can_be_made(
    offers: Find, manifest: Manifest
) -> None:
    names, config = manifest("qwen3-14b-mlx-4bit")
    wanted = [name for name in names if name.endswith(".weight")]
    found = offers(names, config, known=wanted)
    assert not found.broken
    made = [n for n in wanted if type(found.best[n].logical.node).__name__ == "Dequantize"]
    assert len(made) == 40 * 7 + 2  # embed_tokens and lm_head too
