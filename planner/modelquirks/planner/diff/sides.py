"""``Side``: one of two checkpoints or plans, as what is compared of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.mapping.recipes import concrete, stored_names
from modelquirks.planner.placement.devicemap import expand
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.placement.outlook import predicted
from modelquirks.planner.plan import Plan
from modelquirks.planner.wording import summary
from modelquirks.quirks.recipe import Node
from modelquirks.quirks.registry import Registry
from modelquirks.quirks.resolve import Facts, resolve

__all__ = ["Item", "Side", "of_checkpoint", "of_plan"]


class Item(NamedTuple):
    """What is compared of one tensor. None: not known on this side, so not compared."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    recipe: Node | None = None
    """How the plan makes it, over stored names."""
    made_from: str = ""
    """The same in few words."""
    state: str | None = None
    """Its class in the plan's audit: ``matched``, ``missing``…"""


@dataclass(frozen=True)
class Side:
    """One checkpoint or plan."""

    title: str
    kind: Literal["checkpoint", "plan"]
    summary: str
    items: Mapping[str, Item]
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else there is to say of it, by label. It is shown where it differs, and decides
    nothing."""
    errors: tuple[str, ...] = ()
    """What is wrong with it, so that something may be missing here."""
    logical: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name → its name in the model, and the record that says so, where a record does."""


def of_checkpoint(manifest: Manifest, registry: Registry) -> Side:
    """Return a checkpoint, by its headers, with the names that the records of *registry* give."""
    checkpoint = manifest.to_json()
    sizes = manifest.total_bytes
    return Side(
        title=manifest.shown,
        kind="checkpoint",
        summary=summary(checkpoint),
        items={name: Item(t.shape, t.dtype) for name, t in manifest.tensors.items()},
        facts={
            "format": manifest.format,
            "container": manifest.container or "none",
            "files": f"{len(manifest.shards):,}",
            "bytes": "not known" if sizes is None else f"{sizes:,} ({show_bytes(sizes)})",
        },
        errors=tuple(f.message for f in manifest.findings if f.severity == "error"),
        logical=dict(_logical(manifest, registry)),
    )


def of_plan(plan: Plan) -> Side:
    """Return a plan: of each model tensor what it is made of, and where it goes.

    A plan without a model is compared by the modules that it places.
    """
    if plan.model is not None:
        items = dict(_planned(plan))
    else:
        items = {module: Item(device=device) for module, device in _modules(plan)}
    placement = plan.placement
    used = (
        f"{device}: {show_bytes(m.used_bytes)} of {show_bytes(m.capacity_bytes)}"
        for device, m in placement.memory.items()
    )
    model = None if plan.model is None else plan.model.source
    forecast = placement.prediction
    return Side(
        title=plan.shown,
        kind="plan",
        summary=summary(plan.checkpoint) + (f", for {model}" if model else ", without a model"),
        items=items,
        facts={
            "checkpoint": plan.shown,
            "model": model or "none",
            "usable": "yes" if plan.ok else "no",
            "placed by": placement.solver,
            "main device": str(placement.main_device),
            "memory": ", ".join(used) or "nothing placed",
            "prediction": "none" if forecast is None else predicted(forecast),
            "quirks": ", ".join(quirk.name for quirk in plan.quirks) or "none",
        },
    )


def _logical(manifest: Manifest, registry: Registry) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each name that records change, with what they make of it and which these are."""
    facts = Facts(manifest.config, tuple(manifest.families.values()), manifest.container)
    for piece in resolve(registry.records, facts).renamed:
        records = ", ".join(dict.fromkeys(step.quirk for step in piece.steps))
        for member, (name, _) in zip(piece.indices(), piece.items(), strict=True):
            if piece.steps:
                yield piece.family.template.format(*member), (name, records)


def _planned(plan: Plan) -> Iterator[tuple[str, Item]]:
    """Yield each model tensor."""
    made: dict[str, Item] = {}
    for recipe in plan.recipes:
        dtype, shape = recipe.type
        how = f" (by {recipe.rule})" if recipe.rule else ""
        for name, env in recipe.items():
            text = f"{_named(list(stored_names(recipe.node, env)))}{how}"
            node = concrete(recipe.node, env)
            made[name] = Item(shape, dtype, recipe=node, made_from=text)
    names = [name for entry in plan.audit.model for name in entry.names]
    placement = plan.placement
    keys = expand(placement.device_map, names)
    for entry in plan.audit.model:
        for name in entry.names:
            device = str(placement.device_map[keys[name]]) if name in keys else "none"
            yield name, made.get(name, Item())._replace(device=device, state=entry.kind)


def _modules(plan: Plan) -> Iterator[tuple[str, str]]:
    for module, device in plan.placement.device_map.items():
        yield module, str(device)


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
