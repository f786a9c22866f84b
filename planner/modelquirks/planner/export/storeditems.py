"""``stored_items``: the tensors of a checkpoint under the names that they have there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import BITS, is_float
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.mapping.offers import find_offers
from modelquirks.planner.mapping.places import in_places
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import Source, TensorType
from modelquirks.quirks.registry import Registry
from modelquirks.quirks.resolve import Facts, resolve

__all__ = ["cast_rule", "stored_items"]

DtypeOf = Callable[[str, str], str]
"""The dtype that a tensor of that name and stored dtype will have."""


def stored_items(manifest: Manifest, dtype: DtypeOf) -> Iterator[LoadItem]:
    """Yield every tensor whose dtype and shape are known, under its stored name, in stored order.

    Names that share one place in a file, or are made of the same parts, are one item: the first
    bears the tensor, the others are its aliases.
    """
    owners = {name: names[0] for names in manifest.shared for name in names}
    others: dict[str, list[str]] = {}
    for name, owner in owners.items():
        if name != owner:
            others.setdefault(owner, []).append(name)
    for name, tensor in manifest.tensors.items():
        _, _, stored, shape, *_ = tensor
        if stored is None or shape is None or owners.get(name, name) != name:
            continue
        yield LoadItem(
            name=name,
            node=_recipe(name, manifest).node,
            env={},
            dtype=dtype(name, stored),
            shape=shape,
            device="cpu",
            aliases=tuple(others.get(name, ())),
        )


def cast_rule(manifest: Manifest, registry: Registry, asked: str | None) -> DtypeOf:
    """Return the rule for the dtype *asked* (a safetensors name; None: as stored).

    As in a plan: floating-point weights of 16 bits and more are cast, parts of packed weights and
    what a record keeps in its dtype are not.
    """
    if asked is None:
        return lambda name, stored: stored
    facts = Facts(manifest.config, tuple(manifest.families.values()), manifest.container)
    resolution = resolve(registry.records, facts)
    offers = find_offers(resolution, manifest.config, {}, registry.schemes)
    parts = frozenset(
        stored for pack in offers.packed for part in pack.parts for stored, _ in part.stored_as()
    )
    kept = [Pattern(text) for record in resolution.records() for text in record.keep_dtype]

    def dtype(name: str, stored: str) -> str:
        return stored if _stays(name, stored, parts, kept) else asked

    return dtype


def _stays(name: str, stored: str, parts: Collection[str], kept: Collection[Pattern]) -> bool:
    if not is_float(stored) or BITS[stored] < 16 or name in parts:
        return True
    return any(pattern.match(name) for pattern in kept)


def _recipe(name: str, manifest: Manifest) -> FamilyRecipe:
    """Return how the tensor is made of what is stored."""
    literal = name.replace("{", "{{").replace("}", "}}")
    whole = FamilyRecipe(literal, Source(literal), (), ((),), TensorType(None, None))
    (recipe,) = in_places((whole,), manifest)
    return recipe
