"""GPT-OSS as released, in the original layout and rewritten, to the values of transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from modelquirks.planner import Dispatcher, PlanError, load_checkpoint_and_dispatch
from modelquirks.planner.cli import main
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.ties import tie_groups
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.plugins import gpt_oss
from modelquirks.quirks import RecipeError, TensorType, infer
from modelquirks.quirks.resolve import Resolution

Tensors = dict[str, torch.Tensor]
Resolved = Callable[..., Resolution]
Loaded = Callable[..., Tensors]
Find = Callable[..., Offers]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]

E, H, I, LAYERS = 3, 32, 64, 2  # noqa: E741
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
}
NAMES_OF = {"gate_up_proj": "mlp1", "down_proj": "mlp2"}


@pytest.fixture(scope="module")
def model() -> Tensors:
    """Return the tensors of a tiny model, every one of them random."""
    torch.manual_seed(0)
    tensors = GptOssForCausalLM(GptOssConfig(**CONFIG)).bfloat16().state_dict()
    return {name: torch.randn(t.shape).to(t.dtype) for name, t in tensors.items()}


def applied(resolution: Resolution) -> set[str]:
    return {record.name for record in resolution.records()}


def experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def packed(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    return blocks, scales


def released(model: Tensors) -> tuple[Tensors, Tensors]:
    """Return a checkpoint as OpenAI released it on the Hub, and the model that it stands for."""
    stored, wanted = dict(model), dict(model)
    for layer in range(LAYERS):
        shapes = {"gate_up_proj": (E, 2 * I, H // 32), "down_proj": (E, H, I // 32)}
        for proj, shape in shapes.items():
            blocks, scales = packed(layer, *shape)
            name = f"{experts(layer)}.{proj}"
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            wanted[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, wanted


def original(stored: Tensors) -> Tensors:
    """Return a released checkpoint in OpenAI's own layout, by the table of its converter."""
    out = {
        "embedding.weight": stored["model.embed_tokens.weight"],
        "unembedding.weight": stored["lm_head.weight"],
        "norm.scale": stored["model.norm.weight"],
    }
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}", f"block.{layer}"
        for kind in ("weight", "bias"):
            qkv = [stored[f"{old}.self_attn.{proj}_proj.{kind}"] for proj in "qkv"]
            out[f"{new}.attn.qkv.{kind}"] = torch.cat(qkv)
            out[f"{new}.attn.out.{kind}"] = stored[f"{old}.self_attn.o_proj.{kind}"]
            out[f"{new}.mlp.gate.{kind}"] = stored[f"{old}.mlp.router.{kind}"]
        out[f"{new}.attn.sinks"] = stored[f"{old}.self_attn.sinks"]
        out[f"{new}.attn.norm.scale"] = stored[f"{old}.input_layernorm.weight"]
        out[f"{new}.mlp.norm.scale"] = stored[f"{old}.post_attention_layernorm.weight"]
        for proj, mlp in NAMES_OF.items():
            for part in ("blocks", "scales"):
                out[f"{new}.mlp.{mlp}_weight.{part}"] = stored[f"{experts(layer)}.{proj}_{part}"]
            out[f"{new}.mlp.{mlp}_bias"] = stored[f"{experts(layer)}.{proj}_bias"]
    return out


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different
    assert {n for n in wanted if got[n].dtype != wanted[n].dtype} == set()


# As released -------------------------------------------------------------------------------------


def test_the_release_is_recognised_by_config_and_names(
    resolved: Resolved, manifest: Manifest
) -> None:
    names, config = manifest("gpt-oss-20b")
    assert applied(resolved(names, config)) == {"gpt_oss", "gpt_oss.mxfp4"}
    assert applied(resolved(names, {})) == {"gpt_oss.mxfp4"}  # the names tell it is packed


