"""Dtypes, and weights that are packed or quantised."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import init_empty_weights
from accelerate.utils import compute_module_sizes
from torch import nn

from modelquirks.planner import (
    Dispatcher,
    load_checkpoint_and_dispatch,
    skeleton_of,
)

NetMaker = Callable[..., nn.Module]
Logits = Callable[[nn.Module], torch.Tensor]
Save = Callable[..., Path]
Theirs = Callable[..., Any]
Refused = Callable[..., str]

CPU: dict[str, Any] = {"": "cpu"}
LAYER_ON_DISK: dict[str, Any] = {"wte": "cpu", "layers.0": "cpu", "layers.1": "disk", "head": "cpu"}


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def bf16(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16() for name, value in model.state_dict().items()}


def as_stored(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    """Return *model* with the values of *state* in its own dtypes."""
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("offload_state_dict", [None, False], ids=["default", "in memory"])
@pytest.mark.parametrize("device_map", [CPU, LAYER_ON_DISK], ids=["cpu", "a layer on disk"])
def test_the_dtype_does_not_depend_on_the_placement(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    logits: Logits,
    device_map: Any,
    offload_state_dict: bool | None,
) -> None:
    """accelerate, bf16 checkpoint, fp32 model, no dtype: all on the CPU is cast to fp32; with one
    layer on disk everything becomes bf16, silently; with ``offload_state_dict=False`` only what is
    on disk, and the forward fails: "mat1 and mat2 must have the same dtype".
    """
    state = bf16(net())
    save(state, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"device_map": device_map, "offload_state_dict": offload_state_dict}
    theirs = accelerate.load_checkpoint_and_dispatch(
        net(meta=True), str(tmp_path), offload_folder=tmp_path / "off", **options
    )
    if device_map is CPU:
        assert dtypes(theirs) == {torch.float32}
    elif offload_state_dict is None:
        assert dtypes(theirs) == {torch.bfloat16}
    else:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            logits(theirs)

    model = load_checkpoint_and_dispatch(net(meta=True), tmp_path, **options)
    assert dtypes(model) == {torch.float32}
    assert torch.equal(logits(model), logits(as_stored(net(), state)))


def test_a_dtype_counts_without_a_device_map_too(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs
) -> None:
    """accelerate, ``device_map=None``: silently ignored."""
    source = net()
    save(source.state_dict(), tmp_path / "model.safetensors")
    said = theirs(net(), str(tmp_path), dtype=torch.float16)
    assert dtypes(said.model) == {torch.float32}
    assert said.warnings == []
    for model in (net(), net(meta=True)):
        loaded = load_checkpoint_and_dispatch(model, tmp_path, dtype=torch.float16)
        assert dtypes(loaded) == {torch.float16}
        assert torch.equal(
            loaded.get_parameter("head.weight"), source.get_parameter("head.weight").half()
        )


def test_a_dtype_holds_for_weights_on_disk_and_nothing_is_written(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate, fp32 checkpoint, ``dtype=float16``: the parameter says fp16, the file that is
    written for it holds fp32 and is cast at each forward.
    """
    source = net()
    file = save(source.state_dict(), tmp_path / "checkpoint" / "model.safetensors")
    options: dict[str, Any] = {"device_map": LAYER_ON_DISK, "dtype": torch.float16}
    folder = tmp_path / "off"
    accelerate.load_checkpoint_and_dispatch(
        net(meta=True), str(file), offload_folder=folder, **options
    )
    written = {path.name: path.stat().st_size for path in folder.glob("*.dat")}
    assert written["layers.1.fc1.weight.dat"] == 8 * 8 * 4

    before = sorted(tmp_path.rglob("*"))
    model = load_checkpoint_and_dispatch(net(meta=True), file, offload_folder=folder, **options)
    assert dtypes(model) == {torch.float16}
    assert torch.equal(logits(model), logits(source.half()))
    assert sorted(tmp_path.rglob("*")) == before


