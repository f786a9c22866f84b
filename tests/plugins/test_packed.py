"""Packed formats are told by their companions: each as itself, and none where there is none."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from modelquirks.planner.mapping.offers import Offers
from modelquirks.quirks import ModelQuirks
from modelquirks.quirks.resolve import Resolution

Resolved = Callable[..., Resolution]
Find = Callable[..., Offers]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]

SHARED = Path(__file__).parents[3] / "shared" / "data" / "manifests"
PLAIN = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
LINEARS = tuple(
    f"model.layers.{layer}.{name}" for layer in range(2) for name in ("mlp.up_proj", "self_attn.o")
)


class Format(NamedTuple):
    """What a writer stores for one Linear, by the table of its documentation."""

    record: str
    scheme: str
    parts: str
    config: dict[str, Any] = {}  # noqa: RUF012
    """Needed only where names do not tell."""
    optional: str = ""


def method(name: str, **said: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **said}}


NF4 = "weight weight.absmax weight.quant_map weight.quant_state.bitsandbytes__nf4"
MLX = {"quantization": {"bits": 4, "group_size": 64}}
FORMATS = {
    "gptq": Format("gptq", "gptq", "qweight qzeros scales g_idx", method("gptq", bits=4)),
    "gptq without g_idx": Format(
        "gptq_unsorted", "gptq", "qweight qzeros scales", method("gptq", bits=4)
    ),
    "awq": Format("awq", "awq", "qweight qzeros scales"),
    "auto-round": Format(
        "auto_round", "auto_round", "qweight qzeros scales", method("auto-round", bits=4)
    ),
    "fp_quant": Format("fp_quant", "fp_quant", "qweight scales", method("fp_quant")),
    "bnb nf4": Format("bitsandbytes_nf4", "bnb_nf4", NF4),
    "bnb nf4, nested": Format(
        "bitsandbytes_nf4", "bnb_nf4", f"{NF4} weight.nested_absmax weight.nested_quant_map"
    ),
    "bnb fp4": Format("bitsandbytes_fp4", "bnb_fp4", NF4.replace("nf4", "fp4")),
    "bnb int8": Format("bitsandbytes_8bit", "bnb_int8", "weight SCB weight_format"),
    "ct pack-quantized": Format(
        "compressed_tensors", "ct_pack_quantized", "weight_packed weight_scale weight_shape"
    ),
    "ct pack-quantized, asymmetric": Format(
        "compressed_tensors",
        "ct_pack_quantized",
        "weight_packed weight_scale weight_shape weight_zero_point weight_g_idx",
    ),
    "ct nvfp4": Format(
        "compressed_tensors_nvfp4",
        "ct_nvfp4",
        "weight_packed weight_scale weight_global_scale input_global_scale",
    ),
    "ct mxfp4": Format("compressed_tensors_mxfp4", "ct_mxfp4", "weight_packed weight_scale"),
    "ct float-quantized": Format(
        "scaled", "scaled", "weight weight_scale input_scale", method("compressed-tensors")
    ),
    "ct int-quantized": Format("scaled", "scaled", "weight weight_scale weight_zero_point"),
    "fbgemm_fp8": Format("scaled", "scaled", "weight weight_scale", method("fbgemm_fp8")),
    "modelopt fp8": Format("scaled", "scaled", "weight weight_scale input_scale"),
    "fp8 block": Format("fp8_block", "fp8_block", "weight weight_scale_inv"),
    "fp8 block, static": Format(
        "fp8_block", "fp8_block", "weight weight_scale_inv activation_scale"
    ),
    "deepseek v4 fp8": Format("fp8_scale", "fp8_block", "weight scale", method("fp8")),
    "mistral fp8": Format("mistral_fp8", "fp8_block", "weight qscale_weight qscale_act"),
    "modelopt nvfp4": Format(
        "modelopt", "modelopt", "weight weight_scale weight_scale_2 input_scale"
    ),
    "quark": Format("quark", "quark", "weight weight_scale input_scale", method("quark")),
    "bitnet": Format("bitnet", "bitnet", "weight weight_scale", method("bitnet")),
    "gemma": Format("gemma", "gemma", "weight weight_scale", method("gemma")),
    "chatglm": Format("chatglm", "chatglm", "weight weight_scale", {"model_type": "chatglm"}),
    "eetq": Format("eetq", "eetq", "weight weight_scales"),
    "mlx": Format("mlx", "mlx", "weight scales biases", MLX),
    "mlx nvfp4": Format("mlx_floats", "mlx", "weight scales", {"quantization": {"mode": "nvfp4"}}),
    "metal": Format("metal", "metal", "weight scales qbiases", MLX),
    "higgs": Format("higgs", "higgs", "weight scales tables tables2"),
    "aqlm": Format("aqlm", "aqlm", "codes codebooks scales"),
    "vptq": Format("vptq", "vptq", "indices centroids.weight weight_scale weight_bias"),
    "spqr": Format("spqr", "spqr", "dense_weights row_offsets col_vals in_perm"),
    "hqq": Format("hqq", "hqq", "W_q scale zero nbits group_size shape axis packing"),
    "sinq": Format("sinq", "sinq", "W_q meta"),
    "quanto": Format("quanto", "quanto", "weight._data weight._scale input_scale output_scale"),
    "torchao": Format("torchao", "torchao", "_weight_qdata _weight_scale"),
}
REFUSED = {"packed.gptq_marlin"}
"""Recognised, and never made plain: each is tested with its family."""
ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def stored(form: Format) -> list[str]:
    names = [f"{linear}.{part}" for linear in LINEARS for part in form.parts.split()]
    return [*PLAIN, *(f"{linear}.bias" for linear in LINEARS), *names]


def recognised(resolution: Resolution) -> set[str]:
    assert not resolution.conflicts
    return {r.name for r in resolution.records() if r.role == "quantization"}


@ALL
def test_each_format_is_recognised_as_itself(form: Format, resolved: Resolved) -> None:
    assert recognised(resolved(stored(form), form.config)) == {f"packed.{form.record}"}


@ALL
def test_companions_are_one_weight_and_every_one_of_them_counts(form: Format, offers: Find) -> None:
    found = offers(stored(form), form.config)
    assert {pack.scheme for pack in found.packed} == {form.scheme}
    weights = [name for pack in found.packed for name, _ in pack.weight.items()]
    assert sorted(weights) == sorted(f"{linear}.weight" for linear in LINEARS)
    parts = {name for pack in found.packed for part in pack.parts for name, _ in part.items()}
    assert parts == {f"{linear}.{part}" for linear, part in product(LINEARS, form.parts.split())}
    assert not found.broken
    for name in PLAIN:
        assert found.best[name].logical.name == name  # untouched


@ALL
def test_a_plain_module_is_never_given_the_codes_for_a_weight(form: Format, offers: Find) -> None:
    """Also where the codes bear the weight's own name."""
    wanted = {f"{linear}.weight" for linear in LINEARS} | set(PLAIN)
    best = offers(stored(form), form.config, known=wanted).best
    for linear in LINEARS:
        assert type(best[f"{linear}.weight"].logical.node).__name__ == "Dequantize"