def test_blocks_and_scales_of_the_release_are_one_weight_each(
    offers: Find, manifest: Manifest
) -> None:
    names, config = manifest("gpt-oss-20b")
    found = offers(names, config)
    weights = [name for pack in found.packed for name, _ in pack.weight.items()]
    assert sorted(weights) == sorted(
        f"{experts(layer)}.{proj}" for layer in range(24) for proj in NAMES_OF
    )
    assert {pack.scheme for pack in found.packed} == {"mxfp4"}
    kept = {name for name in names if not name.endswith(("_blocks", "_scales"))}
    assert kept | set(weights) <= found.best.keys()
    assert len(kept | set(weights)) == 411  # the parameters of GptOssForCausalLM
    assert not found.broken


def test_released_experts_have_the_values_of_transformers(model: Tensors, loaded: Loaded) -> None:
    stored, wanted = released(model)
    same(loaded(stored, wanted, CONFIG), wanted)


@pytest.fixture
def release(model: Tensors, tmp_path: Path) -> Path:
    """Give a folder with the release of *model*."""
    stored, _ = released(model)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


# Of the two layers: blocks of 16 bytes with a byte of scale for 32 values, of 2 bytes once plain.
VALUES = LAYERS * E * (2 * I * H + H * I)
BOTH_SIZES = f"{VALUES // 32 * 17:,} bytes stored, {VALUES * 2:,} bytes once loaded"


def test_the_release_is_not_unpacked_into_a_plain_model_unasked(
    model: Tensors, release: Path
) -> None:
    plain = GptOssForCausalLM(GptOssConfig(**CONFIG)).bfloat16()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    plan = Dispatcher().plan(release, model=plain, device_map={"": "cpu"})
    (error,) = (f for f in plan.all_findings if f.severity == "error")
    assert error.code == "packed-into-plain" and not plan.ok
    assert BOTH_SIZES in error.message and "dequantize=True" in error.message
    with pytest.raises(PlanError, match=BOTH_SIZES):
        plan.execute(plain)
    with pytest.raises(PlanError, match=BOTH_SIZES):
        load_checkpoint_and_dispatch(plain, release, device_map={"": "cpu"})
    same(plain.state_dict(), before)

    load_checkpoint_and_dispatch(plain, release, device_map={"": "cpu"}, dequantize=True)
    same(plain.state_dict(), released(model)[1])


def test_the_command_line_wants_to_be_told_to_unpack(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(release), "--model", "transformers", "--max-memory", "cpu=1GiB"]
    assert main(words) == 1
    assert BOTH_SIZES in (said := " ".join(capsys.readouterr().out.split()))
    assert "--dequantize" in said
    assert main([*words, "--dequantize", "--json", "--dry-run"]) == 0
    report = json.loads(capsys.readouterr().out)
    (note,) = (f for f in report["findings"] if f["code"] == "dequantized")
    assert note["severity"] == "info" and BOTH_SIZES in note["message"]


def test_a_module_that_keeps_packed_parameters_gets_them_as_they_are(
    model: Tensors, loaded: Loaded
) -> None:
    stored, _ = released(model)
    same(loaded(stored, stored.keys(), CONFIG), stored)


def test_without_its_scales_a_weight_is_named_as_lacking_them(model: Tensors, offers: Find) -> None:
    stored, _ = released(model)
    lost = f"{experts(1)}.down_proj_scales"
    del stored[lost]
    found = offers(stored, CONFIG)
    assert lost in found.broken[f"{experts(1)}.down_proj"].reason
    assert f"{experts(0)}.down_proj" in found.best


def test_bf16_fine_tunes_need_no_rule(model: Tensors, loaded: Loaded) -> None:
    same(loaded(model, model, CONFIG), model)


@pytest.mark.parametrize(("flag", "groups"), [(False, 0), (True, 1), (None, 0)])
def test_tied_only_if_the_config_says_so(
    flag: bool | None, groups: int, resolved: Resolved, manifest: Manifest
) -> None:
    names, config = manifest("gpt-oss-20b")
    assert config["tie_word_embeddings"] is False  # as released
    config["tie_word_embeddings"] = flag
    pair = ("model.embed_tokens.weight", "lm_head.weight")
    skeleton = Skeleton("", {n: ModelTensor(n, "BF16", (4, 4)) for n in pair}, {})
    found = tie_groups(skeleton, resolved(names, config), config)
    assert [group.names for group in found] == [pair] * groups


