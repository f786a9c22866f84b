"""``infer_auto_device_map`` and ``get_balanced_memory`` of ours."""

import logging
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate.utils.dataclasses import CustomDtype
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelquirks.planner import PlanError, get_balanced_memory, infer_auto_device_map
from modelquirks.planner.placement.devicemap import expand


class Part(nn.Module):
    """So many bytes, in one piece."""

    def __init__(self, size: int) -> None:
        super().__init__()
        values = torch.empty(size, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(values, requires_grad=False)


class Block(nn.Sequential):
    """Must not be split."""


class Mixed(nn.Module):
    """Owns values beside a part."""

    def __init__(self, own: int, part: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(own, dtype=torch.uint8), requires_grad=False)
        self.part = Part(part)


def floats(n: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of so many values."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(n, dtype=dtype, device="meta"), requires_grad=False)
    return model


def size_of(model: nn.Module, **options: Any) -> int:
    """Return the bytes that the model counts: the least cpu that takes it without a disk."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        try:
            infer_auto_device_map(model, {"cpu": middle, "disk": 0}, **options)
            high = middle
        except PlanError:
            low = middle + 1
    return low


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Draw a row of parts, some in blocks, some tied."""
    rows = [
        Block(*map(Part, sizes)) if draw(st.booleans()) else nn.Sequential(*map(Part, sizes))
        for sizes in draw(st.lists(SIZES, min_size=1, max_size=4))
    ]
    model = nn.Sequential(*rows)
    every = [module for module in model.modules() if isinstance(module, Part)]
    if draw(st.booleans()):
        draw(st.sampled_from(every)).weight = draw(st.sampled_from(every)).weight
    return model


MEMORY = st.dictionaries(
    st.sampled_from([0, 1, 3, "cpu"]), st.integers(0, 400), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(models(), MEMORY)
def test_every_tensor_has_one_device_that_has_room_and_blocks_and_ties_are_whole(
    model: nn.Module, memory: dict[Any, int]
) -> None:
    try:
        found = infer_auto_device_map(model, memory, no_split_module_classes="Block")
    except PlanError:  # what is on the disk needs room where it runs
        assert max(memory.values()) < sum(p.nbytes for p in model.parameters())
        return
    tensors = dict(model.named_parameters(remove_duplicate=False))
    keys = expand(found, tensors)
    assert keys.keys() == tensors.keys()
    homes: dict[int, Any] = {}
    used: dict[Any, int] = {}
    for name, tensor in tensors.items():
        device = found[keys[name]]
        if id(tensor) not in homes:
            used[device] = used.get(device, 0) + tensor.nbytes
        assert homes.setdefault(id(tensor), device) == device
    assert all(n <= memory.get(device, n) for device, n in used.items())
    for name, module in model.named_modules():
        if isinstance(module, Block):
            inside = [found[keys[tensor]] for tensor in keys if tensor.startswith(f"{name}.")]
            assert len(set(inside)) == 1


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(0, 50), st.booleans())
def test_balanced_memory_is_filled_in_order_as_evenly_as_parts_allow(
    sizes: list[int], n_devices: int, spare: int, low_zero: bool
) -> None:
    model = nn.Sequential(*map(Part, sizes))
    room = sum(sizes) // n_devices + max(sizes) + spare
    memory: dict[Any, int] = {2 * number + 1: room for number in range(n_devices)}
    before = dict(memory)
    balanced = get_balanced_memory(model, memory, low_zero=low_zero)
    assert memory == before
    assert balanced.keys() == memory.keys()
    assert all(n is not None and n <= memory[device] for device, n in balanced.items())
    found = infer_auto_device_map(model, balanced)
    homes: list[Any] = [
        found[key] for key in expand(found, dict(model.named_parameters())).values()
    ]
    assert "disk" not in homes
    assert all(one <= other for one, other in pairwise(homes))
    if not low_zero:
        loads: dict[Any, int] = {}
        for home, size in zip(homes, sizes, strict=True):
            loads[home] = loads.get(home, 0) + size
        assert max(loads.values()) <= sum(sizes) // n_devices + max(sizes)


MIXED = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(MIXED, st.lists(st.integers(0, 300), min_size=2, max_size=3), st.booleans())
def test_balanced_memory_never_sends_to_the_disk_what_fits_without_it(
    sizes: list[tuple[int, int]], rooms: list[int], low_zero: bool
) -> None:
    """Tensors beside parts need room on the main device before they follow their module."""
    model = nn.Sequential(*(Mixed(*pair) for pair in sizes))
    memory: dict[Any, int] = dict(enumerate(rooms))
    for whole in ([], ["Mixed"]):
        balanced = get_balanced_memory(model, memory, whole, low_zero=low_zero)
        assert all(n is not None and n <= memory[device] for device, n in balanced.items())
        if "disk" not in infer_or_disk(model, memory, whole):
            assert "disk" not in infer_or_disk(model, balanced, whole)


def infer_or_disk(model: nn.Module, memory: Any, whole: list[str]) -> list[Any]:
    """Return the devices of the map; where there is none, the disk."""
    try:
        return [*infer_auto_device_map(model, memory, whole).values()]
    except PlanError:
        return ["disk"]


def test_balanced_memory_comes_back_as_it_is_where_nothing_can_be_spread() -> None:
    model = nn.Sequential(*map(Part, [10] * 4))
    for memory in ({"cpu": 100}, {0: 100, "cpu": 100}, {0: 15, 1: 15, "cpu": 100}, {0: 0, 1: 50}):
        given_memory: dict[Any, Any] = memory
        assert get_balanced_memory(model, given_memory) == memory


def test_without_max_memory_this_machine_is_asked() -> None:
    assert infer_auto_device_map(nn.Linear(2, 2)) == {"": "cpu"}
    assert get_balanced_memory(nn.Linear(2, 2)).keys() == {"cpu"}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (None, 400),
        (torch.float16, 200),
        ("float16", 200),
        ("torch.bfloat16", 200),
        ("bf16", 200),
        ("float64", 800),
        ("float8_e4m3fn", 100),
        (CustomDtype.FP8, 100),
        (CustomDtype.INT4, 50),
        (CustomDtype.INT2, 25),
    ],
)
def test_floats_take_the_dtype_that_is_asked_for(dtype: Any, size: int) -> None:
    assert size_of(floats(100), dtype=dtype) == size
    assert size_of(floats(100), special_dtypes={"weight": dtype or torch.float32}) == size


