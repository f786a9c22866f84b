"""GGUF files by gguf's own writer: against transformers' way of loading them, and damaged."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.plugins import bridge, gguf, transformers
from modelquirks.plugins.gguf import schemes as schemes_module
from modelquirks.plugins.gguf.records import ARCHITECTURES
from modelquirks.plugins.gguf.schemes import Blocks
from modelquirks.plugins.gguf.types import PACKED, TYPES
from modelquirks.quirks.recipe import RecipeError, TensorType
from modelquirks.quirks.registry import Registry

library: Any = pytest.importorskip("gguf")
TYPE: Any = library.GGMLQuantizationType

PLAIN = {"F32": TYPE.F32, "F16": TYPE.F16, "BF16": TYPE.BF16}
SMALL = ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16")
"""For rows of 64."""
LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q4_1", "Q5_0", "IQ4_NL", "F32")
"""For rows of 256."""


def registry() -> Registry:
    found = Registry()
    for plugin in (bridge, gguf, transformers):
        found.register(plugin, name=plugin.__name__.rpartition(".")[2])
    return found


def errors(manifest: Manifest) -> dict[str, str]:
    return {one.code: one.message for one in manifest.findings if one.severity == "error"}


def random_blocks(rows: int, columns: int, kind: Any, seed: int = 0) -> Any:
    """Return packed rows of that many values, all of them finite and not too large."""
    random = np.random.default_rng(seed)
    elements, size = library.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for _ in range(200):
        with np.errstate(all="ignore"):
            values = library.dequantize(blocks, kind)
        bad = ~(np.abs(values) < 100).all(axis=1)  # a NaN is not smaller either
        if not bad.any():
            break
        blocks[bad] = random.integers(0, 256, (int(bad.sum()), size), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def add(writer: Any, name: str, values: Any, kind: Any) -> None:
    """Write a tensor: packed as random blocks, plain as *values*."""
    if kind == TYPE.F32:
        writer.add_tensor(name, values)
    elif kind == TYPE.F16:
        writer.add_tensor(name, values.astype(np.float16))
    elif kind == TYPE.BF16:
        writer.add_tensor(name, library.quants.quantize(values, kind), raw_dtype=kind)
    else:
        rows = math.prod(values.shape[:-1])
        packed = random_blocks(rows, values.shape[-1], kind)
        writer.add_tensor(name, packed.reshape(*values.shape[:-1], -1), raw_dtype=kind)


def simple(path: Path, tensors: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write a file with these tensors."""
    writer = library.GGUFWriter(path, architecture)
    for name, values in tensors.items():
        add(writer, name, values, TYPE.F32)
    return finished(writer, path)


