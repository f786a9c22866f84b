"""Placement: what users of accelerate and transformers reported, by the number of the issue."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.hooks
import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import compute_module_sizes, infer_auto_device_map
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from modelquirks.planner import Dispatcher, Plan
from modelquirks.planner.placement.workload import Workload

Save = Callable[..., Path]
Refused = Callable[..., str]

KIB = 1024
REPORTED = (
    "accelerate#4297", "accelerate#3041", "accelerate#608", "accelerate#473", "accelerate#1533",
    "accelerate#1548", "accelerate#3584", "transformers#46823", "transformers#22018",
    "transformers#34456", "llm-compressor#1122", "accelerate#3127", "accelerate#1851",
    "accelerate#1149", "accelerate#762", "accelerate#901", "transformers#19399", "localGPT#206",
    "gpt4all#239",
)  # fmt: skip
"""Reports of placement and device maps, whatever became of them."""


def test_each_report_has_a_test_that_names_it() -> None:
    told = [
        ast.get_docstring(node) or ""
        for folder in ("failures", "planner")
        for file in (Path(__file__).parent.parent / folder).glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in REPORTED if not any(name in text for text in told)] == []


def opt() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=97,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    )


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def planned(model: Any, folder: Path, memory: dict[Any, Any], **options: Any) -> Plan:
    model.save_pretrained(folder)
    plan = Dispatcher().plan(folder, model=model, max_memory=memory, **options)
    assert plan.ok, plan.problems
    return plan


def test_there_is_room_for_what_a_batch_computes(tmp_path: Path) -> None:
    """accelerate: fills the GPU with weights and runs out of memory at batch 8 (accelerate#608)."""
    model = opt()
    total = sum(p.nbytes for p in model.parameters())
    memory: dict[Any, Any] = {0: 2 * total, "cpu": 10 * total}
    assert set(infer_auto_device_map(model, {**memory}).values()) == {0}
    assert planned(model, tmp_path, memory).device_map == {"": 0}
    workload = Workload(context=1000, batch=8)
    plan = planned(model, tmp_path, {**memory, 0: 128 << 20}, workload=workload)
    reserves = {r.what: r.n_bytes for r in plan.placement.reserves if r.device == "0"}
    assert {"cache", "activations"} <= reserves.keys()
    assert plan.placement.memory[0].used_bytes + sum(reserves.values()) <= 128 << 20


class Part(nn.Module):
    """So many KiB."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kib * KIB, dtype=torch.uint8), requires_grad=False)


def test_an_exact_fit_can_be_told_to_leave_room(save: Save, tmp_path: Path) -> None:
    """accelerate: a model that fits to the byte leaves nothing to run in (accelerate#473)."""
    model = nn.Sequential(*(Part(10) for _ in range(4)))
    file = save(model.state_dict(), tmp_path / "model.safetensors")
    memory: dict[Any, Any] = {0: 40 * KIB, "cpu": 100 * KIB}
    whole = Dispatcher().plan(file, model=model, max_memory=memory)
    assert whole.device_map == {"": 0}
    told = Dispatcher().plan(file, model=model, max_memory=memory, reserve={0: "10KiB"})
    assert told.ok
    reserved = sum(reserve.n_bytes for reserve in told.placement.reserves)
    assert told.placement.memory[0].used_bytes + reserved <= 40 * KIB
    assert "cpu" in told.device_map.values()


class Int8(nn.Module):
    """A matrix in eight bits with its scale, as bitsandbytes stores it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
        self.SCB = nn.Parameter(torch.ones(64), requires_grad=False)


def test_eight_bits_may_be_offloaded_to_the_cpu(save: Save, tmp_path: Path) -> None:
    """transformers: "Some modules are dispatched on the CPU or the disk", though there is room for
    all of it (transformers#22018).
    """
    model = nn.Sequential(*(Int8() for _ in range(4)))
    save(model.state_dict(), tmp_path / "model.safetensors")
    memory: dict[Any, Any] = {0: 16 * KIB, "cpu": 100 * KIB}
    plan = Dispatcher().plan(tmp_path, model=model, max_memory=memory)
    assert plan.ok, plan.problems
    devices = plan.placement.devices
    assert {0, "cpu"} == set(devices.values())
    for n in range(4):
        assert devices[f"{n}.weight"] == devices[f"{n}.SCB"]


def unmoved(*_: Any, **__: Any) -> None:
    """Leave a tensor where it is."""


@pytest.mark.parametrize("policy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_every_module_runs_where_its_tensors_are(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate: "Expected all tensors to be on the same device" where ``lm_head`` is not on
    device 0 (accelerate#3127), in LLaMA (accelerate#1851), and with a map of one's own
    (accelerate#1149).
    """
    model = llama()
    total = sum(p.nbytes for p in model.parameters())
    plan = planned(model, tmp_path, {0: total * 2 // 3, 1: total * 2 // 3}, device_map=policy)
    devices = plan.placement.devices
    assert {0, 1} >= set(devices.values())
    assert policy == "balanced_low_0" or devices["lm_head.weight"] == 1
    # Nothing is moved, as there are no such devices; everything else is accelerate's own.
    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", unmoved)
    call: Any = dispatch_model
    call(model, dict(plan.device_map), main_device=plan.placement.main_device, force_hooks=True)
    for name, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            hook: Any = getattr(module, "_hf_hook", None)
            assert isinstance(hook, AlignDevicesHook), name
            assert hook.execution_device == devices[f"{name}.{leaf}"], name
    root: Any = model._hf_hook
    assert root.io_same_device  # logits are where the words were


def test_a_map_that_leaves_out_a_module_of_bloom_is_refused_by_its_name(
    tmp_path: Path, refused: Refused
) -> None:
    """accelerate: "transformer.word_embeddings.weight doesn't have any device set"
    (accelerate#762).
    """
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config)
    model.save_pretrained(tmp_path)
    device_map = {"transformer.h": "cpu", "transformer.ln_f": "cpu", "lm_head": "cpu"}
    naming = ("transformer.word_embeddings_layernorm",)
    refused(BloomForCausalLM(config), tmp_path, device_map=device_map, naming=naming)


def test_balanced_has_an_effect(tmp_path: Path) -> None:
    """accelerate: "balanced" leaves all of GPT-Neo on one device (accelerate#901)."""
    model = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=97,
            hidden_size=32,
            num_layers=4,
            attention_types=[[["global", "local"], 2]],
            num_heads=4,
            max_position_embeddings=64,
        )
    )
    total = sum(p.nbytes for p in model.parameters())
    plan = planned(model, tmp_path, {0: 2 * total, 1: 2 * total}, device_map="balanced")
    used = [plan.placement.memory[n].used_bytes for n in (0, 1)]
    assert min(used) > total // 4
    blocks = {f"transformer.h.{n}": plan.placement.devices for n in range(4)}
    assert all(
        len({d for name, d in devices.items() if name.startswith(f"{block}.")}) == 1
        for block, devices in blocks.items()
    )


EXPERTS, INNER, HIDDEN = 2, 32, 64


class Mxfp4Experts(nn.Module):
    """As transformers' ``Mxfp4GptOssExperts``: on meta the scales are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        shape = (EXPERTS, 2 * INNER, HIDDEN // 32, 16)
        self.gate_up_proj_blocks = nn.Parameter(
            torch.zeros(shape, dtype=torch.uint8), requires_grad=False
        )
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER), requires_grad=False)


def test_scales_that_are_no_parameters_count_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    """transformers: sizes come from the meta model, so the scales of mxfp4 are 0 bytes, 0.58 GB of
    gpt-oss-20b (facts of its ``compute_module_sizes``).
    """
    state = {
        "experts.gate_up_proj_blocks": torch.zeros(EXPERTS, 64, 2, 16, dtype=torch.uint8),
        "experts.gate_up_proj_scales": torch.zeros(EXPERTS, 64, 2, dtype=torch.uint8),
        "experts.gate_up_proj_bias": torch.zeros(EXPERTS, 64, dtype=torch.bfloat16),
    }
    save_file(state, tmp_path / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in state.values())
    with init_empty_weights():
        model = nn.ModuleDict({"experts": Mxfp4Experts()})
    blocks, bias = 2 * 64 * 2 * 16, 2 * 64 * 4
    assert compute_module_sizes(model)[""] == blocks + bias  # no scales, and biases of float32
    plan = Dispatcher().plan(tmp_path, max_memory={"cpu": 100 * KIB})
    assert plan.placement.memory["cpu"].used_bytes == stored
    loaded = Dispatcher().plan(tmp_path, model=model, max_memory={"cpu": 100 * KIB})
    assert "experts.gate_up_proj_scales" in str(loaded.audit)  # never silent