class Proj(nn.Module):
    """One ``Linear``; perhaps with the parameters of a quantised one."""

    def __init__(self, dtype: torch.dtype = torch.float32, **scales: torch.Tensor) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        is_plain = dtype.is_floating_point and dtype.itemsize > 1
        self.proj.weight = nn.Parameter(self.proj.weight.detach().to(dtype), is_plain)
        for name, value in scales.items():
            self.proj.register_parameter(name, nn.Parameter(value, requires_grad=False))


WEIGHT = "proj.weight"
CODES = torch.arange(-32, 32, dtype=torch.int8).reshape(8, 8)


@pytest.mark.parametrize(
    ("dtype", "learns"),
    [(None, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=["no dtype", "bf16", "bf16 frozen"],
)
def test_int8_codes_are_no_weights(
    save: Save,
    tmp_path: Path,
    theirs: Theirs,
    refused: Refused,
    dtype: torch.dtype | None,
    learns: bool,
) -> None:
    """accelerate: without a dtype, the codes become floats; with one, "Only Tensors of floating
    point and complex dtype can require gradients", or int8 in a float ``Linear`` where nothing
    learns. Only the scale is reported, as not used (case 6).
    """
    scale = torch.rand(8, 1)
    save({WEIGHT: CODES, "proj.weight_scale": scale}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"device_map": CPU, "dtype": dtype}
    model = Proj().requires_grad_(learns)
    if dtype and learns:
        with pytest.raises(RuntimeError, match="can require gradients"):
            theirs(model, str(tmp_path), **options)
    else:
        said = theirs(model, str(tmp_path), **options)
        assert torch.equal(model.proj.weight.float(), CODES.float())
        assert not any(WEIGHT + "'" in text for text in said.warnings)
    message = refused(Proj().requires_grad_(learns), tmp_path, naming=(WEIGHT,), **options)
    assert "packed (scaled)" in message and "96 bytes stored" in message
    model = Proj().requires_grad_(learns)
    load_checkpoint_and_dispatch(model, tmp_path, dequantize=True, **options)
    assert torch.equal(model.proj.weight, (CODES * scale).to(dtype))


@pytest.mark.parametrize("alone", [False, True], ids=["scale stored", "scale lost"])
def test_int8_codes_are_no_weights_whether_or_not_a_scale_is_there(
    save: Save, tmp_path: Path, refused: Refused, alone: bool
) -> None:
    """The row above with names that no known format has: there is no way out to ask for."""
    state = {WEIGHT: CODES, "proj.some_factor": torch.rand(8, 1)}
    without = ("proj.some_factor",) if alone else ()
    save(state, tmp_path / "model.safetensors", without=without)
    for dequantize in (False, True):
        refused(Proj(), tmp_path, device_map=CPU, dequantize=dequantize, naming=(WEIGHT,))


@pytest.fixture
def fp8(save: Save, tmp_path: Path, theirs: Theirs) -> Callable[[torch.dtype, str], torch.Tensor]:
    """Give the function that stores fp8 values and a scale of 0.5 under a name, and returns them.

    It asserts what accelerate does with ``dtype=bfloat16``: the unscaled values are cast to bf16,
    even where the module's own parameter is fp8; only the scale is reported, as not used (case 6).
    """

    def stored(wanted: torch.dtype, scale: str) -> torch.Tensor:
        values = (torch.rand(8, 8) * 16).to(torch.float8_e4m3fn)
        factor = torch.full((1, 1), 0.5)
        save({WEIGHT: values, f"proj.{scale}": factor}, tmp_path / "model.safetensors")
        model = Proj(wanted)
        said = theirs(model, str(tmp_path), device_map=CPU, dtype=torch.bfloat16)
        assert torch.equal(model.proj.weight, values.bfloat16())
        assert not any(WEIGHT + "'" in text for text in said.warnings)
        return values

    return stored


@pytest.mark.parametrize("dequantize", [False, True], ids=["", "dequantize"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float8_e4m3fn], ids=["plain", "fp8"])
@pytest.mark.parametrize("scale", ["scale", "odd_factor_scale"])
def test_fp8_values_are_not_taken_without_their_scale(
    fp8: Callable[[torch.dtype, str], torch.Tensor],
    tmp_path: Path,
    refused: Refused,
    wanted: torch.dtype,
    scale: str,
    dequantize: bool,
) -> None:
    """Scales with names that no known format has: dequantising does not help either."""
    fp8(wanted, scale)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "dequantize": dequantize}
    message = refused(Proj(wanted), tmp_path, device_map=CPU, naming=(WEIGHT,), **options)
    assert f"nothing reads 'proj.{scale}'" in message


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["no dtype", "bf16"])
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_fp8_values_are_multiplied_by_their_scale_if_that_is_asked_for(
    fp8: Callable[[torch.dtype, str], torch.Tensor],
    tmp_path: Path,
    refused: Refused,
    scale: str,
    dtype: torch.dtype | None,
) -> None:
    values = fp8(torch.float32, scale)
    options: dict[str, Any] = {"device_map": CPU, "dtype": dtype}
    message = refused(Proj(), tmp_path, naming=(WEIGHT,), **options)
    plain = 64 * (2 if dtype else 4)
    assert f"68 bytes stored, {plain} bytes once loaded" in message
    model = Proj()
    load_checkpoint_and_dispatch(model, tmp_path, dequantize=True, **options)
    assert torch.equal(model.proj.weight, (values.float() * 0.5).to(dtype))


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_fp8_module_without_a_place_for_the_scale_gets_no_values(
    fp8: Callable[[torch.dtype, str], torch.Tensor], tmp_path: Path, refused: Refused, scale: str
) -> None:
    """It can neither take the scale nor hold the scaled values."""
    fp8(wanted := torch.float8_e4m3fn, scale)
    for dequantize in (False, True):
        options = {"device_map": CPU, "dequantize": dequantize}
        message = refused(Proj(wanted), tmp_path, naming=(WEIGHT,), **options)
        assert re.search(rf"{WEIGHT}.*{scale}.*the model wants F8_E4M3", message)