def finished(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ------------------------------------------------------------------- models of transformers


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 256, "intermediate_size": 256, "attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3_moe", {**_MOE, "head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128}),
}


def model_of(architecture: str) -> Any:
    library = import_module("transformers")
    kind, more = MODELS[architecture]
    torch.manual_seed(0)
    config = library.AutoConfig.for_model(kind, **{**SIZES, **more})
    model = library.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    return model


def converted(model: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as llama.cpp's converter names them; values are not those of the model."""
    number = {name: key for key, name in library.MODEL_ARCH_NAMES.items()}[architecture]
    names = library.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, _, kind = name.rpartition(".")
        layer = "".join(name.split(".")[2:3])
        if kind == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif kind == "down_proj":
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif base.endswith("shared_expert_gate"):
            yield f"{names.get_name(base)}.{kind}", tensor.reshape(-1)
        elif architecture == "gpt2" and kind == "weight" and (".c_" in base):
            yield f"{names.get_name(base)}.{kind}", tensor.T
        else:
            yield f"{names.get_name(base)}.{kind}", tensor


def write_model(path: Path, model: Any, architecture: str) -> Path:
    config = model.config
    writer = library.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 128))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-6)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    if count := getattr(config, "num_experts", None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    kinds = LARGE if config.hidden_size == 256 else SMALL
    for number, (name, tensor) in enumerate(converted(model, architecture)):
        kind = kinds[number % len(kinds)] if tensor.dim() > 1 else "F32"
        add(writer, name, np.ascontiguousarray(tensor.numpy()), TYPE[kind])
    return finished(writer, path)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_loads_bit_for_bit_as_transformers_loads_it(
    architecture: str, tmp_path: Path
) -> None:
    from accelerate import init_empty_weights

    make: Any = import_module("transformers").AutoModelForCausalLM
    model = model_of(architecture)
    path = write_model(tmp_path / "model.gguf", model, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = make.from_pretrained(
            tmp_path, gguf_file=path.name, config=model.config, dtype=torch.float32
        ).state_dict()
    with init_empty_weights(include_buffers=False):
        empty = make.from_config(model.config)

    plan = Dispatcher(registry()).plan(path, model=empty, device_map=None, dequantize=True)

    assert plan.ok, (plan.problems, plan.audit)
    ours = plan.execute(empty).state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_config_comes_out_of_the_header(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = model_of("llama")
    path = write_model(tmp_path / "model.gguf", model, "llama")

    built = Dispatcher(registry()).model(path)

    assert built is not None
    assert type(built) is type(model)
    for key in ("hidden_size", "num_key_value_heads", "vocab_size", "rms_norm_eps"):
        want = 1e-6 if key == "rms_norm_eps" else getattr(model.config, key)
        assert getattr(built.config, key) == pytest.approx(want)


def test_without_dequantize_the_plan_is_refused(tmp_path: Path) -> None:
    writer = library.GGUFWriter(tmp_path / "m.gguf", "llama")
    add(writer, "output.weight", np.ones((4, 64), dtype=np.float32), TYPE.Q8_0)
    path = finished(writer, tmp_path / "m.gguf")
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(64, 4, bias=False)

    refused = Dispatcher(registry()).plan(path, model=model, device_map=None)
    taken = Dispatcher(registry()).plan(path, model=model, device_map=None, dequantize=True)

    assert not refused.ok
    assert taken.ok, taken.problems
    assert [q.name for q in taken.quirks] == ["gguf.llama", "gguf.packed"]


# ----------------------------------------------------------------------------------- the tables


def test_the_table_of_types_is_that_of_gguf() -> None:
    known = {kind.value: (kind.name, *library.GGML_QUANT_SIZES[kind]) for kind in TYPE}
    assert {n: (t.name, t.elements, t.nbytes) for n, t in TYPES.items()} == known
    for number, type_ in PACKED.items():
        blocks = np.zeros((1, type_.nbytes), dtype=np.uint8)
        if type_.known:
            assert library.dequantize(blocks, TYPE(number)).shape == (1, type_.elements)
        else:
            with pytest.raises(NotImplementedError):
                library.dequantize(blocks, TYPE(number))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_names_are_those_of_gguf(architecture: str) -> None:
    number = {name: key for key, name in library.MODEL_ARCH_NAMES.items()}[architecture]
    names = library.get_tensor_name_map(number, 1)
    layer = "transformer.h.0" if architecture == "gpt2" else "model.layers.0"
    found = {
        old: names.get_name(f"{layer}.{new}") for old, new in ARCHITECTURES[architecture].items()
    }
    wrong = {old: name for old, name in found.items() if name not in (None, f"blk.0.{old}")}
    assert wrong == {}
    assert sum(name is not None for name in found.values()) >= 6


_CHECKED = [(number, type_) for number, type_ in PACKED.items() if type_.known]


@given(st.sampled_from(_CHECKED), st.data())
@settings(max_examples=30, deadline=None)
def test_a_region_is_that_of_the_whole(kind: tuple[int, Any], data: st.DataObject) -> None:
    number, type_ = kind
    rows, columns = 5, 2 * type_.elements
    packed = torch.from_numpy(random_blocks(rows, columns, TYPE(number), seed=number))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (rows, columns)]
    region = tuple((start, stop) for start, stop in bounds)
    scheme = Blocks(number, type_)
    types = {"blocks": TensorType("U8", tuple(packed.shape))}
    assert scheme.infer(types, {}) == TensorType("F32", (rows, columns))

    (first, last), (begin, end) = scheme.regions(region, types, {})["blocks"]
    part = packed[first:last, begin:end]
    made = scheme.evaluate({"blocks": part}, region, torch.float32, {})

    whole = torch.from_numpy(library.dequantize(packed.numpy(), TYPE(number)))
    (top, bottom), (left, right) = region
    assert torch.equal(made, whole[top:bottom, left:right])


def test_without_gguf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes_module, "find_spec", {}.get)
    scheme = Blocks(2, TYPES[2])
    with pytest.raises(RecipeError, match=r"modelquirks\[gguf\]"):
        scheme.infer({"blocks": TensorType("U8", (2, 18))}, {})


# ------------------------------------------------------------------------------- damaged files


W = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_dimensions_are_the_other_way_round(tmp_path: Path) -> None:
    manifest = open_manifest(simple(tmp_path / "m.gguf", {"output.weight": W}), registry)

    assert manifest.tensors["output.weight"].shape == (3, 4)
    assert manifest.container == "gguf.llama"
    assert not errors(manifest)


def patched(path: Path, at: int, content: bytes) -> Path:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)
    return path


