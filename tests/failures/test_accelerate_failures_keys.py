"""Missing, unexpected and renamed names."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, load_checkpoint_and_dispatch

NetMaker = Callable[..., nn.Module]
Logits = Callable[[nn.Module], torch.Tensor]
Save = Callable[..., Path]
Shard = Callable[..., dict[str, str]]
Theirs = Callable[..., Any]
Refused = Callable[..., str]

LOST = "layers.1.fc2.weight"
CPU: dict[str, Any] = {"": "cpu"}
LAST_ON_DISK: dict[str, Any] = {"wte": "cpu", "layers.0": "cpu", "layers.1": "disk", "head": "cpu"}


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def test_a_missing_tensor_of_a_model_on_meta_is_refused_by_its_name(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: "Cannot copy out of meta tensor; no data!", without a name (case 9)."""
    file = save(net().state_dict(), tmp_path / "model.safetensors", without=(LOST,))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as obscure:
        accelerate.load_checkpoint_and_dispatch(net(meta=True), str(file), device_map=CPU)
    assert "fc2" not in str(obscure.value)
    refused(net(meta=True), file, device_map=CPU, naming=(LOST,))


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": CPU},
        {"device_map": CPU, "strict": True},
        {"device_map": None, "strict": True},
    ],
    ids=["map", "strict map", "strict without a map"],
)
def test_a_missing_tensor_of_a_real_model_is_refused(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    theirs: Theirs,
    refused: Refused,
    options: dict[str, Any],
) -> None:
    """accelerate: silent, random weights are kept; with ``strict=True`` too (case 2)."""
    file = save(net().state_dict(), tmp_path / "model.safetensors", without=(LOST,))
    model = net()
    random = model.state_dict()[LOST].clone()
    said = theirs(model, str(file), **options)
    assert torch.equal(said.model.state_dict()[LOST], random)
    assert said.warnings == []
    refused(net(), file, naming=(LOST,), **options)


def test_strict_holds_for_a_sharded_checkpoint_as_a_whole(
    net: NetMaker, shard: Shard, tmp_path: Path
) -> None:
    """accelerate with ``full_state_dict=False``: missing keys are seen, but in each shard, so
    that a right sharded checkpoint fails under strict.
    """
    source = net()
    shard(source.state_dict(), tmp_path)
    options: dict[str, Any] = {"device_map": None, "strict": True, "full_state_dict": False}
    with pytest.raises(RuntimeError, match="Missing key"):
        accelerate.load_checkpoint_and_dispatch(net(), str(tmp_path), **options)
    model = load_checkpoint_and_dispatch(net(), tmp_path, **options)
    assert same_state(model, source)


def test_a_tensor_missing_from_a_disk_module_is_refused_before_the_first_forward(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs, logits: Logits, refused: Refused
) -> None:
    """accelerate: loads; KeyError at the first forward (case 9)."""
    source = net()
    # from a .bin: with safetensors accelerate gives a KeyError of its own even earlier
    file = tmp_path / "pytorch_model.bin"
    torch.save({k: v for k, v in source.state_dict().items() if k != LOST}, file)
    said = theirs(net(), str(file), device_map=LAST_ON_DISK, offload_folder=tmp_path / "off")
    with pytest.raises(KeyError, match=LOST):
        logits(said.model)
    refused(net(), file, device_map=LAST_ON_DISK, naming=(LOST,))


