"""Perform a plan on a model that is divided among ranks: each reads what it has of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.distributed.agreement import Agreement, judge
from modelquirks.planner.distributed.ranks import together
from modelquirks.planner.distributed.shard import resharded, take_notice
from modelquirks.planner.distributed.shell import Shell
from modelquirks.planner.execution.execute import ExecutionReport, execute
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.openfile import known_of
from modelquirks.planner.execution.perform import computed, items_of, same_model, unchanged
from modelquirks.planner.execution.preflight import left_behind, unfilled
from modelquirks.planner.execution.slots import find_slots
from modelquirks.planner.execution.snapshot import Snapshot
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.registry import Registry

__all__ = ["perform_together"]

_MEANINGLESS = frozenset(
    ["offload_folder", "materialize", "skip_keys", "preload_module_classes", "force_hooks"]
)
"""What is for accelerate, which has no part in this."""


def perform_together(
    plan: Plan,
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    **options: Any,
) -> ExecutionReport:
    """Load into *model* what this rank has of it, while the other ranks do the same.

    All ranks of *group* (by default: all) call this with plans that say the same and with their
    own *model*: sharded by the standard calls while on meta or not, or a part of the modules (a
    pipeline stage) that keeps the names which the whole model has. Of a DTensor only the rank's own
    elements are read and made, of any other tensor all; nothing is sent from rank to rank but
    what they have to say to each other. Whatever the recipe makes as a whole (``Opaque``), each
    rank that has a part of it makes as a whole. What the plan ties and the sharded model has as
    two parameters is loaded into both and not tied; the device map of the plan plays no role.

    Before anything is read the ranks compare their plans, and see that each planned tensor has a
    place on some rank. They wait for each other again when everything is made and when it is in
    the model and verified, at most *timeout* seconds (1800). If one fails all raise
    :class:`ExecutionError`, which names it and its reason, and their models are as before. The
    report is of this rank.
    """
    given = {name: options.pop(name) for name in _MEANINGLESS & options.keys()}
    if told := sorted(name for name, value in given.items() if value):
        raise ValueError(
            f"{shown(told)} are for a model that accelerate dispatches: a sharded one is not, each "
            "rank keeps its part where the model has it"
        )
    with together(group, timeout) as ranks:
        ready = ranks.step(
            "load the plan on all ranks",
            partial(_Ready.of, plan, model),
            tell=lambda ready: Agreement.of(plan, ready.lacking),
            judge=judge(plan),
        )
        with computed(plan, model, ready.registry):
            job = ranks.step("load", partial(_Job, ready, model))
            report = ranks.step("load", partial(job.load, options))
            try:
                ranks.step("put what was loaded into the model", job.install)
            except BaseException:
                job.undo()
                raise
    return replace(report, notes=(*report.notes, *job.notes))


def _empty_shards(plan: Plan, model: nn.Module) -> Iterator[str]:
    """Yield the sharded tensors without data that nothing provides."""
    slots = find_slots(model)
    for entry in plan.audit.model:
        for name in entry.names if entry.kind in ("absent", "waived") else ():
            tensor = slots[name].tensor if name in slots else None
            if isinstance(tensor, DTensor) and tensor.is_meta:
                yield name


@dataclass(frozen=True, slots=True)
class _Ready:
    """A plan that fits the files and the model of this rank."""

    plan: Plan
    manifest: Manifest
    registry: Registry
    items: Sequence[LoadItem]
    lacking: frozenset[str]

    @classmethod
    def of(cls, plan: Plan, model: nn.Module) -> _Ready:
        """Bring plan, files and model together; PlanError if they do not fit."""
        if not plan.ok:
            raise PlanError(plan.refusal())
        if plan.model is None:
            raise PlanError("the plan was made without a model, so nothing says what to load")
        hooked = [path for path, module in model.named_modules() if hasattr(module, "_hf_hook")]
        if hooked:
            raise PlanError(f"a sharded model cannot have accelerate's hooks: {shown(hooked, 3)}")
        resharded(model)
        if empty := list(_empty_shards(plan, model)):
            raise PlanError(
                f"{shown(empty)} are not in the checkpoint, and no rank has values for them: fill "
                "them before the model is sharded"
            )
        manifest = unchanged(plan)
        skeleton = skeleton_of(model)
        items = list(items_of(plan, skeleton, partial=True))
        lacking = same_model(plan, skeleton, items, partial=True)
        return cls(plan, manifest, plan.registry or Registry.load(), items, lacking)


class _Job:
    """One rank's share of the work."""

    def __init__(self, ready: _Ready, model: nn.Module) -> None:
        self._ready, self._model = ready, model
        self._shell = Shell(model)
        self._parts = self._shell.items(ready.items)
        self._snapshot = Snapshot(model)
        self.notes: list[Finding] = list(_notes(ready, self._shell, self._parts))

    def load(self, options: dict[str, Any]) -> ExecutionReport:
        """Make this rank's parts, beside the model."""
        ready = self._ready
        report = execute(
            self._shell.model,
            self._parts,
            device_map=None,
            root=ready.manifest.root,
            tensors=ready.manifest.readable,
            schemes=ready.registry.schemes,
            known=known_of(ready.manifest.shards),
            **options,
        )
        if torn := list(self._shell.torn()):
            listed = "; ".join(shown(names) for names in torn[:3])
            raise ExecutionError(
                f"the checkpoint stores different values for names that are one tensor of the "
                f"sharded model: {listed}. Build the model without that tie before sharding it"
            )
        return report

    def install(self) -> None:
        """Put the parts into the model."""
        before = self._shell.adopt(self._parts)
        take_notice(self._model)
        self.notes += [*unfilled(self._model), *left_behind(self._model, before, self._parts)]

    def undo(self) -> None:
        """Give the model back what it had."""
        self._snapshot.restore()
        take_notice(self._model)


def _notes(ready: _Ready, shell: Shell, parts: Iterable[LoadItem]) -> Iterator[Finding]:
    if ready.plan.options.dispatch:
        text = "the device map of the plan is for one process: here each rank has its own part"
        yield Finding("device-map-unused", "info", text)
    for names in shell.apart(ready.items):
        text = (
            f"{shown(names)} are one tensor by the plan and several in the sharded model: each has "
            "its copy, and training will make them differ"
        )
        yield Finding("not-tied", "warning", text)
    here = {name for part in parts for name in part.names}
    for group in ready.plan.compare:
        names = [name for name in group if name in here]
        if len(names) > 1:
            text = f"{shown(names)} may be equal: in a sharded model each keeps its own copy"
            yield Finding("copies-apart", "info", text)
    wholes = [part.name for part in parts if part.is_opaque]
    if wholes:
        text = f"{shown(wholes)} are made as a whole on each rank that has a part of them"
        yield Finding("made-whole", "info", text)
