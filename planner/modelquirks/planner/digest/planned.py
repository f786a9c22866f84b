"""``sealed``: what a plan reads has the bytes that a digest says.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.digest.comparison import compare
from modelquirks.planner.digest.digest import Digest
from modelquirks.planner.digest.seal import Seal
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.finding import Finding
from modelquirks.planner.mapping.recipes import FamilyRecipe, stored_names
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.planner.wording import counted
from modelquirks.quirks.recipe import sources
from modelquirks.quirks.registry import Registry

__all__ = ["sealed", "used_tensors"]


def sealed(
    plan: Plan,
    manifest: Manifest,
    digest: Digest,
    registry: Registry | None = None,
    options: LoadOptions | None = None,
) -> tuple[Seal, Finding]:
    """Compare every stored tensor that *plan* reads, in *manifest* as it is now, with *digest*.

    PlanError if one differs or is not in the digest. That is looked for before anything is made,
    so that no model is touched for weights which nobody vouches for. The seal that is returned
    tells afterwards whether a file was exchanged between that look and the end of the load.
    """
    names = used_tensors(plan.recipes, manifest)
    shards = {manifest.readable[name].shard for name in _places(plan.recipes, manifest)}
    seal = Seal.of(manifest.root / shard for shard in sorted(shards))
    found = compare(manifest, digest, frozenset(names), registry=registry, options=options)
    if found.changes:
        listed = [f"{name!r}: {why}" for name, _, why in found.changes[:10]]
        more = [f"… and {len(found.changes) - 10:,} more"] if len(found.changes) > 10 else []
        raise PlanError(
            "\n- ".join(
                (
                    f"{counted(len(found.changes), 'tensor')} of the {len(names):,} that the plan "
                    "reads are not as the digest says, so nothing was loaded:",
                    *listed,
                    *more,
                )
            )
        )
    text = (
        f"the {counted(found.n_same, 'stored tensor')} that the plan reads, "
        f"{show_bytes(found.n_bytes)}, have the bytes that the digest says"
    )
    return seal, Finding("digest", "info", text)


def used_tensors(recipes: Iterable[FamilyRecipe], manifest: Manifest) -> list[str]:
    """Return the tensors of *manifest* of which *recipes* read something, in its order."""
    places = _places(recipes, manifest)
    return [
        name
        for name in manifest.tensors
        if (
            name in places
            if (node := manifest.assembled.get(name)) is None
            else any(leaf.name in places for leaf in sources(node))
        )
    ]


def _places(recipes: Iterable[FamilyRecipe], manifest: Manifest) -> frozenset[str]:
    """Return the names of what *recipes* read, as far as there is something of the name."""
    return frozenset(
        name
        for recipe in recipes
        for _, env in recipe.items()
        for name in stored_names(recipe.node, env)
        if name in manifest.readable
    )
