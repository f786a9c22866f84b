"""Dtypes that are not what one expects: said by name, as no error would show them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.finding import Finding

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def model(dtype: str) -> nn.Module:
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    return nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(4)}).to(DTYPES[dtype])


def told(
    folder: Path, stored: str, wanted: str, *, asked: str | None = None, **odd: str
) -> dict[str, Finding]:
    """Return what is said of dtypes; *odd*: dtypes of single tensors, dots as double lines."""
    tensors = model(stored).state_dict()
    for key, dtype in odd.items():
        name = key.replace("__", ".")
        tensors[name] = tensors[name].to(DTYPES[dtype])
    save_file(tensors, folder / "model.safetensors")
    plan = Dispatcher().plan(folder, model=model(wanted), device_map=None, dtype=asked)
    assert plan.ok, plan.problems
    return {f.code: f for f in plan.all_findings if f.code.startswith("dtype-")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_as_the_model_has_it_is_not_talked_about(dtype: str, tmp_path: Path) -> None:
    assert told(tmp_path, dtype, dtype) == {}


def test_a_tensor_unlike_its_siblings_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, "F32", "F32", layers__1__weight="F16")
    assert found["dtype-uneven"].severity == "warning"
    assert found["dtype-uneven"].message.startswith("'layers.1.weight' (F16): of another dtype")
    assert "'layers.1.weight': stored as F16, cast to F32" in found["dtype-cast"].message


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        (("F32", "F64"), "'1.weight' (F64), '0.weight' (F32): in several dtypes, none of which"),
        (
            ("F32", "F32", "BF16", "BF16", "F64"),
            "'4.weight' (F64), '0.weight' (F32), '1.weight' (F32), '2.weight' (BF16), "
            "'3.weight' (BF16): in several dtypes, none of which",
        ),
    ],
)
def test_all_are_named_where_nobody_knows_which_is_odd(
    dtypes: Sequence[str], named: str, tmp_path: Path
) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in dtypes])
    tensors = {f"{n}.weight": torch.zeros(4, 4).to(DTYPES[d]) for n, d in enumerate(dtypes)}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=layers, device_map=None)
    (uneven,) = [f.message for f in plan.all_findings if f.code == "dtype-uneven"]
    assert uneven.startswith(named)


def test_a_tensor_without_siblings_is_named_by_its_cast(tmp_path: Path) -> None:
    found = told(tmp_path, "BF16", "BF16", norm__weight="F32")
    assert "dtype-uneven" not in found
    assert "'norm.weight': stored as F32, cast to BF16" in found["dtype-cast"].message
    assert found["dtype-cast"].severity == "info"


@pytest.mark.parametrize(("stored", "wanted"), [("F16", "BF16"), ("BF16", "F16")])
def test_sixteen_bits_of_the_other_kind_are_a_warning(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    cast = told(tmp_path, stored, wanted)["dtype-cast"]
    assert cast.severity == "warning"
    assert "'layers.0.weight'" in cast.message
    assert "Neither holds all values of the other" in cast.message


@pytest.mark.parametrize("asked", ["auto", "F16"])
def test_a_cast_that_was_asked_for_needs_no_word(asked: str, tmp_path: Path) -> None:
    assert told(tmp_path, "BF16", "F32", asked=asked) == {}


def test_many_are_counted_and_ten_are_named(tmp_path: Path) -> None:
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(13)])
    save_file({n: t.half() for n, t in layers.state_dict().items()}, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=layers, device_map=None)
    (cast,) = [f.message for f in plan.all_findings if f.code == "dtype-cast"]
    assert cast.count(".weight'") == 10
    assert "… and 3 more: stored as F16" in cast


def test_f32_scales_of_packed_weights_are_as_they_should_be(tmp_path: Path) -> None:
    linear = nn.Linear(4, 4, bias=False).bfloat16()
    stored = {"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(4, 1)}
    holder = nn.ModuleDict({"up": linear})
    save_file({f"up.{k}": t for k, t in stored.items()}, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=holder, device_map=None, dequantize=True)
    assert plan.ok, plan.problems
    assert [f for f in plan.all_findings if f.code.startswith("dtype-")] == []
    stored["weight_scale"] = stored["weight_scale"].half()
    save_file({f"up.{k}": t for k, t in stored.items()}, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=holder, device_map=None, dequantize=True)
    (cast,) = [f.message for f in plan.all_findings if f.code == "dtype-cast"]
    assert "'up.weight_scale': stored as F16" in cast


def test_a_scale_in_a_byte_among_scales_that_are_floats_is_named(tmp_path: Path) -> None:
    """A byte is an exponent, which is right where all are, and another number otherwise."""
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)]).bfloat16()
    stored = {
        f"{n}.{name}": tensor
        for n in range(3)
        for name, tensor in (
            ("weight", torch.zeros(4, 4).to(torch.float8_e4m3fn)),
            ("weight_scale", torch.ones(4, 1).to(torch.uint8 if n == 1 else torch.float32)),
        )
    }
    save_file(stored, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=layers, device_map=None, dequantize=True)
    (uneven,) = [f.message for f in plan.all_findings if f.code == "dtype-uneven"]
    assert "'1.weight_scale' (U8)" in uneven
