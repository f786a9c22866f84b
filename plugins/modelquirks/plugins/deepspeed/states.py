"""What the two kinds of state files say, by their keys.

Source: ``_common_checkpoint_state`` in DeepSpeed 0.19.8's ``runtime/engine.py``; ``state_dict`` in
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.deepspeed.saved import (
    SavedState,
    Shapes,
    mapping,
    names,
    shapes,
    state_of,
    whole,
)

__all__ = [
    "Address",
    "ModelState",
    "OptimState",
    "Stage",
    "inner_state",
    "model_state",
    "optim_state",
]

Stage = Literal["0", "1", "2", "3", "bf16", "unknown"]
"""Of ZeRO; ``bf16``: the class BF16_Optimizer, which writes no stage and keeps its padding."""


_INNER = "base_optimizer_state"
_MAX_STEPS = 64  # all are alike; one of them may never have been trained


class Address(NamedTuple):
    """The part of a parameter that one rank holds, in elements of its flat group."""

    start: int
    numel: int


class ModelState(NamedTuple):
    """A file with the module and the facts about the run."""

    saved: SavedState
    module: Mapping[str, StoredTensor] | None
    """None: a pipeline, whose weights are in files of layers."""
    buffers: tuple[str, ...]
    groups: tuple[Shapes, ...] | None
    """Shapes of the trained parameters, by group of the optimizer, in the order in which they were
    flattened; None: ZeRO 0."""
    frozen_shapes: Shapes | None
    frozen: Mapping[str, StoredTensor]
    shared: Mapping[str, str]
    """Stored name of each name that shares a parameter; only the file of rank 0 has them."""
    facts: Mapping[str, Any]
    """``dp_world_size``, ``mp_world_size``, ``global_steps``, ``ds_version``, … as far as there."""
    config: Mapping[str, Any]
    universal: Mapping[str, Any]
    """How tensor-parallel slices go together."""
    findings: tuple[Finding, ...] = ()

    def number(self, key: str) -> int | None:
        """Return a whole number of the facts, None if it is not there."""
        return whole(self.facts.get(key))


class OptimState(NamedTuple):
    """A file with one rank's share of the fp32 masters."""

    saved: SavedState
    stage: Stage
    flat: tuple[StoredTensor | None, ...]
    """One a group, 1-D; of ZeRO 3 one a sub-group. None: no tensor."""
    partitions: tuple[int, ...]
    """Ranks over which each group is cut; of ZeRO 3 one number for all."""
    paddings: tuple[tuple[int, ...], ...]
    """Elements behind each parameter of each group, ``()`` for none."""
    slices: tuple[Mapping[str, Address], ...] | None
    """The rank's own account of what it holds, by group; ZeRO 3 has none."""
    step: float | None
    """Steps that the optimizer has made, by its own count."""
    config: Mapping[str, Any]
    version: str
    findings: tuple[Finding, ...] = ()


def model_state(saved: SavedState) -> ModelState:
    """Return what a file of weights and facts says."""
    value = saved.value
    module = value.get("module")
    placed = saved.place(mapping(module))
    frozen = saved.place(mapping(value.get("frozen_param_fragments")))
    groups = value.get("param_shapes")
    shared = mapping(value.get("shared_params"))
    frozen_shapes = value.get("frozen_param_shapes")
    return ModelState(
        saved=saved,
        module=placed.tensors if isinstance(module, dict) else None,
        buffers=names(value.get("buffer_names")),
        groups=tuple(map(shapes, groups)) if isinstance(groups, list) else None,
        frozen_shapes=shapes(frozen_shapes) if isinstance(frozen_shapes, dict) else None,
        frozen=frozen.tensors,
        shared={k: v for k, v in shared.items() if isinstance(k, str) and isinstance(v, str)},
        facts={k: v for k, v in value.items() if isinstance(k, str)},
        config=mapping(value.get("ds_config")),
        universal=mapping(value.get("universal_checkpoint_info")),
        findings=(*placed.findings, *frozen.findings, *_another_file(saved)),
    )


def _another_file(saved: SavedState) -> Iterator[Finding]:
    """``save_checkpoint`` writes ``module`` always; of a pipeline it is None."""
    if saved.value and "module" not in saved.value:
        text = (
            f"{saved.shard.name!r} has no 'module', as every file of model states has: it holds "
            f"{shown(map(str, saved.value), 4)}. Another file lies there under this name."
        )
        yield Finding("state-invalid", "error", text)


def optim_state(saved: SavedState) -> OptimState:
    """Return what a file of masters says; moments are not looked at."""
    state = mapping(saved.value.get("optimizer_state_dict"))
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    flat = state.get(key)
    listed = flat if isinstance(flat, list) else []
    placed = saved.place({f"{key}[{number}]": item for number, item in enumerate(listed)})
    count = state.get("partition_count")
    paddings = state.get("param_alignment_paddings")
    slices = state.get("param_slice_mappings")
    version = saved.value.get("ds_version")
    return OptimState(
        saved=saved,
        stage=_stage(state),
        flat=tuple(placed.tensors.get(f"{key}[{number}]") for number in range(len(listed))),
        partitions=_numbers(count if isinstance(count, list | tuple) else [count]),
        paddings=tuple(map(_numbers, paddings)) if isinstance(paddings, list) else (),
        slices=tuple(map(_addresses, slices)) if isinstance(slices, list) else None,
        step=_step(saved),
        config=mapping(saved.value.get("ds_config")),
        version=version if isinstance(version, str) else "",
        findings=placed.findings,
    )


def _stage(state: Mapping[str, Any]) -> Stage:
    if "fp32_flat_groups" in state:
        return "3"
    if "single_partition_of_fp32_groups" not in state:
        return "unknown"
    stages: dict[int | None, Stage] = {1: "1", 2: "2", None: "bf16"}
    return stages.get(whole(state.get("zero_stage")), "unknown")


def inner_state(saved: SavedState) -> Any:
    """Return the state of the optimizer that was wrapped, as a file of masters has it."""
    state = mapping(saved.value.get("optimizer_state_dict"))
    return state.get("optimizer_state_dict" if "fp32_flat_groups" in state else _INNER)


def _step(saved: SavedState) -> float | None:
    """Return the greatest ``step`` in the inner optimizer's state, as Adam has it."""
    inner = inner_state(saved)
    entries = mapping(mapping(inner).get("state")).values()
    groups = mapping(inner).get("param_groups")
    listed = [*entries, *(groups if isinstance(groups, list) else ())]
    found = (saved.number(mapping(entry).get("step")) for entry in listed[:_MAX_STEPS])
    return max((step for step in found if step is not None), default=None)


def _numbers(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list | tuple) else ()
    return tuple(number for item in listed if (number := whole(item)) is not None)


def _addresses(value: Any) -> dict[str, Address]:
    found: dict[str, Address] = {}
    for name, item in mapping(value).items():
        state = state_of(item)
        start, numel = whole(state.get("start")), whole(state.get("numel"))
        if isinstance(name, str) and start is not None and numel is not None:
            found[name] = Address(start, numel)
    return found