def test_fp8_values_that_have_no_scale_at_all_are_told_of(
    save: Save, tmp_path: Path, theirs: Theirs, caplog: pytest.LogCaptureFixture
) -> None:
    """The row above without any scale, as image models are sometimes stored. accelerate: silent;
    the values may be whole, and are taken, but whoever loads them is told (case 6).
    """
    values = torch.rand(8, 8).to(torch.float8_e4m3fn)
    save({WEIGHT: values}, tmp_path / "model.safetensors")
    assert theirs(Proj(), str(tmp_path), device_map=CPU).warnings == []
    model = Proj()
    load_checkpoint_and_dispatch(model, tmp_path, device_map=CPU)
    assert torch.equal(model.proj.weight, values.float())
    assert f"{WEIGHT!r}: stored as F8_E4M3, cast to F32 as it is, without a scale" in caplog.text


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["no dtype", "bf16"])
def test_a_module_that_computes_with_fp8_and_scale_gets_both_as_they_are(
    save: Save, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """accelerate, ``dtype=bfloat16``: both are cast to bf16 (case 6)."""
    values = (torch.rand(8, 8) * 16).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 0.3)
    save({WEIGHT: values, "proj.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"device_map": CPU, "dtype": dtype}
    model = Proj(torch.float8_e4m3fn, weight_scale_inv=torch.zeros(1, 1))
    load_checkpoint_and_dispatch(model, tmp_path, **options)
    assert torch.equal(model.proj.weight.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(model.proj.get_parameter("weight_scale_inv"), scale)


class Kept(Proj):
    _keep_in_fp32_modules_strict = ("norm",)
    _keep_in_fp32_modules = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("dtype", "gate"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["fp16", "bf16"],
)
def test_modules_that_must_stay_in_fp32_do(
    save: Save, tmp_path: Path, dtype: torch.dtype, gate: torch.dtype
) -> None:
    """accelerate: ``keep_in_fp32_modules``, which only ``load_checkpoint_in_model`` takes, is
    ignored for bf16. Ours asks the model, with the meaning of transformers: the strict list
    holds for both 16-bit dtypes, the other for fp16.
    """
    save(Kept().state_dict(), tmp_path / "model.safetensors")
    model = Kept()
    accelerate.load_checkpoint_in_model(
        model,
        str(tmp_path),
        device_map=CPU,
        dtype=torch.bfloat16,
        keep_in_fp32_modules=["norm"],
    )
    assert model.norm.weight.dtype == torch.bfloat16

    model = Kept()
    load_checkpoint_and_dispatch(model, tmp_path, device_map=CPU, dtype=dtype)
    assert (model.norm.weight.dtype, model.gate.weight.dtype) == (torch.float32, gate)
    assert model.proj.weight.dtype == dtype


@pytest.mark.parametrize("dtype", ["bf16", "auto"])
def test_dtypes_may_be_given_by_name(net: NetMaker, save: Save, tmp_path: Path, dtype: str) -> None:
    """accelerate: "module 'torch' has no attribute 'bf16'"."""
    save(bf16(net()), tmp_path / "model.safetensors")
    with pytest.raises(AttributeError, match=f"has no attribute '{dtype}'"):
        accelerate.load_checkpoint_and_dispatch(
            net(), str(tmp_path), device_map={"": "cpu", "head": "cpu"}, dtype=dtype
        )
    for device_map in (None, CPU):
        model = load_checkpoint_and_dispatch(net(), tmp_path, device_map=device_map, dtype=dtype)
        assert dtypes(model) == {torch.bfloat16}


def test_a_dtype_that_there_is_not_is_refused(net: NetMaker, save: Save, tmp_path: Path) -> None:
    """accelerate: "module 'torch' has no attribute 'bf17'"; without a map, silent."""
    save(net().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'bf17' is not known"):
        load_checkpoint_and_dispatch(net(), tmp_path, dtype="bf17")


class Odd(nn.Module):
    """One tensor of an unusual dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(64, dtype=torch.uint8).view(dtype), requires_grad=False)


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [(torch.float4_e2m1fn_x2, 0), (torch.bool, 8), (torch.float8_e8m0fnu, 64)],
    ids=["float4_e2m1fn_x2", "bool", "float8_e8m0fnu"],
)
def test_unusual_dtypes_count_with_their_bytes(
    tmp_path: Path, dtype: torch.dtype, counted: int
) -> None:
    """accelerate: 4-bit dtypes count as 0 bytes, bool as an eighth (case 10)."""
    model = Odd(dtype)
    assert compute_module_sizes(model)[""] == counted
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    plan = Dispatcher().plan(tmp_path, model=model, device_map=CPU)
    assert plan.ok
    assert plan.placement.memory["cpu"].used_bytes == 64


def test_dtypes_that_no_file_can_hold_are_refused_by_name() -> None:
    """accelerate: a ``uint4`` parameter counts as 0 bytes (case 10). torch cannot even save it."""
    model = nn.Module()
    uint4: torch.dtype = getattr(torch, "uint4")  # noqa: B009  # its stubs do not have it
    empty = torch.empty(8, dtype=uint4, device="meta")
    model.codes = nn.Parameter(empty, requires_grad=False)
    assert compute_module_sizes(model)[""] == 0
    with pytest.raises(ValueError, match=r"'codes'.*'uint4'"):
        skeleton_of(model)


def test_a_wider_dtype_than_the_models_counts_with_what_it_takes(
    net: NetMaker, save: Save, tmp_path: Path
) -> None:
    """accelerate: ``dtype=float32`` for a bf16 model is planned with 2 bytes each and loaded with
    4 (case 10).
    """
    with init_empty_weights():
        model = net().bfloat16()
    save(net().state_dict(), tmp_path / "model.safetensors")
    wanted = sum(p.numel() for p in model.parameters()) * 4
    fp32: Any = torch.float32  # its annotation says torch.device
    assert compute_module_sizes(model, dtype=fp32)[""] == wanted // 2
    plan = Dispatcher().plan(tmp_path, model=model, device_map=CPU, dtype=torch.float32)
    assert plan.placement.memory["cpu"].used_bytes == wanted
    loaded = plan.execute(model)
    assert sum(p.nbytes for p in loaded.parameters()) == wanted
