"""Shapes, buffers, device maps and the offload folder."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from transformers.integrations.accelerate import expand_device_map

from modelquirks.planner import Dispatcher, ExecutionError, load_checkpoint_and_dispatch
from modelquirks.planner.placement.devicemap import expand

NetMaker = Callable[..., nn.Module]
Logits = Callable[[nn.Module], torch.Tensor]
Save = Callable[..., Path]
Theirs = Callable[..., Any]
Refused = Callable[..., str]

CPU: dict[str, Any] = {"": "cpu"}
LAYER_ON_DISK: dict[str, Any] = {"wte": "cpu", "layers.0": "cpu", "layers.1": "disk", "head": "cpu"}
FC2 = "layers.1.fc2.weight"


@pytest.fixture
def checkpoint(net: NetMaker, save: Save, tmp_path: Path) -> tuple[nn.Module, Path]:
    """Give a model, and the folder with its weights."""
    source = net()
    return source, save(source.state_dict(), tmp_path / "stored" / "model.safetensors").parent


Checkpoint = tuple[nn.Module, Path]


# Shapes and buffers


@pytest.mark.parametrize("device_map", [CPU, LAYER_ON_DISK], ids=["cpu", "disk"])
def test_a_shape_that_does_not_fit_is_refused_by_its_full_name(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits, refused: Refused, device_map: Any
) -> None:
    """accelerate: "Trying to set a tensor of shape [8, 9] in "weight" (which has shape [8, 8])",
    only the last part of the name; for a module on disk only at the first forward (case 9).
    """
    state = {**net().state_dict(), FC2: torch.rand(8, 9)}
    save(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensor of shape") as obscure:
        model = accelerate.load_checkpoint_and_dispatch(
            net(meta=True), str(tmp_path), device_map=device_map, offload_folder=tmp_path / "off"
        )
        assert device_map is LAYER_ON_DISK
        logits(model)
    assert "fc2" not in str(obscure.value)
    message = refused(net(meta=True), tmp_path, device_map=device_map, naming=(FC2,))
    assert "[8, 9]" in message
    assert "[8, 8]" in message


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))  # type: ignore[no-any-return]


def trained() -> Normed:
    model = Normed().eval()
    model.norm.running_mean = torch.rand(8) + 1
    model.norm.running_var = torch.rand(8) + 1
    model.norm.num_batches_tracked = torch.tensor(17)
    return model


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("on_meta", [False, True], ids=["buffers real", "buffers on meta"])
def test_persistent_buffers_of_a_module_on_disk_are_loaded(
    save: Save, tmp_path: Path, offload_buffers: bool, on_meta: bool
) -> None:
    """accelerate, ``offload_buffers=False``: silent, the values are never loaded, the statistics
    stay at 0 and 1; with buffers on meta: ValueError "running_mean is on the meta device" (case 5).
    """
    source, x = trained(), torch.rand(4, 8)
    expected = source(x)
    save(source.state_dict(), tmp_path / "model.safetensors")
    options: dict[str, Any] = {
        "device_map": {"inner": "cpu", "norm": "disk"},
        "offload_buffers": offload_buffers,
    }

    def empty() -> nn.Module:
        with init_empty_weights(include_buffers=on_meta):
            return Normed().eval()

    if not offload_buffers:
        off = tmp_path / "off"
        if on_meta:
            with pytest.raises(ValueError, match="running_mean is on the meta device"):
                accelerate.load_checkpoint_and_dispatch(
                    empty(), str(tmp_path), offload_folder=off, **options
                )
        else:
            theirs = accelerate.load_checkpoint_and_dispatch(
                empty(), str(tmp_path), offload_folder=off, **options
            )
            assert not torch.equal(theirs(x), expected)
    for model in (empty(), Normed().eval()):
        loaded = load_checkpoint_and_dispatch(model, tmp_path, **options)
        assert torch.equal(loaded(x), expected)


class Packed(nn.Module):
    """A ``Linear`` as GPTQ makes them: everything is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(1, 8, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("qweight").float().sum() * self.get_buffer("scales").float()


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_packed_weights_that_are_buffers_are_loaded_wherever_they_are(
    save: Save, tmp_path: Path, device: str
) -> None:
    """accelerate: silent, ``qweight`` and ``scales`` of a module on disk stay zero (case 5)."""
    source, x = nn.Sequential(nn.Linear(8, 8), Packed()), torch.rand(2, 8)
    packed = source[1]
    packed.qweight = torch.randint(1, 99, (4, 8), dtype=torch.int32)
    packed.scales = torch.rand(1, 8).half()
    expected = source(x)
    save(source.state_dict(), tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(8, 8), Packed())
    loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map={"0": "cpu", "1": device})
    assert torch.equal(loaded(x), expected)


