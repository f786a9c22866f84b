"""Parameters as what a plan is made of: stored pieces by name, and logical tensors over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.mapping.logical import Logical
from modelquirks.plugins.deepspeed.parameter import Parameter, recipe
from modelquirks.quirks.family import indices_of, template_of
from modelquirks.quirks.recipe import Node, Source, mapped

__all__ = ["logical_tensors", "stored_pieces"]


def stored_pieces(parameters: Iterable[Parameter]) -> dict[str, StoredTensor]:
    """Return the byte ranges that *parameters* are made of, by name: ``tensors`` of a Manifest."""
    return {piece.name: piece for parameter in parameters for piece in parameter.pieces}


def logical_tensors(parameters: Mapping[str, Parameter]) -> tuple[Logical, ...]:
    """Return *parameters* by family, those together that are cut alike and have one shape.

    Of ZeRO 3 that are all layers; of ZeRO 1 and 2 all but the few that lie across a border between
    ranks. Parameters without elements are left out: nothing of them is stored.
    """
    alike: dict[tuple[str, Node], list[tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        if any(True for _ in parameter.pieces):
            key = template_of(name), _over_family(name, recipe(parameter))
            alike.setdefault(key, []).append(next(indices_of([name])))
    return tuple(
        Logical(template, node, tuple(members), rule="deepspeed")
        for (template, node), members in alike.items()
    )


def _over_family(name: str, node: Node) -> Node:
    """Return *node* with the indices of *name* as slots in the names of its pieces."""
    written, template = name.replace("{", "{{").replace("}", "}}"), template_of(name)

    def change(found: Node) -> Node:
        if isinstance(found, Source) and found.name.startswith(f"{written}@"):
            return Source(f"{template}{found.name.removeprefix(written)}")
        return Source(template) if found == Source(written) else found

    return mapped(node, change)
