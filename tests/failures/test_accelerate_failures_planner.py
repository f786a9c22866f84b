"""Where everything goes: ``device_map="auto"`` and its kin, and ``max_memory``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import (
    check_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from modelquirks import planner as ours
from modelquirks.planner import Dispatcher, Plan, PlanError, load_checkpoint_and_dispatch
from modelquirks.planner.placement.devicemap import expand

Save = Callable[..., Path]
Planned = Callable[..., Plan]

KIB = 1024


@pytest.fixture
def planned(save: Save, tmp_path: Path) -> Planned:
    """Give the function that plans a model with its own weights."""

    def plan(
        model: nn.Module,
        max_memory: dict[Any, Any],
        *,
        without: tuple[str, ...] = (),
        **options: Any,
    ) -> Plan:
        file = save(model.state_dict(), tmp_path / "model.safetensors", without=without)
        return Dispatcher().plan(file, model=model, max_memory=max_memory, **options)

    return plan


def placed(plan: Plan) -> list[Any]:
    assert plan.ok, plan.problems
    return [plan.placement.devices[name] for name in plan.placement.devices]


class Heads(nn.Module):
    """Has a ``head`` beside a tied ``lm_head``, and a ``decoder`` beside ``model.decoder``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"decoder": nn.ModuleDict({"embed": nn.Embedding(20, 8)})})
        self.head = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.model["decoder"]["embed"].weight  # type: ignore[index]


def test_a_module_whose_name_is_part_of_a_tied_name_is_placed(planned: Planned) -> None:
    """accelerate: "IndexError: list index out of range" (case 10)."""
    memory: dict[Any, Any] = {0: 1000, "cpu": 100 * KIB}
    larger: dict[Any, Any] = {**memory, 0: 2000}  # a plan counts what an allocator rounds up
    for each in (memory, larger):
        with pytest.raises(IndexError, match="list index out of range"):
            infer_auto_device_map(Heads(), max_memory={**each})
    plan = planned(Heads(), larger, without=("lm_head.weight",))
    assert set(placed(plan)) == {0, "cpu"}
    devices = plan.placement.devices
    assert devices["lm_head.weight"] == devices["model.decoder.embed.weight"]
    found = ours.infer_auto_device_map(Heads(), memory)
    assert found == {"model": 0, "head": "cpu", "decoder": "cpu", "lm_head": 0}


class Block(nn.Module):
    """Owns a persistent buffer beside its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos", torch.rand(8))
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x + self.get_buffer("pos")))  # type: ignore[no-any-return]


def test_a_buffer_of_a_module_that_is_split_has_a_device(planned: Planned, tmp_path: Path) -> None:
    """accelerate: missing from its own map, so that it then raises "The device_map provided does
    not give any device for the following parameters: 0.pos" (case 10).
    """
    memory: dict[Any, Any] = {"cpu": 600, "disk": 100 * KIB}
    source = nn.Sequential(Block(), nn.Linear(8, 8))
    theirs = infer_auto_device_map(source, max_memory={**memory})
    with pytest.raises(ValueError, match=r"does not give any device.*0\.pos"):
        check_device_map(source, theirs)
    plan = planned(source, memory)
    assert set(placed(plan)) == {"cpu", "disk"}
    found = ours.infer_auto_device_map(source, memory)
    assert set(found.values()) == {"cpu", "disk"}
    assert expand(found, source.state_dict()).keys() == source.state_dict().keys()
    model = nn.Sequential(Block(), nn.Linear(8, 8))
    loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map="auto", max_memory=memory)
    assert torch.equal(loaded(torch.ones(2, 8)), source(torch.ones(2, 8)))


class Part(nn.Module):
    """So many KiB that must not be split."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kib * KIB, dtype=torch.uint8), requires_grad=False)


def parts(*kib: int) -> nn.Module:
    return nn.Sequential(*map(Part, kib))