class Rotary(nn.Module):
    """Computes what no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.arange(8).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.get_buffer("inv_freq")  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_computed_buffer_on_meta_is_refused_by_its_name(
    save: Save, tmp_path: Path, device: str
) -> None:
    """accelerate: "Cannot copy out of meta tensor", at dispatch, without a name (case 9)."""
    source = nn.Sequential(Rotary(), nn.Linear(8, 8))
    save(source.state_dict(), tmp_path / "model.safetensors")
    device_map: dict[Any, Any] = {"0": device, "1": "cpu"}

    def on_meta() -> nn.Module:
        with init_empty_weights(include_buffers=True):
            return nn.Sequential(Rotary(), nn.Linear(8, 8))

    with pytest.raises((NotImplementedError, ValueError)) as obscure:
        accelerate.load_checkpoint_and_dispatch(
            on_meta(), str(tmp_path), device_map=device_map, offload_folder=tmp_path / "off"
        )
    assert "0.inv_freq" not in str(obscure.value)
    model = on_meta()
    before = dict(model.named_parameters())
    with pytest.raises(ExecutionError, match=r"'0\.inv_freq'.*include_buffers=False"):
        load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map)
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    with init_empty_weights():
        model = nn.Sequential(Rotary(), nn.Linear(8, 8))
    loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map)
    assert torch.equal(loaded(torch.ones(2, 8)), source(torch.ones(2, 8)))


# Device maps


def test_a_key_that_matches_nothing_is_refused_with_the_nearest(
    net: NetMaker, checkpoint: Checkpoint, refused: Refused
) -> None:
    """accelerate: a warning, where the rest is covered; once not a word (accelerate#3584)."""
    device_map: dict[Any, Any] = {"": "cpu", "layer.1": "disk"}
    message = refused(net(), checkpoint[1], device_map=device_map, naming=("layer.1",))
    assert "'layers.1'" in message


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8))
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.gain  # type: ignore[no-any-return]


