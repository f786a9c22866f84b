"""Real checkpoints for the benchmark of inference: manifests whose mapping is known.

The mapping is that of a plan with all plugins, into the class of transformers that config.json
names or, for code that comes with the checkpoint, the one of `real_models.py`; only where every
tensor of both sides is accounted for. Shapes follow from it (`infer_shapes.py`), as an index has
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infer_listings import Listing
from infer_shapes import AmbiguousError, stored_types
from real_models import MAKERS, shape_of

from modelquirks.planner import Dispatcher
from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.mapping.recipes import concrete
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.quirks.recipe import (
    Cast,
    Dequantize,
    Merge,
    Node,
    Opaque,
    TensorType,
    mapped,
    nodes,
)  # fmt: skip
from modelquirks.quirks.registry import ModelBuildError

if TYPE_CHECKING:
    import torch

    from modelquirks.planner import Plan
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.planner.model.skeleton import Skeleton

__all__ = ["Left", "listing_of", "real_listings"]


class Left(NamedTuple):
    """A manifest that says nothing of inference, and why."""

    name: str
    why: str


def real_listings(folder: Path) -> Iterator[Listing | Left]:
    """Yield the listing of each manifest below *folder*, or why there is none."""
    dispatcher = Dispatcher()
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        yield listing_of(place, dispatcher)


def listing_of(folder: Path, dispatcher: Dispatcher) -> Listing | Left:
    """Return the listing of the manifest *folder*, or why there is none."""
    manifest = open_manifest(folder)
    if not manifest.tensors:
        return Left(folder.name, "no names: " + ", ".join(f.code for f in manifest.findings))
    try:
        model = _model(folder, manifest, dispatcher)
    except ModelBuildError:
        return Left(folder.name, "config.json is not that of the class that it names")
    if model is None:
        return Left(folder.name, "no class of transformers is known for it")
    plan = dispatcher.plan(manifest, model=model, device_map=None)
    if why := _unknown(plan):
        return Left(folder.name, why)
    try:
        return _listed(folder.name, manifest, skeleton_of(model), plan)
    except AmbiguousError as error:
        return Left(folder.name, f"its shapes do not follow: {error}")


def _model(folder: Path, manifest: Manifest, dispatcher: Dispatcher) -> torch.nn.Module | None:
    import torch

    make = MAKERS.get(folder.name)
    if make is None:
        return dispatcher.model(manifest)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    with torch.device("meta"):
        return make(config)


def _unknown(plan: Plan) -> str:
    """Return why the mapping of a plan is not the whole truth; empty if it is."""
    counts = {k: len(plan.audit.names(k)) for k in ("missing", "mismatched", "unexpected")}
    if any(counts.values()):
        told = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
        return f"not fully accounted for: {told}"
    kinds = {type(node) for recipe in plan.recipes for node in nodes(recipe.node)}
    if kinds & {Dequantize, Merge, Opaque}:
        return "packed: inference does not see what codes stand for"
    return ""


def _listed(name: str, manifest: Manifest, skeleton: Skeleton, plan: Plan) -> Listing:
    model = {n: TensorType(t.dtype, t.shape) for n, t in skeleton.wanted.items()}
    recipes: dict[str, Node] = {}
    for recipe in plan.recipes:
        for target, env in recipe.items():
            recipes[target] = mapped(concrete(recipe.node, env), _uncast)
    config = manifest.config
    types = stored_types(recipes.items(), model, lambda n: shape_of(n, config, {}))
    shapes = {n: t.shape for n, t in types.items() if t.shape is not None}
    stored = {
        n: types.get(n) or TensorType("F32", shape_of(n, config, shapes)) for n in manifest.tensors
    }
    recipes |= {n: recipes[owner] for n, owner in plan.aliases.items() if owner in recipes}
    partners = {n: group for group in skeleton.ties for n in group}
    truth = {
        n: tuple(recipes[m] for m in dict.fromkeys((n, *partners.get(n, ()))) if m in recipes)
        for n in model
    }
    return Listing(name, stored, model, skeleton.ties, truth)


def _uncast(node: Node) -> Node:
    return node.of if isinstance(node, Cast) else node