@ALL
def test_a_packed_module_is_given_the_companions_as_they_are(form: Format, offers: Find) -> None:
    names = stored(form)
    best = offers(names, form.config, known=names).best
    for name in names:
        node = best[name].logical.node
        assert type(node).__name__ == "Source", name


@pytest.mark.parametrize("base", ["model.layers.0.mlp.experts.gate_up_proj", "x.experts.down_proj"])
@pytest.mark.parametrize(("suffix", "scheme"), [("scale_inv", "fp8_block"), ("scale", "scaled")])
def test_stacked_experts_have_companions_without_a_dot(
    base: str, suffix: str, scheme: str, offers: Find
) -> None:
    wanted = [base]
    both = [base, f"{base}_{suffix}", "model.layers.0.mlp.experts.gate_up_proj_" + suffix]
    (pack,) = [p for p in offers(both, known=wanted).packed if p.weight.name.startswith(base[:8])]
    assert pack.scheme == scheme


def test_plain_fp8_layers_of_an_nvfp4_checkpoint_are_packed_too(offers: Find) -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.weight_scale_2",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.o_proj.weight_scale",
    ]
    best = offers(names, known=["model.layers.0.mlp.up_proj.weight", names[3]]).best
    nodes = {name: best[name].logical.node for name in (names[0], names[3])}
    assert [getattr(node, "scheme", None) for node in nodes.values()] == ["modelopt", "modelopt"]