def test_the_name_of_a_parameter_is_a_good_key(save: Save, tmp_path: Path, theirs: Theirs) -> None:
    """accelerate: warns that keys "do not match any submodules", for those that its own planner
    gives too.
    """
    source = Root()
    save(source.state_dict(), tmp_path / "model.safetensors")
    options: dict[str, Any] = {"device_map": {"gain": "cpu", "proj": "cpu"}}
    said = theirs(Root(), str(tmp_path), **options)
    assert any("do not match any submodules" in text for text in said.warnings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_checkpoint_and_dispatch(Root(), tmp_path, **options)
        copied = load_checkpoint_and_dispatch(Root(), tmp_path, copy=True, **options)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
    # Of copies: a view begins where the file has it, and not every CPU rounds the same there.
    assert torch.equal(copied(torch.ones(8)), source(torch.ones(8)))


def test_tensors_without_a_device_are_all_named(
    net: NetMaker, checkpoint: Checkpoint, refused: Refused
) -> None:
    """accelerate: "head.weight doesn't have any device set.", the first one only."""
    device_map: dict[Any, Any] = {"layers.0": "cpu", "wte": "cpu"}
    with pytest.raises(ValueError, match="doesn't have any device set") as first:
        accelerate.load_checkpoint_and_dispatch(net(), str(checkpoint[1]), device_map=device_map)
    assert "layers.1.fc2" not in str(first.value)
    naming = ("layers.1.fc1", "layers.1.fc2", "head")
    refused(net(), checkpoint[1], device_map=device_map, naming=naming)


@pytest.mark.parametrize(
    "device_map",
    [
        {"wte": "cpu", "head": "cpu", "layers": "cpu", "layers.1": "disk"},
        {"": "cpu", "layers.1.fc2": "disk"},
    ],
    ids=["part of a list", "part of the whole"],
)
def test_a_parent_with_an_exception_is_loaded(
    net: NetMaker, checkpoint: Checkpoint, tmp_path: Path, logits: Logits, device_map: Any
) -> None:
    """accelerate: ValueError "weight is on the meta device" at dispatch (case 9)."""
    with pytest.raises(ValueError, match="is on the meta device"):
        accelerate.load_checkpoint_and_dispatch(
            net(), str(checkpoint[1]), device_map=device_map, offload_folder=tmp_path / "off"
        )
    for model in (net(), net(meta=True)):
        loaded = load_checkpoint_and_dispatch(model, checkpoint[1], device_map=device_map)
        assert torch.equal(logits(loaded), logits(checkpoint[0]))


def test_everything_may_be_on_disk(
    net: NetMaker, checkpoint: Checkpoint, tmp_path: Path, logits: Logits
) -> None:
    """accelerate, safetensors: "device disk is invalid" (case 9)."""
    with pytest.raises(SafetensorError, match="device disk is invalid"):
        accelerate.load_checkpoint_and_dispatch(
            net(), str(checkpoint[1]), device_map={"": "disk"}, offload_folder=tmp_path / "off"
        )
    for model in (net(), net(meta=True)):
        loaded = load_checkpoint_and_dispatch(model, checkpoint[1], device_map={"": "disk"})
        assert torch.equal(logits(loaded), logits(checkpoint[0]))


def test_devices_may_be_torch_devices(
    net: NetMaker, checkpoint: Checkpoint, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: "device device(type='cpu') is invalid" beside other devices (case 9)."""
    device_map: dict[Any, Any] = {
        "wte": torch.device("cpu"),
        "layers": "disk",
        "head": torch.device("cpu"),
    }
    with pytest.raises(SafetensorError, match="is invalid"):
        accelerate.load_checkpoint_and_dispatch(
            net(), str(checkpoint[1]), device_map=device_map, offload_folder=tmp_path / "off"
        )
    loaded = load_checkpoint_and_dispatch(net(), checkpoint[1], device_map=device_map)
    assert torch.equal(logits(loaded), logits(checkpoint[0]))


def test_weights_on_disk_need_no_offload_folder(
    net: NetMaker, checkpoint: Checkpoint, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: ValueError, as it writes them anew, one file each; transformers: "had weights
    offloaded to the disk. Please provide an `offload_folder`" (localGPT#206, gpt4all#239).
    """
    options: dict[str, Any] = {"device_map": LAYER_ON_DISK}
    with pytest.raises(ValueError, match="offload_folder"):
        accelerate.load_checkpoint_and_dispatch(net(), str(checkpoint[1]), **options)
    before = sorted(tmp_path.rglob("*"))
    loaded = load_checkpoint_and_dispatch(net(), checkpoint[1], **options)
    assert torch.equal(logits(loaded), logits(checkpoint[0]))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_main_device_is_the_first_of_the_map(net: NetMaker, checkpoint: Checkpoint) -> None:
    """accelerate: ``list(set(devices) - {"cpu", "disk"})[0]``, another one from run to run where
    devices are strings.
    """
    expression = 'print(list(set(["xpu:1", "xpu:0", "cpu"]) - {"cpu", "disk"})[0])'
    found = {
        subprocess.run(
            [sys.executable, "-c", expression],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(8)
    }
    assert len(found) > 1
    for first, second in (("cuda:1", "cuda:0"), ("cuda:0", "cuda:1"), ("xpu:1", "xpu:0")):
        device_map: dict[Any, Any] = {"wte": "cpu", "layers": first, "head": second}
        plan = Dispatcher().plan(checkpoint[1], model=net(), device_map=device_map)
        assert plan.ok
        assert plan.placement.main_device == plan.device_map["layers"]


def test_a_key_covers_whole_segments_only(save: Save, tmp_path: Path) -> None:
    """transformers' ``expand_device_map``: a prefix of letters is enough, so that ``layers.10``
    goes where ``layers.1`` does, and ``head2`` where ``head`` does.
    """
    wrong = expand_device_map({"layers.1": 0, "layers": "cpu"}, ["layers.10.weight"])
    assert wrong["layers.10.weight"] == 0
    assert expand_device_map({"head": 0, "": "cpu"}, ["head2.weight"])["head2.weight"] == 0

    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
    model.head, model.head2 = nn.Linear(2, 2), nn.Linear(2, 2)
    save(model.state_dict(), tmp_path / "model.safetensors")
    device_map: dict[Any, Any] = {"layers.1": 0, "layers": "cpu", "head": 0, "": "cpu"}
    plan = Dispatcher().plan(tmp_path, model=model, device_map=device_map)
    assert plan.ok
    keys = expand(plan.device_map, model.state_dict())
    names = [name for name, key in keys.items() if plan.device_map[key] == 0]
    assert names == ["layers.1.weight", "layers.1.bias", "head.weight", "head.bias"]


class Experts(nn.Module):
    """Has a tensor whose name begins with that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.rand(8))
        self.gate_up_proj_bias = nn.Parameter(torch.rand(8))


def test_keys_of_siblings_are_told_apart_and_what_is_left_out_is_named(
    save: Save, tmp_path: Path, refused: Refused
) -> None:
    """transformers' ``expand_device_map``: the key of a parameter takes ``…_bias`` too, and what
    no key covers goes where a key that looks alike does, or to the cpu. A dot in a key is any
    letter, which ends in a KeyError.
    """
    wrong = expand_device_map(
        {"experts.gate_up_proj": "disk", "layers.1": 0, "layers.10": 1, "": "cpu"},
        ["experts.gate_up_proj_bias", "layers.12.weight"],
    )
    assert [*wrong.values()] == ["disk", 0]
    with pytest.raises(KeyError, match="layersX1"):
        expand_device_map({"layers.1": 0}, ["layersX1.weight"])
    assert expand_device_map({"layers.1": 0}, ["head.weight"]) == {"head.weight": "cpu"}

    def model() -> nn.Module:
        made = nn.ModuleDict({"experts": Experts()})
        made["layers"] = nn.ModuleList(nn.Linear(2, 2) for _ in range(13))
        return made

    save(model().state_dict(), tmp_path / "model.safetensors")
    device_map: dict[Any, Any] = {"experts.gate_up_proj": 0, "layers.1": 0, "layers.10": 1}
    plan = Dispatcher().plan(tmp_path, model=model(), device_map={**device_map, "": "cpu"})
    devices = plan.placement.devices
    assert devices["experts.gate_up_proj"] == 0
    assert devices["experts.gate_up_proj_bias"] == devices["layers.12.weight"] == "cpu"
    refused(model(), tmp_path, device_map=device_map, naming=("experts", "layers.2"))


# The offload folder


def loaded_by(
    load: Callable[..., nn.Module], model: nn.Module, checkpoint: Path, folder: Path
) -> nn.Module:
    return load(
        model,
        str(checkpoint),
        device_map={"wte": "cpu", "layers": "disk", "head": "cpu"},
        offload_folder=folder,
    )


def test_a_folder_of_another_model_is_not_read(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate's ``disk_offload`` and ``dispatch_model`` with a folder that already holds an
    index: the new model silently runs with the old one's weights (case 7).
    """
    old, new, folder = net(), net(), tmp_path / "off"
    expected = logits(new)
    accelerate.disk_offload(old, str(folder))
    offloaded = net()
    offloaded.load_state_dict(new.state_dict())
    accelerate.disk_offload(offloaded, str(folder))
    assert torch.equal(logits(offloaded), logits(old))
    assert not torch.equal(logits(offloaded), expected)

    file = save(new.state_dict(), tmp_path / "new" / "model.safetensors")
    model = load_checkpoint_and_dispatch(
        net(), file, device_map={"": "disk"}, offload_folder=folder
    )
    assert torch.equal(logits(model), expected)


def test_loading_a_second_model_does_not_change_the_first(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: silent, the first model's outputs change (case 7)."""
    sources, folder = (net(), net()), tmp_path / "off"
    files = [
        save(source.state_dict(), tmp_path / str(number) / "model.safetensors")
        for number, source in enumerate(sources)
    ]
    theirs = accelerate.load_checkpoint_and_dispatch
    first = loaded_by(theirs, net(), files[0], folder)
    assert torch.equal(logits(first), logits(sources[0]))
    loaded_by(theirs, net(), files[1], folder)
    assert not torch.equal(logits(first), logits(sources[0]))

    models = [loaded_by(load_checkpoint_and_dispatch, net(), file, folder) for file in files]
    for model, source in zip(models, sources, strict=True):
        assert torch.equal(logits(model), logits(source))


def test_a_missing_tensor_is_not_taken_from_a_folder_of_another_model(
    net: NetMaker, tmp_path: Path, logits: Logits, refused: Refused
) -> None:
    """accelerate: silent, the first model's tensor is used (case 7)."""
    first, second, folder = net(), net(), tmp_path / "off"
    files = [tmp_path / "first.bin", tmp_path / "second.bin"]
    torch.save(first.state_dict(), files[0])
    torch.save({k: v for k, v in second.state_dict().items() if k != FC2}, files[1])
    theirs = accelerate.load_checkpoint_and_dispatch
    loaded_by(theirs, net(), files[0], folder)
    model = loaded_by(theirs, net(), files[1], folder)
    mixed = net()
    mixed.load_state_dict({**second.state_dict(), FC2: first.state_dict()[FC2]})
    assert torch.equal(logits(model), logits(mixed))
    device_map: dict[Any, Any] = {"wte": "cpu", "layers": "disk", "head": "cpu"}
    refused(net(), files[1], device_map=device_map, offload_folder=folder, naming=(FC2,))
