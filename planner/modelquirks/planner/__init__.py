"""From a checkpoint and a model to a plan, and from the plan to a loaded model.

The names below are imported when first used: reading headers must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
    from modelquirks.planner.dispatcher import Dispatcher
    from modelquirks.planner.dropin import load_checkpoint_and_dispatch
    from modelquirks.planner.dropin_maps import get_balanced_memory, infer_auto_device_map
    from modelquirks.planner.execution.execute import ExecutionError
    from modelquirks.planner.model.from_module import skeleton_of
    from modelquirks.planner.opening import HubOptions, open_checkpoint
    from modelquirks.planner.plan import Plan, PlanError

__all__ = [
    "CheckpointError",
    "Dispatcher",
    "ExecutionError",
    "HubOptions",
    "Plan",
    "PlanError",
    "get_balanced_memory",
    "infer_auto_device_map",
    "load_checkpoint_and_dispatch",
    "open_checkpoint",
    "open_manifest",
    "skeleton_of",
]

_HOMES = {
    "CheckpointError": "checkpoint.open",
    "Dispatcher": "dispatcher",
    "ExecutionError": "execution.execute",
    "HubOptions": "opening",
    "Plan": "plan",
    "PlanError": "plan",
    "get_balanced_memory": "dropin_maps",
    "infer_auto_device_map": "dropin_maps",
    "load_checkpoint_and_dispatch": "dropin",
    "open_checkpoint": "opening",
    "open_manifest": "checkpoint.open",
    "skeleton_of": "model.from_module",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
