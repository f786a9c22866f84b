"""Perform: a plan, a model and the files brought together, checked, and executed."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.beside import beside
from modelquirks.planner.checkpoint.fingerprint import changed, layout_digest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.digest.digest import Digest
from modelquirks.planner.digest.planned import sealed
from modelquirks.planner.execution.ahead import AHEAD_BYTES
from modelquirks.planner.execution.execute import ExecutionReport, execute
from modelquirks.planner.execution.loading import MORE_MEMORY
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions, Verify
from modelquirks.planner.execution.materialize import forecast
from modelquirks.planner.execution.nomemory import with_memory
from modelquirks.planner.execution.openfile import known_of
from modelquirks.planner.execution.progress import Progress
from modelquirks.planner.execution.reader import Reader
from modelquirks.planner.execution.slots import find_slots
from modelquirks.planner.execution.target import Target
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.recipes import stored_names
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.planner.opening import fetch_files, reopened
from modelquirks.planner.placement.devicemap import expand
from modelquirks.planner.placement.memory import Device, parse_size
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = [
    "computed",
    "enough_memory",
    "files_needed",
    "foresee",
    "items_of",
    "perform",
    "same_model",
    "unchanged",
]


def perform(
    plan: Plan,
    model: torch.nn.Module,
    *,
    offload_folder: str | Path | None = None,
    materialize: bool = False,
    together: bool = False,
    copy: bool = False,
    load_memory: int | str | None = None,
    verify: Verify = "samples",
    digest: Digest | str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ExecutionReport:
    """Execute *plan* on *model*; PlanError before anything is touched if it must not be.

    Nothing is written to *offload_folder* without *materialize*. *together*: with the other ranks
    of torch.distributed, as is always done if the model is sharded. ValueError for options that
    mean nothing, DigestError for a *digest* that cannot be read.
    """
    loading = LoadOptions.of(copy=copy, load_memory=load_memory, verify=verify, progress=progress)
    if together or _is_sharded(model):
        from modelquirks.planner.distributed.perform import perform_together

        if digest is not None:
            raise ValueError(
                "digest is for a model that one process loads: here each rank reads its part. "
                "Check the files first: `modelquirks digest CHECKPOINT --check FILE`"
            )
        if offload_folder is not None or materialize:
            options |= {"offload_folder": offload_folder, "materialize": materialize}
        return perform_together(plan, model, loading=loading, **options)
    if materialize and offload_folder is None:
        raise ValueError("materialize=True writes weights: say where, with offload_folder")
    options.setdefault("expert_offload", plan.options.expert_offload)
    options["ahead_bytes"] = _ahead_bytes(plan, options.get("ahead_bytes"))
    if not plan.ok:
        raise PlanError(plan.refusal())
    if plan.model is None:
        raise PlanError("the plan was made without a model, so nothing says what to load")
    known = Digest.load(digest) if isinstance(digest, str | Path) else digest
    manifest = unchanged(plan)
    skeleton = skeleton_of(model)
    items = list(items_of(plan, skeleton))
    same_model(plan, skeleton, items)
    registry = plan.registry or Registry.load()
    seal, told = None, list[Finding]()
    if known is not None:
        seal, note = sealed(plan, manifest, known, registry, loading)
        told.append(note)
    target = None
    if materialize and offload_folder is not None:
        target = _target(offload_folder, plan, manifest, registry)
    with computed(plan, model, registry):
        report = execute(
            model,
            items,
            device_map=dict(plan.device_map) if plan.options.dispatch else None,
            main_device=plan.placement.main_device,
            root=manifest.root,
            tensors=manifest.readable,
            schemes=registry.schemes,
            compare=plan.compare,
            offload_buffers=plan.options.offload_buffers,
            dispatch=plan.options.dispatch,
            target=target,
            room=_room(plan, plan.placement.main_device),
            loading=loading,
            seal=seal,
            known=known_of(manifest.shards),
            **options,
        )
    return replace(report, notes=(*told, *report.notes))


def enough_memory(plan: Plan) -> AbstractContextManager[None]:
    """Return what turns a want of memory into an :class:`ExecutionError` that says what to do."""
    text = f"there was not enough memory to load {plan.shown!r}: {MORE_MEMORY}"
    return with_memory(ExecutionError, text)


def _room(plan: Plan, device: Device | None) -> int | None:
    """Return the bytes that the plan leaves unused on *device*, if it has a limit."""
    memory = None if device is None else plan.placement.memory.get(device)
    if memory is None or memory.capacity_bytes is None:
        return None
    kept = [r.n_bytes for r in plan.placement.reserves if r.device in ("*", str(device))]
    return max(0, memory.capacity_bytes - memory.used_bytes - sum(kept))


def _ahead_bytes(plan: Plan, asked: int | str | None) -> int:
    """Return how much may be made ahead: what is asked for, else what the plan leaves unused."""
    if asked is not None:
        return parse_size(asked)
    room = _room(plan, "cpu")
    # With 0 even the page cache would not be filled ahead, which is nobody's memory.
    return AHEAD_BYTES if room is None else max(1, min(AHEAD_BYTES, room))


def _is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether *model* holds DTensors, without importing what nobody has used."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    tensors = chain(model.parameters(), model.buffers())
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


@contextmanager
def computed(plan: Plan, model: torch.nn.Module, registry: Registry) -> Generator[None, None, None]:
    """Give *model* what no checkpoint holds and its library computes; take it back on failure."""
    slots = find_slots(model)
    absent = [n for e in plan.audit.model if e.kind in ("absent", "waived") for n in e.names]
    empty = [name for name in absent if name in slots and slots[name].tensor.is_meta]
    library = registry.library(model, list(slots)) if empty else None
    values = {} if library is None else library[0].computed(empty)
    try:
        for name, value in values.items():
            slots[name].put(value)
        yield
    except BaseException:
        for name in values:
            slots[name].put(slots[name].tensor)
        raise


def foresee(plan: Plan, skeleton: Skeleton, offload_folder: str | Path) -> Finding:
    """Say what ``perform(…, materialize=True)`` would write; reads headers, writes nothing.

    An error if there is no room for it. Copies that turn out to be equal make it less.
    """
    manifest = unchanged(plan)
    target = _target(offload_folder, plan, manifest, plan.registry or Registry.load())
    items = list(items_of(plan, skeleton))
    keys = expand(plan.device_map, [name for item in items for name in item.names])
    on_disk = [
        item
        for item in items
        if (item.kind == "parameter" or plan.options.offload_buffers)
        and all(name in keys and plan.device_map[keys[name]] == "disk" for name in item.names)
    ]
    return forecast(on_disk, target, types=Reader(manifest.root, manifest.readable).type_of)


def _target(folder: str | Path, plan: Plan, manifest: Manifest, registry: Registry) -> Target:
    return Target(
        folder=Path(folder),
        root=manifest.root,
        shards=manifest.shards,
        layout=plan.layout,
        makers={
            scheme: f"{info.distribution} {info.version}"
            for info in registry.plugins
            for scheme in info.schemes
        },
    )


def items_of(plan: Plan, skeleton: Skeleton, *, partial: bool = False) -> Iterator[LoadItem]:
    """Yield what is to be loaded, tensor by tensor.

    *partial*: the model is a part of the one that was planned for, so what it has not is left out;
    otherwise that is a PlanError.
    """
    shared: dict[str, list[str]] = {}
    for alias, owner in plan.aliases.items():
        shared.setdefault(owner, []).append(alias)
    named = [(recipe, name, env) for recipe in plan.recipes for name, env in recipe.items()]
    keys = expand(plan.device_map, [name for _, name, _ in named])
    for recipe, planned, env in named:
        names = [planned, *shared.get(planned, ())]
        if partial:
            names = [name for name in names if name in skeleton.wanted]
            if not names:
                continue
        name = names[0]
        tensor = skeleton.tensors.get(name)
        if tensor is None or tensor.kind == "computed":
            raise PlanError(
                f"the model has no tensor {name!r}: it is not the one the plan was made for"
            )
        yield LoadItem(
            name=name,
            node=recipe.node,
            env=env,
            dtype=recipe.type.dtype or tensor.dtype,
            shape=recipe.type.shape or tensor.shape,
            device=plan.device_map[keys[planned]] if planned in keys else "cpu",
            kind=tensor.kind,
            aliases=tuple(names[1:]),
            rule=recipe.rule,
        )


def unchanged(plan: Plan) -> Manifest:
    """Open the checkpoint of *plan*; PlanError if it is not as it was.

    Of a commit on the hub the files that the plan reads are downloaded first, if they are not here.
    """
    base = reopened(plan.path, plan.origin, lambda: plan.registry or Registry.load(), plan.opening)
    shards = plan.shards
    if plan.origin is not None:
        needed = files_needed(plan, base)
        left = {shard.name for shard in base.shards}.difference(needed)
        shards = tuple(shard for shard in shards if shard.name not in left)
        fetch_files(base, needed)
    manifest = _with_adapter(plan, base)
    told = [f.message for f in changed(manifest.root, shards, same_place=not plan.moved)]
    known = {shard.name for shard in plan.shards}
    new = [shard.name for shard in manifest.shards if shard.name not in known]
    if not told and (new or layout_digest(manifest.readable) != plan.layout):
        where = f"from {shown(new)}" if new else "from other places in the same files"
        told = [f"tensors would be read {where}, by another index or file; make the plan again."]
    if told:
        listed = "\n- ".join(told)
        raise PlanError(f"the checkpoint is not the one the plan was made for:\n- {listed}")
    return manifest


def _with_adapter(plan: Plan, base: Manifest) -> Manifest:
    """Return *base* with the adapter of *plan* as it is now, if there is one."""
    if plan.adapter is None:
        return base
    try:
        found = open_adapter(plan.adapter.path, lambda: plan.registry or Registry.load())
    except CheckpointError as error:
        raise PlanError(f"the adapter of the plan is not there any more: {error}") from error
    return beside(base, found.manifest)


def files_needed(plan: Plan, manifest: Manifest) -> tuple[str, ...]:
    """Return the files that executing *plan* reads, relative to the checkpoint's folder."""
    names = {
        name
        for recipe in plan.recipes
        for _, env in recipe.items()
        for name in stored_names(recipe.node, env)
    }
    names.update(*plan.compare)
    found = manifest.readable
    return tuple(dict.fromkeys(found[name].shard for name in sorted(names) if name in found))


def same_model(
    plan: Plan, skeleton: Skeleton, items: list[LoadItem], *, partial: bool = False
) -> frozenset[str]:
    """Refuse a model whose tensors are not those of the plan, naming the differences.

    *partial*: it may lack some, which are returned.
    """
    planned = {name for entry in plan.audit.model for name in entry.names}
    absent = frozenset(name for name in planned if name not in skeleton.wanted)
    lacking = () if partial else sorted(absent)
    further = [name for name in skeleton.wanted if name not in planned]
    shapes = [i.name for i in items if skeleton.tensors[i.name].shape != i.shape]
    arriving = {name for item in items for name in item.names}
    waived = {n for e in plan.audit.model if e.kind in ("absent", "waived") for n in e.names}
    lost = planned - arriving - waived - absent
    faults = [
        f"{text}: {shown(names)}"
        for text, names in (
            ("not in the model", lacking),
            ("not in the plan", further),
            ("of another shape", shapes),
            ("in the audit without a recipe", sorted(lost)),
        )
        if names
    ]
    if faults:
        raise PlanError("the model is not the one the plan was made for: " + "; ".join(faults))
    return absent
