import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.execute import execute
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.reader import Reader
from modelquirks.planner.execution.route import make_route, same_device
from modelquirks.planner.execution.verify import Verification, verify
from modelquirks.planner.placement.memory import Device
from modelquirks.quirks.recipe import Source

Located = Callable[[Path], dict[str, StoredTensor]]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 300, bias=False)
        self.head.weight = self.embed.weight


class Loaded:
    """A loaded model, to be tampered with."""

    def __init__(self, root: Path, located: Located, device: Device) -> None:
        source = Pair()
        state = {k: v for k, v in source.state_dict().items() if k != "head.weight"}
        save_file(state, root / "model.safetensors")
        self.root, self.tensors = root, located(root)
        self.items = [
            LoadItem(
                name=name,
                node=Source(name),
                env={},
                dtype=stored.dtype or "",
                shape=stored.shape or (),
                device=device,
                kind="buffer" if "running" in name or "batches" in name else "parameter",
                aliases=("head.weight",) if name == "embed.weight" else (),
            )
            for name, stored in self.tensors.items()
        ]
        with init_empty_weights():
            model: Any = Pair()
        execute(
            model,
            self.items,
            device_map={"": device},
            root=root,
            tensors=self.tensors,
            schemes={},
            offload_buffers=True,
        )
        self.model = model

    def verify(self, sample_bytes: int = 65536) -> Verification:
        reader = Reader(self.root, self.tensors)
        return verify(
            self.model,
            self.items,
            read=reader.read,
            types=reader.type_of,
            schemes={},
            sample_bytes=sample_bytes,
        )