# The original layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["original__config.json", "config.json"])
def test_the_original_names_serve_every_parameter(
    beside: str, resolved: Resolved, offers: Find, manifest: Manifest, pytestconfig: pytest.Config
) -> None:
    folder = pytestconfig.rootpath / "tests/data/manifests/gpt-oss-20b"
    names = json.loads((folder / "original__dtypes.json").read_text())
    config = json.loads((folder / beside).read_text())
    assert applied(resolved(names, config)) == {"gpt_oss.original", "gpt_oss.mxfp4"}
    best = offers(names, config).best
    hub, _ = manifest("gpt-oss-20b")
    assert set(hub) - best.keys() == set()
    assert {f"{experts(layer)}.{proj}" for layer in range(24) for proj in NAMES_OF} <= best.keys()


def test_the_fused_qkv_of_the_release_is_cut_at_4096_and_4608(
    offers: Find, pytestconfig: pytest.Config
) -> None:
    folder = pytestconfig.rootpath / "tests/data/manifests/gpt-oss-20b"
    names = json.loads((folder / "original__dtypes.json").read_text())
    config = json.loads((folder / "original__config.json").read_text())
    best = offers(names, config).best
    fused = {"weight": TensorType("BF16", (5120, 2880)), "bias": TensorType("BF16", (5120,))}
    for proj, rows in {"q": 4096, "k": 512, "v": 512}.items():
        for kind, whole in fused.items():
            node = best[f"model.layers.7.self_attn.{proj}_proj.{kind}"].logical.node
            made = infer(node, lambda _, whole=whole: whole, {})  # type: ignore[misc]
            assert made.shape == (rows, *(whole.shape or ())[1:])


def test_the_original_layout_has_the_values_of_the_released_one(
    model: Tensors, loaded: Loaded
) -> None:
    stored, wanted = released(model)
    fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
    config = {field: CONFIG[field] for field in fields}
    same(loaded(original(stored), wanted, config), wanted)
    same(loaded(original(stored), stored, config), stored)  # for a module that keeps it packed


def test_a_split_without_the_sizes_in_the_config_says_which_field_it_needs(
    model: Tensors, offers: Find
) -> None:
    stored, _ = released(model)
    broken = offers(original(stored), {}).broken
    assert "num_attention_heads" in broken["model.layers.0.self_attn.q_proj.weight"].reason


def test_openais_own_class_gets_its_own_names(model: Tensors, loaded: Loaded) -> None:
    """It keeps the fused qkv and wants plain experts, not transposed."""
    stored, released_model = released(model)
    wanted = {n: t for n, t in original(stored).items() if not n.endswith(("blocks", "scales"))}
    for layer in range(LAYERS):
        for proj, mlp in NAMES_OF.items():
            weight = released_model[f"{experts(layer)}.{proj}"].transpose(1, 2)
            wanted[f"block.{layer}.mlp.{mlp}_weight"] = weight
    same(loaded(original(stored), wanted, CONFIG), wanted)


# As others have rewritten it ---------------------------------------------------------------------


def unfused(model: Tensors, name: Callable[[str, int], Mapping[str, torch.Tensor]]) -> Tensors:
    stored = {n: t for n, t in model.items() if ".experts." not in n}
    for layer in range(LAYERS):
        for expert in range(E):
            stored.update(name(experts(layer), expert))
    return stored


