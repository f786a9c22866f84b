"""Listings for the benchmark of inference: names and types of both sides, and how they belong.

What belongs together is what a plan with all plugins says: the rules of transformers' bridge, with
which every tensor of these models is loaded right (``python benchmarks/zoo.py``). Models are those
of the zoo's cache, which `python benchmarks/zoo.py` makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelquirks.quirks.recipe import Node, Source, TensorType
from modelquirks.quirks.recipe_json import from_json, to_json

__all__ = ["Listing", "extracted", "read_listing"]

Truth = Mapping[str, tuple[Node, ...]]


@dataclass(frozen=True)
class Listing:
    """Both sides of one checkpoint and model, and the truth."""

    name: str
    stored: Mapping[str, TensorType]
    model: Mapping[str, TensorType]
    ties: tuple[tuple[str, ...], ...]
    truth: Truth
    """Name of the model → its recipe, under each name that it shares its tensor with."""


def read_listing(text: str) -> Listing:
    """Return the listing that is *text*."""
    data = json.loads(text)
    ties = tuple(tuple(group) for group in data["ties"])
    recipes = {name: _node(value) for name, value in data["truth"].items()}
    recipes |= {n: recipes[owner] for n, owner in data["aliases"].items() if owner in recipes}
    partners = {name: group for group in ties for name in group}
    truth = {
        name: tuple(recipes[n] for n in (name, *partners.get(name, ())) if n in recipes)
        for name in data["model"]
    }
    return Listing(data["name"], _types(data["stored"]), _types(data["model"]), ties, truth)


def _types(data: Mapping[str, Any]) -> dict[str, TensorType]:
    return {name: TensorType(dtype, tuple(shape)) for name, (dtype, shape) in data.items()}


def _node(data: Any) -> Node:
    return Source(data) if isinstance(data, str) else from_json(data)


def extracted(names: Sequence[str], zoo: Path, cache: Path) -> Iterator[Listing]:
    """Yield the listing of each class in *zoo*, from *cache* or made by a plan with all plugins."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = cache / f"{name}.json"
        if not path.exists() and not (zoo / name / "about.json").exists():
            continue
        if not path.exists():
            try:
                path.write_text(json.dumps(_planned(name, zoo)))
            except Exception as error:  # a class that cannot be built is told, and left out
                print(f"  {name}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
                continue
        yield read_listing(path.read_text())


def _planned(name: str, zoo: Path) -> dict[str, Any]:
    from modelquirks.planner import Dispatcher
    from modelquirks.planner.checkpoint.open import open_manifest
    from modelquirks.planner.mapping.recipes import concrete
    from modelquirks.planner.model.from_module import skeleton_of

    folder = zoo / name
    dispatcher = Dispatcher()
    manifest = open_manifest(folder / "checkpoint")
    model = dispatcher.model(manifest)
    if model is None:
        raise ValueError("no plugin builds its model")
    plan = dispatcher.plan(manifest, model=model, device_map=None)
    if not plan.ok:
        raise ValueError(plan.refusal())
    truth: dict[str, Any] = {}
    for recipe in plan.recipes:
        for target, env in recipe.items():
            node = concrete(recipe.node, env)
            truth[target] = node.name if isinstance(node, Source) else to_json(node)
    skeleton = skeleton_of(model)
    return {
        "name": name,
        "stored": {n: [t.dtype, list(t.shape or ())] for n, t in manifest.tensors.items()},
        "model": {n: [t.dtype, list(t.shape)] for n, t in skeleton.wanted.items()},
        "ties": [list(group) for group in skeleton.ties],
        "aliases": dict(plan.aliases),
        "truth": truth,
    }