@pytest.fixture(params=["cpu", "disk"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path, located: Located) -> Loaded:
    return Loaded(tmp_path, located, request.param)


@pytest.fixture
def in_memory(tmp_path: Path, located: Located) -> Loaded:
    return Loaded(tmp_path, located, "cpu")


@pytest.fixture
def on_disk(tmp_path: Path, located: Located) -> Loaded:
    return Loaded(tmp_path, located, "disk")


def test_a_loaded_model_is_right(loaded: Loaded) -> None:
    result = loaded.verify()
    assert result.ok
    assert (result.n_tensors, result.n_ties) == (7, 1)
    assert result.n_offloaded == (7 if loaded.items[0].device == "disk" else 0)
    assert result.to_json()["problems"] == []


def test_samples_are_bounded_and_cover_small_tensors_whole(in_memory: Loaded) -> None:
    result = in_memory.verify(sample_bytes=1024)
    assert result.ok
    # The tied matrix of 9,600 bytes by two samples, once for all of its names, the rest whole.
    assert result.sampled_bytes == 2 * 512 + 4 * 8 * 4 + 8


def test_a_changed_value_is_found_though_it_is_a_view_of_the_file(in_memory: Loaded) -> None:
    with torch.no_grad():
        in_memory.model.norm.weight[3] += 1
    assert in_memory.verify().problems == (
        "'norm.weight': 'norm.weight' differs from the checkpoint at ((0, 8),)",
    )


def test_a_negative_zero_is_not_a_zero(in_memory: Loaded) -> None:
    """Bits are compared, not numbers."""
    assert in_memory.model.norm.bias[0] == 0
    with torch.no_grad():
        in_memory.model.norm.bias[0] = -0.0
    assert len(in_memory.verify().problems) == 1


def test_a_broken_tie_is_found(in_memory: Loaded) -> None:
    in_memory.model.head.weight = nn.Parameter(in_memory.model.head.weight.detach().clone())
    (problem,) = in_memory.verify().problems
    assert problem == "'embed.weight': tied to 'head.weight', but they share no storage"


def test_another_dtype_or_shape_is_found(in_memory: Loaded) -> None:
    in_memory.model.norm.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    in_memory.model.norm.bias = nn.Parameter(torch.ones(9))
    problems = in_memory.verify().problems
    assert "'norm.weight': 'norm.weight' is torch.bfloat16, not F32" in problems
    assert "'norm.bias': 'norm.bias' has shape [9], not [8]" in problems


def test_a_parameter_left_on_meta_is_found(in_memory: Loaded) -> None:
    in_memory.model.norm.weight = nn.Parameter(torch.empty(8, device="meta"))
    in_memory.model.extra = nn.Parameter(torch.empty(8, device="meta"))
    assert in_memory.verify().problems == (
        "'norm.weight': 'norm.weight' is still on the meta device",
        "'extra' is on the meta device and no hook fetches it",
    )


def test_a_tensor_that_the_model_lacks_is_found(in_memory: Loaded) -> None:
    in_memory.model.norm = nn.Identity()
    assert "'norm.weight': the model has no 'norm.weight'" in in_memory.verify().problems


def test_a_hook_that_cannot_fetch_is_found(on_disk: Loaded) -> None:
    weights = on_disk.model.norm._hf_hook.weights_map.dataset.state_dict
    broken = copy.copy(weights._entries)
    del broken["norm.bias"]
    broken["norm.weight"] = broken["norm.weight"]._replace(source="gone")
    weights._entries = broken
    first, second = on_disk.verify().problems
    assert first == "'norm.bias': 'norm.bias' is still on the meta device"
    assert second.startswith("'norm.weight': 'norm.weight' cannot be fetched: tensor 'gone'")


def test_offloaded_names_that_are_served_different_tensors_are_found(on_disk: Loaded) -> None:
    weights = on_disk.model.head._hf_hook.weights_map.dataset.state_dict
    other = LoadItem("head.weight", Source("embed.weight"), {}, "F32", (300, 8), "disk")
    weights._entries["head.weight"] = weights._entries["head.weight"]._replace(item=other)
    (problem,) = on_disk.verify().problems
    assert "share no storage" in problem


# The route that accelerate takes.

MODULES = frozenset({"", "embed", "blocks", "blocks.0", "blocks.0.up", "head"})


@pytest.mark.parametrize(
    ("device_map", "main", "offloaded"),
    [
        ({"": "cpu"}, "cpu", set()),
        ({"": 0}, 0, set()),
        ({"": "disk"}, "cpu", {"disk"}),
        ({"embed": "cpu", "head": "disk"}, "cpu", {"disk"}),
        ({"embed": "disk", "blocks": "cuda:1", "head": "cuda:0"}, "cuda:1", {"cpu", "disk"}),
        ({"embed": "cpu", "head": 1}, 1, {"cpu", "disk"}),
        ({"embed": "cpu", "head": "mps"}, "mps", {"disk"}),
        ({"embed": torch.device("cpu"), "head": "cpu"}, "cpu", set()),
    ],
)
def test_the_main_device_is_the_first_that_computes(
    device_map: Mapping[str, Any], main: Device, offloaded: set[str]
) -> None:
    """accelerate takes any of them; what it offloads depends on it."""
    route = make_route(device_map, main_device=None, force_hooks=False, modules=MODULES)
    assert route.main_device == main
    assert route.offloaded == offloaded


def test_the_longest_key_in_whole_segments_decides() -> None:
    device_map: dict[str, Device] = {"": 0, "blocks.1": "cpu", "blocks.10": "disk"}
    route = make_route(device_map, main_device=None, force_hooks=False, modules=MODULES)
    assert route.device_of("blocks.1.weight") == "cpu"
    assert route.device_of("blocks.10.weight") == "disk"
    assert route.device_of("blocks.11.weight") == 0


def test_a_module_is_loose_if_only_parts_of_it_have_a_device() -> None:
    device_map: dict[str, Device] = {"embed": 0, "blocks.0.up": "cpu", "blocks.0.gain": 0}
    route = make_route(device_map, main_device=None, force_hooks=False, modules=MODULES)
    assert {module for module in MODULES if route.is_loose(module)} == {
        *("", "blocks", "blocks.0", "head")
    }


def test_a_device_has_two_spellings() -> None:
    assert same_device(0, "cuda:0")
    assert not same_device(1, "cuda:0")
    assert not same_device("cpu", "disk")