@pytest.mark.parametrize("policy", ["auto", "balanced", "sequential"])
@pytest.mark.parametrize("sizes", [(50, 50), (60, 40)])
def test_what_fits_on_the_accelerators_goes_there(
    planned: Planned, sizes: tuple[int, ...], policy: str
) -> None:
    """accelerate: GPU 0 left empty, 40 to 60 of 100 KB on the CPU, though a perfect plan exists;
    ``fallback_allocation=True`` changes nothing (case 10).
    """
    memory: dict[Any, Any] = {0: 60 * KIB, 1: 60 * KIB, "cpu": 1000 * KIB}
    theirs = infer_auto_device_map(
        parts(*sizes), {**memory}, no_split_module_classes=["Part"], fallback_allocation=True
    )
    assert 0 not in theirs.values()
    assert "cpu" in theirs.values()
    plan = planned(parts(*sizes), memory, no_split_module_classes=["Part"], device_map=policy)
    assert placed(plan) == [0, 1]
    found = ours.infer_auto_device_map(parts(*sizes), memory, ["Part"])
    assert found == {"0": 0, "1": 1}


@pytest.mark.parametrize("policy", ["auto", "balanced", "sequential"])
def test_an_exact_fit_leaves_nothing_for_the_disk(planned: Planned, policy: str) -> None:
    """accelerate, ten blocks of 10 KB on two devices of 50 KB: one of them on disk (case 10)."""
    memory: dict[Any, Any] = {0: 50 * KIB, 1: 50 * KIB, "disk": 1000 * KIB}
    theirs = infer_auto_device_map(parts(*[10] * 10), {**memory}, no_split_module_classes=["Part"])
    assert "disk" in theirs.values()
    plan = planned(parts(*[10] * 10), memory, no_split_module_classes=["Part"], device_map=policy)
    assert placed(plan) == [0] * 5 + [1] * 5
    assert [*ours.infer_auto_device_map(parts(*[10] * 10), memory).values()] == placed(plan)


@pytest.mark.parametrize("ids", [(1, 2), (0, 2)])
def test_balanced_low_0_takes_any_device_ids(planned: Planned, ids: tuple[int, int]) -> None:
    """accelerate: KeyError (case 10)."""
    memory = dict.fromkeys(ids, 1000 * KIB)
    with pytest.raises(KeyError):
        get_balanced_memory(parts(*[10] * 4), {**memory}, low_zero=True)
    plan = planned(parts(*[10] * 4), memory, device_map="balanced_low_0")
    assert placed(plan) == [ids[1]] * 4
    low = ours.get_balanced_memory(parts(*[10] * 4), memory, low_zero=True)
    assert low == {ids[0]: 0, ids[1]: 1000 * KIB}
    assert ours.infer_auto_device_map(parts(*[10] * 4), low) == {"": ids[1]}


def test_balanced_low_0_keeps_0_free_beside_a_device_without_memory(planned: Planned) -> None:
    """accelerate: a device without budget between two others puts everything on GPU 0 (case 10,
    accelerate#4297).
    """
    memory: dict[Any, Any] = {0: 1000 * KIB, 1: 0, 2: 1000 * KIB}
    theirs: Any = get_balanced_memory(parts(*[10] * 4), {**memory}, low_zero=True)
    assert theirs[0] == 40 * KIB
    plan = planned(parts(*[10] * 4), memory, device_map="balanced_low_0")
    assert placed(plan) == [2] * 4
    low = ours.get_balanced_memory(parts(*[10] * 4), memory, low_zero=True)
    assert low == {0: 0, 1: 0, 2: 1000 * KIB}


@pytest.mark.parametrize(("size", "theirs"), [("24Gb", 3 * 10**9), ("24Gib", 24 << 30)])
def test_bits_are_not_guessed(planned: Planned, size: str, theirs: int) -> None:
    """accelerate: silent, ``24Gb`` is 3 GB, ``24Gib`` is 24 GiB (case 10)."""
    assert get_max_memory({"cpu": size}) == {"cpu": theirs}
    with pytest.raises(ValueError, match=rf"'cpu': size '{size}' does not say whether bits"):
        planned(parts(10), {"cpu": size})
    for function in (ours.infer_auto_device_map, ours.get_balanced_memory):
        with pytest.raises(ValueError, match="does not say whether bits"):
            function(parts(10), {"cpu": size})


