"""For every tensor of a plan: what accelerate does with the map is what the plan says.

Maps with accelerators are given to the real ``dispatch_model`` on a machine that has none: moving a
tensor there is noted instead of done (``accelerate.hooks.set_module_tensor_to_device``), all else
is accelerate's own. Maps over cpu and disk are executed, by accelerate and by the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate.hooks
import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_model
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution.placeholder import is_placeholder
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.planner.placement.moduletree import ModuleTree, is_offloaded, runs_on
from modelquirks.planner.placement.placement import Placement, place
from modelquirks.planner.placement.wishes import Wishes
from modelquirks.planner.placement.workload import Reserve, Workload

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following device_map keys do not match any submodules"
)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attends, normalises with statistics, and routes to one of its experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.rand(8))
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.attn = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.attn(x * self.scale)) + self.get_buffer("shift")
        chosen = int(self.gate(x).sum(0).argmax())
        return self.experts[chosen](x * self.get_buffer("mask"))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Eleven layers, so that ``layers.1`` and ``layers.10`` differ; tied if that is asked for."""

    def __init__(self, *, experts: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.rand(8))
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(11))
        self.layers1 = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers1(x))  # type: ignore[no-any-return]


def net(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(experts=4 if kind == "experts" else 2, tied=kind == "tied").eval()


NETS = ("plain", "experts", "tied")
UNITS = {"plain": ["Layer"], "experts": [], "tied": ["Layer"]}
POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
PINS: tuple[tuple[str, Device], ...] = (("layers.1", "cpu"), ("layers.10", 0), ("layers1", 0))


def tree_of(model: nn.Module, units: Sequence[str]) -> ModuleTree:
    skeleton = skeleton_of(model)
    aliases = {alias: group[0] for group in skeleton.ties for alias in group[1:]}
    return ModelTree(skeleton, (), aliases, units).whole


def n_bytes(tree: ModuleTree) -> int:
    return sum(tree.sizes.values())


class Moves:
    """Where accelerate puts each tensor, on a machine that need not have the devices."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.devices: dict[str, Device] = {}
        real: Any = accelerate.hooks.set_module_tensor_to_device

        def noted(module: nn.Module, name: str, device: Any, *args: Any, **kwargs: Any) -> None:
            if device == "meta":
                real(module, name, device, *args, **kwargs)
            else:
                path = self.paths[module]
                self.devices[f"{path}.{name}" if path else name] = device

        monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", noted)

    def home(self, name: str, placement: Placement) -> Device | None:
        """Return the device that holds a tensor between two passes; None if nothing fetches it."""
        if name in self.offloaded:
            return self.offloaded[name]
        if name in self.devices:
            return self.devices[name]
        loaded = loaded_to(name, placement.device_map)  # and left there: no hook is for it
        return None if is_offloaded(loaded, placement.main_device) else loaded

    @property
    def offloaded(self) -> Mapping[str, Device]:
        """Those that a hook fetches, and from where."""
        found: dict[str, Device] = {}
        for path, module in self.model.named_modules():
            for hook in hooks(module):
                if hook.offload:
                    loader: Any = hook.weights_map
                    names = [n for n, _ in module.named_parameters(recurse=hook.place_submodules)]
                    if hook.offload_buffers:
                        kept = module.state_dict()
                        names += [n for n, _ in module.named_buffers(recurse=False) if n in kept]
                    source: OffloadedWeightsLoader = loader.dataset
                    for name in (f"{path}.{n}" if path else n for n in names):
                        found[name] = "cpu" if name in source.state_dict else "disk"
        return found


def loaded_to(name: str, device_map: Mapping[str, Device]) -> Device:
    """Return where ``load_checkpoint_in_model`` of accelerate 1.15 puts a tensor."""
    while name and name not in device_map:
        name = parent(name)
    return device_map[name]


def hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    attached: Any = getattr(module, "_hf_hook", None)
    for hook in attached.hooks if isinstance(attached, SequentialHook) else (attached,):
        if isinstance(hook, AlignDevicesHook):
            yield hook


def expected(tree: ModuleTree, placement: Placement, *, offload_buffers: bool) -> dict[str, Device]:
    """Return where the plan says that each tensor stays."""
    main = placement.main_device
    found: dict[str, Device] = {}
    for name, device in placement.devices.items():
        owner = tree.aliases.get(name, name)
        stays = tree.stays(owner, offload_buffers=offload_buffers)
        stays = stays and is_offloaded(device, main)
        found[name] = runs_on(device, main) if stays else device
    return found


def dispatched(model: nn.Module, placement: Placement, folder: Path, **options: Any) -> None:
    call: Any = dispatch_model  # typed for torch.device alone, though it takes what we give
    call(
        model,
        dict(placement.device_map),
        main_device=placement.main_device,
        offload_dir=str(folder),
        force_hooks=True,
        **options,
    )


def follows(
    kind: str, placement: Placement, folder: Path, patch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Assert that accelerate puts every tensor where *placement* says."""
    model = net(kind)
    moves = Moves(model, patch)
    dispatched(model, placement, folder, **options)
    tree = tree_of(net(kind), UNITS[kind])
    wanted = expected(tree, placement, offload_buffers=options.get("offload_buffers", False))
    assert {name: moves.home(name, placement) for name in wanted} == wanted
    assert wanted.keys() == tree.sizes.keys() | tree.aliases.keys()


MEMORIES: dict[str, Mapping[Device, float | None]] = {
    "gap in ids": {0: 0.5, 3: 0.8},
    "accelerator, cpu, disk": {0: 0.5, "cpu": 0.3, "disk": None},
    "two accelerators, disk": {0: 0.3, 1: 0.4, "disk": None},
}


@pytest.mark.parametrize(
    ("kind", "policy", "memory", "offload_buffers"),
    [
        *((kind, "auto", memory, False) for kind in NETS for memory in MEMORIES),
        *(("experts", policy, "gap in ids", False) for policy in POLICIES[1:]),
        *(("tied", policy, "two accelerators, disk", False) for policy in POLICIES[1:]),
        *((kind, "auto", "accelerator, cpu, disk", True) for kind in NETS),
    ],
)
def test_accelerate_does_with_the_map_of_a_policy_what_the_plan_says(
    kind: str,
    policy: str,
    memory: str,
    offload_buffers: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = tree_of(net(kind), UNITS[kind])
    limits = {d: None if s is None else int(n_bytes(tree) * s) for d, s in MEMORIES[memory].items()}
    placement = place(tree, device_map=policy, max_memory=limits, offload_buffers=offload_buffers)
    assert placement.ok, placement.findings
    follows(kind, placement, tmp_path, monkeypatch, offload_buffers=offload_buffers)


@pytest.mark.parametrize(
    ("kind", "policy"), [*((kind, "auto") for kind in NETS), *(("plain", p) for p in POLICIES[1:])]
)
def test_pins_and_reserves_are_where_accelerate_puts_them(
    kind: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(net(kind), UNITS[kind])
    tree = replace(tree, state={f"layers.{n}": 100 for n in range(11)})
    total = n_bytes(tree) + 1100
    wishes = Wishes(
        workload=Workload(context=10),
        pins=PINS,
        kept_free={0: 500},
        running=Reserve("activations", "*", 100, "given"),
    )
    placement = place(
        tree, device_map=policy, max_memory={0: total * 2 // 3, "cpu": total}, wishes=wishes
    )
    assert placement.ok, placement.findings
    assert placement.devices["layers.1.attn.weight"] == "cpu"
    assert placement.devices["layers.10.attn.weight"] == 0
    assert placement.memory[0].used_bytes + 600 <= total * 2 // 3
    follows(kind, placement, tmp_path, monkeypatch)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(NETS),
    shares=st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3),
    pins=st.lists(
        st.tuples(st.integers(0, 10), st.sampled_from([0, "cpu", "disk"])),
        max_size=3,
        unique_by=lambda pin: pin[0],
    ),
    policy=st.sampled_from(POLICIES),
)
def test_accelerate_does_with_any_map_what_the_plan_says(
    kind: str,
    shares: list[float],
    pins: list[tuple[int, Device]],
    policy: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tree = tree_of(net(kind), UNITS[kind])
    limits: dict[Device, int | None] = {
        n: int(n_bytes(tree) * share) for n, share in enumerate(shares)
    }
    wishes = Wishes(pins=tuple((f"layers.{n}", device) for n, device in pins))
    placement = place(
        tree,
        device_map=policy,
        max_memory={**limits, "cpu": n_bytes(tree) // 2, "disk": None},
        wishes=wishes,
    )
    if not placement.ok:  # a pin that finds no room is told
        assert placement.findings
        return
    for number, device in pins:
        assert placement.devices[f"layers.{number}.attn.weight"] == device
    with pytest.MonkeyPatch.context() as patch:
        follows(kind, placement, tmp_path_factory.mktemp("off"), patch)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(
    ("policy", "share", "offload_buffers"),
    [("auto", 0.4, True), ("auto", 0.8, False), ("sequential", 0.6, False)],
)
def test_a_plan_over_cpu_and_disk_is_executed_as_it_says(
    kind: str, policy: str, share: float, offload_buffers: bool, tmp_path: Path
) -> None:
    source = net(kind)
    save_model(source, str(tmp_path / "model.safetensors"))
    ids = torch.tensor([3, 7, 1])
    limit = int(n_bytes(tree_of(source, UNITS[kind])) * share)
    with init_empty_weights():
        model = net(kind)
    if kind == "tied":
        model.head.weight = model.embed.weight
    plan = Dispatcher().plan(
        tmp_path,
        model=model,
        device_map=policy,
        max_memory={"cpu": limit, "disk": None},
        no_split_module_classes=UNITS[kind],
        offload_buffers=offload_buffers,
        pins=["layers.1=disk", "layers.10=cpu"],
        reserve={"cpu": 200},
    )
    assert plan.ok, plan.problems
    plan.execute(model)
    buffers = dict(model.named_buffers())
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    for name, device in plan.placement.devices.items():
        stays = name in buffers and (not offload_buffers or name.endswith(".mask"))
        moved = device == "disk" and not stays
        assert is_placeholder(tensors[name]) == moved, name
        assert tensors[name].is_meta == moved, name
    assert {plan.placement.devices[f"layers.{n}.attn.weight"] for n in (1, 10)} == {"cpu", "disk"}
    held = sum(t.nbytes for t in {id(t): t for t in tensors.values()}.values() if not t.is_meta)
    assert held == plan.placement.memory["cpu"].used_bytes <= limit - 200
    assert torch.equal(model(ids), source(ids))


def test_keys_are_whole_segments_for_accelerate_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net("plain")
    moves = Moves(model, monkeypatch)
    names = ["pos", "embed", "head", "layers1", *(f"layers.{n}" for n in range(11))]
    device_map: dict[str, Device] = {**dict.fromkeys(names, "cpu"), "layers.1": 0, "layers.10": 1}
    placement = place(tree_of(net("plain"), ["Layer"]), device_map=device_map, max_memory={})
    dispatched(model, placement, tmp_path)
    for module, device in (("layers.1", 0), ("layers.10", 1), ("layers.9", "cpu")):
        assert moves.home(f"{module}.scale", placement) == device
        assert placement.devices[f"{module}.scale"] == device
    assert moves.home("layers1.weight", placement) == "cpu"


def test_the_main_device_is_the_one_that_tensors_of_the_root_are_on() -> None:
    """accelerate moves them to the main device whatever the map says of them."""
    tree = tree_of(net("experts"), [])
    memory: dict[Device, int | None] = {0: n_bytes(tree) // 2, 3: n_bytes(tree) * 4 // 5}
    placement = place(tree, device_map="auto", max_memory=memory)
    assert set(placement.devices.values()) == {0, 3}
    assert placement.devices["pos"] == placement.main_device