@pytest.mark.parametrize("name", ["int8", "bool", "float8_e4m3fn", "uint4"])
def test_what_is_no_wide_float_keeps_its_size(name: str) -> None:
    """As in loading: integers are not cast, and a module of 8-bit floats computes with them."""
    assert size_of(floats(100, getattr(torch, name)), dtype=torch.float32) == 100


def test_a_dtype_that_nobody_knows_is_refused() -> None:
    for dtype in ("float17", 16):
        with pytest.raises(ValueError, match=f"dtype '?{dtype}'? is not known"):
            infer_auto_device_map(floats(1), dtype=dtype)  # type: ignore[arg-type]


def test_what_the_model_keeps_in_float32_is_counted_so() -> None:
    model = nn.ModuleDict({"wo": floats(100), "wi": floats(100)})
    model._keep_in_fp32_modules = ["wo"]  # type: ignore[assignment]
    assert size_of(model, dtype=torch.float16) == 600
    assert size_of(model, dtype=torch.bfloat16) == 400
    model._keep_in_fp32_modules_strict = {"wo"}  # type: ignore[assignment]
    assert size_of(model, dtype=torch.bfloat16) == 600


def test_packed_subclasses_count_the_tensors_inside() -> None:
    class Packed(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["packed", "scales"], None

    weight = torch.empty(100, dtype=torch.bfloat16).as_subclass(Packed)
    weight.packed = torch.empty(50, dtype=torch.uint8)  # type: ignore[attr-defined]
    weight.scales = torch.empty(3)  # type: ignore[attr-defined]
    model = nn.Module()
    model.register_buffer("weight", weight)
    assert size_of(model) == size_of(model, dtype=torch.float16) == 62


def test_a_tie_that_only_the_model_declares_counts_once_and_is_together() -> None:
    """``init_empty_weights`` breaks ties; transformers 5 tells them in this attribute."""
    model = nn.Sequential(*map(Part, [100, 10, 10, 100]))
    assert size_of(model) == 220
    model.all_tied_weights_keys = {"3.weight": "0.weight"}  # type: ignore[assignment]
    assert size_of(model) == 120
    found = infer_auto_device_map(model, {0: 115, 1: 100})
    assert found["0"] == found["3"]


def test_classes_that_the_model_declares_are_kept_whole() -> None:
    model = nn.Sequential(Block(Part(10), Part(10)), Block(Part(10), Part(10)))
    assert infer_auto_device_map(model, {0: 35, 1: 35}) == {"0": 0, "1.0": 0, "1.1": 1}
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    assert infer_auto_device_map(model, {0: 35, 1: 35}) == {"0": 0, "1": 1}


def test_without_clean_result_each_part_has_a_key() -> None:
    model = nn.Sequential(Part(10), nn.Identity(), Part(10))
    model.scale = nn.Parameter(torch.ones(1))
    assert infer_auto_device_map(model, {0: 100}) == {"": 0}
    found = infer_auto_device_map(model, {0: 100}, clean_result=False)
    assert list(found.items()) == [("scale", 0), ("0", 0), ("1", 0), ("2", 0)]


def test_verbose_prints_why(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(nn.Sequential(Part(60), Part(40)), {0: 60, 1: 60}, verbose=True)
    assert re.match(r"0 on 0: .*\n1 on 1: .*\n$", capsys.readouterr().out)


def test_an_accelerator_that_stays_empty_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = infer_auto_device_map(nn.Sequential(Part(60), Part(60)), {0: 50, "cpu": 500})
    assert found == {"": "cpu"}
    assert "on 0 is no room" in caplog.text


def test_what_fits_nowhere_is_refused_with_what_would_help() -> None:
    with pytest.raises(PlanError, match=r"there is no device map: .*'cpu'"):
        infer_auto_device_map(Part(100), {"cpu": 50, "disk": 0})


def test_a_module_without_a_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"'weight' of the model has no size yet"):
        infer_auto_device_map(nn.LazyLinear(3))


def test_a_module_that_contains_itself_is_refused() -> None:
    model = nn.Sequential(Part(1))
    model.add_module("again", model)
    with pytest.raises(ValueError, match="contains itself"):
        infer_auto_device_map(model)
