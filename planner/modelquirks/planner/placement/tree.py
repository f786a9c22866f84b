"""Module trees for placement of a checkpoint as it lies, without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.mapping.logical import Logical, Members, renumbered
from modelquirks.planner.names import parent
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.outline import Outline, content_of
from modelquirks.quirks.recipe import sources

__all__ = ["tree_of_checkpoint"]

Share = Callable[[str, str], float]


def tree_of_checkpoint(
    manifest: Manifest, pieces: Sequence[Logical], share: Share | None = None
) -> Outline | None:
    """Return the modules that the names of the checkpoint suggest; None if no size is known.

    *share* tells the part of a tensor, by its name and block, that one step reads.

    Without a model nobody knows which modules must stay whole: everything below the first index
    of a name (``model.layers.3``) is taken as one block.
    """
    if not manifest.has_headers:
        return None
    tree, counts = _Growing(), _Counts()
    for piece in pieces:
        block = _block(parent(piece.name), _is_slot_or_index)
        if block is None:
            for name, size in zip(piece.names, _sizes(manifest, piece), strict=True):
                tree.enter(name, size)
        else:
            for name, size in _sums(block, piece, manifest, counts):
                tree.blocks[name] = None
                part = 1.0 if share is None else share(piece.name, name)
                tree.enter(content_of(name), size, part)
    return Outline(tree.grown(), lambda: _whole(manifest, pieces, share))


def _whole(manifest: Manifest, pieces: Sequence[Logical], share: Share | None) -> ModuleTree:
    """Return the tree with every tensor of the checkpoint."""
    tree = _Growing()
    for stored, name in (pair for piece in pieces for pair in piece.stored_as()):
        part = 1.0 if share is None else share(name, _block(parent(name)) or "")
        tree.enter(name, manifest.sizes[stored] or 0, part)
    for module in tree.modules:
        if (block := _block(module)) is not None:
            tree.blocks[block] = None
    return tree.grown()


class _Growing:
    """A tree of modules as names tell of them, one after the other."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.read: dict[str, float] = {}
        self.modules: dict[str, None] = {"": None}
        self.blocks: dict[str, None] = {}

    def enter(self, name: str, size: int, share: float = 1.0) -> None:
        """Add a tensor; one that is there grows by *size*, of which *share* is read."""
        known = self.sizes.get(name, 0)
        if share < 1 or name in self.read:
            self.read[name] = self.read.get(name, known) + size * share
        self.sizes[name] = known + size
        module = parent(name)
        if module not in self.modules:
            self.modules.update(dict.fromkeys(reversed(list(_above(module, self.modules)))))

    def grown(self) -> ModuleTree:
        """Return the tree."""
        return ModuleTree(
            sizes=self.sizes,
            modules=tuple(self.modules),
            units=frozenset(self.blocks),
            read=self.read,
        )


def _sizes(manifest: Manifest, piece: Logical) -> Sequence[int]:
    """Return the bytes of each member."""
    template = next(sources(piece.node)).name
    if (even := manifest.even_sizes.get(template)) is not None:
        return [even] * len(piece.members)
    each = manifest.uneven_sizes.get(template, ())
    if len(each) == len(piece.members):  # all of the family, and so in its order
        return each
    return [manifest.sizes[stored] or 0 for stored in piece.stored_names]


class _Counts(dict[tuple[int, tuple[int, ...]], Mapping[Any, int]]):
    """How many members have each value in some slots; companions have the very same members."""

    def of(self, members: Members, numbers: Sequence[int]) -> Mapping[Any, int]:
        """Return the numbers; a value is an index, or a tuple of them if there are two slots."""
        key = (id(members), tuple(numbers))
        if key not in self:
            self[key] = Counter(map(itemgetter(*numbers), members))
        return self[key]


def _sums(
    block: str, piece: Logical, manifest: Manifest, counts: _Counts
) -> Iterator[tuple[str, int]]:
    """Yield each block, of that template, with the bytes of the members in it."""
    name, numbers = renumbered(block)
    if not numbers:
        yield block.format(), sum(_sizes(manifest, piece))
        return
    even = manifest.even_sizes.get(next(sources(piece.node)).name)
    if even is not None:
        totals = {key: even * n for key, n in counts.of(piece.members, numbers).items()}
    else:
        totals = {}
        keys = map(itemgetter(*numbers), piece.members)
        for key, size in zip(keys, _sizes(manifest, piece), strict=True):
            totals[key] = totals.get(key, 0) + size
    for key, total in totals.items():
        yield name.format(*(key if len(numbers) > 1 else [key])), total


def _above(module: str, known: Collection[str]) -> Iterator[str]:
    """Yield *module* and what it is in, up to the first that is *known*."""
    while module not in known:
        yield module
        module = parent(module)


def _block(module: str, is_index: Callable[[str], bool] = str.isdigit) -> str | None:
    """Return the module down to the first index.

    >>> _block("model.layers.3.mlp.w1"), _block("norm")
    ('model.layers.3', None)
    >>> _block("layers.{0}.experts.{1}", _is_slot_or_index)
    'layers.{0}'
    """
    parts = module.split(".")
    for position, part in enumerate(parts):
        if is_index(part):
            return ".".join(parts[: position + 1])
    return None


def _is_slot_or_index(segment: str) -> bool:
    """Tell whether a segment of a template is a number in every member."""
    return segment.isdigit() or (segment[:1] + segment[-1:] == "{}" and segment[1:-1].isdigit())