def three_linears(model: Tensors) -> Tensors:
    """llm-compressor, and GPTQModel once it takes experts apart."""

    def named(base: str, e: int) -> Mapping[str, torch.Tensor]:
        both, bias = model[f"{base}.gate_up_proj"][e].T, model[f"{base}.gate_up_proj_bias"][e]
        return {
            f"{base}.{e}.gate_proj.weight": both[0::2],
            f"{base}.{e}.gate_proj.bias": bias[0::2],
            f"{base}.{e}.up_proj.weight": both[1::2],
            f"{base}.{e}.up_proj.bias": bias[1::2],
            f"{base}.{e}.down_proj.weight": model[f"{base}.down_proj"][e].T,
            f"{base}.{e}.down_proj.bias": model[f"{base}.down_proj_bias"][e],
        }

    return unfused(model, named)


def two_linears(gate_up: str, down: str) -> Callable[[Tensors], Tensors]:
    """Return what writes one Linear for gate and up, and one for down."""

    def write(model: Tensors) -> Tensors:
        def named(base: str, e: int) -> Mapping[str, torch.Tensor]:
            return {
                f"{base}.{gate_up}.{e}.weight": model[f"{base}.gate_up_proj"][e].T,
                f"{base}.{gate_up}.{e}.bias": model[f"{base}.gate_up_proj_bias"][e],
                f"{base}.{down}.{e}.weight": model[f"{base}.down_proj"][e].T,
                f"{base}.{down}.{e}.bias": model[f"{base}.down_proj_bias"][e],
            }

        return unfused(model, named)

    return write


def mlx(model: Tensors) -> Tensors:
    """MLX keeps experts stacked, and takes gate and up apart."""
    stored = {n: t for n, t in model.items() if ".experts." not in n}
    for layer in range(LAYERS):
        base = experts(layer)
        both = model[f"{base}.gate_up_proj"].transpose(1, 2)
        stored[f"{base}.gate_proj.weight"] = both[:, 0::2]
        stored[f"{base}.up_proj.weight"] = both[:, 1::2]
        stored[f"{base}.gate_proj.bias"] = model[f"{base}.gate_up_proj_bias"][:, 0::2]
        stored[f"{base}.up_proj.bias"] = model[f"{base}.gate_up_proj_bias"][:, 1::2]
        stored[f"{base}.down_proj.weight"] = model[f"{base}.down_proj"].transpose(1, 2)
        stored[f"{base}.down_proj.bias"] = model[f"{base}.down_proj_bias"]
    return stored


def unsloth(model: Tensors) -> Tensors:
    stored = two_linears("gate_up_projs", "down_projs")(model)
    return {name.replace(".router.", ".router.linear."): t for name, t in stored.items()}


WRITERS = {
    "llm-compressor": three_linears,
    "gptqmodel": two_linears("gate_up", "down"),
    "unsloth": unsloth,
    "mlx": mlx,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_rewritten_experts_have_the_values_of_the_model(
    writer: Callable[[Tensors], Tensors], model: Tensors, loaded: Loaded
) -> None:
    same(loaded(writer(model), model, CONFIG), model)


def test_experts_one_by_one_are_left_alone_where_the_model_has_them_so(
    model: Tensors, loaded: Loaded
) -> None:
    stored = unsloth(model)
    same(loaded(stored, stored, CONFIG), stored)


def test_requantised_experts_are_recognised_and_refused_as_what_they_are(
    model: Tensors, offers: Find
) -> None:
    """The notion of qweight, scales and qzeros: true of these, never of the release."""
    names = [
        name.removesuffix(".weight") + f".{part}"
        for name in three_linears(model)
        if ".experts." in name and name.endswith(".weight")
        for part in ("qweight", "qzeros", "scales", "g_idx")
    ]
    best = offers(names, CONFIG).best
    node = best[f"{experts(0)}.down_proj"].logical.node
    with pytest.raises(RecipeError, match=r"packed as 'gptq'.*no plugin"):
        infer(node, lambda _: TensorType("I32", (8, 8)), {})


def test_every_record_says_why_and_where_that_is_proven() -> None:
    for record in gpt_oss.RECORDS:
        assert record.why and record.url.startswith("https://"), record.name
