"""``OpenOptions``: which of several states and kinds of weights in one checkpoint are meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["AS_USUAL", "OpenOptions", "Weights"]

Weights = Literal["master", "training"]
"""``master``: the fp32 copies that the optimizer keeps; ``training``: the dtype of the module."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """A choice that formats of training checkpoints offer; None leaves it to the format.

    ValueError for weights that there are not.
    """

    weights: Weights | None = None
    tag: str | None = None
    """Name of one of several saved states."""
    expect: Mapping[str, Any] | None = None
    """How a job is going to load it, for comparison: keys and values are the format's."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.weights is not None and self.weights not in get_args(Weights):
            known = " or ".join(map(repr, get_args(Weights)))
            raise ValueError(f"weights {self.weights!r} are not known; they can be {known}")
        if self.tag is not None and not self.tag:
            raise ValueError("tag '' names no saved state; leave it out to take the latest")

    def __bool__(self) -> bool:
        """Tell whether anything was chosen."""
        return self != AS_USUAL

    def to_json(self) -> dict[str, str | None]:
        """Return what was chosen; what is expected of a job is no part of it."""
        return {"weights": self.weights, "tag": self.tag}

    def told(self) -> str:
        """Return the choice as one would write it.

        >>> OpenOptions("training", "global_step3").told()
        "weights 'training' and tag 'global_step3'"
        """
        expect = None if self.expect is None else ",".join(self.expect)
        pairs = (("weights", self.weights), ("tag", self.tag), ("expect", expect))
        return " and ".join(f"{name} {value!r}" for name, value in pairs if value is not None)


AS_USUAL = OpenOptions()
"""No wishes."""