Damage = Callable[[Path], object]
DAMAGES: list[tuple[Damage, str, str]] = [
    (lambda p: p.write_bytes(p.read_bytes()[:-40]), "data-truncated", "'b.weight'"),
    (lambda p: p.write_bytes(p.read_bytes()[:60]), "gguf-invalid", "cut off"),
    (lambda p: patched(p, 4, struct.pack(">I", 3)), "gguf-invalid", "big-endian"),
    (lambda p: patched(p, 4, struct.pack("<I", 1)), "gguf-invalid", "version 1"),
    (lambda p: patched(p, 8, struct.pack("<Q", 1 << 40)), "gguf-invalid", "dimensions"),
]


@pytest.mark.parametrize(("damage", "code", "text"), DAMAGES)
def test_a_damaged_file_is_told_by_name(
    damage: Damage, code: str, text: str, tmp_path: Path
) -> None:
    path = simple(tmp_path / "m.gguf", {"a.weight": W, "b.weight": W})
    damage(path)

    assert text in errors(open_manifest(path, registry))[code]


def test_types_that_are_not_known_and_tensors_that_overlap_are_named(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.gguf", {"a.weight": W, "b.weight": W})
    at = path.read_bytes().index(b"b.weight") + len("b.weight") + 4 + 16
    patched(path, at + 4, struct.pack("<Q", 0))
    assert "a.weight and b.weight" in errors(open_manifest(path, registry))["data-overlap"]

    patched(path, at, struct.pack("<I", 999))
    assert "b.weight (999)" in errors(open_manifest(path, registry))["dtype-unknown"]


def test_a_model_of_several_files_is_one_and_a_missing_one_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        name = tmp_path / f"m-0000{number}-of-00002.gguf"
        simple(name, {f"blk.{number}.ffn_up.weight": W})

    whole = open_manifest(tmp_path, registry)
    of_one = open_manifest(tmp_path / "m-00002-of-00002.gguf", registry)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    torn = open_manifest(tmp_path, registry)

    assert len(whole.tensors) == len(of_one.tensors) == 2
    assert not errors(whole)
    assert "'m-00002-of-00002.gguf'" in errors(torn)["shard-missing"]


def test_of_several_models_in_a_folder_none_is_chosen(tmp_path: Path) -> None:
    simple(tmp_path / "m-Q4.gguf", {"output.weight": W})
    simple(tmp_path / "m-Q8.gguf", {"output.weight": W})

    assert "'m-Q4.gguf', 'm-Q8.gguf'" in errors(open_manifest(tmp_path, registry))["several-models"]


def test_a_projector_beside_the_model_is_left_aside_by_name(tmp_path: Path) -> None:
    simple(tmp_path / "m.gguf", {"output.weight": W})
    simple(tmp_path / "mmproj-m.gguf", {"v.weight": W})

    manifest = open_manifest(tmp_path, registry)

    assert [*manifest.tensors] == ["output.weight"]
    assert manifest.config["model_type"] == "llama"
    found = {one.code: one.message for one in manifest.findings}
    assert "'mmproj-m.gguf'" in found["other-copies"]


def test_an_architecture_without_rules_keeps_the_names_of_llama_cpp(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.gguf", {"blk.0.attn_q.weight": W}, "mamba")

    found = {one.code: one.message for one in open_manifest(path, registry).findings}

    assert "'mamba'" in found["gguf-architecture"]


def test_a_file_without_its_ending_is_read_by_its_first_bytes(tmp_path: Path) -> None:
    path = simple(tmp_path / "sha256-0123", {"output.weight": W})

    assert [*open_manifest(path, registry).tensors] == ["output.weight"]


def test_without_the_plugin_the_file_is_said_not_to_be_read(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.gguf", {"output.weight": W})
    try:
        found = errors(open_manifest(path, Registry))
    except CheckpointError as error:
        found = {"gguf-unsupported": str(error)}

    assert "GGUF" in found["gguf-unsupported"]


def test_a_plan_notices_that_the_file_has_changed(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.gguf", {"output.weight": W})
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(4, 3, bias=False)
    plan = Dispatcher(registry()).plan(path, model=model, device_map=None)
    assert plan.ok, plan.problems
    assert torch.equal(plan.execute(model).state_dict()["lm_head.weight"], torch.from_numpy(W))
    simple(path, {"strange.weight": W})

    with pytest.raises(Exception, match=r"m\.gguf"):
        plan.execute(model)
