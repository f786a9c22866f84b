"""Module trees for placement: of a model as it will be loaded, or of a checkpoint as it lies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.planner.names import parent
from modelquirks.planner.placement.moduletree import ModuleTree

__all__ = ["tree_of_checkpoint", "tree_of_model"]


def tree_of_model(
    skeleton: Skeleton,
    recipes: Sequence[FamilyRecipe],
    aliases: Mapping[str, str],
    no_split: Collection[str],
) -> ModuleTree:
    """Return the modules of the model with the bytes that each tensor will take."""
    planned = {
        name: nbytes(recipe.type.dtype, recipe.type.shape)
        for recipe in recipes
        if recipe.type.dtype is not None and recipe.type.shape is not None
        for name, _ in recipe.items()
    }
    sizes = {
        name: planned.get(name, tensor.nbytes)
        for name, tensor in skeleton.tensors.items()
        if name not in aliases
    }
    kept_whole = skeleton.no_split | frozenset(no_split)
    return ModuleTree(
        sizes=sizes,
        modules=tuple(skeleton.modules),
        units=frozenset(n for n, kind in skeleton.modules.items() if kind in kept_whole),
        aliases=dict(aliases),
        buffers=frozenset(n for n, t in skeleton.tensors.items() if t.kind != "parameter"),
        computed=frozenset(n for n, t in skeleton.tensors.items() if t.kind == "computed"),
    )


def tree_of_checkpoint(manifest: Manifest, pieces: Sequence[Logical]) -> ModuleTree | None:
    """Return the modules that the names of the checkpoint suggest; None if no size is known.

    Without a model nobody knows which modules must stay whole: everything below the first index
    of a name (``model.layers.3``) is taken as one block.
    """
    if not manifest.has_headers:
        return None
    sizes: dict[str, int] = {}
    modules: dict[str, None] = {"": None}
    blocks: dict[str, None] = {}
    for stored, name in (pair for piece in pieces for pair in piece.stored_as()):
        sizes[name] = sizes.get(name, 0) + (manifest.tensors[stored].nbytes or 0)
        module = parent(name)
        if module not in modules:
            modules.update(dict.fromkeys(reversed(list(_above(module, modules)))))
            if (block := _block(module)) is not None:
                blocks[block] = None
    return ModuleTree(sizes=sizes, modules=tuple(modules), units=frozenset(blocks))


def _above(module: str, known: Collection[str]) -> Iterator[str]:
    """Yield *module* and what it is in, up to the first that is *known*."""
    while module not in known:
        yield module
        module = parent(module)


def _block(module: str) -> str | None:
    """Return the module down to the first index.

    >>> _block("model.layers.3.mlp.w1"), _block("norm")
    ('model.layers.3', None)
    """
    parts = module.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return None
