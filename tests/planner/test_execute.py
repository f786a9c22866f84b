import copy
import gc
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import init_empty_weights
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import align_module_device, has_offloaded_params
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.dispatching import DispatchOptions
from modelquirks.planner.execution.execute import ExecutionError, ExecutionReport, _Job, execute
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.route import make_route
from modelquirks.planner.execution.slots import find_slots
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.planner.placement.memory import Device
from modelquirks.quirks.recipe import (
    Concat,
    Dequantize,
    Node,
    Part,
    Scheme,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
)

Region = tuple[tuple[int, int], ...]
Located = Callable[[Path], dict[str, StoredTensor]]
Map = Mapping[str, Device | torch.device]


class Block(nn.Module):
    """Holds a parameter of its own beside its children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width))
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))) * self.gain + x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Has every kind of tensor: tied, at the root, buffers persistent and computed."""

    def __init__(self, width: int = 8, words: int = 20) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("grid", torch.arange(width).float(), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = (self.embed(words) * self.scale + self.shift + self.grid).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpoint:
    """A model, its weights in files, and everything that loading them takes."""

    def __init__(self, make: Callable[[], nn.Module], folder: Path, located: Located) -> None:
        self.make, self.root = make, folder
        self.model = make().eval()
        for name, slot in find_slots(self.model).items():
            if slot.persistent and slot.tensor.is_floating_point():
                values = torch.linspace(0.5, 1.5, slot.tensor.numel()) + len(name) / 50
                slot.tensor.data.copy_(values.reshape(slot.tensor.shape))
        self.aliases: dict[str, tuple[str, ...]] = {}
        first: dict[int, str] = {}
        for name, slot in find_slots(self.model).items():
            owner = first.setdefault(id(slot.tensor), name)
            if owner != name:
                self.aliases[owner] = (*self.aliases.get(owner, ()), name)
        tied = {alias for aliases in self.aliases.values() for alias in aliases}
        state = {k: v for k, v in self.model.state_dict().items() if k not in tied}
        half = len(state) // 2
        for number, part in enumerate((list(state)[:half], list(state)[half:])):
            save_file({k: state[k].contiguous() for k in part}, folder / f"{number}.safetensors")
        self.tensors = located(folder)

    def empty(self) -> nn.Module:
        """Return the model without weights; ties are broken by the way."""
        with init_empty_weights():
            return self.make().eval()

    def items(self, device_map: Map | None, dtype: str | None = None) -> list[LoadItem]:
        modules = frozenset(path for path, _ in self.model.named_modules())
        route = make_route(
            device_map or {"": "cpu"}, main_device=None, force_hooks=False, modules=modules
        )
        slots = find_slots(self.model)
        return [
            LoadItem(
                name=name,
                node=Source(name),
                env={},
                dtype=dtype if dtype and stored.dtype == "F32" else stored.dtype or "",
                shape=stored.shape or (),
                device="cpu" if (device := route.device_of(name)) is None else device,
                kind="parameter" if slots[name].is_parameter else "buffer",
                aliases=self.aliases.get(name, ()),
            )
            for name, stored in self.tensors.items()
        ]

    def load(
        self,
        model: nn.Module,
        device_map: Map | None,
        items: Iterable[LoadItem] | None = None,
        *,
        schemes: Mapping[str, Scheme] | None = None,
        **options: Any,
    ) -> ExecutionReport:
        return execute(
            model,
            self.items(device_map) if items is None else items,
            device_map=device_map,
            root=self.root,
            tensors=self.tensors,
            schemes=schemes or {},
            **options,
        )


@pytest.fixture
def net(tmp_path: Path, located: Located) -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(Net, tmp_path, located)


WORDS = torch.arange(20).reshape(5, 4)
ROOT: dict[str, Device] = {"scale": "cpu", "shift": "cpu"}
MAPS: dict[str, Map | None] = {
    "none": None,
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "torch-device": {**ROOT, "embed": torch.device("cpu"), "blocks": "disk", "head": "cpu"},
    "blocks-on-disk": {**ROOT, "embed": "cpu", "blocks": "disk", "head": "cpu"},
    "ends-on-disk": {**ROOT, "embed": "disk", "blocks": "cpu", "head": "disk"},
    "tie-on-disk-and-cpu": {**ROOT, "embed": "disk", "blocks": "cpu", "head": "cpu"},
    "split-block": {
        **{"scale": "disk", "shift": "disk", "embed": "disk", "head": "disk"},
        **{"blocks.0": "disk", "blocks.1": "cpu", "blocks.2.gain": "disk"},
        **{"blocks.2.up": "disk", "blocks.2.down": "cpu", "blocks.2.norm": "disk"},
    },
}


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state_of(model: nn.Module) -> Any:
    """Return all that a failed attempt could have changed, by identity."""
    modules = [(path, id(module), sorted(vars(module))) for path, module in model.named_modules()]
    tensors = [
        (
            name,
            id(slot.tensor),
            slot.tensor.data_ptr(),
            str(slot.tensor.device),
            slot.tensor.requires_grad,
            sorted(vars(slot.tensor).items()) if slot.is_parameter else [],
            None if slot.tensor.is_meta else slot.tensor.detach().clone().tolist(),
        )
        for name, slot in find_slots(model).items()
    ]
    return modules, tensors


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_outputs_equal_those_of_the_plain_model_again_and_again(
    net: Checkpoint, name: str, offload_buffers: bool
) -> None:
    before = listing(net.root)
    model, device_map = net.empty(), MAPS[name]
    report = net.load(model, device_map, offload_buffers=offload_buffers)
    assert report.verification.ok
    assert report.n_tensors == len(net.tensors)
    for _ in range(3):
        assert torch.equal(model(WORDS), net.model(WORDS))
    assert listing(net.root) == before
    assert getattr(model, "hf_device_map", None) == device_map


@pytest.mark.parametrize("name", MAPS)
def test_a_model_that_was_built_for_real_and_tied_is_loaded_right(
    net: Checkpoint, name: str
) -> None:
    """accelerate 1.15 lets the random head win over the loaded embedding."""
    model = net.make().eval()
    net.load(model, MAPS[name])
    assert torch.equal(model(WORDS), net.model(WORDS))


@pytest.mark.parametrize("name", MAPS)
def test_the_model_lives_on_when_everything_else_is_gone(net: Checkpoint, name: str) -> None:
    model, expected = net.empty(), net.model(WORDS)
    net.load(model, MAPS[name])
    del net
    gc.collect()
    assert torch.equal(model(WORDS), expected)


def test_tied_names_get_one_parameter_though_init_empty_weights_broke_the_tie(
    net: Checkpoint,
) -> None:
    model: Any = net.empty()
    assert model.head.weight is not model.embed.weight
    net.load(model, {"": "cpu"})
    assert model.head.weight is model.embed.weight


def test_unchanged_cpu_tensors_are_views_of_the_mapped_file(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {"": "cpu"})
    by_place = sorted(
        (stored.begin or 0, find_slots(model)[name].tensor.data_ptr())
        for name, stored in net.tensors.items()
        if stored.shard == "0.safetensors"
    )
    assert len({address - begin for begin, address in by_place}) == 1


def test_training_a_view_does_not_change_the_file_or_another_model(net: Checkpoint) -> None:
    before = listing(net.root)
    one: Any = net.empty()
    other = net.empty()
    net.load(one, {"": "cpu"})
    net.load(other, {"": "cpu"})
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert listing(net.root) == before
    assert torch.equal(other(WORDS), net.model(WORDS))


def test_two_models_from_different_checkpoints_do_not_mix(
    net: Checkpoint, tmp_path_factory: pytest.TempPathFactory, located: Located
) -> None:
    """accelerate's offload folder, when reused, gives one model the weights of the other."""
    second = Checkpoint(lambda: Net(8, 30), tmp_path_factory.mktemp("second"), located)
    one, two = net.empty(), second.empty()
    net.load(one, {"": "disk"})
    second.load(two, {"": "disk"})
    assert torch.equal(one(WORDS), net.model(WORDS))
    assert torch.equal(two(WORDS), second.model(WORDS))


def test_disk_tensors_take_no_memory_and_are_read_at_each_pass(net: Checkpoint) -> None:
    model: Any = net.empty()
    report = net.load(model, {"": "disk"}, offload_buffers=True)
    assert report.bytes_read == 0
    assert report.bytes_by_device == {"disk": sum(item.nbytes for item in net.items(None))}
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = model.embed._hf_hook.weights_map.dataset.state_dict
    before = weights.bytes_read
    model(WORDS)
    once = weights.bytes_read - before
    model(WORDS)
    assert once == weights.bytes_read - before - once > 0
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_the_planned_dtype_does_not_depend_on_the_device(net: Checkpoint, device: str) -> None:
    model = net.empty()
    net.load(model, {"": device}, net.items({"": device}, dtype="BF16"))
    dtypes = {slot.tensor.dtype for slot in find_slots(model).values() if slot.persistent}
    assert dtypes == {torch.bfloat16, torch.int64}
    weight: Any = net.model
    fetched = torch.equal(
        value_of(model, "blocks.1.up.weight"), weight.blocks[1].up.weight.bfloat16()
    )
    assert fetched


def value_of(model: nn.Module, name: str) -> torch.Tensor:
    """Return a parameter wherever it is."""
    path, _, leaf = name.rpartition(".")
    with align_module_device(model.get_submodule(path)):
        return getattr(model.get_submodule(path), leaf).detach().clone()  # type: ignore[no-any-return]


def test_persistent_buffers_of_disk_modules_are_loaded(net: Checkpoint) -> None:
    """accelerate 1.15 leaves BatchNorm's statistics at 0 and 1, silently."""
    model: Any = net.empty()
    net.load(model, {**ROOT, "embed": "cpu", "blocks": "disk", "head": "cpu"})
    expected: Any = net.model
    assert torch.equal(model.blocks[0].norm.running_var, expected.blocks[0].norm.running_var)


def test_offloaded_buffers_come_from_the_weights_map(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {"": "disk"}, offload_buffers=True)
    assert model.blocks[0].norm.running_var.is_meta
    assert not model.grid.is_meta
    assert "blocks.0.norm.running_var" in list(model.blocks[0].norm._hf_hook.weights_map)


# What third parties do with dispatched models.


def test_third_parties_reach_weights_through_hooks(net: Checkpoint) -> None:
    model: Any = net.empty()
    expected: Any = net.model
    net.load(model, {"": "disk"})
    up = model.blocks[0].up
    assert has_offloaded_params(up)
    with align_module_device(up):
        assert torch.equal(up.weight, expected.blocks[0].up.weight)
    assert up.weight.is_meta
    weights = up._hf_hook.weights_map
    assert torch.equal(weights["weight"].data, expected.blocks[0].up.weight)
    assert weights.dataset[next(iter(weights.dataset))].device == torch.device("cpu")
    assert sorted(weights) == ["blocks.0.up.bias", "blocks.0.up.weight"]
    assert weights.dataset.index == {}


def test_removing_the_hooks_brings_the_weights_into_memory(net: Checkpoint) -> None:
    """accelerate's own hooks leave them on the meta device, without data."""
    model = net.empty()
    net.load(model, {"": "disk"}, offload_buffers=True)
    remove_hook_from_submodules(model)
    assert not any(slot.tensor.is_meta for slot in find_slots(model).values())
    assert torch.equal(model(WORDS), net.model(WORDS))


def test_a_deep_copy_of_an_offloaded_model_is_a_model_of_its_own(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {**ROOT, "embed": "cpu", "blocks": "disk", "head": "cpu"})
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.embed.weight.zero_()
    del model
    assert torch.equal(other(WORDS), net.model(WORDS))


def test_pickling_an_offloaded_model_fails_by_accelerates_hooks(net: Checkpoint) -> None:
    """They put a local function on each module; without hooks a model pickles as any other."""
    offloaded, plain = net.empty(), net.empty()
    net.load(offloaded, {"": "disk"})
    with pytest.raises((AttributeError, pickle.PicklingError), match="new_forward"):
        pickle.dumps(offloaded)
    net.load(plain, {"": "cpu"})
    assert torch.equal(pickle.loads(pickle.dumps(plain))(WORDS), net.model(WORDS))


def test_moving_an_offloaded_model_is_refused_as_accelerate_does(net: Checkpoint) -> None:
    model = net.empty()
    net.load(model, {"": "disk"})
    with pytest.raises(RuntimeError, match="You can't move a model that has some modules"):
        model.to("cpu")


def test_preloaded_modules_fetch_all_their_weights_at_once(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {"": "disk"}, preload_module_classes=["Block"])
    assert model.blocks[0]._hf_hook.place_submodules
    assert not hasattr(model.blocks[0].up, "_hf_hook")
    assert torch.equal(model(WORDS), net.model(WORDS))


def test_hooks_can_be_forced_on_a_single_device(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.execution_device == "cpu"
    assert torch.equal(model(WORDS), net.model(WORDS))


def test_without_dispatch_tensors_are_placed_and_nothing_is_hooked(net: Checkpoint) -> None:
    model: Any = net.empty()
    net.load(model, {"": "cpu"}, dispatch=False)
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(WORDS), net.model(WORDS))
    with pytest.raises(ExecutionError, match="dispatch=False cannot leave them there"):
        net.load(net.empty(), {"": "disk"}, dispatch=False)


class Small(nn.Module):
    """Without buffers, so that it can run on the meta device in the place of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.embed = nn.Embedding(20, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.embed(words) * self.scale))  # type: ignore[no-any-return]


SMALL: Map = {"scale": "cpu", "embed": "cpu", "up": "disk", "head": "cpu"}


def test_cpu_weights_under_another_main_device_are_streamed_from_memory(
    tmp_path: Path, located: Located
) -> None:
    """Not read again from disk; a meta device stands in for the GPU."""
    small = Checkpoint(Small, tmp_path, located)
    model: Any = small.empty()
    report = small.load(model, SMALL, main_device="meta")
    assert report.bytes_by_device == {"cpu": 4 * (8 + 20 * 8), "disk": 4 * (8 + 8 * 8)}
    assert all(p.is_meta for p in model.parameters())
    embed, head = model.embed._hf_hook.weights_map, model.head._hf_hook.weights_map
    weights = embed.dataset.state_dict
    before = weights.bytes_read
    assert embed["weight"].data_ptr() == head["weight"].data_ptr()
    assert torch.equal(embed["weight"], small.model.embed.weight)  # type: ignore[arg-type,union-attr]
    assert torch.equal(model._hf_hook.weights_map["scale"], small.model.scale)  # type: ignore[arg-type]
    assert weights.bytes_read == before
    assert model(WORDS.to("meta")).shape == (5, 4, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "device_map",
    [{"": 0}, SMALL, {**SMALL, "up": 0}, {"": "disk"}, {**SMALL, "embed": 0, "head": 0}],
    ids=str,
)
def test_outputs_on_a_gpu(tmp_path: Path, located: Located, device_map: Map) -> None:
    small = Checkpoint(Small, tmp_path, located)
    model = small.empty()
    small.load(model, device_map, main_device=0)
    expected = small.model.to(0)(WORDS.to(0))
    for _ in range(2):
        assert torch.equal(model(WORDS.to(0)), expected)


# Parameters: class, attributes, gradients.


class Marked(nn.Parameter):
    """Its constructor wants another argument than accelerate would give it."""

    marker: str

    def __new__(cls, data: torch.Tensor, marker: str) -> "Marked":
        made: Any = torch.Tensor._make_subclass(cls, data, True)
        made.marker = marker
        return made  # type: ignore[no-any-return]

    def __init__(self, data: torch.Tensor, marker: str) -> None:
        pass


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.marked = Marked(torch.zeros(2), "here")
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        self.eighth = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)


def test_parameters_keep_class_attributes_and_gradients(tmp_path: Path, located: Located) -> None:
    odd = Checkpoint(Odd, tmp_path, located)
    model = Odd()
    odd.load(model, {"": "cpu"})
    assert type(model.marked) is Marked
    assert model.marked.marker == "here"
    assert [p.requires_grad for p in model.parameters()] == [True, False, False, False]
    assert all(p.is_leaf for p in model.parameters())
    assert torch.equal(model.marked, odd.model.marked)  # type: ignore[arg-type]


def test_quantised_values_take_the_place_of_a_learnable_parameter(tmp_path: Path) -> None:
    """``Only Tensors of floating point … can require gradients`` otherwise."""
    save_file({"weight": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "0.safetensors")
    begin = (tmp_path / "0.safetensors").stat().st_size - 4
    stored = StoredTensor("weight", "0.safetensors", "I8", (2, 2), begin, begin + 4)
    model = nn.Linear(2, 2, bias=False)
    item = LoadItem("weight", Source("weight"), {}, "I8", (2, 2), "cpu")
    execute(
        model,
        [item],
        device_map={"": "cpu"},
        root=tmp_path,
        tensors={"weight": stored},
        schemes={},
    )
    assert model.weight.dtype == torch.int8
    assert not model.weight.requires_grad


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("device_map", [None, {"": "disk"}, {"lstm": "disk", "out": "cpu"}])
def test_modules_that_list_their_own_parameters_use_the_loaded_ones(
    tmp_path: Path, located: Located, device_map: Map | None
) -> None:
    recurrent = Checkpoint(Recurrent, tmp_path, located)
    model = Recurrent().eval()
    recurrent.load(model, device_map)
    x = torch.rand(2, 3, 4)
    assert torch.equal(model(x), recurrent.model(x))


# Weights that have to be made.


class PerRow(Scheme):
    """A small packing: int8 codes, one float32 scale for each row."""

    name = "per_row"
    roles: tuple[str, ...] = ("codes", "scales")

    def __init__(self, fail_at: int = -1, drift: float = 0.0) -> None:
        self.calls, self.fail_at, self.drift = 0, fail_at, drift

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        return TensorType("F32", parts["codes"].shape)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Any
    ) -> Mapping[str, Region]:
        return {"codes": region, "scales": region[:1]}

    def evaluate(self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("no such luck")
        plain = parts["codes"].float() * parts["scales"][:, None] + self.calls * self.drift
        return plain.to(dtype)


PACKED = Dequantize(
    "per_row", (Part("codes", Source("{m}.codes")), Part("scales", Source("{m}.s")))
)
EXPERTS = Stack(Concat((Source("e.{e}.w1"), Source("e.{e}.w3"))), "e", 4)


class Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"gate_up": torch.zeros(4, 6, 2)})
        self.qkv = nn.Linear(5, 2, bias=False)
        self.packed = nn.Linear(3, 4, bias=False)
        self.last = nn.Linear(3, 4, bias=False)

    def forward(self) -> tuple[torch.Tensor, ...]:
        # Through calls, as hooks of accelerate need it.
        x, y = torch.eye(5), torch.eye(3)
        return self.qkv(x), self.packed(y), self.last(y)


@pytest.fixture
def made(tmp_path: Path, located: Located) -> Checkpoint:
    checkpoint = Checkpoint.__new__(Checkpoint)
    tensors = {f"e.{e}.{w}": torch.rand(3, 2) for e in range(4) for w in ("w1", "w3")}
    tensors["fused"] = torch.rand(5, 6)
    for m in ("0", "1"):
        tensors[f"{m}.codes"] = torch.randint(-9, 9, (4, 3), dtype=torch.int8)
        tensors[f"{m}.s"] = torch.rand(4)
    save_file(tensors, tmp_path / "0.safetensors")
    checkpoint.make, checkpoint.root, checkpoint.tensors = Made, tmp_path, located(tmp_path)
    return checkpoint


def made_items(device: Device) -> list[LoadItem]:
    nodes: list[tuple[str, Node, dict[str, int], tuple[int, ...]]] = [
        ("experts.gate_up", EXPERTS, {}, (4, 6, 2)),
        ("qkv.weight", Transpose(Slice(Source("fused"), 1, 2, 4)), {}, (2, 5)),
        ("packed.weight", PACKED, {"m": 0}, (4, 3)),
        ("last.weight", PACKED, {"m": 1}, (4, 3)),
    ]
    return [
        LoadItem(name, node, env, "F32", shape, device, rule=f"rule of {name}")
        for name, node, env, shape in nodes
    ]


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_stacked_cut_and_packed_weights_are_made(made: Checkpoint, device: Device) -> None:
    model: Any = made.empty()
    report = made.load(
        model,
        {"": device},
        made_items(device),
        schemes={"per_row": PerRow()},
        loading=LoadOptions(sample_bytes=64),
    )
    assert report.verification.ok
    in_memory: Any = made.empty()
    made.load(in_memory, None, made_items("cpu"), schemes={"per_row": PerRow()})
    assert in_memory.experts["gate_up"].shape == (4, 6, 2)
    for one, other in zip(model(), in_memory(), strict=True):
        assert torch.equal(one, other)


def test_a_weights_map_tells_its_names_without_making_a_tensor(made: Checkpoint) -> None:
    model: Any = made.empty()
    made.load(model, {"": "disk"}, made_items("disk"), schemes={"per_row": PerRow()})
    weights = model.qkv._hf_hook.weights_map.dataset.state_dict
    assert isinstance(weights, WeightsMap)
    before = weights.bytes_read
    assert "packed.weight" in weights
    assert "nothing" not in weights
    assert len(weights) == len(list(weights)) == 4
    assert weights.bytes_read == before
    with pytest.raises(KeyError):
        weights["nothing"]


# Failing well.


def test_a_failure_at_the_last_tensor_leaves_the_model_as_it_was(made: Checkpoint) -> None:
    model = Made()
    before = state_of(model)
    with pytest.raises(ExecutionError) as caught:
        made.load(model, {"": "cpu"}, made_items("cpu"), schemes={"per_row": PerRow(fail_at=2)})
    assert str(caught.value) in {  # whichever thread comes second
        f"'{name}' by rule 'rule of {name}': dequantize of '{m}.codes', '{m}.s': no such luck"
        for m, name in enumerate(("packed.weight", "last.weight"))
    }
    assert state_of(model) == before


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("name", [name for name, device_map in MAPS.items() if device_map])
def test_a_failure_of_accelerate_leaves_the_model_as_it_was(
    net: Checkpoint, name: str, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: when all its hooks are in place."""
    real = accelerate.dispatch_model

    def breaks(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise ValueError("out of luck")

    model = net.empty() if empty else net.make()
    before = state_of(model)
    monkeypatch.setattr(accelerate, "dispatch_model", breaks)
    with pytest.raises(ExecutionError, match="cannot dispatch the model: out of luck"):
        net.load(model, MAPS[name])
    assert state_of(model) == before
    monkeypatch.undo()
    net.load(model, MAPS[name])
    assert torch.equal(model.eval()(WORDS), net.model(WORDS))


def test_a_model_on_disk_as_a_whole_is_hooked_as_accelerate_before_1_15_must_be_told(
    net: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``dispatch_model`` refuses one device, the disk, unless hooks are forced."""
    real = accelerate.dispatch_model

    def older(model: Any, device_map: Any, *, force_hooks: bool = False, **kwargs: Any) -> None:
        if len(set(device_map.values())) == 1 and "disk" in device_map.values() and not force_hooks:
            raise ValueError("You are trying to offload the whole model to the disk.")
        real(model, device_map, force_hooks=force_hooks, **kwargs)

    monkeypatch.setattr(accelerate, "dispatch_model", older)
    model = net.empty()
    net.load(model, {"": "disk"})
    assert torch.equal(model.eval()(WORDS), net.model(WORDS))


# Of accelerate 1.15 on Python 3.13, for the partial that it sets on the class.
@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor:FutureWarning")
def test_a_traced_module_gets_back_the_forward_of_its_class(
    tmp_path: Path, located: Located, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate hooks the class of these modules instead of the module."""
    checkpoint = Checkpoint(lambda: torch.fx.symbolic_trace(Small()), tmp_path, located)
    model: Any = checkpoint.make()
    forward = type(model).forward
    with monkeypatch.context() as patch:
        patch.setattr("modelquirks.planner.execution.execute.verify", None)
        with pytest.raises(TypeError):
            checkpoint.load(model, SMALL)
    assert type(model).forward is forward
    checkpoint.load(model, SMALL)
    assert torch.equal(model(WORDS), checkpoint.model(WORDS))


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_values_that_verification_finds_different_are_refused(
    made: Checkpoint, device: Device
) -> None:
    """A scheme that answers differently each time stands for memory that goes wrong."""
    model = Made()
    before = state_of(model)
    drifting = PerRow(drift=0.25)
    with pytest.raises(ExecutionError, match=r"'packed.weight' differs from the checkpoint at"):
        made.load(model, {"": device}, made_items(device), schemes={"per_row": drifting})
    assert state_of(model) == before


def test_an_interrupt_leaves_the_model_as_it_was(
    net: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    model = net.make()
    before = state_of(model)
    monkeypatch.setattr(accelerate, "dispatch_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        net.load(model, {"": "cpu"})
    assert state_of(model) == before


def refused(net: Checkpoint, model: nn.Module, items: list[LoadItem], device_map: Map) -> str:
    """Return the message with which loading is refused, the model being left alone."""
    before = state_of(model)
    with pytest.raises(ExecutionError) as caught:
        net.load(model, device_map, items)
    assert state_of(model) == before
    return str(caught.value)


def replaced(items: list[LoadItem], name: str, /, **changes: Any) -> list[LoadItem]:
    fields = ("name", "node", "env", "dtype", "shape", "device", "kind", "aliases", "rule")
    return [
        LoadItem(**{**{f: getattr(item, f) for f in fields}, **changes})
        if item.name == name
        else item
        for item in items
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("scale", {"name": "scaly"}, "'scaly': the model has no parameter or buffer 'scaly'"),
        ("scale", {"aliases": ("a.b",)}, "'scale': the model has no parameter or buffer 'a.b'"),
        ("scale", {"shape": (9,)}, "'scale' has shape [9], the model has [8] at 'scale'"),
        ("scale", {"kind": "buffer"}, "'scale' is planned as a buffer, the model has a parameter"),
        ("scale", {"node": Source("gone")}, "tensor 'gone' is not in the checkpoint"),
        ("scale", {"node": Source("embed.weight")}, "'scale' would be F32 [20, 8]"),
        ("scale", {"dtype": "I8"}, "'scale' would be F32 [8], which cannot become I8"),
        ("scale", {"aliases": ("shift",)}, "'shift' is provided twice"),
        ("scale", {"device": "disk"}, "'scale' is planned for 'disk', the device map says 'cpu'"),
        (
            "blocks.1.gain",
            {"node": Source("scale.{x}"), "rule": "scale.{x} → gain"},
            "'blocks.1.gain' of family 'blocks.*.gain' by rule 'scale.{x} → gain': variable 'x'",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(
    net: Checkpoint, name: str, changes: dict[str, Any], message: str
) -> None:
    items = replaced(net.items({"": "cpu"}), name, **changes)
    assert message in refused(net, net.make(), items, {"": "cpu"})


def test_every_fault_is_told_at_once(net: Checkpoint) -> None:
    items = replaced(net.items({"": "cpu"}), "scale", name="scaly")
    items = replaced(items, "shift", shape=(9,))
    text = refused(net, net.make(), items, {"": "cpu"})
    assert "'scaly'" in text
    assert "'shift' has shape [9]" in text


def test_a_tensor_that_nothing_provides_is_named_before_anything_is_loaded(
    net: Checkpoint,
) -> None:
    items = [i for i in net.items({"": "disk"}) if "blocks.1.up" not in i.name]
    assert refused(net, net.empty(), items, {"": "disk"}) == (
        "on the meta device, and nothing in the plan provides them: "
        "'blocks.1.up.weight', 'blocks.1.up.bias'. What may be missing keeps the values it has: "
        "build the model on a real device"
    )


def test_computed_buffers_on_meta_are_named_with_the_way_out(net: Checkpoint) -> None:
    with torch.device("meta"):
        model = net.make()
    text = refused(net, model, net.items({"": "cpu"}), {"": "cpu"})
    assert "non-persistent buffers on the meta device: 'grid'" in text
    assert "accelerate.init_empty_weights(include_buffers=False)" in text


def test_a_dispatched_model_is_refused(net: Checkpoint) -> None:
    model = net.empty()
    net.load(model, {"": "disk"})
    text = refused(net, model, net.items({"": "cpu"}), {"": "cpu"})
    assert "have accelerate hooks of an earlier dispatch" in text
    assert "remove_hook_from_submodules" in text


def test_a_lazy_module_is_refused(net: Checkpoint) -> None:
    model = nn.LazyLinear(2, bias=False)
    item = LoadItem("weight", Source("scale"), {}, "F32", (8,), "cpu")
    with pytest.raises(ExecutionError, match="'weight' is a lazy parameter without shape"):
        net.load(model, {"": "cpu"}, [item])


def test_a_missing_shard_is_named_before_anything_is_loaded(net: Checkpoint) -> None:
    (net.root / "1.safetensors").unlink()
    text = refused(net, net.make(), net.items({"": "disk"}), {"": "disk"})
    assert "cannot open '1.safetensors'" in text
    assert "… and " in text


def test_a_truncated_shard_is_named_before_anything_is_loaded(net: Checkpoint) -> None:
    path = net.root / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    text = refused(net, net.make(), net.items({"": "disk"}), {"": "disk"})
    assert "of '1.safetensors', but the file has only" in text


def test_a_device_map_with_a_gap_is_refused(net: Checkpoint) -> None:
    device_map: Map = {**ROOT, "embed": "cpu", "head": "cpu", "blocks.0": "cpu", "blocks.1": "cpu"}
    text = refused(net, net.make(), net.items({"": "cpu"}), device_map)
    assert "'blocks.2.gain' of family 'blocks.*.gain' has no device in the device map" in text


def test_ties_over_two_computing_devices_are_refused(net: Checkpoint) -> None:
    device_map: Map = {**ROOT, "embed": 0, "blocks": 0, "head": 1}
    text = refused(net, net.make(), net.items(device_map), device_map)
    assert "tied weights must be on one device" in text
    assert "'embed.weight' on 0, 'head.weight' on 1" in text


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_waived_tensors_keep_their_values_and_are_named(net: Checkpoint, device: Device) -> None:
    model: Any = net.make().eval()
    kept = model.blocks[1].up.weight
    items = [i for i in net.items({"": device}) if i.name != "blocks.1.up.weight"]
    report = net.load(model, {"": device}, items)
    assert [note.code for note in report.notes] == ["kept-initial"]
    assert "'blocks.1.up.weight'" in report.notes[0].message
    assert torch.equal(value_of(model, "blocks.1.up.weight"), kept)
    assert model(WORDS).shape == (5, 20)


def test_tensors_kept_outside_of_parameters_on_meta_are_pointed_out(net: Checkpoint) -> None:
    model: Any = net.empty()
    model.blocks[0].table = torch.zeros(2, device="meta")
    report = net.load(model, {"": "cpu"})
    assert [note.code for note in report.notes] == ["meta-attribute"]
    assert "module 'blocks.0' keeps 'table' on the meta device" in report.notes[0].message


# Several stored copies of one tensor.


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))  # type: ignore[no-any-return]


PAIR = ("embed.weight", "head.weight")


def twice(folder: Path, located: Located, *, equal: bool) -> Checkpoint:
    checkpoint = Checkpoint(Twice, folder, located)
    with torch.no_grad():
        model: Any = checkpoint.model
        model.head.weight.copy_(model.embed.weight)
        if not equal:
            model.head.weight[19, 7] = torch.nan
    save_file({"embed.weight": model.embed.weight.detach()}, folder / "0.safetensors")
    save_file({"head.weight": model.head.weight.detach()}, folder / "1.safetensors")
    return checkpoint


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": "disk"}, {"embed": "cpu", "head": "disk"}]
)
def test_equal_copies_are_tied(tmp_path: Path, located: Located, device_map: Map) -> None:
    checkpoint = twice(tmp_path, located, equal=True)
    model: Any = checkpoint.empty()
    report = checkpoint.load(model, device_map, compare=[PAIR])
    assert report.n_tensors == 1
    assert [note.code for note in report.notes] == ["copies-equal"]
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(WORDS), checkpoint.model(WORDS))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
@pytest.mark.parametrize("compare", [[PAIR], []], ids=["told", "found"])
def test_copies_that_differ_are_both_kept_and_named(
    tmp_path: Path, located: Located, device_map: Map, compare: list[tuple[str, str]]
) -> None:
    """Also where the plan does not ask, but the model has them as one Parameter."""
    checkpoint = twice(tmp_path, located, equal=False)
    model: Any = checkpoint.make()
    model.head.weight = model.embed.weight
    report = checkpoint.load(model, device_map, compare=compare)
    (note,) = report.notes
    assert (note.code, note.severity) == ("copies-differ", "warning")
    assert "'embed.weight', 'head.weight' would be one tensor" in note.message
    assert model.head.weight is not model.embed.weight
    expected = checkpoint.model(WORDS)
    assert torch.equal(model(WORDS).nan_to_num(9), expected.nan_to_num(9))


def test_copies_on_two_computing_devices_are_not_compared(tmp_path: Path, located: Located) -> None:
    checkpoint = twice(tmp_path, located, equal=True)
    device_map: Map = {"embed": 0, "head": 1}
    job = _Job(
        checkpoint.empty(),
        checkpoint.items(device_map),
        root=checkpoint.root,
        tensors=checkpoint.tensors,
        schemes={},
        options=DispatchOptions(),
    )
    job.check(device_map, None, dispatch=True)
    job.settle([PAIR])
    assert [item.name for item in job.items] == list(PAIR)
    assert [note.code for note in job.notes] == ["copies-apart"]


def test_a_tie_that_the_plan_does_not_name_is_kept(net: Checkpoint) -> None:
    model: Any = net.make().eval()
    net.load(model, {"": "cpu"}, replaced(net.items({"": "cpu"}), "embed.weight", aliases=()))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(WORDS), net.model(WORDS))


# Real files and architectures.


def test_a_file_of_torch_save_with_a_transposed_tensor(tmp_path: Path) -> None:
    plain, turned = torch.rand(4, 3), torch.rand(3, 4).T
    torch.save({"up": plain, "down": turned}, tmp_path / "model.bin")
    stored: dict[str, StoredTensor] = {}
    with zipfile.ZipFile(tmp_path / "model.bin") as archive:
        for name, key in (("up", "0"), ("down", "1")):
            info = archive.getinfo(f"model/data/{key}")
            local = (tmp_path / "model.bin").read_bytes()[info.header_offset :][:30]
            begin = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:]))
            place = ("F32", (4, 3), begin, begin + info.file_size)
            stored[name] = StoredTensor(name, "model.bin", *place, (1, 4) if key == "1" else None)
    model = nn.ParameterDict({"up": torch.zeros(4, 3), "down": torch.zeros(4, 3)})
    items = [LoadItem(n, Source(n), {}, "F32", (4, 3), "cpu") for n in stored]
    execute(model, items, device_map={"": "cpu"}, root=tmp_path, tensors=stored, schemes={})
    assert torch.equal(model["up"], plain)
    assert torch.equal(model["down"], turned)


