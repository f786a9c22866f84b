"""An animal of the zoo: a tiny model filled at random, saved, and what is true of it.

``made`` writes two things into a folder: ``checkpoint/``, by transformers' own ``save_pretrained``,
and ``truth.pt``, every tensor under every name it has, with what shares storage still sharing it,
and what a forward pass gives.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from zoo_classes import class_named
from zoo_forward import Forward, forward_of
from zoo_shrink import STRATEGIES, config_classes, default_config, shrunk

__all__ = ["TooLarge", "Truth", "built", "filled", "load_truth", "made", "slots", "truth_of"]

MAX_PARAMETERS = 5_000_000


class TooLarge(ValueError):
    """The model stays larger than the zoo is willing to build."""


class Held(NamedTuple):
    """A tensor at one of its names in a model."""

    module: nn.Module
    leaf: str
    tensor: torch.Tensor
    is_parameter: bool
    persistent: bool


def slots(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """Yield every parameter and buffer of *model* under every name it has."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + leaf, Held(module, leaf, parameter, True, True)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                persistent = leaf not in module._non_persistent_buffers_set
                yield prefix + leaf, Held(module, leaf, buffer, False, persistent)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a correctly loaded model holds and answers."""

    tensors: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers; names that share a tensor still share it."""
    computed: Mapping[str, torch.Tensor]
    """Buffers that no checkpoint holds, where building twice gives the same."""
    forward: Forward | None
    """Inputs and what the model answered; None if no simple forward pass is possible."""

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of names that share one tensor."""
        groups: dict[object, list[str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel():
                groups.setdefault(identity(tensor), []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def identity(tensor: torch.Tensor) -> object:
    """Return the same for two tensors exactly if they are the same memory in the same form."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def built(name: str) -> tuple[nn.Module, str]:
    """Return a small model of the class *name*, and the name of the way it was shrunk.

    The sizes are looked at on the meta device first. Raises the last way's error if none builds.
    """
    model_class = class_named(name)
    errors: list[Exception] = []
    for config_class in config_classes(model_class):
        try:
            default = default_config(config_class, name)
        except Exception as error:
            errors.append(error)
            continue
        for strategy in STRATEGIES:
            try:
                config = shrunk(default, strategy)
                _not_too_large(model_class, shrunk(default, strategy))
                torch.manual_seed(seed_of(name))
                return model_class(config).eval(), strategy.__name__.strip("_")
            except Exception as error:
                errors.append(error)
    raise errors[0] if errors else ValueError("it has no config class")


def _not_too_large(model_class: Any, config: Any) -> None:
    try:
        with torch.device("meta"):
            model = model_class(config)
    except TooLarge:
        raise
    except Exception:  # some compute with what they have just made; the real device will tell
        return
    n = sum(parameter.numel() for parameter in model.parameters())
    if n > MAX_PARAMETERS:
        raise TooLarge(f"{n:,} parameters, however it is shrunk")


def seed_of(*parts: object) -> int:
    """Return a number that depends on *parts* only."""
    return zlib.crc32("/".join(map(str, parts)).encode())


@torch.no_grad()
def filled(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter and persistent buffer of *model* values of its own.

    Except what ``save_pretrained`` leaves out because the model computes it.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    unsaved = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    for name, held in slots(model):
        if any(pattern.search(name) for pattern in unsaved):
            continue
        if held.persistent and id(held.tensor) not in seen:
            seen.add(id(held.tensor))
            _fill(name, held, generator)
    return model


def _fill(name: str, held: Held, generator: torch.Generator) -> None:
    tensor = held.tensor
    if tensor.is_complex():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    elif not tensor.is_floating_point():
        _shuffle(tensor, generator)
    elif held.is_parameter:
        scale = 0.2 if tensor.dim() > 1 else 0.4
        value = torch.randn(tensor.shape, generator=generator) * scale
        tensor.copy_(value + (0.5 if "norm" in name and tensor.dim() == 1 else 0))
    elif (
        tensor.numel() > 1
        and bool((tensor != tensor.reshape(-1)[0]).any())
        and ("running" not in name)
    ):
        _shuffle(tensor, generator)  # masks and frequencies: other values could break a forward
    else:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def _shuffle(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Put the values that are there into another order; constants become zeros and ones."""
    flat = tensor.reshape(-1)
    if flat.numel() > 1 and bool((flat != flat[0]).any()):
        tensor.copy_(flat[torch.randperm(flat.numel(), generator=generator)].reshape(tensor.shape))
    else:
        top = 2 if tensor.dtype == torch.bool or tensor.numel() > 1 else 1000
        tensor.copy_(torch.randint(0, top, tensor.shape, generator=generator).to(tensor.dtype))


def truth_of(
    model: nn.Module, computed: Mapping[str, torch.Tensor], forward: Forward | None
) -> Truth:
    """Return what is true of *model* as it stands."""
    tensors = {name: held.tensor.detach() for name, held in slots(model) if held.persistent}
    return Truth(tensors, computed, forward)


def _computed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held.tensor for name, held in slots(model) if not held.persistent}


def made(name: str, folder: Path) -> dict[str, Any]:
    """Build, fill and save the class *name* into *folder*; return what is told of it.

    Whatever stands in the way is raised. The folder is complete or not there.
    """
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model, strategy = built(name)
    filled(model, seed_of(name))
    forward = forward_of(model, seed_of(name))
    model.save_pretrained(partial / "checkpoint")  # type: ignore[operator]
    truth = truth_of(model, _computed(model), forward)
    torch.save(
        {
            "tensors": dict(truth.tensors),
            "computed": dict(truth.computed),
            "forward": None if forward is None else forward._asdict(),
        },
        partial / "truth.pt",
    )
    about: dict[str, Any] = {
        "class": name,
        "shrunk": strategy,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(truth.tensors),
        "ties": len(truth.ties),
        "buffers": sum(1 for _, h in slots(model) if h.persistent and not h.is_parameter),
        "forward": None if forward is None else sorted(forward.inputs),
    }
    (partial / "about.json").write_text(json.dumps(about))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return about


def load_truth(folder: Path) -> Truth:
    """Return what :func:`made` wrote of a model."""
    data = torch.load(folder / "truth.pt", weights_only=False)
    forward = data["forward"]
    return Truth(data["tensors"], data["computed"], None if forward is None else Forward(**forward))
