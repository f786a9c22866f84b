"""``Workload``: what a model will be asked to do, and ``Reserve``: room for what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.placement.cost import OBJECTIVES, Objective

__all__ = ["Reserve", "Workload"]


@dataclass(frozen=True)
class Workload:
    """Sequences that are generated together. ValueError names everything that is wrong with it."""

    context: int = 0
    """Tokens of one sequence, prompt and answer, that the cache has room for; 0: none is kept."""
    batch: int = 1
    """Sequences at once."""
    kv_dtype: str | None = None
    """Dtype of the cache, as safetensors or torch spell it; None: that of the model."""
    objective: Objective = "latency"

    def __post_init__(self) -> None:
        """Check every field, and spell the dtype as safetensors does."""
        given = vars(self)
        faults = [
            f"{name} {given[name]!r} is not a whole number of at least {least}"
            for name, least in (("context", 0), ("batch", 1))
            if not isinstance(given[name], int)
            or isinstance(given[name], bool)
            or given[name] < least
        ]
        if self.objective not in OBJECTIVES:
            faults.append(f"objective {self.objective!r} is none of {', '.join(OBJECTIVES)}")
        if self.objective == "throughput" and not self.context:
            faults.append("objective 'throughput' needs a context: the room for more sequences")
        if self.kv_dtype is not None:
            try:
                object.__setattr__(self, "kv_dtype", from_torch(self.kv_dtype))
            except ValueError as error:
                faults.append(f"kv_dtype: {error}")
        if faults:
            raise ValueError("; ".join(faults))

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Workload:
        """Return what :meth:`to_json` told."""
        return cls(**data)


class Reserve(NamedTuple):
    """Bytes that something beside the weights takes, and how that was worked out."""

    what: str
    """``cache``, ``activations``, ``streaming``, ``asked for``."""
    device: str
    """The device, as a report names it; ``*``: each that computes."""
    n_bytes: int
    formula: str