@pytest.mark.parametrize(("size", "wanted"), [("1TB", 10**12), ("20480", 20480)])
def test_sizes_may_have_tb_or_no_unit(planned: Planned, size: str, wanted: int) -> None:
    """accelerate: ValueError."""
    with pytest.raises(ValueError, match="not in a valid format"):
        get_max_memory({"cpu": size})
    plan = planned(parts(10), {"cpu": size})
    assert plan.placement.memory["cpu"].capacity_bytes == wanted
    assert ours.get_balanced_memory(parts(10), {"cpu": size}) == {"cpu": wanted}


def test_devices_of_max_memory_may_be_written_as_in_torch(planned: Planned) -> None:
    """accelerate: ValueError "Device cuda:0 is not recognized"."""
    with pytest.raises(ValueError, match="cuda:0 is not recognized"):
        get_max_memory({"cuda:0": 100 * KIB})
    assert placed(planned(parts(10), {"cuda:0": 100 * KIB})) == [0]
    assert ours.infer_auto_device_map(parts(10), {"cuda:0": 100 * KIB}) == {"": 0}


def test_a_device_without_a_size_is_refused_at_once(planned: Planned) -> None:
    """accelerate: a TypeError later on, about ``NoneType`` and ``int``."""
    memory: dict[Any, Any] = {0: None}
    with pytest.raises(TypeError, match="NoneType"):
        infer_auto_device_map(parts(10), {**memory})
    for plan in (planned, ours.infer_auto_device_map, ours.get_balanced_memory):
        with pytest.raises(ValueError, match="device 0 has no size"):
            plan(parts(10), memory)


def test_the_callers_max_memory_is_left_alone(planned: Planned) -> None:
    """accelerate: silent, texts in it are replaced by numbers."""
    memory: dict[Any, Any] = {"cpu": "1MiB"}
    get_max_memory(theirs := {**memory})
    assert theirs == {"cpu": 1 << 20}
    for plan in (planned, ours.infer_auto_device_map, ours.get_balanced_memory):
        plan(parts(10), memory)
        assert memory == {"cpu": "1MiB"}


@pytest.mark.parametrize("name", ["uint4", "int4", "uint1", "bool"])
def test_types_below_a_byte_count_as_the_bytes_that_torch_holds(name: str) -> None:
    """accelerate: 4-bit types are 0 bytes, ``bool`` an eighth, so that a map overfills a device
    (case 10).
    """
    model = nn.Sequential(*(Holder(name) for _ in range(3)))
    assert sum(p.nbytes for p in model.parameters()) == 3000
    memory: dict[Any, Any] = {0: 2500, "cpu": 100 * KIB}
    assert infer_auto_device_map(model, {**memory}) == {"": 0}
    assert ours.infer_auto_device_map(model, memory) == {"0": 0, "1": "cpu", "2": "cpu"}


class Holder(nn.Module):
    """1000 values."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        values = torch.empty(1000, dtype=getattr(torch, dtype))
        self.weight = nn.Parameter(values, requires_grad=False)


def test_a_dtype_that_is_wider_than_the_models_counts() -> None:
    """accelerate: ``dtype=float32`` counts a bfloat16 model as 2 bytes a value, and loads 4."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in "ab"))
    memory: dict[Any, Any] = {0: 2000, "cpu": 100 * KIB}
    assert infer_auto_device_map(model, {**memory}, dtype=torch.float32) == {"": 0}
    found = ours.infer_auto_device_map(model, {**memory, 0: 2047}, dtype="float32")
    assert found == {"": "cpu"}  # 1024 bytes stay free for the other one: 2048 are needed
    assert ours.infer_auto_device_map(model, {**memory, 0: 2048}, dtype="float32") == {"": 0}


