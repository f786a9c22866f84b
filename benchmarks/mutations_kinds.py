"""``KINDS``: every way to damage a checkpoint, by name; the modules beside this one hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mutations_copy import Copy

__all__ = ["KINDS", "Damage", "Kind", "damage"]

Damage = Callable[[Copy], bool]
"""Changes a copy; returns False where there is nothing of the kind to damage."""


class Kind(NamedTuple):
    """A way to damage a checkpoint."""

    name: str
    group: str
    """The noun that it belongs to."""
    apply: Damage
    unseen: bool
    """Declared in advance: no header shows it, only values."""


KINDS: dict[str, Kind] = {}


def damage(group: str, *, unseen: bool = False) -> Callable[[Damage], Damage]:
    """Enter a function among the kinds, under its own name with hyphens."""

    def enter(apply: Damage) -> Damage:
        name = apply.__name__.replace("_", "-")
        KINDS[name] = Kind(name, group, apply, unseen)
        return apply

    return enter
