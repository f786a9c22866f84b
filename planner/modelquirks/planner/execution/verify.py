"""``verify``: is the model what the plan says, value by value where sampled, or everywhere?"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import nbytes, to_torch
from modelquirks.planner.execution.copies import bits_equal
from modelquirks.planner.execution.evaluate import (
    Read,
    Types,
    elements,
    torch_shape,
    whole,
)
from modelquirks.planner.execution.loading import Piece, pieces
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.pages import fresh
from modelquirks.planner.execution.pool import available_cpus, run
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.execution.slots import Slot, find_slots
from modelquirks.planner.execution.weights import WeightsMap, is_view
from modelquirks.planner.finding import shown
from modelquirks.planner.names import parent
from modelquirks.quirks.family import template_of
from modelquirks.quirks.recipe import Scheme

__all__ = ["Verification", "verify"]

VERIFICATION = "verification"
"""What progress calls the bytes that are compared."""

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
    options: LoadOptions | None = None,
    tensors: Mapping[str, StoredTensor] | None = None,
    release: Callable[[], None] | None = None,
) -> Verification:
    """Compare a loaded model with the items it was loaded from.

    Nothing may be on the meta device that no hook fetches; dtype and shape are as planned; tied
    names share one tensor; and regions of up to *sample_bytes* of each tensor, at its end and
    at a place that depends on its name, equal bit by bit what *read* gives now. Give it a reader
    of its own: one that shares its mapping with the model would see what was written to it.
    Offloaded weights are fetched through their hooks; of those that must be computed, one of
    each family.

    With ``verify="full"`` in *options* every byte of every tensor is compared, also of all that
    are offloaded, by several threads in pieces; that needs *tensors*, the stored ones. *release*
    is called when a thread is done with what it has read.
    """
    items = list(items)
    budget = max(64, min(sample_bytes, _ALL_SAMPLES // max(1, len(items))))
    source = _Files(read, types, schemes, release or (lambda: None))
    everything = None
    if options is not None and options.verify == "full":
        everything = _Everything(options, tensors or {})
        options.progress.begin({VERIFICATION: sum(item.nbytes for item in items)})
    check = _Check(find_slots(model), _hooks(model), source, budget, everything)
    for item in items:
        check.item(item)
    check.finish()
    check.others({name for item in items for name in item.names})
    return Verification(
        n_tensors=sum(len(item.names) for item in items),
        n_offloaded=check.n_offloaded,
        n_ties=sum(1 for item in items if item.aliases),
        sampled_bytes=check.sampled_bytes,
        problems=tuple(check.problems),
    )


class _Files(NamedTuple):
    """What a model is compared with."""

    read: Read
    types: Types
    schemes: Mapping[str, Scheme]
    release: Callable[[], None]

    def expected(
        self, item: LoadItem, region: Region, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return item.make(
            read=self.read, types=self.types, schemes=self.schemes, region=region, out=out
        )


class _Everything(NamedTuple):
    """How every byte is compared."""

    options: LoadOptions
    tensors: Mapping[str, StoredTensor]

    @property
    def n_threads(self) -> int:
        return self.options.n_threads(available_cpus())

    def pieces(self, item: LoadItem) -> Iterator[Piece]:
        return pieces(item, self.tensors, memory=self.options.memory_bytes // self.n_threads)


class _Look(NamedTuple):
    """A piece of a tensor that is to be compared."""

    piece: Piece
    name: str
    tensor: torch.Tensor


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
        files: _Files,
        budget: int,
        everything: _Everything | None,
    ) -> None:
        self.problems: list[str] = []
        self.n_offloaded = 0
        self.sampled_bytes = 0
        self._slots, self._hooks = slots, hooks
        self._files, self._budget, self._everything = files, budget, everything
        self._looks: list[_Look] = []
        self._seen: set[str] = set()
        self._counting = threading.Lock()
        self._buffers = threading.local()

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
                if name == item.name or slot.tensor is not self._slots[item.name].tensor:
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
        if self._everything is None and (not is_cheap or item.is_opaque):
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
        self._compare_all()  # before the next one is made

    def _values(self, item: LoadItem, name: str, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != torch_shape(item.dtype, item.shape):
            self.problems.append(
                f"{item}: {name!r} has shape {list(tensor.shape)}, not {list(item.shape)}"
            )
            return
        if self._everything is not None:
            self._looks += [_Look(p, name, tensor.detach()) for p in self._everything.pieces(item)]
            return
        for region in _samples(item, self._budget):
            if self._differs(item, name, tensor.detach(), region):
                return

    def finish(self) -> None:
        """Compare what is left to compare."""
        self._compare_all()

    def _compare_all(self) -> None:
        """Compare all pieces that are noted down, and forget them."""
        if self._everything is None or not self._looks:
            return
        options = self._everything.options
        found: set[str] = set()

        def look(look: _Look) -> None:
            item, region, _ = look.piece
            out = None if is_view(item, self._files.types) else self._scratch(look.piece)
            if look.name not in found and self._differs(item, look.name, look.tensor, region, out):
                found.add(look.name)
            options.progress.add(VERIFICATION, look.piece.nbytes)

        looks, self._looks = self._looks, []
        run(
            looks,
            look,
            n_threads=self._everything.n_threads,
            cost=lambda look: look.piece.cost + look.piece.nbytes,
            limit=options.memory_bytes,
        )

    def _scratch(self, piece: Piece) -> torch.Tensor:
        """Return memory for a piece that this thread has used before: fresh memory is slow."""
        held: torch.Tensor | None = getattr(self._buffers, "bytes", None)
        if held is None or held.nbytes < piece.nbytes:
            held = self._buffers.bytes = fresh((piece.nbytes,), torch.uint8)
        shape = [b - a for a, b in elements(piece.item.dtype, piece.region)]
        return held[: piece.nbytes].view(to_torch(piece.item.dtype)).view(shape)

    def _differs(
        self,
        item: LoadItem,
        name: str,
        tensor: torch.Tensor,
        region: Region,
        out: torch.Tensor | None = None,
    ) -> bool:
        """Compare a region with the files, made in *out* if given; note a difference."""
        try:
            expected = self._files.expected(item, region, out)
            found = tensor
            for dim, (start, stop) in enumerate(elements(item.dtype, region)):
                found = found.narrow(dim, start, stop - start)
            differs = not bits_equal(found.cpu(), expected)
        finally:
            self._files.release()
        with self._counting:
            self.sampled_bytes += expected.numel() * expected.element_size()
            if differs:
                self.problems.append(f"{item}: {name!r} differs from the checkpoint at {region}")
        return differs


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