def test_an_embedding_larger_than_an_even_share_does_not_spill(planned: Planned) -> None:
    """accelerate: 10 KB on the cpu though there is room for twice the model
    (transformers#46823, facts of its planner).
    """
    memory: dict[Any, Any] = {0: 100 * KIB, 1: 100 * KIB, "cpu": 1000 * KIB}
    model = parts(90, *[10] * 5)
    balanced = ours.get_balanced_memory(model, memory, ["Part"])
    assert balanced == {0: 90 * KIB, 1: 100 * KIB, "cpu": 1000 * KIB}
    assert [*ours.infer_auto_device_map(model, balanced, ["Part"]).values()] == [0, *[1] * 5]
    plan = planned(model, memory, no_split_module_classes=["Part"], device_map="balanced")
    assert placed(plan) == [0, *[1] * 5]


def test_without_an_accelerator_cpu_and_disk_are_used(planned: Planned) -> None:
    """accelerate and transformers: "device_map auto" once needed a GPU (transformers#19399)."""
    memory: dict[Any, Any] = {"cpu": 35 * KIB}
    assert placed(planned(parts(*[10] * 4), memory)) == ["cpu"] * 2 + ["disk"] * 2
    found = ours.infer_auto_device_map(parts(*[10] * 4), memory)
    assert [*found.values()] == ["cpu"] * 2 + ["disk"] * 2


def test_a_disk_with_a_limit_is_limited(planned: Planned) -> None:
    """accelerate: the disk takes everything whatever ``max_memory`` says of it."""
    memory: dict[Any, Any] = {"cpu": 25 * KIB, "disk": 10 * KIB}
    assert "disk" in infer_auto_device_map(parts(*[10] * 6), {**memory}).values()
    assert not planned(parts(*[10] * 6), memory).ok
    with pytest.raises(PlanError, match=r"there is no device map: .*give device"):
        ours.infer_auto_device_map(parts(*[10] * 6), memory)


@pytest.mark.parametrize("policy", ["auto", "balanced", "sequential"])
def test_a_device_that_one_large_layer_passes_over_is_filled_later(
    planned: Planned, policy: str
) -> None:
    """accelerate: GPU 0 left empty, 60 of 130 KB on the cpu, as it never goes back to an earlier
    device (accelerate#3041, llm-compressor#1122).
    """
    memory: dict[Any, Any] = {0: 60 * KIB, 1: 80 * KIB, "cpu": 1000 * KIB}
    model = parts(70, 20, 20, 20)
    theirs = infer_auto_device_map(model, {**memory}, no_split_module_classes=["Part"])
    assert [*theirs.values()] == [1, "cpu", "cpu", "cpu"]
    plan = planned(model, memory, no_split_module_classes=["Part"], device_map=policy)
    assert placed(plan) == [1, 0, 0, 0]
    assert [*ours.infer_auto_device_map(model, memory, ["Part"]).values()] == [1, 0, 0, 0]


def test_blocks_of_a_library_model_are_whole_without_asking() -> None:
    """accelerate: splits a ``GPT2Block``, whose parts add to one another, if nobody names the class
    (accelerate#1533).
    """
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    memory: dict[Any, Any] = {0: 26_000, 1: 100 * KIB}

    def block_devices(device_map: Mapping[str, Any]) -> list[set[Any]]:
        keys = expand(device_map, dict(model.named_parameters()))
        found = [
            {device_map[key] for name, key in keys.items() if f".h.{number}." in name}
            for number in range(config.n_layer)
        ]
        assert len(set.union(*found)) == 2
        return found

    theirs = block_devices(infer_auto_device_map(model, {**memory, 0: 40_000}))
    assert max(map(len, theirs)) == 2
    assert max(map(len, block_devices(ours.infer_auto_device_map(model, memory)))) == 1


def test_parameters_of_the_root_have_a_device(planned: Planned) -> None:
    """accelerate: once none (accelerate#1548)."""
    model = parts(10, 10)
    model.first = nn.Parameter(torch.zeros(KIB, dtype=torch.uint8), requires_grad=False)
    model.second = nn.Parameter(torch.ones(KIB, dtype=torch.uint8), requires_grad=False)
    memory: dict[Any, Any] = {0: 12 * KIB, 1: 10 * KIB}
    wanted = {"first": 0, "second": 0, "0": 0, "1": 1}
    assert ours.infer_auto_device_map(model, memory) == wanted
    plan = planned(model, memory, device_map="sequential")
    assert plan.ok
    assert plan.device_map == wanted
