"""``KINDS``: every way to damage a checkpoint, by name; the modules beside this one hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mutations_copy import Copy

__all__ = ["KINDS", "Damage", "Kind", "damage", "is_companion"]

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


_COMPANION = ("scale", "scales", "zeros", "g_idx", "absmax", "quant_map", "_state")


def is_companion(name: str) -> bool:
    """Tell whether a tensor belongs to a packed weight and is not its codes, by its name."""
    return any(part in name.rpartition(".")[2] for part in _COMPANION) or "quant_state" in name