def test_unexpected_tensors_are_warned_of(
    net: NetMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """accelerate: a warning with the names. Ours may not say less."""
    source = net()
    state = {**source.state_dict(), "layers.2.fc1.weight": torch.ones(8, 8)}
    save_file(state, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(net(), tmp_path, device_map=CPU)
    assert same_state(model, source)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "'layers.2.fc1.weight'" in caplog.text


def test_strict_names_all_unexpected_tensors_at_once(
    net: NetMaker, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: AttributeError "'ModuleList' object has no attribute '2'" or ValueError, one
    key at a time (case 9).
    """
    extra = {"layers.2.fc1.weight": torch.ones(8, 8), "head.scale": torch.ones(1)}
    save_file({**net().state_dict(), **extra}, tmp_path / "model.safetensors")
    with pytest.raises((AttributeError, ValueError)) as obscure:
        accelerate.load_checkpoint_and_dispatch(net(), str(tmp_path), device_map=CPU, strict=True)
    assert sum(name in str(obscure.value) for name in extra) == 0
    refused(net(), tmp_path, device_map=CPU, strict=True, naming=tuple(extra))


def meta_error() -> Any:
    return pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor")


def test_another_prefix_is_refused_for_a_real_model_and_the_alias_is_proposed(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs, refused: Refused
) -> None:
    """accelerate: warns, and returns a model with random weights (case 4)."""
    source, model = net(), net()
    file = save(source.state_dict(), tmp_path / "model.safetensors", prefix="backbone.")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = theirs(model, str(file), device_map=CPU)
    assert all(torch.equal(said.model.state_dict()[n], value) for n, value in before.items())
    assert any("were not used" in text for text in said.warnings)

    message = refused(net(), file, device_map=CPU, naming=("wte.weight", LOST))
    assert "--alias 'backbone.**=**'" in message
    plan = Dispatcher().plan(file, model=(model := net()), aliases=["backbone.**=**"])
    assert same_state(plan.execute(model), source)


def test_the_alias_that_is_proposed_works_beneath_a_wrapper(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """The row above with a prefix that is known around one that is not (case 4)."""
    source = net()
    prefix = "module.backbone."
    file = save(source.state_dict(), tmp_path / "model.safetensors", prefix=prefix)
    message = refused(net(), file, device_map=CPU, naming=(LOST,))
    assert "--alias 'backbone.**=**'" in message
    for alias in ("backbone.**=**", "module.backbone.**=**"):
        model = net()
        plan = Dispatcher().plan(file, model=model, device_map=CPU, aliases=[alias])
        assert same_state(plan.execute(model), source)


@pytest.mark.parametrize("device_map", [CPU, "auto"], ids=["cpu", "auto"])
def test_another_prefix_is_refused_for_a_model_on_meta(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    refused: Refused,
    device_map: Any,
    logits: Logits,
) -> None:
    """accelerate: warns, then the meta error without a name (cases 4, 9)."""
    source = net()
    file = save(source.state_dict(), tmp_path / "model.safetensors", prefix="backbone.")
    with meta_error():
        accelerate.load_checkpoint_and_dispatch(net(meta=True), str(file), device_map=device_map)
    refused(net(meta=True), file, device_map=device_map, naming=("wte.weight", LOST))
    plan = Dispatcher().plan(
        file, model=(model := net(meta=True)), device_map=device_map, aliases=["backbone.**=**"]
    )
    assert torch.equal(logits(plan.execute(model)), logits(source))


def test_another_prefix_under_strict_names_both_sides(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: AttributeError "'Net' object has no attribute 'backbone'" (cases 4, 9)."""
    file = save(net().state_dict(), tmp_path / "model.safetensors", prefix="backbone.")
    with pytest.raises(AttributeError, match="has no attribute 'backbone'"):
        accelerate.load_checkpoint_and_dispatch(net(), str(file), device_map=CPU, strict=True)
    refused(net(), file, device_map=CPU, strict=True, naming=("wte.weight", "backbone.wte.weight"))


def test_a_known_wrapper_is_seen_through(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """accelerate: warns, and returns a model with random weights (case 4)."""
    source = net()
    prefix = "module._orig_mod."
    file = save(source.state_dict(), tmp_path / "model.safetensors", prefix=prefix)
    for model in (net(), net(meta=True)):
        loaded = load_checkpoint_and_dispatch(model, file, device_map=CPU)
        assert torch.equal(logits(loaded), logits(source))


def test_loading_without_dispatch_does_not_leave_a_model_on_meta(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """accelerate's ``load_checkpoint_in_model`` with another prefix: warns, and returns with every
    parameter on meta (cases 4, 9).
    """
    file = save(net().state_dict(), tmp_path / "model.safetensors", prefix="backbone.")
    model = net(meta=True)
    accelerate.load_checkpoint_in_model(model, str(file), device_map=CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    refused(net(meta=True), file, device_map=None, naming=("wte.weight", LOST))


def test_a_model_on_meta_is_loaded_without_a_device_map(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs, logits: Logits
) -> None:
    """accelerate, with a right checkpoint: "Default process group has not been initialized"."""
    source = net()
    file = save(source.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        theirs(net(meta=True), str(file))
    model = load_checkpoint_and_dispatch(net(meta=True), file)
    assert torch.equal(logits(model), logits(source))


def test_a_model_on_meta_is_loaded_with_full_state_dict_off(
    net: NetMaker, save: Save, tmp_path: Path, theirs: Theirs, logits: Logits
) -> None:
    """accelerate: UserWarnings "copying … is a no-op"; the model stays on meta."""
    source = net()
    file = save(source.state_dict(), tmp_path / "model.safetensors")
    said = theirs(net(meta=True), str(file), full_state_dict=False)
    assert all(parameter.is_meta for parameter in said.model.parameters())
    model = load_checkpoint_and_dispatch(net(meta=True), file, full_state_dict=False)
    assert torch.equal(logits(model), logits(source))


def test_a_training_checkpoint_is_unpacked(net: NetMaker, tmp_path: Path, theirs: Theirs) -> None:
    """accelerate, real model: a warning about ``state_dict`` and ``epoch``, a random model."""
    source, model = net(), net()
    file = tmp_path / "pytorch_model.bin"
    torch.save({"state_dict": source.state_dict(), "epoch": 1}, file)
    assert not same_state(theirs(model, str(file), device_map=CPU).model, source)
    assert same_state(load_checkpoint_and_dispatch(net(), file, device_map=CPU), source)


class SCBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SCBlock = nn.Linear(8, 8)


@pytest.mark.parametrize("strict", [False, True])
def test_a_name_with_scb_in_it_is_loaded_like_any_other(
    save: Save, tmp_path: Path, theirs: Theirs, strict: bool
) -> None:
    """accelerate: silent, every name that contains ``SCB`` is skipped; with strict too."""
    source, model = SCBlock(), SCBlock()
    before = model.SCBlock.weight.detach().clone()
    save(source.state_dict(), tmp_path / "model.safetensors")
    said = theirs(model, str(tmp_path), device_map=CPU, strict=strict)
    assert torch.equal(said.model.SCBlock.weight, before)
    assert said.warnings == []
    loaded = load_checkpoint_and_dispatch(SCBlock(), tmp_path, device_map=CPU, strict=strict)
    assert same_state(loaded, source)


def test_a_failure_in_a_later_shard_leaves_nothing_behind(
    net: NetMaker,
    shard: Shard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    """accelerate: the model is left half loaded, and the temporary folder with all CPU weights
    so far is leaked.
    """
    folder, scratch = tmp_path / "checkpoint", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    last = folder / shard(net().state_dict(), folder)["head.weight"]
    last.write_bytes(last.read_bytes()[:-4])
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Exception, match="incomplete metadata"):
        accelerate.load_checkpoint_and_dispatch(
            model, str(folder), device_map=LAST_ON_DISK, offload_folder=tmp_path / "off"
        )
    assert any(
        value.is_meta or not torch.equal(value, before[name])
        for name, value in model.state_dict().items()
    )
    assert list(scratch.rglob("*.dat"))
    leaked = set(scratch.rglob("*"))
    message = refused(net(), folder, device_map=LAST_ON_DISK, naming=(last.name,))
    assert "4 bytes" in message
    assert set(scratch.rglob("*")) == leaked
