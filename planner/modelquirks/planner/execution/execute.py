"""``execute``: make the planned tensors, put them into the model, have accelerate run it.

Every tensor is made before the model is touched. From then on a failure, of accelerate or of the
verification at the end, gives the model back the very objects that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.digest.seal import Seal
from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.ahead import AHEAD_BYTES
from modelquirks.planner.execution.copies import equal, settle
from modelquirks.planner.execution.dispatching import DispatchOptions, hand_over, loose_modules
from modelquirks.planner.execution.evaluate import EvaluationError, torch_shape
from modelquirks.planner.execution.executionreport import Clock, ExecutionReport, peak_memory
from modelquirks.planner.execution.expert_forward import index_experts
from modelquirks.planner.execution.experts import ExpertOffload, ExpertOptions
from modelquirks.planner.execution.loading import load
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.materialize import Materialized, materialize
from modelquirks.planner.execution.openfile import Known
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.preflight import (
    faults,
    followers,
    hook_faults,
    left_behind,
    needs,
    route_faults,
    shared_places,
    split_places,
    unfilled,
    waived,
)
from modelquirks.planner.execution.reader import Reader, ReadError, Region
from modelquirks.planner.execution.route import Route, make_route
from modelquirks.planner.execution.slots import find_slots
from modelquirks.planner.execution.snapshot import Snapshot
from modelquirks.planner.execution.stacked import stacked_experts
from modelquirks.planner.execution.target import Target
from modelquirks.planner.execution.verify import Verification, verify
from modelquirks.planner.execution.weights import WeightsMap, is_view
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device, parse_size
from modelquirks.quirks.recipe import Scheme, Source

__all__ = ["ExecutionError", "ExecutionReport", "execute"]

_LEARNABLE = frozenset({"F16", "BF16", "F32", "F64", "C64", "C128"})
"""Dtypes whose parameters keep ``requires_grad``; packed, integer and F8 ones cannot learn."""


def execute(
    model: nn.Module,
    items: Iterable[LoadItem],
    *,
    device_map: Mapping[str, Device | torch.device] | None,
    main_device: Device | torch.device | None = None,
    root: Path,
    tensors: Mapping[str, StoredTensor],
    schemes: Mapping[str, Scheme],
    compare: Iterable[Sequence[str]] = (),
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    offload_buffers: bool = False,
    dispatch: bool = True,
    target: Target | None = None,
    loading: LoadOptions | None = None,
    ahead_bytes: int = AHEAD_BYTES,
    expert_offload: bool = True,
    expert_cache: int | str | None = None,
    room: int | None = None,
    seal: Seal | None = None,
    known: Known | None = None,
) -> ExecutionReport:
    """Load *items* from the checkpoint at *root* into *model* and dispatch it with accelerate.

    Unchanged CPU tensors are views of the mapped files, disk tensors stay in the files and are
    fetched at each forward pass; nothing is written, but with *target* those that must be
    computed, once. Tied names get one Parameter. *compare*
    holds groups of names of which several are stored: they are tied if their bits are equal.
    With ``device_map=None`` tensors go where those of the model are, or to the CPU, and nothing
    is dispatched; ``dispatch=False`` places them by their own device only. The other arguments
    are those of ``accelerate.dispatch_model``. *loading* says how tensors are made and verified,
    and with *seal* the files must be at the end what they were when that was made.
    *known* is what the files were when their headers were read: one that is replaced or written to
    while others are read is refused, as the weights would be of two checkpoints.

    At most *ahead_bytes* of computed weights are made in the background before a forward pass
    comes to them; with 0 nothing is done ahead. With *expert_offload* stacked experts that are
    offloaded are brought one by one, and *expert_cache* bytes of them kept on the device that
    computes. None is a quarter of what is free there, and no more than *room*, what the plan
    leaves unused.

    Raises :class:`ExecutionError`, which names what is wrong, and leaves the model as it was.
    """
    clock = Clock()
    cache = None if expert_cache is None else parse_size(expert_cache)
    by_expert = ExpertOptions(expert_offload, cache, room)
    options = DispatchOptions(
        skip_keys, preload_module_classes, force_hooks, offload_buffers, ahead_bytes
    )
    job = _Job(
        model,
        items,
        root=root,
        tensors=tensors,
        schemes=schemes,
        options=options,
        loading=loading,
        known=known,
    )
    job.check(device_map, main_device, dispatch=dispatch)
    job.settle(compare)
    if target is not None:
        job.materialize(target)
    clock.lap("check")
    made = job.make()
    clock.lap("make")
    snapshot = Snapshot(model)
    try:
        job.install(made)
        if dispatch and device_map is not None and job.route is not None:
            job.dispatch(job.route, device_map, made, by_expert)
        clock.lap("dispatch")
        bytes_read = job.bytes_read
        verification = job.verify(seal)
    except BaseException:
        snapshot.restore()
        raise
    if job.experts is not None:
        job.notes += index_experts(model, job.experts.names)
    clock.lap("verify")
    return ExecutionReport(
        seconds=clock.seconds,
        bytes_by_device=job.bytes_by_device(),
        n_tensors=len(job.items),
        bytes_read=bytes_read,
        verification=verification,
        notes=tuple(job.notes),
        bytes_written=0 if job.computed is None else job.computed.bytes_written,
        experts=job.experts,
        bytes_made=job.bytes_made,
        work_bytes=job.work_bytes,
        peak_bytes=peak_memory(),
        seconds_by_step=clock.laps,
    )


class _Job:
    """One execution: what each step hands to the next."""

    route: Route | None = None
    computed: Materialized | None = None
    experts: ExpertOffload | None = None
    bytes_made = 0
    work_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        items: Iterable[LoadItem],
        *,
        root: Path,
        tensors: Mapping[str, StoredTensor],
        schemes: Mapping[str, Scheme],
        options: DispatchOptions,
        loading: LoadOptions | None = None,
        known: Known | None = None,
    ) -> None:
        self.model, self.schemes, self.options = model, schemes, options
        self.loading = loading or LoadOptions()
        self.items = list(items)
        self.slots = find_slots(model)
        # Only what is needed: the weights map keeps its reader as long as the model lives.
        used = (name for item in self.items for name in needs(item))
        self.located = {name: tensors[name] for name in used if name in tensors}
        self.root = root
        self.known: Known = {} if known is None else known
        copies = self.loading.copy
        self.reader = Reader(root, self.located, known=self.known, copies=copies)
        # Another one for what is read once: it lets go of the pages, which a view must not lose.
        self.passing = PassingReader(root, self.located, known=self.known, copies=copies)
        self.notes: list[Finding] = []

    def check(
        self,
        device_map: Mapping[str, Device | torch.device] | None,
        main_device: Device | torch.device | None,
        *,
        dispatch: bool,
    ) -> None:
        """Find every fault before anything is made; tie what the model has tied."""
        found = list(
            faults(self.model, self.slots, self.items, reader=self.reader, schemes=self.schemes)
        )
        if not found:
            self._follow()
        if device_map is not None:
            modules = frozenset(p for p, _ in self.model.named_modules(remove_duplicate=False))
            route = make_route(
                device_map,
                main_device=main_device,
                force_hooks=self.options.force_hooks,
                modules=modules,
            )
            self.route = route if dispatch else replace(route, offloaded=frozenset())
            found += route_faults(self.slots, self.items, self.route)
            found += hook_faults(self.slots, self._is_fetched)
            if not dispatch and "disk" in route.device_map.values():
                found.append("weights on 'disk' need hooks: dispatch=False cannot leave them there")
        if found:
            more = f"\n… and {len(found) - 10} more" if len(found) > 10 else ""
            raise ExecutionError("\n".join(found[:10]) + more)
        self.notes += unfilled(self.model)
        if kept := waived(self.slots, self.items):
            text = f"no tensor of the plan provides {shown(kept)}: they keep their initial values"
            self.notes.append(Finding("kept-initial", "warning", text))

    def _follow(self) -> None:
        by_owner: dict[str, list[str]] = {}
        for name, owner in followers(self.slots, self.items).items():
            by_owner.setdefault(owner, []).append(name)
        self.items = [
            replace(item, aliases=(*item.aliases, *more))
            if (more := [n for name in item.names for n in by_owner.get(name, ())])
            else item
            for item in self.items
        ]

    def settle(self, compare: Iterable[Sequence[str]]) -> None:
        """Tie equal copies, also of what is one tensor in the model and stored more than once."""
        groups = [tuple(group) for group in compare]
        covered = [set(group) for group in groups]
        shared: dict[int, list[str]] = {}
        for item in self.items:
            shared.setdefault(id(self.slots[item.name].tensor), []).append(item.name)
        groups += [
            tuple(names)
            for names in shared.values()
            if len(names) > 1 and not any(group.issuperset(names) for group in covered)
        ]
        near = [group for group in groups if not self._is_apart(group)]
        self.notes += [_apart_note(group) for group in groups if group not in near]
        if near:
            self.items, notes = settle(
                self.items, near, equal=lambda a, b: equal(a, b, self.evaluate)
            )
            self.notes += notes
        if clashes := list(shared_places(self.slots, self.items)):
            raise ExecutionError("\n".join(clashes[:10]))

    def _is_apart(self, names: Iterable[str]) -> bool:
        """Tell whether the names are on several devices that compute."""
        if self.route is None:
            return False
        return len({self.route.device_of(name) for name in names} - self.route.offloaded) > 1

    def evaluate(self, item: LoadItem, region: Region | None = None) -> torch.Tensor:
        """Return an item, or a region of it, on the CPU as it will be in memory."""
        return item.made(self.reader, self.schemes, region=region)

    def materialize(self, target: Target) -> None:
        """Have what stays on disk and must be computed in files of our own."""
        on_disk = [item for item in self.items if self._home(item) is None]
        self.computed = materialize(
            on_disk, target, types=self.reader.type_of, evaluate=self.evaluate
        )
        self.notes += self.computed.notes

    def make(self) -> dict[str, torch.Tensor]:
        """Return every tensor by the name of its item; those on disk without data, on meta."""
        made: dict[str, torch.Tensor] = {}
        wanted: list[tuple[LoadItem, Device | torch.device]] = []
        readers = Counter(name for item in self.items for name in needs(item))
        for item in self.items:
            device = self._home(item)
            if device is None:
                shape = torch_shape(item.dtype, item.shape)
                made[item.name] = torch.empty(shape, dtype=to_torch(item.dtype), device="meta")
            elif self._stays_mapped(item, device, readers):
                made[item.name] = self.evaluate(item)
            else:
                wanted.append((item, device))
        loaded = load(wanted, write=self._write, tensors=self.located, options=self.loading)
        self.bytes_made, self.work_bytes = loaded.n_bytes, loaded.peak_bytes
        return {**made, **loaded.tensors}

    def _stays_mapped(
        self, item: LoadItem, device: Device | torch.device, readers: Mapping[str, int]
    ) -> bool:
        """Tell whether the tensor can be a view of its file."""
        if str(device) != "cpu" or self.loading.copy or not is_view(item, self.reader.type_of):
            return False
        (name,) = needs(item)
        # Two views of one range in the file: training one tensor would change the other.
        shared = isinstance(item.node, Source) and readers[name] > 1
        return self.reader.is_mapped(name) and not shared

    def _write(self, item: LoadItem, region: Region, out: torch.Tensor) -> None:
        """Write a region of an item to *out*; called from several threads."""
        try:
            item.made(self.passing, self.schemes, region=region, out=out)
        finally:
            self.passing.release()

    @property
    def bytes_read(self) -> int:
        """Bytes asked of the files so far."""
        return self.reader.bytes_read + self.passing.bytes_read

    def _home(self, item: LoadItem) -> Device | torch.device | None:
        """Return where the tensor is kept in memory; None: nowhere, it stays in its files."""
        if self.route is None:
            now = self.slots[item.name].tensor.device
            return "cpu" if now.type == "meta" else now
        fetched = [self._is_fetched(name) for name in item.names]
        devices = [self.route.device_of(name) for name in item.names]
        for device, is_fetched in zip(devices, fetched, strict=True):
            if not is_fetched:
                # Buffers of offloaded modules live where those compute.
                return self.route.main_device if device in self.route.offloaded else device
        return "cpu" if "cpu" in devices else None

    def _is_fetched(self, name: str) -> bool:
        """Tell whether accelerate's hooks fetch the tensor from the weights map."""
        route, slot = self.route, self.slots[name]
        if route is None or not route.is_offloaded(name):
            return False
        if slot.is_parameter:
            return True
        return self.options.offload_buffers and slot.persistent and not route.is_loose(parent(name))

    def install(self, made: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors into the model, one Parameter for all names of an item."""
        for item in self.items:
            value = made[item.name]
            if item.kind == "parameter":
                value = _parameter(self.slots[item.name].tensor, value, item.dtype)
            for name in item.names:
                self.slots[name].put(value)
        self.notes += left_behind(self.model, self.slots, self.items)

    def dispatch(
        self,
        route: Route,
        device_map: Mapping[str, Device | torch.device],
        made: Mapping[str, torch.Tensor],
        by_expert: ExpertOptions,
    ) -> None:
        """Have accelerate attach its hooks."""
        loose = loose_modules(self.model, route, self._is_fetched)
        weights = self._weights(made, set(loose))
        if by_expert.offload and (stacked := self._stacked()):
            limit = by_expert.limit(torch.device(route.main_device))
            self.experts = ExpertOffload(weights, stacked, limit=limit)
        try:
            hand_over(
                self.model,
                device_map,
                route=route,
                weights=weights,
                loose=loose,
                slots=self.slots,
                options=self.options,
                experts=self.experts,
            )
        except Exception as error:
            told = [f"accelerate cannot dispatch the model: {error}"]
            told += list(split_places(self.slots, route))[:3]
            raise ExecutionError("\n".join(told)) from error

    def _stacked(self) -> frozenset[str]:
        return stacked_experts(self.items, self.slots, self._is_fetched)

    def _weights(self, made: Mapping[str, torch.Tensor], loose: set[str]) -> WeightsMap:
        def served(name: str) -> bool:
            slot = self.slots[name]
            return self._is_fetched(name) or (slot.is_parameter and parent(name) in loose)

        items = [item for item in self.items if any(map(served, item.names))]
        extra = filter(served, waived(self.slots, self.items))
        return WeightsMap(
            items,
            reader=self.reader,
            schemes=self.schemes,
            kept={i.name: made[i.name] for i in items if not made[i.name].is_meta},
            extra={name: self.slots[name].tensor.detach() for name in extra},
            computed={} if self.computed is None else self.computed.readers,
            ahead_bytes=self.options.ahead_bytes,
        )

    def verify(self, seal: Seal | None = None) -> Verification:
        """Compare with the files, mapped anew; raise if anything differs or *seal* is broken."""
        copies = self.loading.copy
        fresh = PassingReader(self.root, self.located, known=self.known, copies=copies)
        try:
            result = verify(
                self.model,
                self.items,
                read=fresh.read,
                types=fresh.type_of,
                schemes=self.schemes,
                tensors=self.located,
                sample_bytes=self.loading.sample_bytes,
                options=self.loading,
                release=fresh.release,
            )
        except (EvaluationError, ReadError) as error:
            raise ExecutionError(f"what was loaded cannot be verified: {error}") from error
        if seal is not None:
            result = replace(result, problems=(*seal.broken(), *result.problems))
        if not result.ok:
            told = "verification failed: " + "; ".join(result.problems[:10])
            if self.computed is not None and self.computed.readers:
                told += f". If that is so without materialize, delete {str(self.computed.folder)!r}"
            raise ExecutionError(told)
        return result

    def bytes_by_device(self) -> dict[str, int]:
        """Return the bytes of all items by the device that keeps them."""
        total: dict[str, int] = {}
        for item in self.items:
            home = self._home(item)
            device = "disk" if home is None else str(home)
            total[device] = total.get(device, 0) + item.nbytes
        return total


def _apart_note(names: Iterable[str]) -> Finding:
    return Finding(
        "copies-apart",
        "info",
        f"{shown(names)} may be equal, but are planned for different devices: each keeps its copy",
    )


def _parameter(old: torch.Tensor, value: torch.Tensor, dtype: str) -> nn.Parameter:
    """Return *value* as a parameter of the class and with the attributes of *old*."""
    kind = type(old) if issubclass(type(old), nn.Parameter) else nn.Parameter
    learns = old.requires_grad and dtype in _LEARNABLE
    # The way nn.Parameter itself goes; the constructors of subclasses want other arguments.
    new: nn.Parameter = torch.Tensor._make_subclass(kind, value, learns)  # type: ignore[assignment]
    vars(new).update(vars(old))
    return new
