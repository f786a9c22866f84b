"""``differences``: in what a loaded model is not what was saved, tensor by tensor.

Independent of modelquirks on purpose: offloaded tensors are asked of accelerate's hooks, as a
forward pass asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from zoo_forward import Forward, answers, near, same
from zoo_models import Held, Truth, identity, slots

__all__ = ["Difference", "differences", "experts_implementation", "forward_difference"]


class Difference(NamedTuple):
    """One thing that is not as it should be."""

    kind: str
    """``absent``, ``extra``, ``meta``, ``fetch``, ``dtype``, ``shape``, ``values``, ``untied``,
    ``computed`` or ``forward``."""
    name: str
    text: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.kind}: {self.name!r} {self.text}".rstrip()


class _Found(NamedTuple):
    tensor: torch.Tensor
    origin: object
    """The same for two names exactly if one tensor serves both."""


def differences(
    model: nn.Module,
    truth: Truth,
    *,
    unsure: Collection[str] = (),
    free: Collection[str] = (),
) -> list[Difference]:
    """Return everything in which *model* differs from *truth*; nothing is taken on trust.

    Every parameter and persistent buffer must be there under every name, with the same dtype,
    shape and bits, and names that shared a tensor must share one. Buffers that no checkpoint
    holds must be as the model computed them, except those in *unsure*. Names in *free* may hold
    anything, but not the meta device.
    """
    held = dict(slots(model))
    found: dict[str, _Found] = {}
    told: list[Difference] = []
    for name, expected in truth.tensors.items():
        if name not in held or not held[name].persistent:
            told.append(Difference("absent", name, "is not in the model"))
            continue
        got = _found(model, name, held[name])
        if isinstance(got, Difference):
            told.append(got)
            continue
        found[name] = got
        if name not in free:
            told.extend(_unlike(name, got.tensor, expected))
    known = truth.tensors.keys() | truth.computed.keys()
    told += [Difference("extra", n, "") for n, h in held.items() if n not in known and h.persistent]
    told += _untied(truth, found, free)
    told += _computed(truth, held, unsure)
    return told


def _unlike(name: str, got: torch.Tensor, expected: torch.Tensor) -> Iterator[Difference]:
    if got.dtype != expected.dtype:
        yield Difference("dtype", name, f"is {got.dtype}, not {expected.dtype}")
    elif got.shape != expected.shape:
        yield Difference("shape", name, f"is {list(got.shape)}, not {list(expected.shape)}")
    elif not same(got.detach().cpu(), expected.detach()):
        n = int((got.detach().cpu() != expected).sum())
        yield Difference("values", name, f"differs in {n} of {expected.numel()} values")


def _untied(
    truth: Truth, found: Mapping[str, _Found], free: Collection[str]
) -> Iterator[Difference]:
    for names in truth.ties:
        there = [name for name in names if name in found and name not in free]
        if len({found[name].origin for name in there}) > 1:
            yield Difference("untied", there[0], f"shares nothing with {there[1:]}")
    group = {name: names for names in truth.ties for name in names}
    owners: dict[object, str] = {}
    for name, got in found.items():
        if not got.tensor.numel():
            continue
        first = owners.setdefault(got.origin, name)
        if first not in group.get(name, (name,)) and name not in free and first not in free:
            yield Difference("untied", name, f"shares its tensor with {first!r}, and should not")


def _computed(
    truth: Truth, held: Mapping[str, Held], unsure: Collection[str]
) -> Iterator[Difference]:
    for name, expected in truth.computed.items():
        if name in unsure:
            continue
        if name not in held:
            yield Difference("computed", name, "is not in the model")
        elif held[name].tensor.is_meta:
            yield Difference("computed", name, "is on the meta device")
        elif not same(held[name].tensor.detach().cpu(), expected):
            yield Difference("computed", name, "is not as the model computes it")


def _found(model: nn.Module, name: str, held: Held) -> _Found | Difference:
    """Return the tensor that a forward pass would use for *name*."""
    if not held.tensor.is_meta:
        return _Found(held.tensor, identity(held.tensor))
    fetch = _fetch(model, name)
    if fetch is None:
        return Difference("meta", name, "is on the meta device and no hook fetches it")
    weights, key = fetch
    try:
        tensor = weights[key]
    except Exception as error:
        return Difference("fetch", name, f"cannot be fetched: {error!r}")
    if tensor.is_meta:
        return Difference("meta", name, "is fetched from the meta device")
    return _Found(tensor, _origin(weights, key, tensor))


def _fetch(model: nn.Module, name: str) -> tuple[Any, str] | None:
    """Return the weights map of the hook that fetches *name*, and the key there."""
    own, _, _ = name.rpartition(".")
    path = own
    while True:
        for hook in _hooks(model.get_submodule(path)):
            if path == own or getattr(hook, "place_submodules", False):
                key = name[len(path) + 1 :] if path else name
                if key in hook.weights_map:
                    return hook.weights_map, key
        if not path:
            return None
        path = path.rpartition(".")[0]


def _hooks(module: nn.Module) -> Iterator[Any]:
    attached = getattr(module, "_hf_hook", None)
    for hook in getattr(attached, "hooks", (attached,)):
        if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
            yield hook


def _origin(weights: Any, key: str, tensor: torch.Tensor) -> object:
    """Return what two names have in common that are fetched from one tensor."""
    while hasattr(weights, "prefix"):
        weights, key = weights.dataset, weights.prefix + key
    inner = getattr(weights, "state_dict", weights)
    if hasattr(inner, "origin"):
        return id(inner), inner.origin(key)
    return identity(tensor)


def experts_implementation(model: nn.Module) -> Any:
    """Return what computes the experts of a transformers model; None where there is no choice."""
    get = getattr(model, "get_experts_implementation", None)
    return get() if callable(get) else None


def forward_difference(model: nn.Module, truth: Truth, usual: Any = None) -> Difference | None:
    """Run *model* on the inputs of *truth*; return how its answer differs, None if it does not.

    *usual* is what computed the experts for *truth*. If something else does now, which sums in
    another order, its answer must be near, and that of the usual one the same.
    """
    if truth.forward is None:
        return None
    if usual is not None and experts_implementation(model) != usual:
        if (found := _answered(model, truth.forward, near)) is not None:
            return found
        cast(Any, model).set_experts_implementation(usual)
    return _answered(model, truth.forward, same)


def _answered(
    model: nn.Module, truth: Forward, alike: Callable[[torch.Tensor, torch.Tensor], bool]
) -> Difference | None:
    try:
        got = answers(model, truth.inputs)
    except Exception as error:
        # An error of our own says which weight cannot be used so: no answer is given at all.
        kind = "refuses" if type(error).__module__.startswith("modelquirks.") else "raises"
        return Difference(kind, "forward", f"{type(error).__name__}: {error}"[:300])
    if len(got) != len(truth.outputs):
        text = f"gives {len(got)} tensors, not {len(truth.outputs)}"
        return Difference("forward", "forward", text)
    for at, (one, other) in enumerate(zip(got, truth.outputs, strict=True)):
        if not alike(one, other):
            return Difference("forward", "forward", f"output {at} differs")
    return None
