"""``Misfit``: a change that cannot be made, as the kind of difference that people mean by it."""

from __future__ import annotations

from typing import NamedTuple

from modelquirks.planner.adapter.base import Shape
from modelquirks.planner.names import module_word

__all__ = ["EMPTY", "Misfit", "is_empty", "other_size"]


class Misfit(NamedTuple):
    """A change that cannot be made, and why; ``kind`` is what people confuse it with."""

    kind: str
    """``target``, ``vocabulary``, ``head``, ``size``, ``rank``, ``pair``, ``empty``, ``method``."""
    name: str
    text: str


EMPTY = (
    "is stored without values (shape [0]): under ZeRO-3 the weights are with the other ranks' "
    "files, and were not gathered when it was saved"
)
"""What is said of a tensor without values."""


def is_empty(shape: Shape) -> bool:
    """Tell whether a tensor of that shape has no values."""
    return shape is not None and 0 in shape


def other_size(name: str, have: tuple[int, ...], want: tuple[int, ...]) -> Misfit:
    """Return the misfit of two shapes, as the kind of difference that people mean by it."""
    word = module_word(name)
    both = f"the adapter's is {list(have)}, the base's {list(want)}"
    embeds = any(text in word for text in ("embed", "lm_head", "wte"))
    embeds = embeds or word in ("shared", "output", "head")
    if embeds and len(have) == len(want) == 2 and have[1] == want[1]:
        text = f"another vocabulary: {both}. Build the model with {have[0]} tokens"
        return Misfit("vocabulary", name, text)
    if any(text in word for text in ("classif", "score", "output")) and have[1:] == want[1:]:
        text = f"another head: {both}. Build the model with {have[0]} labels"
        return Misfit("head", name, text)
    return Misfit("size", name, f"{both}: it was trained on a model of another size")
