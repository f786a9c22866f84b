"""Binding: which weight of the base each change of an adapter is for, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from modelquirks.planner.adapter.adapter import Adapter
from modelquirks.planner.adapter.base import Base, Shape
from modelquirks.planner.adapter.changes import Change, changes_of
from modelquirks.planner.adapter.config import AdapterConfig, Strength
from modelquirks.planner.adapter.misfit import EMPTY, Misfit, is_empty, other_size
from modelquirks.quirks.recipe import Setting

__all__ = ["WHOLE", "Bound", "Bounds", "bind"]

WHOLE = "whole"
"""The scheme of what takes the place of a weight of the base."""


class Bound(NamedTuple):
    """A change of one weight, ready to become a recipe."""

    name: str
    """The weight, as the model calls it."""
    scheme: str
    """How it is merged; ``whole``: the adapter's tensor takes the place of the base's."""
    parts: tuple[tuple[str, str], ...]
    """Role → stored name in the adapter."""
    settings: tuple[tuple[str, Setting], ...] = ()
    strength: Strength | None = None


@dataclass
class Bounds:
    """All changes of an adapter, by what became of them."""

    bound: list[Bound] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    """Names of weights that the adapter changes and the model does not have."""
    former: list[str] = field(default_factory=list)
    """Stored names of what retrained modules were before: a copy takes their place."""

    def by_name(self) -> Mapping[str, Sequence[Bound]]:
        """Return the changes by weight, whole weights first: others change these then."""
        found: dict[str, list[Bound]] = {}
        for one in sorted(self.bound, key=lambda b: b.scheme != WHOLE):
            found.setdefault(one.name, []).append(one)
        return found


def bind(adapter: Adapter, base: Base) -> Bounds:
    """Return the changes of *adapter* bound to weights of *base*, with all that does not fit."""
    found = Bounds()
    changes = changes_of(list(adapter.manifest.tensors))
    nested = _nested(changes)
    for change in changes:
        binder = _Binder(adapter, base, change, nested.get(change.module, 1))
        binder.bind(found)
    return found


def _nested(changes: Sequence[Change]) -> Mapping[str, int]:
    """Return of each module with LoRA how many there are around it, one for each parameter."""
    counts: dict[str, int] = {}
    for change in changes:
        if change.kind == "linear":
            counts[change.module] = counts.get(change.module, 0) + 1
    return counts


@dataclass(frozen=True)
class _Binder:
    adapter: Adapter
    base: Base
    change: Change
    n_nested: int

    def bind(self, found: Bounds) -> None:
        """Enter the change in *found*: bound, or as what it is instead."""
        match self.change.kind:
            case "whole":
                self._whole(found)
            case "rows":
                self._rows(found)
            case "former":
                found.former += self.change.parts.values()
            case "other":
                text = f"is of the method {self.config.kind}, of which only the names are known"
                found.misfits.append(Misfit("method", self.change.module, text))
            case _:
                self._lora(found)

    @property
    def config(self) -> AdapterConfig:
        return self.adapter.config

    def _whole(self, found: Bounds) -> None:
        ((role, stored),) = self.change.parts.items()
        wanted = f"{self.change.module}.{role}" if self.change.module else role
        if (name := self.base.find(wanted)) is None:
            found.strangers.append(wanted)
            return
        have, want = self._shape(stored), self.base.shapes[name]
        if is_empty(have):
            found.misfits.append(Misfit("empty", name, EMPTY))
        elif have is not None and want is not None and have != want:
            found.misfits.append(other_size(name, have, want))
        else:
            found.bound.append(Bound(name, WHOLE, (("weight", stored),)))

    def _rows(self, found: Bounds) -> None:
        wanted = f"{self.change.module}.weight"
        if (name := self.base.find(wanted)) is None:
            found.strangers.append(wanted)
            return
        indices = self._indices()
        have, want = self._shape(self.change.parts["rows"]), self.base.shapes[name]
        if have is not None and have[0] != len(indices):
            text = f"holds {have[0]} rows, adapter_config.json names {len(indices)} tokens"
            found.misfits.append(Misfit("rank", name, text))
        elif want is not None and indices and max(indices) >= want[0]:
            text = f"row {max(indices)} is trained, the base has {want[0]}: another vocabulary"
            found.misfits.append(Misfit("vocabulary", name, text))
        else:
            settings = (("indices", ",".join(map(str, indices))),)
            parts = (("rows", self.change.parts["rows"]),)
            found.bound.append(Bound(name, "trained_rows", parts, settings))

    def _indices(self) -> tuple[int, ...]:
        module = self.change.module
        for end, indices in self.config.tokens.items():
            if end and (module == end or module.endswith(f".{end}")):
                return indices
        return self.config.tokens.get("", ())

    def _lora(self, found: Bounds) -> None:
        target = self._target()
        if target is None:
            found.strangers.append(self._wanted())
            return
        name, key = target
        strength = self.config.strength(key)
        shapes = {role: self._shape(stored) for role, stored in self.change.parts.items()}
        want = self.base.shapes[name]
        lacking = [role for role in ("a", "b") if role not in shapes]
        if self.config.dora and self.change.kind == "linear" and "magnitude" not in shapes:
            lacking.append("magnitude")
        if lacking:
            words = ", ".join(self._word(role) for role in lacking)
            found.misfits.append(Misfit("pair", name, f"there is no {words} for it"))
        elif any(map(is_empty, shapes.values())):
            found.misfits.append(Misfit("empty", name, EMPTY))
        elif misfit := self._misfit(name, shapes, want, strength):
            found.misfits.append(misfit)
        else:
            found.bound.append(self._merge(name, shapes, want, strength))
            self._bias(name, strength, found)

    def _target(self) -> tuple[str, str] | None:
        """Return the weight as the model calls it, and the key that patterns of ranks go by."""
        module = self.change.module
        weight = self.base.find(f"{module}.weight")
        parameters = self._parameters()
        if parameters and (weight is None or len(parameters) == self.n_nested):
            at = len(parameters) - 1 - self.change.depth
            if 0 <= at < len(parameters):
                return parameters[at], parameters[at]
        return None if weight is None else (weight, module)

    def _wanted(self) -> str:
        """Return what the weight that the base does not have would be called."""
        module = self.change.module
        pairs = (end.rpartition(".") for end in self.config.parameters)
        leaves = sorted(leaf for of, _, leaf in pairs if f".{module}".endswith(f".{of}"))
        at = len(leaves) - 1 - self.change.depth  # a guess: the order is the module's
        return f"{module}.{leaves[at] if 0 <= at < len(leaves) else 'weight'}"

    def _parameters(self) -> list[str]:
        """Return the parameters of the module that are adapted themselves, in its order.

        peft wraps a module once for each, the first one innermost (``_inject_parameters``).
        """
        head = f"{self.change.module}."
        ends = self.config.parameters
        return [
            name
            for name in self.base.shapes
            if ends
            and name.startswith(head)
            and "." not in name.removeprefix(head)
            and any(name == end or name.endswith(f".{end}") for end in ends)
        ]

    def _misfit(
        self, name: str, shapes: Mapping[str, Shape], want: Shape, strength: Strength
    ) -> Misfit | None:
        a, b = shapes["a"], shapes["b"]
        if a is None or b is None:
            return None
        if len(a) < 2 or len(b) < 2:
            return Misfit("pair", name, f"lora_A is {list(a)} and lora_B {list(b)}: no matrices")
        if a[0] != b[1]:
            return Misfit("rank", name, f"lora_A has rank {a[0]} and lora_B rank {b[1]}")
        experts = want[0] if want is not None and self._is_stacked(want) else 1
        if a[0] != strength.rank * experts:
            of = f" for each of {experts} experts" if experts > 1 else ""
            text = f"has rank {a[0]}, adapter_config.json says {strength.rank}{of}"
            return Misfit("rank", name, text)
        if want is None:
            return None
        made = (b[0], *a[1:])
        fitting = want[1:] if self._is_stacked(want) else want
        if made in (fitting, fitting[::-1]):
            return None
        embeds = self.change.kind == "embedding"
        return other_size(name, made[::-1] if embeds else made, fitting)

    def _is_stacked(self, want: tuple[int, ...]) -> bool:
        a = self._shape(self.change.parts["a"])
        return len(want) == 3 and a is not None and len(a) == 2

    def _merge(
        self, name: str, shapes: Mapping[str, Shape], want: Shape, strength: Strength
    ) -> Bound:
        """Return the change as a recipe needs it."""
        a, b = shapes["a"], shapes["b"]
        stacked = want is not None and self._is_stacked(want)
        parameter = not name.endswith(".weight") or self.change.depth > 0
        settings: dict[str, Setting] = {"scaling": strength.scaling}
        if self.change.kind == "embedding":
            settings |= {"transposed": True, "rounded": True}
        elif a is not None and b is not None and want is not None:
            fitting = want[1:] if stacked else want
            turned = self._is_turned(name) if stacked else self.config.transposed
            if fitting != fitting[::-1]:  # else the shape tells nothing
                turned = (b[0], *a[1:]) != fitting
            settings |= {"transposed": True} if turned else {}
            settings |= {"rounded": True} if parameter and not stacked else {}
        roles = ("a", "b", *(["magnitude"] if "magnitude" in shapes else []))
        parts = tuple((role, self.change.parts[role]) for role in roles)
        scheme = "lora_experts" if stacked else "lora"
        return Bound(name, scheme, parts, tuple(sorted(settings.items())), strength)

    def _is_turned(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.base.turned

    def _bias(self, name: str, strength: Strength, found: Bounds) -> None:
        """Enter the bias of ``lora_B``, which is added to that of the layer."""
        if (stored := self.change.parts.get("b_bias")) is None:
            return
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias not in self.base.shapes:
            found.misfits.append(Misfit("target", bias, "lora_B has a bias and the layer has none"))
            return
        settings = (("scaling", strength.scaling),)
        found.bound.append(Bound(bias, "lora_bias", (("b", stored),), settings, strength))

    def _word(self, role: str) -> str:
        words = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector (DoRA)"}
        embeds = self.change.kind == "embedding" and role in ("a", "b")
        return words[role].replace("lora_", "lora_embedding_") if embeds else words[role]

    def _shape(self, stored: str) -> Shape:
        return self.adapter.manifest.tensors[stored].shape
