"""Tied weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters
from torch import nn

from modelquirks.planner import Dispatcher, load_checkpoint_and_dispatch

NetMaker = Callable[..., nn.Module]
Logits = Callable[[nn.Module], torch.Tensor]
Save = Callable[..., Path]
Theirs = Callable[..., Any]
Refused = Callable[..., str]

CPU: dict[str, Any] = {"": "cpu"}
EMBED, HEAD = "wte.weight", "head.weight"


def parameter(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_parameter(name)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "device_map",
    [None, CPU, {"": "cpu", "layers.0": "disk"}],
    ids=["no map", "cpu", "a layer on disk"],
)
def test_one_stored_copy_serves_both_names_of_a_tied_model(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    device_map: Any,
    strict: bool,
) -> None:
    """accelerate, real model, with a map: silent; the head's random values are written over the
    embedding, with strict too. Without a map it is right (case 1).
    """
    source = net(tied=True)
    save(source.state_dict(), tmp_path / "model.safetensors", without=(HEAD,))
    if device_map == CPU:
        model = net(tied=True)
        random = parameter(model, HEAD).detach().clone()
        said = theirs(model, str(tmp_path), device_map=device_map, strict=strict)
        assert torch.equal(parameter(said.model, EMBED), random)
        assert said.warnings == []
    for model in (net(tied=True), net(tied=True, meta=True)):
        loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map, strict=strict)
        assert torch.equal(logits(loaded), logits(source))
        assert parameter(loaded, EMBED) is parameter(loaded, HEAD)


def broken_by_init_empty_weights(make: NetMaker) -> nn.Module:
    with init_empty_weights():
        return make(tied=True)


def test_a_tie_that_init_empty_weights_has_broken_is_asked_for_by_name(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits, refused: Refused
) -> None:
    """accelerate: each parameter is made anew, ``find_tied_parameters`` returns ``[]``, then the
    meta error without a name. Nothing in such a model tells that the two were one; but the head
    that is missing has the shape of the embedding, so the tie is proposed.
    """
    source = net(tied=True)
    file = save(source.state_dict(), tmp_path / "model.safetensors", without=(HEAD,))
    model = broken_by_init_empty_weights(net)
    assert find_tied_parameters(model) == []
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as obscure:
        accelerate.load_checkpoint_and_dispatch(model, str(file), device_map=CPU)
    assert "head" not in str(obscure.value)

    model = broken_by_init_empty_weights(net)
    message = refused(model, file, device_map=CPU, naming=(HEAD,))
    assert "--tie 'head.weight=wte.weight'" in message
    plan = Dispatcher().plan(file, model=model, device_map=CPU, ties=["head.weight=wte.weight"])
    loaded = plan.execute(model)
    assert torch.equal(logits(loaded), logits(source))
    assert parameter(loaded, EMBED) is parameter(loaded, HEAD)


@pytest.mark.parametrize("device_map", [None, CPU], ids=["no map", "cpu"])
def test_two_stored_copies_that_differ_are_both_kept_and_told_of(
    net: NetMaker,
    save: Save,
    tmp_path: Path,
    theirs: Theirs,
    logits: Logits,
    caplog: pytest.LogCaptureFixture,
    device_map: Any,
) -> None:
    """accelerate: silent, one of the two is dropped: with a map all but the first by name, without
    a map all but the last loaded.
    """
    source = net()  # not tied: another head
    save(source.state_dict(), tmp_path / "model.safetensors")
    said = theirs(net(tied=True), str(tmp_path), device_map=device_map)
    kept = parameter(source, HEAD)
    assert torch.equal(parameter(said.model, EMBED), kept)
    assert torch.equal(parameter(said.model, HEAD), kept)
    assert said.warnings == []

    for model in (net(tied=True), net(tied=True, meta=True)):
        caplog.clear()
        loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map)
        assert torch.equal(logits(loaded), logits(source))
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert any(repr(EMBED) in text and repr(HEAD) in text for text in told)


def test_two_stored_copies_that_are_equal_become_one(
    net: NetMaker, save: Save, tmp_path: Path, logits: Logits
) -> None:
    """The other side of the row above."""
    source = net(tied=True)
    save(source.state_dict(), tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(net(tied=True, meta=True), tmp_path, device_map=CPU)
    assert torch.equal(logits(loaded), logits(source))
    assert parameter(loaded, EMBED) is parameter(loaded, HEAD)


def test_one_stored_copy_with_both_names_on_disk_runs(
    net: NetMaker, tmp_path: Path, theirs: Theirs, logits: Logits
) -> None:
    """accelerate: loads; ``KeyError: 'head.weight'`` at the first forward (case 9)."""
    source = net(tied=True)
    state = {k: v for k, v in source.state_dict().items() if k != HEAD}
    torch.save(state, tmp_path / "pytorch_model.bin")
    device_map: dict[Any, Any] = {"wte": "disk", "layers": "cpu", "head": "disk"}
    said = theirs(
        net(tied=True, meta=True),
        str(tmp_path),
        device_map=device_map,
        offload_folder=tmp_path / "off",
    )
    with pytest.raises(KeyError, match=HEAD):
        logits(said.model)
    for model in (net(tied=True), net(tied=True, meta=True)):
        loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map)
        assert torch.equal(logits(loaded), logits(source))


def test_names_of_one_tensor_on_disk_and_cpu_are_refused_with_both_names(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: "weight is on the meta device, we need a `value`" at dispatch (case 9)."""
    save(net(tied=True).state_dict(), tmp_path / "model.safetensors", without=(HEAD,))
    device_map: dict[Any, Any] = {"wte": "disk", "layers": "cpu", "head": "cpu"}
    with pytest.raises(ValueError, match="weight is on the meta device"):
        accelerate.load_checkpoint_and_dispatch(
            net(tied=True, meta=True),
            str(tmp_path),
            device_map=device_map,
            offload_folder=tmp_path / "off",
        )
    refused(net(tied=True), tmp_path, device_map=device_map, naming=(EMBED, HEAD))


def test_names_of_one_tensor_on_two_devices_are_refused_with_both_names(
    net: NetMaker, save: Save, tmp_path: Path, refused: Refused
) -> None:
    """accelerate: warns "Tied parameters are on different devices" and goes on with two copies,
    one of them as large as the other.
    """
    save(net(tied=True).state_dict(), tmp_path / "model.safetensors", without=(HEAD,))
    device_map: dict[Any, Any] = {"wte": 0, "layers": 0, "head": 1}
    refused(net(tied=True), tmp_path, device_map=device_map, naming=(EMBED, HEAD))
