"""``Copy``: the files of a right checkpoint, in memory, while they are damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from mutations_files import Files, is_weights, tensors_in, with_tensors
from mutations_subjects import Config, Subject

__all__ = ["Copy", "NothingLeft", "Place"]


def _any(name: str, tensor: torch.Tensor) -> bool:
    """Fit whatever there is."""
    del name, tensor
    return True


class Place(NamedTuple):
    """A stored tensor: in which file, under which name."""

    file: str
    name: str


class NothingLeft(Exception):
    """What a damage would change is not there any more."""


@dataclass
class Copy:
    """A checkpoint that may be changed, by chance, and what was done to it."""

    subject: Subject
    chance: Random
    files: Files = field(default_factory=dict)
    config: Config = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    """What a report of the damage has to name, one of them at least."""
    done: list[str] = field(default_factory=list)
    """The damage in words."""
    may_be_unseen: bool = False
    """What was done was declared as not visible before any value is read."""

    behaves_otherwise: bool = False
    """The model computes otherwise, with the very same tensors."""

    def __post_init__(self) -> None:
        """Begin with the files as they are."""
        self.files = dict(self.subject.files)
        self.config = dict(self.subject.config)

    def is_named_in(self, texts: Iterable[str]) -> bool:
        """Tell whether one of *texts* names what was damaged."""
        return any(name in text for text in texts for name in self.named)

    def tell(self, done: str, *named: str) -> bool:
        """Note what was done, and the names that a report may give it; returns True."""
        self.done.append(done)
        told = [name for name in named if name]
        self.named.extend((*told, *self._served(told)))
        return True

    def _served(self, names: Iterable[str]) -> list[str]:
        """Return the model's names for what tensors of these stored names make."""
        names = [name.removeprefix("base_model.model.") for name in names]
        names = [re.sub(r"\.lora_\w+", "", name) for name in names]
        names += [name.replace("block_sparse_moe", "mlp") for name in names]
        modules = {name.rpartition(".")[0] for name in names} - {""}
        found = [n for n in self.subject.truth.tensors if n.rpartition(".")[0] in modules]
        long = [n for n in self.subject.truth.tensors for name in names if name.startswith(n)]
        adapted = modules if self.subject.adapter else ()
        return [*dict.fromkeys((*found, *long, *adapted))]

    # ---- files

    @property
    def weights(self) -> list[str]:
        """The weight files."""
        return [name for name in self.files if is_weights(name)]

    @property
    def flat(self) -> list[str]:
        """The weight files that are one mapping of names to tensors."""
        plain = self.subject.config or self.subject.adapter
        kinds = (".safetensors", ".bin")
        return [name for name in self.weights if plain and name.endswith(kinds)]

    @property
    def safetensors(self) -> list[str]:
        """The safetensors files."""
        return [name for name in self.files if name.endswith(".safetensors")]

    @property
    def index_name(self) -> str | None:
        """The index, if there is one."""
        return next((name for name in self.files if name.endswith(".index.json")), None)

    @property
    def index(self) -> dict[str, Any]:
        """A copy of the index."""
        found: Any = json.loads(self.files[self.index_name or ""])
        return found if isinstance(found, dict) else {}

    def set_index(self, index: Mapping[str, Any] | str) -> None:
        """Write the index anew."""
        assert self.index_name is not None
        text = index if isinstance(index, str) else json.dumps(index)
        self.files[self.index_name] = text.encode()

    def set_config(self, **settings: Any) -> None:
        """Write config.json anew; None takes a setting out."""
        changed = {**self.config, **settings}
        self.config = {key: value for key, value in changed.items() if value is not None}
        name = next((n for n in self.files if n.rpartition("/")[2] == "config.json"), None)
        if name is None:
            raise NothingLeft("an earlier damage left no config.json")
        self.files[name] = json.dumps(self.config).encode()

    # ---- tensors

    def tensors(self, file: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a flat file; do not change them in place."""
        raw = self.files[file]
        if raw is self.subject.files.get(file):
            return dict(_known(self.subject, file))
        try:
            return tensors_in(file, raw)
        except Exception:  # an earlier damage left no file of this format
            return {}

    def set_tensors(self, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a flat file anew, and put right what the index says of it."""
        self.files[file] = with_tensors(file, tensors)
        try:
            index = self.index
        except (ValueError, KeyError):  # there is none, or an earlier damage left none
            return
        if not isinstance(index.get("weight_map"), dict):
            return
        kept = {k: v for k, v in index["weight_map"].items() if v != file}
        index["weight_map"] = {**kept, **dict.fromkeys(tensors, file)}
        self.set_index(index)

    def change(self, place: Place, tensor: torch.Tensor, *, name: str = "") -> None:
        """Put another tensor at *place*, under another *name* if there is one."""
        tensors = self.tensors(place.file)
        held = {
            (name or place.name if key == place.name else key): tensor.clone()
            if key == place.name
            else was
            for key, was in tensors.items()
        }
        self.set_tensors(place.file, held)

    def places(self, fits: Callable[[str, torch.Tensor], bool] = _any) -> list[Place]:
        """Return every stored tensor that *fits*."""
        return [
            Place(file, name)
            for file in self.flat
            for name, tensor in sorted(self.tensors(file).items())  # a reader may give any order
            if fits(name, tensor)
        ]

    def pick(
        self, fits: Callable[[str, torch.Tensor], bool] = _any
    ) -> tuple[Place, torch.Tensor] | None:
        """Return a stored tensor that *fits*, by chance; None if there is none."""
        found = self.places(fits)
        if not found:
            return None
        place = self.chance.choice(found)
        return place, self.tensors(place.file)[place.name]

    def twins(self) -> tuple[Place, Place] | None:
        """Return two stored tensors of one shape and dtype, with other values."""
        found = self.pick(lambda _, tensor: tensor.numel() > 1)
        if found is None:
            return None
        place, tensor = found
        like = [
            other
            for other in self.places(
                lambda _, t: t.shape == tensor.shape and t.dtype == tensor.dtype
            )
            if other != place
            and not torch.equal(_octets(self.tensors(other.file)[other.name]), _octets(tensor))
        ]
        return (place, self.chance.choice(like)) if like else None


_CACHE: dict[tuple[str, str], dict[str, torch.Tensor]] = {}


def _known(subject: Subject, file: str) -> dict[str, torch.Tensor]:
    key = subject.name, file
    if key not in _CACHE:
        _CACHE[key] = tensors_in(file, subject.files[file])
    return _CACHE[key]


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
