"""Files: which one is read, and what is in it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, PlanError, load_checkpoint_and_dispatch

NetMaker = Callable[..., nn.Module]
Logits = Callable[[nn.Module], torch.Tensor]
Save = Callable[..., Path]
Shard = Callable[..., dict[str, str]]
Theirs = Callable[..., Any]
Refused = Callable[..., str]

CPU: dict[str, Any] = {"": "cpu"}
LAYER_ON_DISK: dict[str, Any] = {"wte": "cpu", "layers.0": "cpu", "layers.1": "disk", "head": "cpu"}
INDEX = "model.safetensors.index.json"
HEAD = "head.weight"


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def warned(caplog: pytest.LogCaptureFixture, *names: str) -> bool:
    """Tell whether one warning has all the names in it."""
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return any(all(repr(name) in text for name in names) for text in texts)


def test_a_stale_torch_file_does_not_win_over_safetensors(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """accelerate: silent, the ``.bin`` is loaded (case 8)."""
    source, stale = net(), net()
    save(source.state_dict(), tmp_path / "model.safetensors")
    torch.save(stale.state_dict(), tmp_path / "pytorch_model.bin")
    said = theirs(net(), str(tmp_path), device_map=CPU)
    assert torch.equal(logits(said.model), logits(stale))
    assert said.warnings == []
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))
    assert warned(caplog, "pytorch_model.bin")


def test_a_stale_single_file_does_not_win_over_the_index(
    net: NetMaker,
    save: Save,
    shard: Shard,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """accelerate: silent, the single file is loaded (case 8)."""
    source, stale = net(), net()
    shard(source.state_dict(), tmp_path)
    save(stale.state_dict(), tmp_path / "model.safetensors")
    said = theirs(net(), str(tmp_path), device_map=CPU)
    assert torch.equal(logits(said.model), logits(stale))
    assert said.warnings == []
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))
    assert warned(caplog, "model.safetensors")


def test_of_two_indexes_the_one_that_is_taken_is_told(
    net: NetMaker,
    shard: Shard,
    tmp_path: Path,
    logits: Logits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """accelerate: a clear ValueError. Ours takes that of the weights themselves, and says so."""
    source = net()
    shard(source.state_dict(), tmp_path)
    other = tmp_path / "model.fp16.safetensors.index.json"
    other.write_text(json.dumps({"weight_map": {HEAD: "model.fp16.safetensors"}}))
    with pytest.raises(ValueError, match="containing more than one"):
        accelerate.load_checkpoint_and_dispatch(net(), str(tmp_path), device_map=CPU)
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))
    assert warned(caplog, INDEX, other.name)


@pytest.mark.parametrize("strict", [False, True])
def test_an_empty_index_is_refused(
    net: NetMaker, tmp_path: Path, theirs: Theirs, refused: Refused, strict: bool
) -> None:
    """accelerate, real model: silent, nothing is loaded (case 8)."""
    write_index(tmp_path, {})
    options: dict[str, Any] = {"device_map": CPU, "strict": strict}
    assert theirs(net(), str(tmp_path), **options).warnings == []
    refused(net(), tmp_path, naming=(HEAD,), **options)


@pytest.mark.parametrize("strict", [False, True])
def test_a_name_in_the_index_that_is_not_in_its_file_is_refused(
    net: NetMaker, shard: Shard, tmp_path: Path, theirs: Theirs, refused: Refused, strict: bool
) -> None:
    """accelerate, real model: silent, random weights are kept; with strict too (case 8)."""
    state = net().state_dict()
    lost = state.pop(HEAD)
    weight_map = shard(state, tmp_path)
    file = weight_map["layers.1.fc2.weight"]
    write_index(tmp_path, {**weight_map, HEAD: file})
    options: dict[str, Any] = {"device_map": CPU, "strict": strict}
    said = theirs(net(), str(tmp_path), **options)
    assert said.warnings == []
    assert not torch.equal(said.model.state_dict()[HEAD], lost)
    refused(net(), tmp_path, naming=(HEAD, file), **options)


def test_a_shard_that_the_index_omits_is_named(
    net: NetMaker, shard: Shard, tmp_path: Path, theirs: Theirs, refused: Refused
) -> None:
    """accelerate, real model: silent, the weights of that file stay random (case 8)."""
    weight_map = shard(net().state_dict(), tmp_path)
    omitted = weight_map[HEAD]
    write_index(tmp_path, {n: file for n, file in weight_map.items() if file != omitted})
    assert theirs(net(), str(tmp_path), device_map=CPU).warnings == []
    refused(net(), tmp_path, device_map=CPU, naming=(HEAD, omitted))


def test_of_two_copies_the_one_that_the_index_names_is_taken(
    net: NetMaker,
    shard: Shard,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """accelerate: silent, the last file by name wins, whatever the index says (case 8)."""
    source, stale = net(), net()
    state = source.state_dict()
    weight_map = shard(state, tmp_path)
    first, last = weight_map["wte.weight"], weight_map[HEAD]
    assert first < last
    copies = {"wte.weight": stale.state_dict()["wte.weight"]}
    copies |= {name: state[name] for name, file in weight_map.items() if file == last}
    save_file(copies, tmp_path / last, {"format": "pt"})
    said = theirs(net(), str(tmp_path), device_map=CPU)
    assert torch.equal(said.model.state_dict()["wte.weight"], copies["wte.weight"])
    assert said.warnings == []
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))
    assert warned(caplog, "wte.weight", last)


def cut_data(data: bytes) -> bytes:
    return data[:-8]


def cut_header(data: bytes) -> bytes:
    return data[:40]


def to_pointer(data: bytes) -> bytes:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {len(data)}\n"
    return text.encode()


@pytest.mark.parametrize("damage", [cut_data, cut_header, to_pointer])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_a_damaged_file_is_named(
    net: NetMaker,
    shard: Shard,
    tmp_path: Path,
    refused: Refused,
    damage: Callable[[bytes], bytes],
    sharded: bool,
) -> None:
    """accelerate: "incomplete metadata, file not fully covered", "invalid header length" or
    "header too large", without the name of the file; shards before it are loaded by then (case 9).
    """
    weight_map = shard(net().state_dict(), tmp_path, 3 if sharded else 1)
    file = tmp_path / weight_map[HEAD]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SafetensorError) as obscure:
        accelerate.load_checkpoint_and_dispatch(net(), str(tmp_path), device_map=CPU)
    assert file.name not in str(obscure.value)
    refused(net(), tmp_path, device_map=CPU, naming=(file.name,))


def test_a_missing_shard_is_refused_before_others_are_loaded(
    net: NetMaker, shard: Shard, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: FileNotFoundError with the path, after earlier shards were loaded."""
    weight_map = shard(net().state_dict(), tmp_path)
    file = tmp_path / weight_map[HEAD]
    file.unlink()
    model = net()
    before = model.get_parameter("wte.weight").detach().clone()
    with pytest.raises(FileNotFoundError, match=file.name):
        accelerate.load_checkpoint_and_dispatch(model, str(tmp_path), device_map=CPU)
    assert not torch.equal(model.get_parameter("wte.weight"), before)
    refused(net(), tmp_path, device_map=CPU, naming=(file.name, HEAD))


