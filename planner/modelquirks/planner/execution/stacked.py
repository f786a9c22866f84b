"""``stacked_experts``: which offloaded parameters are stacked experts, to be brought one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.slots import Slot
from modelquirks.planner.placement.touched import in_stacked_experts
from modelquirks.quirks.recipe import (
    Cast,
    Concat,
    Dequantize,
    Interleave,
    Merge,
    Node,
    Permute,
    Stack,
    Transpose,
)

__all__ = ["stacked_experts"]


def stacked_experts(
    items: Iterable[LoadItem], slots: Mapping[str, Slot], is_fetched: Callable[[str], bool]
) -> frozenset[str]:
    """Return the names of the offloaded parameters whose first dimension counts experts.

    A matrix for each of two or more experts, so three dimensions or more, and one of these says
    so: the recipe, which stacks what the checkpoint stores one by one; or the name, below a module
    called ``experts``. Beside one of them in the same module, a parameter of two dimensions that
    counts as many is their bias. Modules of torch itself are none: they use their weights whole.

    The answer decides when values are fetched, never which: a parameter that is named here by
    mistake is fetched when it is first used instead of before its module runs.
    """
    candidates = [
        item
        for item in items
        if item.kind == "parameter"
        and len(item.shape) >= 2
        and item.shape[0] >= 2
        and (isinstance(item.node, Stack) or not item.is_opaque)
        and all(map(is_fetched, item.names))
        and not _is_torch(slots[item.name])
    ]
    wide = [item for item in candidates if len(item.shape) >= 3 and _counts_experts(item)]
    counts = {id(slots[item.name].module): item.shape[0] for item in wide}
    biases = [
        item
        for item in candidates
        if len(item.shape) == 2 and counts.get(id(slots[item.name].module)) == item.shape[0]
    ]
    return frozenset(name for item in (*wide, *biases) for name in item.names)


def _counts_experts(item: LoadItem) -> bool:
    return in_stacked_experts(item.name) or _is_stack(item.node)


def _is_stack(node: Node) -> bool:
    """Tell whether *node* stacks along dimension 0 what is stored one by one."""
    match node:
        case Stack():
            return True
        case Cast(of):
            return _is_stack(of)
        case Transpose(of, dim0, dim1):
            return 0 not in (dim0, dim1) and _is_stack(of)
        case Permute(of, dims):
            return dims[0] == 0 and _is_stack(of)
        case Concat(of, dim) | Interleave(of, dim):
            return dim != 0 and _all_stacks(of)
        case Dequantize(_, parts):
            return _all_stacks([part.of for part in parts])
        case Merge(_, parts):
            return all(_is_stack(of) for role, of in parts if role == "weight")
        case _:
            return False


def _all_stacks(nodes: Sequence[Node]) -> bool:
    return all(map(_is_stack, nodes))


def _is_torch(slot: Slot) -> bool:
    return type(slot.module).__module__.partition(".")[0] == "torch"
