"""Placing: from a model's recipes, or a checkpoint's names, to a placement.

Here the bytes of the weights meet what else takes room (cache, activations, what the user keeps
free) and what one step of generation touches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.finding import Finding
from modelquirks.planner.mapping.derive import Derived
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.planner.placement.activations import activations_of
from modelquirks.planner.placement.cache import cache_of, module_states
from modelquirks.planner.placement.machine import Machine, read_machine
from modelquirks.planner.placement.memory import (
    Device,
    normalize_max_memory,
    parse_device,
    parse_size,
    this_machine,
)
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.outline import Outline
from modelquirks.planner.placement.placement import Placement, place
from modelquirks.planner.placement.touched import experts_of, stored_share, takes_all_experts
from modelquirks.planner.placement.tree import tree_of_checkpoint
from modelquirks.planner.placement.wishes import Wishes, parse_pin
from modelquirks.planner.placement.workload import Reserve, Workload

__all__ = ["DeviceMap", "Request", "placement_of", "prepare"]

DeviceMap = str | Mapping[str, Any] | None

_BATCHES = 13
"""For throughput, batches of 1, 2, 4, … 4096 sequences are tried."""


@dataclass(frozen=True)
class Request:
    """What somebody wants of a placement."""

    device_map: DeviceMap = "auto"
    max_memory: Mapping[Any, Any] | None = None
    machine: Machine | None = None
    workload: Workload = field(default_factory=Workload)
    kept_free: Mapping[Device, int] = field(default_factory=dict)
    pins: tuple[tuple[str, Device], ...] = ()
    frequencies: Mapping[str, Sequence[float]] | None = None
    no_split: Collection[str] = ()
    """Classes, beside those of the model and of the quirks."""
    offload_buffers: bool = False
    expert_offload: bool = True
    """Whether stacked experts are moved one by one where they are offloaded."""
    experts_indexed: bool = False
    """Whether the model is known to take each by its index, and never the stack."""

    @classmethod
    def of(
        cls,
        machine: str | Machine | None,
        workload: Workload | None,
        reserve: Mapping[Any, Any] | None,
        pins: Sequence[str | tuple[str, Any]],
        **others: Any,
    ) -> Request:
        """Return a request with everything read; ValueError for what means nothing."""
        parsed = [parse_pin(p if isinstance(p, str) else f"{p[0]}={p[1]}") for p in pins]
        return cls(
            machine=read_machine(machine) if isinstance(machine, str) else machine,
            workload=workload or Workload(),
            kept_free={parse_device(d): parse_size(n) for d, n in (reserve or {}).items()},
            pins=tuple(pin for each in parsed for pin in each),
            **others,
        )


def placement_of(
    manifest: Manifest,
    skeleton: Skeleton | None,
    derived: Derived | None,
    offers: Offers,
    config: Mapping[str, Any],
    request: Request,
) -> Placement:
    """Return where everything goes; an empty placement with the reason if nobody can say."""
    if request.device_map is None:
        return _nowhere()
    tree: ModelTree | Outline | None
    if skeleton is None or derived is None:
        tree = tree_of_checkpoint(manifest, offers.direct, _share(config, request))
    else:
        tree = ModelTree(skeleton, derived.recipes, derived.aliases, request.no_split)
    if tree is None:
        return _nowhere("the sizes are not known without the files, so nothing was placed")
    memory = _memory(request, ask_torch=skeleton is not None)
    if request.workload.objective != "throughput":
        return _placed(tree, skeleton, config, request, memory)
    return _most(tree, skeleton, config, request, memory)


def _share(config: Mapping[str, Any], request: Request) -> Callable[[str, str], float] | None:
    """Return what a step reads of stored experts; None if all of it, or if the batch is open."""
    experts = experts_of(config, request.frequencies)
    if experts is None or request.workload.objective == "throughput":
        return None
    return stored_share(experts, batch=request.workload.batch)


def _placed(
    tree: ModelTree | Outline,
    skeleton: Skeleton | None,
    config: Mapping[str, Any],
    request: Request,
    memory: Mapping[Device, int | None],
) -> Placement:
    """Return the placement for one batch."""
    on_cpu = all(device in ("cpu", "disk") for device in memory)
    prepared, wishes, findings = prepare(tree, skeleton, config, request, on_cpu=on_cpu)
    placement = place(
        prepared,
        device_map=request.device_map or "auto",
        max_memory=memory,
        offload_buffers=request.offload_buffers,
        wishes=wishes,
    )
    return replace(placement, findings=(*placement.findings, *findings))


def prepare(
    tree: ModelTree | Outline,
    skeleton: Skeleton | None,
    config: Mapping[str, Any],
    request: Request,
    *,
    on_cpu: bool = False,
) -> tuple[Outline, Wishes, tuple[Finding, ...]]:
    """Return *tree* with what a step touches and keeps, what to heed, and what is not known.

    *on_cpu*: there is no accelerator to compute on.
    """
    if isinstance(tree, ModelTree):
        experts = experts_of(config, request.frequencies)
        tree = tree.outline(
            experts,
            batch=request.workload.batch,
            by_expert=request.expert_offload and not takes_all_experts(config),
            indexed=request.experts_indexed,
        )
    needs = _needs(tree.coarse.modules, skeleton, config, request.workload, on_cpu=on_cpu)
    wishes = Wishes(
        machine=request.machine,
        workload=request.workload,
        kept_free=request.kept_free,
        running=needs.running,
        cached=needs.cached,
        pins=request.pins,
    )
    return _with_state(tree, needs), wishes, needs.findings


class _Needs(NamedTuple):
    """What running takes beside the weights."""

    states: Mapping[str, int]
    """Bytes of cache by module, at most: after the prompt."""
    reads: Mapping[str, int]
    """Bytes of it that a step reads."""
    cached: str
    """How these were worked out."""
    running: Reserve | None
    findings: tuple[Finding, ...]


def _needs(
    modules: Sequence[str],
    skeleton: Skeleton | None,
    config: Mapping[str, Any],
    workload: Workload,
    *,
    on_cpu: bool,
) -> _Needs:
    """Return what the cache and the activations of *workload* take, as far as the config tells."""
    if not workload.context:
        return _Needs({}, {}, "", None, ())
    full = config if skeleton is None or not skeleton.config else skeleton.config
    dtype = _dtype_of(full, skeleton)
    if dtype is None:
        text = "the dtype of the model is not known, so no room was kept for cache and activations"
        return _Needs({}, {}, "", None, (Finding("cache-unknown", "warning", text),))
    sizes = cache_of(full, workload, dtype=dtype)
    states, unknown = module_states(modules, sizes, after_prompt=True)
    reads, _ = module_states(modules, sizes)
    running, silent = activations_of(full, workload, dtype=dtype, on_cpu=on_cpu)
    findings = [
        Finding(f"{what}-unknown", "warning", f"no room was kept for {of}: {why}")
        for what, of, why in (
            ("cache", "the cache", unknown),
            ("activations", "activations", silent),
        )
        if why
    ]
    return _Needs(states, reads, sizes.formula, running, tuple(findings))


def _dtype_of(config: Mapping[str, Any], skeleton: Skeleton | None) -> str | None:
    """Return the dtype that the model computes in: that of most bytes, else what a config says."""
    if skeleton is None:
        said = config.get("dtype") or config.get("torch_dtype")
        try:
            return None if said is None else from_torch(str(said))
        except ValueError:
            return None
    counts: dict[str, int] = {}
    for family in skeleton.families.values():
        even = skeleton.even_types.get(family.template)
        alike = [skeleton.tensors[name] for name in (family.names[:1] if even else family.names)]
        for tensor in alike:
            if tensor.dtype in ("F64", "F32", "BF16", "F16"):
                n_bytes = tensor.nbytes * (len(family) // len(alike))
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + n_bytes
    return max(counts, key=counts.__getitem__, default=None)


def _with_state(tree: Outline, needs: _Needs) -> Outline:
    if not needs.states:
        return tree

    def stated(some: ModuleTree) -> ModuleTree:
        return replace(some, state=needs.states, state_read=needs.reads)

    return Outline(stated(tree.coarse), lambda: stated(tree.whole))


def _most(
    tree: ModelTree | Outline,
    skeleton: Skeleton | None,
    config: Mapping[str, Any],
    request: Request,
    memory: Mapping[Device, int | None],
) -> Placement:
    """Return the placement of the batch that makes most tokens a second."""

    def of(batch: int) -> Placement:
        workload = replace(request.workload, batch=batch, objective="latency")
        return _placed(tree, skeleton, config, replace(request, workload=workload), memory)

    first, *larger = _upwards(request.workload.batch)
    best = of(first)
    for batch in larger:
        found = of(batch)
        if not found.ok or found.prediction is None or best.prediction is None:
            break
        if found.prediction.tokens_per_second > best.prediction.tokens_per_second:
            best = found
    if best.prediction is None:
        return best
    return replace(best, prediction=best.prediction._replace(objective="throughput"))


def _upwards(most: int) -> Iterator[int]:
    """Yield batches, doubled each time: up to *most* if that is more than one."""
    for power in range(_BATCHES):
        if most > 1 and 2**power >= most:
            yield most
            return
        yield 2**power


def _memory(request: Request, *, ask_torch: bool) -> Mapping[Device, int | None]:
    """Return bytes by device; as with accelerate, what fits nowhere else may go to the disk."""
    a_map = isinstance(request.device_map, Mapping)
    if request.max_memory is not None:
        given = normalize_max_memory(request.max_memory)
    elif request.machine is not None:
        return request.machine.memory
    elif a_map:
        return {}
    else:
        given = this_machine(ask_torch=ask_torch)
    if "disk" not in given:
        return given if a_map else {**given, "disk": None}
    return {device: size for device, size in given.items() if (device, size) != ("disk", 0)}


def _nowhere(why: str = "") -> Placement:
    findings = (Finding("not-placed", "info", why),) if why else ()
    return Placement(
        device_map={}, devices={}, memory={}, main_device=None, solver="none", reasons={},
        findings=findings,
    )  # fmt: skip
