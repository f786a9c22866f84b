"""``verify``: is the model what the plan says, value by value where sampled?"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from modelquirks.planner.dtypes import nbytes, to_torch
from modelquirks.planner.execution.copies import bits_equal
from modelquirks.planner.execution.evaluate import Read, Types, evaluate, torch_shape, whole
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.execution.slots import Slot, find_slots
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.planner.finding import shown
from modelquirks.planner.names import parent
from modelquirks.quirks.family import template_of
from modelquirks.quirks.recipe import Scheme

__all__ = ["Verification", "verify"]

_ALL_SAMPLES = 1 << 30
"""Bytes sampled of a whole model at most."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at after loading, and what was wrong."""

    n_tensors: int
    """Names of the model that were loaded and looked at."""
    n_offloaded: int
    """How many of them are fetched at each forward pass."""
    n_ties: int
    """Groups of names that share one tensor."""
    sampled_bytes: int
    """Bytes compared with a fresh evaluation from the files."""
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "ok": self.ok,
            "tensors": self.n_tensors,
            "offloaded": self.n_offloaded,
            "ties": self.n_ties,
            "sampled_bytes": self.sampled_bytes,
            "problems": list(self.problems),
        }


def verify(
    model: nn.Module,
    items: Iterable[LoadItem],
    *,
    read: Read,
    types: Types,
    schemes: Mapping[str, Scheme],
    sample_bytes: int = 65536,
) -> Verification:
    """Compare a loaded model with the items it was loaded from.

    Nothing may be on the meta device that no hook fetches; dtype and shape are as planned; tied
    names share one tensor; and regions of up to *sample_bytes* of each tensor, at its end and
    at a place that depends on its name, equal bit by bit what *read* gives now. Give it a reader
    of its own: one that shares its mapping with the model would see what was written to it.
    Offloaded weights are fetched through their hooks; of those that must be computed, one of
    each family.
    """
    items = list(items)
    budget = max(64, min(sample_bytes, _ALL_SAMPLES // max(1, len(items))))
    check = _Check(find_slots(model), _hooks(model), read, types, schemes, budget)
    for item in items:
        check.item(item)
    check.others({name for item in items for name in item.names})
    return Verification(
        n_tensors=sum(len(item.names) for item in items),
        n_offloaded=check.n_offloaded,
        n_ties=sum(1 for item in items if item.aliases),
        sampled_bytes=check.sampled_bytes,
        problems=tuple(check.problems),
    )


class _Fetch(NamedTuple):
    """Where an offloaded tensor comes from."""

    weights: Mapping[str, torch.Tensor]
    key: str


class _Check:
    """The running state of one verification."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        hooks: Mapping[str, Any],
        read: Read,
        types: Types,
        schemes: Mapping[str, Scheme],
        budget: int,
    ) -> None:
        self.problems: list[str] = []
        self.n_offloaded = 0
        self.sampled_bytes = 0
        self._slots, self._hooks = slots, hooks
        self._read, self._types, self._schemes = read, types, schemes
        self._budget = budget
        self._seen: set[str] = set()

    def item(self, item: LoadItem) -> None:
        """Look at one item under all its names."""
        origins: set[object] = set()
        for name in item.names:
            slot = self._slots.get(name)
            if slot is None:
                self.problems.append(f"{item}: the model has no {name!r}")
                continue
            fetch = self._fetch(name) if slot.tensor.is_meta else None
            if fetch is not None:
                self.n_offloaded += 1
                origins.add(self._origin(fetch))
                self._offloaded(item, name, fetch)
            elif slot.tensor.is_meta:
                self.problems.append(f"{item}: {name!r} is still on the meta device")
            else:
                origins.add(slot.tensor.data_ptr())
                self._values(item, name, slot.tensor)
            if slot.tensor.dtype != to_torch(item.dtype):
                self.problems.append(f"{item}: {name!r} is {slot.tensor.dtype}, not {item.dtype}")
        if len(origins) > 1:
            self.problems.append(
                f"{item}: tied to {shown(item.aliases)}, but they share no storage"
            )

    def others(self, seen: Collection[str]) -> None:
        """Look for tensors without data among those that belong to no item."""
        for name, slot in self._slots.items():
            if name not in seen and slot.tensor.is_meta and self._fetch(name) is None:
                self.problems.append(f"{name!r} is on the meta device and no hook fetches it")

    def _fetch(self, name: str) -> _Fetch | None:
        """Return what the hook of the module, or of one that loads it in advance, asks."""
        path = parent(name)
        hook = self._hooks.get(path)
        while hook is None or not (hook.place_submodules or path == parent(name)):
            if not path:
                return None
            path = parent(path)
            hook = self._hooks.get(path)
        key = name[len(path) + 1 :] if path else name
        weights = hook.weights_map
        if hasattr(weights, "dataset"):  # a PrefixedDataset evaluates when asked what it contains
            weights, key = weights.dataset, weights.prefix + key
        if hasattr(weights, "state_dict"):  # an OffloadedWeightsLoader with our map in it
            weights = weights.state_dict
        return _Fetch(weights, key) if key in weights else None

    def _origin(self, fetch: _Fetch) -> object:
        if isinstance(fetch.weights, WeightsMap):
            return fetch.weights.origin(fetch.key)
        return fetch.weights[fetch.key].data_ptr()

    def _offloaded(self, item: LoadItem, name: str, fetch: _Fetch) -> None:
        weights = fetch.weights
        is_cheap = isinstance(weights, WeightsMap) and weights.is_cheap(fetch.key)
        if not is_cheap or item.is_opaque:
            family = template_of(item.name)
            if family in self._seen:
                return
            self._seen.add(family)
        try:
            tensor = fetch.weights[fetch.key]
        except Exception as error:  # whatever a forward pass would meet
            self.problems.append(f"{item}: {name!r} cannot be fetched: {error}")
            return
        self._values(item, name, tensor)

    def _values(self, item: LoadItem, name: str, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != torch_shape(item.dtype, item.shape):
            self.problems.append(
                f"{item}: {name!r} has shape {list(tensor.shape)}, not {list(item.shape)}"
            )
            return
        for region in _samples(item, self._budget):
            dtype = to_torch(item.dtype)
            expected = evaluate(
                item.node,
                item.env,
                read=self._read,
                types=self._types,
                schemes=self._schemes,
                region=region,
                dtype=dtype,
            )
            found = tensor.detach()
            for dim, (start, stop) in enumerate(_elements(item.dtype, region)):
                found = found.narrow(dim, start, stop - start)
            self.sampled_bytes += expected.numel() * dtype.itemsize
            if not bits_equal(found.cpu(), expected):
                self.problems.append(f"{item}: {name!r} differs from the checkpoint at {region}")
                return


def _hooks(model: nn.Module) -> Mapping[str, Any]:
    """Return the hooks that fetch offloaded weights, by the path of their module."""
    hooks: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):  # a SequentialHook holds several
            if getattr(each, "offload", False):
                hooks[path] = each
    return hooks


def _samples(item: LoadItem, budget: int) -> Iterator[Region]:
    """Yield one region at the end of the tensor and one at a place fixed by its name."""
    if 0 in item.shape:
        return
    values = max(2, budget // 2 * 8 // max(1, nbytes(item.dtype, (8,))))
    end = _box(item, values, None)
    yield end
    if end != whole(item.shape):
        yield _box(item, values, zlib.crc32(item.name.encode()))


def _box(item: LoadItem, values: int, seed: int | None) -> Region:
    """Return a region of at most that many values, as wide as it can be in the last dimension."""
    region: list[tuple[int, int]] = []
    step = 2 if item.dtype == "F4" else 1  # two values share a byte along the last dimension
    for size in reversed(item.shape):
        n = min(size, max(step, values))
        values //= n
        start = size - n if seed is None else seed % (size - n + 1)
        start, n = start - start % step, n + n % step
        region.append((start, start + n))
        step = 1
    return tuple(reversed(region))


def _elements(dtype: str, region: Region) -> Region:
    if dtype != "F4":
        return region
    *outer, (start, stop) = region
    return (*outer, (start // 2, stop // 2))