def flip_a_bit(file: Path, value: torch.Tensor) -> None:
    """Change one bit of *value* in the file that holds it."""
    data = bytearray(file.read_bytes())
    position = data.index(value.numpy().tobytes()) + 5
    data[position] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_changed_since_the_plan_are_refused(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs, name: str
) -> None:
    """accelerate: a flipped bit is silent. safetensors has no checksums, and torch.load looks at
    none, so that nobody can tell from the file alone; but a plan is bound to the files as they
    were.
    """
    source, file = net(), tmp_path / name
    save(source.state_dict(), file)
    if file.suffix == ".bin":
        torch.save(source.state_dict(), file)
    plan = Dispatcher().plan(file, model=net(), device_map=CPU)
    flip_a_bit(file, source.state_dict()[HEAD])
    assert theirs(net(), str(file), device_map=CPU).warnings == []
    with pytest.raises(PlanError, match=f"'{name}' was written again"):
        plan.execute(net())


@pytest.mark.parametrize(
    "metadata", [None, {"total": "1"}, {"format": "mlx"}], ids=["none", "no format", "mlx"]
)
def test_metadata_that_says_nothing_of_torch_is_no_fault(
    net: NetMaker,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    metadata: dict[str, str] | None,
) -> None:
    """accelerate: without metadata a warning; without ``format``, or with ``mlx``, an OSError
    "does not contain the valid metadata".
    """
    source = net()
    save_file(source.state_dict(), tmp_path / "model.safetensors", metadata)
    if metadata is None:
        assert theirs(net(), str(tmp_path), device_map=CPU).warnings
    else:
        with pytest.raises(OSError, match="metadata"):
            theirs(net(), str(tmp_path), device_map=CPU)
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))


def test_the_checkpoint_may_be_a_path_to_a_file(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: "'PosixPath' object has no attribute 'endswith'", though its types allow it."""
    source = net()
    file = save(source.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(AttributeError, match="has no attribute 'endswith'"):
        accelerate.load_checkpoint_and_dispatch(net(), file, device_map=CPU)
    loaded = load_checkpoint_and_dispatch(net(), file, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))


def test_other_file_names_are_found_in_a_folder(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: ValueError, the folder "does not contain any of" its own names."""
    source = net()
    save(source.state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match=r"containing a `\.index\.json` file or a"):
        accelerate.load_checkpoint_and_dispatch(net(), str(tmp_path), device_map=CPU)
    loaded = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_on_disk_stay_in_their_files(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits, name: str
) -> None:
    """accelerate: all of them are written anew, a ``.dat`` each, from both formats."""
    source, folder = net(), tmp_path / "off"
    file = tmp_path / "stored" / name
    save(source.state_dict(), file)
    if name.endswith(".bin"):
        torch.save(source.state_dict(), file)
    options: dict[str, Any] = {"device_map": LAYER_ON_DISK, "offload_folder": folder}
    accelerate.load_checkpoint_and_dispatch(net(), str(file), **options)
    assert len(list(folder.glob("*.dat"))) == 4
    before = sorted(tmp_path.rglob("*"))
    loaded = load_checkpoint_and_dispatch(net(), file, **options)
    assert torch.equal(logits(loaded), logits(source))
    assert sorted(tmp_path.rglob("*")) == before
