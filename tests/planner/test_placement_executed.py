"""Placements given to the real accelerate: its map check, its hooks, and the model's output."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from accelerate.utils.modeling import check_device_map
from torch import nn

from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.planner.placement.placement import ModuleTree, Placement, place

PARAMETER_KEYS = "ignore:The following device_map keys do not match any submodules"
"""accelerate warns of keys for single tensors, which its own planner gives too."""


def tree_of(model: nn.Module) -> ModuleTree:
    skeleton = skeleton_of(model)
    aliases = {alias: group[0] for group in skeleton.ties for alias in group[1:]}
    return ModelTree(skeleton, (), aliases, ()).whole


def dispatch(
    model: nn.Module, device_map: Mapping[str, Device], main: Device | None, **options: Any
) -> None:
    call: Any = dispatch_model  # typed for torch.device alone, though it takes what we give
    call(model, dict(device_map), main_device=main, **options)


def dispatched(model: nn.Module, placement: Placement, folder: Path) -> None:
    dispatch(model, placement.device_map, placement.main_device, offload_dir=str(folder))


class Block(nn.Module):
    """A module with a parameter, a buffer and parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.rand(8))
        self.a = nn.Linear(8, 8)
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.get_buffer("shift")
        result: torch.Tensor = self.b(self.a(x * self.scale) + shift)
        return result


class Model(nn.Module):
    """A root with a parameter of its own, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pos
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model().eval()
    for block in made.blocks:
        for name in ("running_mean", "running_var"):
            block.get_submodule("b.1").get_buffer(name).uniform_(1, 2)
    return made


@pytest.mark.filterwarnings(PARAMETER_KEYS)
@pytest.mark.parametrize("room", [600, 800, 1200, 1500, 1700])
def test_a_model_with_tensors_at_every_level_gives_the_same_over_cpu_and_disk(
    model: Model, room: int, tmp_path: Path
) -> None:
    x = torch.rand(3, 8)
    expected = model(x)
    placement = place(tree_of(model), device_map="auto", max_memory={"cpu": room, "disk": None})
    assert placement.ok
    assert "disk" in placement.device_map.values()
    assert placement.memory["cpu"].used_bytes <= room
    buffers = {name for name, _ in model.named_buffers()}
    dispatched(model, placement, tmp_path)
    for name, tensor in model.state_dict().items():
        moved = placement.devices[name] == "disk" and name not in buffers
        assert tensor.device.type == ("meta" if moved else "cpu"), name
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings(PARAMETER_KEYS)
def test_what_stays_on_the_cpu_are_the_bytes_that_the_placement_counts(
    model: Model, tmp_path: Path
) -> None:
    placement = place(tree_of(model), device_map="auto", max_memory={"cpu": 1000, "disk": None})
    dispatched(model, placement, tmp_path)
    there = [t for t in model.state_dict().values() if t.device.type == "cpu"]
    assert sum(t.nbytes for t in there) == placement.memory["cpu"].used_bytes


@pytest.mark.filterwarnings(PARAMETER_KEYS)
def test_accelerate_reads_no_tensor_of_a_split_module_from_the_disk(
    model: Model, tmp_path: Path
) -> None:
    """The reason why such tensors are pinned to the main device."""
    apart = {
        "pos": "cpu", "blocks.0": "cpu", "blocks.1.scale": "disk", "blocks.1.shift": "cpu",
        "blocks.1.a": "disk", "blocks.1.b": "cpu", "head": "cpu",
    }  # fmt: skip
    dispatch(model, apart, "cpu", offload_dir=str(tmp_path))
    assert not hasattr(model.blocks[1], "_hf_hook")
    assert model.blocks[1].get_submodule("a").get_parameter("weight").device.type == "meta"
    scale = model.blocks[1].get_parameter("scale")
    assert scale.device.type == "cpu"  # left where it was: on the disk in name only


@pytest.mark.filterwarnings(PARAMETER_KEYS)
def test_accelerate_moves_tensors_of_the_root_to_the_main_device(
    model: Model, tmp_path: Path
) -> None:
    model.pos = nn.Parameter(torch.empty(8, device="meta"))  # as if it was left on the disk
    apart = {"pos": "disk", "blocks": "disk", "head": "cpu"}
    with pytest.raises(ValueError, match="is on the meta device"):
        dispatch(model, apart, "cpu", offload_dir=str(tmp_path), offload_index={})


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=12,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=97,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=3,
            num_heads=2,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def n_bytes(tree: ModuleTree) -> int:
    return sum(tree.sizes.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_transformers_model_over_cpu_and_disk_gives_the_same_logits(
    name: str, share: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.tensor([[5, 17, 3, 96]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    tree = tree_of(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        placement = place(
            tree,
            device_map="auto",
            max_memory={"cpu": int(n_bytes(tree) * share), "disk": None},
        )
        assert placement.ok
        assert {"cpu", "disk"} == set(placement.device_map.values())
        assert "warning" not in {finding.severity for finding in placement.findings}
        dispatched(model, placement, tmp_path)
        assert torch.equal(model(**inputs).logits, expected)
    assert model.hf_device_map == placement.device_map


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("auto", {0: 0.7, 1: 0.7}),
        ("balanced_low_0", {1: 0.9, 3: 0.9}),
        ("sequential", {0: 0.5, "cpu": 0.4, "disk": None}),
    ],
)
def test_the_map_of_a_meta_model_passes_the_check_of_accelerate(
    name: str, policy: str, shares: Mapping[Device, float | None]
) -> None:
    """A warning would be an error here: every key is a module of the model."""
    with init_empty_weights():
        model = MODELS[name]()
    model.tie_weights()
    tree = tree_of(model)
    memory = {d: None if s is None else int(n_bytes(tree) * s) for d, s in shares.items()}
    placement = place(tree, device_map=policy, max_memory=memory)
    assert placement.ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(model, dict(placement.device_map))
    for module, kind in ((n, type(m).__name__) for n, m in model.named_modules()):
        if kind in {"GPT2Block", "LlamaDecoderLayer", "T5Block"}:
            below = [d for t, d in placement.devices.items() if t.startswith(f"{module}.")]
            assert len(set(below)) == 1


def test_the_layers_of_a_llama_on_one_device_are_told_in_few_keys() -> None:
    with init_empty_weights():
        model = llama()
    tree = tree_of(model)
    placement = place(tree, device_map="auto", max_memory={"cpu": n_bytes(tree) // 2, "disk": None})
    layers = [key for key in placement.device_map if key.startswith("model.layers.")]
    assert layers == [f"model.layers.{n}" for n in range(12)]
    assert dict(place(tree, device_map="auto", max_memory={"cpu": None}).device_map) == {"": "cpu"}
