"""``Plan.weights``: what a server's own ``load_weights`` gets."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, ExecutionError, Plan, PlanError
from modelquirks.planner.execution import stream
from modelquirks.planner.execution.reader import ReadError
from modelquirks.planner.model.build import empty_weights
from modelquirks.quirks import Convert, Match, ModelQuirks, Registry, Source, Stack, hookimpl

N_LAYERS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 8, 4))
        self.norm = nn.Linear(4, 1)


class Net(nn.Module):
    """Stacks its experts and ties its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Stacks:
    """The quirk that stacks experts stored one by one."""

    @hookimpl
    def modelquirks_records(self) -> list[ModelQuirks]:
        recipe = Stack(Source("layers.{layer}.experts.{e}.w"), over="e")
        return [
            ModelQuirks(
                name="stacks",
                role="architecture",
                match=Match(any_of=("layers.{layer}.experts.{e}.w",)),
                conversions=(Convert("layers.{layer}.experts", recipe),),
            )
        ]


def stored(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    tensors = {"embed.weight": made(6, 4)}
    for i in range(N_LAYERS):
        tensors |= {f"layers.{i}.experts.{e}.w": made(8, 4) for e in range(2)}
        tensors |= {f"layers.{i}.norm.weight": made(1, 4), f"layers.{i}.norm.bias": made(1)}
    return tensors


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain = {name: t for name, t in tensors.items() if "experts" not in name}
    for i in range(N_LAYERS):
        members = [tensors[f"layers.{i}.experts.{e}.w"] for e in range(2)]
        plain[f"layers.{i}.experts"] = torch.stack(members)
    return plain


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a file for the even layers and one for the rest, by an index."""
    files: dict[str, dict[str, torch.Tensor]] = {"b.safetensors": {}, "a.safetensors": {}}
    for name, tensor in tensors.items():
        even = name.startswith("layers.") and int(name.split(".")[1]) % 2 == 0
        files["a.safetensors" if even else "b.safetensors"][name] = tensor
    for name, held in files.items():
        save_file(held, folder / name)
    weight_map = {tensor: name for name, held in files.items() for tensor in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register(Stacks(), name="stacks")
    return registry


@pytest.fixture
def plan(tmp_path: Path, registry: Registry) -> Plan:
    with empty_weights():
        model = Net()
    return Dispatcher(registry).plan(write(tmp_path, stored()), model=model, device_map=None)


def test_every_tensor_comes_once_as_the_model_wants_it(plan: Plan) -> None:
    weights = plan.weights()
    wanted = expected(stored())
    got = dict(weights)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert len(weights) == len(wanted) and list(weights.names) == list(got)
    assert weights.nbytes == sum(t.nbytes for t in wanted.values())
    assert not any(tensor.requires_grad for tensor in got.values())


def test_it_can_be_gone_through_again(plan: Plan) -> None:
    weights = plan.weights()
    first = {name: tensor.clone() for name, tensor in weights}
    assert all(torch.equal(first[name], tensor) for name, tensor in weights)


def test_the_order_is_that_of_the_files(plan: Plan) -> None:
    names = plan.weights().names
    in_a = [name.startswith("layers.") and int(name.split(".")[1]) % 2 == 0 for name in names]
    assert in_a == sorted(in_a, reverse=True)


def test_a_tied_tensor_comes_under_each_name_if_asked(plan: Plan) -> None:
    got = dict(plan.weights(ties="each"))
    assert got.keys() == {*expected(stored()), "head.weight"}
    assert got["head.weight"] is got["embed.weight"]
    assert plan.weights(ties="each").nbytes == plan.weights().nbytes


def test_names_and_patterns_choose(plan: Plan) -> None:
    assert set(plan.weights(["layers.{i}.experts", "embed.weight"]).names) == {
        "embed.weight",
        *(f"layers.{i}.experts" for i in range(N_LAYERS)),
    }
    assert set(plan.weights(["layers.1.**"]).names) == {
        f"layers.1.{leaf}" for leaf in ("experts", "norm.weight", "norm.bias")
    }


def test_the_second_name_of_a_tie_can_be_asked_for_alone(plan: Plan) -> None:
    ((name, tensor),) = plan.weights(["head.weight"])
    assert name == "head.weight"
    assert torch.equal(tensor, stored()["embed.weight"])


def test_a_name_that_is_not_made_is_refused_with_the_nearest(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"no tensor 'layer\.1\.norm\.bias'.*'layers\.1\.norm"):
        plan.weights(["layer.1.norm.bias"])
    with pytest.raises(ValueError, match=r"no tensor 'blocks\.\{i\}"):
        plan.weights(["blocks.{i}.*"])


@pytest.mark.parametrize("options", [{"ties": "twice"}, {"device": "disk"}, {"device": "meta"}])
def test_an_option_that_means_nothing_is_refused(plan: Plan, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(options.values()))):
        plan.weights(**options)  # type: ignore[arg-type]


def test_what_is_written_to_a_view_never_reaches_the_file(plan: Plan, tmp_path: Path) -> None:
    before = (tmp_path / "b.safetensors").read_bytes()
    for name, tensor in plan.weights(["embed.weight", "layers.{i}.norm.weight"]):
        tensor.fill_(7)
        assert name
    assert (tmp_path / "b.safetensors").read_bytes() == before
    assert torch.equal(dict(plan.weights())["embed.weight"], stored()["embed.weight"])


@pytest.mark.parametrize("copy", [True, False])
def test_casts_and_copies_have_the_values_of_the_file(
    tmp_path: Path, registry: Registry, copy: bool
) -> None:
    with empty_weights():
        model = Net()
    folder = write(tmp_path, stored(torch.bfloat16))
    plan = Dispatcher(registry).plan(folder, model=model, device_map=None)
    got = dict(plan.weights(copy=copy))
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    wanted = expected(stored(torch.bfloat16))
    assert all(torch.equal(got[name], wanted[name].float()) for name in wanted)


def test_no_more_than_a_batch_is_held(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_BATCH", 1)
    alive: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in plan.weights(copy=True):
        alive.append(weakref.ref(tensor))
        del tensor
        gc.collect()
        assert sum(ref() is not None for ref in alive) == 1


def test_a_saved_plan_gives_them_without_the_model(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    names = ["embed.weight", "layers.1.norm.bias", "layers.{i}.experts"]
    got = dict(again.weights(names))
    wanted = expected(stored())
    assert len(got) == 2 + N_LAYERS
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in got.items())


def test_without_a_model_the_way_out_is_said(tmp_path: Path, registry: Registry) -> None:
    plan = Dispatcher(registry).plan(write(tmp_path, stored()))
    with pytest.raises(PlanError, match=r"Dispatcher\.model builds"):
        plan.weights()


def test_a_plan_that_cannot_be_used_is_refused_before_anything_comes(
    tmp_path: Path, registry: Registry
) -> None:
    tensors = stored()
    del tensors["layers.1.norm.bias"]
    with empty_weights():
        model = Net()
    plan = Dispatcher(registry).plan(write(tmp_path, tensors), model=model)
    with pytest.raises(PlanError, match=r"1 missing: 'layers\.1\.norm\.bias'"):
        plan.weights()


def test_a_changed_checkpoint_is_refused(plan: Plan, tmp_path: Path) -> None:
    save_file({"embed.weight": torch.zeros(6, 4)}, tmp_path / "b.safetensors")
    with pytest.raises(PlanError, match="not the one the plan was made for"):
        plan.weights()


def test_a_file_that_is_cut_off_on_the_way_is_an_error_with_the_name_of_a_tensor(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_BATCH", 1)
    weights = iter(plan.weights())
    next(weights)
    path = tmp_path / "b.safetensors"
    with path.open("r+b") as file:
        file.truncate(16)
    with pytest.raises((ReadError, ExecutionError), match=r"'b\.safetensors'.*truncated"):
        for name, tensor in weights:
            assert name and tensor.numel()