@pytest.mark.parametrize(
    "names",
    [
        PLAIN,
        ("model.layers.0.router.scale", "model.layers.0.router.per_expert_scale", *PLAIN),
        ("block.0.attn.norm.scale", "block.0.mlp.mlp1_bias"),
        ("vit.blocks.0.ls1.gamma", "vit.patch_embed.proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.biases"),
    ],
)
def test_one_suffix_alone_tells_nothing(names: tuple[str, ...], resolved: Resolved) -> None:
    assert recognised(resolved(names)) == set()


REAL = {
    "gpt-oss-20b": {"gpt_oss.mxfp4"},
    "qwen-7b-chat-int4-gptq": {"packed.gptq"},
    "qwen3-14b-mlx-4bit": {"packed.mlx"},
    "llava-next-video-7b-nf4-lora": {"packed.bitsandbytes_nf4"},
    "wizardlm-2-8x22b": set[str](),
    "granite-3.1-1b-a400m": set[str](),
    "mistral-7b-v0.1": set[str](),
}


@pytest.mark.parametrize("slug", REAL)
def test_real_checkpoints_are_recognised_with_and_without_their_config(
    slug: str, resolved: Resolved, manifest: Manifest
) -> None:
    names, config = manifest(slug)
    for known in (config, {}):
        assert recognised(resolved(names, known)) == REAL[slug]


def test_every_linear_of_a_real_gptq_checkpoint_is_one_weight(
    offers: Find, manifest: Manifest
) -> None:
    names, config = manifest("qwen-7b-chat-int4-gptq")
    found = offers(names, config)
    assert sum(len(pack.weight.members) for pack in found.packed) == 32 * 5
    assert not found.broken
    assert "transformer.h.31.mlp.w1.weight" in found.best


QUANTISED = {
    **{slug: names for slug, names in REAL.items() if names},
    "gemma4-26b-a4b-ct-int4": {"packed.compressed_tensors"},
    "mistral4-small-mlx-4bit": {"packed.mlx"},
}
"""Of all manifests; chatglm-6b-int4 says it is quantised, but its index lists no companion."""


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the full collection of manifests is not here")
def test_of_all_real_manifests_the_quantised_ones_are_recognised_and_no_other(
    resolved: Resolved,
) -> None:
    seen: dict[str, set[str]] = {}
    for folder in sorted(SHARED.iterdir()):
        try:
            names = json.loads((folder / "index.json").read_text())["weight_map"]
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError, KeyError):
            continue
        seen[folder.name] = recognised(resolved(names, config))
    assert len(seen) > 50
    assert {slug: names for slug, names in seen.items() if names} == QUANTISED


def test_every_record_says_why_and_where_that_is_proven(shipped: tuple[ModelQuirks, ...]) -> None:
    records = [record for record in shipped if record.name.startswith("packed.")]
    for record in records:
        assert record.why and record.url.startswith("https://"), record.name
    known = {f"packed.{form.record}" for form in FORMATS.values()}
    assert known | REFUSED == {record.name for record in records}