@pytest.fixture(scope="session")
def tiny() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    llama = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True
    )
    bert = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    return {
        "llama": lambda: transformers.LlamaForCausalLM(llama),
        "bert": lambda: transformers.BertForMaskedLM(bert),
    }


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # transformers before 5.1
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, "mixed"], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_transformers_models_give_equal_logits(
    tmp_path: Path,
    located: Located,
    tiny: dict[str, Callable[[], nn.Module]],
    name: str,
    device_map: Any,
) -> None:
    torch.manual_seed(0)
    checkpoint = Checkpoint(tiny[name], tmp_path, located)
    model: Any = checkpoint.empty()
    if device_map == "mixed":
        devices: list[Device] = ["cpu", "disk"]
        children = [
            f"{path}.{child}" if path else child
            for path in ("", "model", "bert", "bert.encoder", "cls")
            if path in dict(model.named_modules())
            for child, _ in model.get_submodule(path).named_children()
        ]
        split = {"model", "bert", "bert.encoder", "cls"}
        device_map = {c: devices[i % 2] for i, c in enumerate(children) if c not in split}
    report = checkpoint.load(model, device_map)
    assert report.verification.ok
    words = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(words).logits, checkpoint.model(words).logits)
        if name == "llama":
            assert torch.equal(
                model.generate(words, max_new_tokens=4, do_sample=False),
                checkpoint.model.generate(words, max_new_tokens=4, do_sample=False),  # type: ignore[operator]
            )
