"""A drop-in for accelerate's ``load_checkpoint_and_dispatch`` that is never silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.plan import PlanError
from modelquirks.planner.tell import tell

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.checkpoint.openoptions import Weights
    from modelquirks.planner.execution.loadoptions import Verify

__all__ = ["load_checkpoint_and_dispatch"]

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    dequantize: bool = False,
    expert_offload: bool = True,
    expert_cache: int | str | None = None,
    copy: bool = False,
    load_memory: int | str | None = None,
    verify: Verify = "samples",
    digest: str | Path | None = None,
    weights: Weights | None = None,
    tag: str | None = None,
) -> torch.nn.Module:
    """Load *checkpoint* into *model* and dispatch it, with accelerate's arguments.

    *checkpoint* may also be ``org/name`` of a repository on the hub, if no file or folder has that
    name. Where accelerate warns or says nothing, this raises
    :class:`~modelquirks.planner.plan.PlanError` before anything is loaded: for tensors of the
    model that nothing provides, that do not fit or that are stored twice, and with *strict* for
    tensors of the checkpoint that nothing wants; without, they are logged as a warning, as there.

    *offload_folder*, *offload_state_dict* and *full_state_dict* are accepted and not needed:
    weights on disk stay in the checkpoint's own files, and every process reads what it loads.
    Nothing is written to *offload_folder*; ``Plan.execute`` does so with ``materialize=True``.
    *copy*, *load_memory*, *verify* and *digest* are those of ``Plan.load_into``.
    *broadcast_from_rank0* is refused. Packed weights become plain ones with *dequantize* only. A
    *dtype* holds with every device map, also with None. *expert_offload* and *expert_cache* are
    those of ``Plan.execute``, *weights* and *tag* those of ``Dispatcher.plan``.
    """
    del offload_folder, offload_state_dict, full_state_dict
    if isinstance(device_map, str) and device_map not in _POLICIES:
        raise ValueError(
            f"device_map {device_map!r} is no policy ({', '.join(_POLICIES)}); "
            f'for one device write {{"": {device_map!r}}}'
        )
    if broadcast_from_rank0:
        raise ValueError(
            "broadcast_from_rank0 is not supported: every process reads the checkpoint itself, "
            "so leave it out where all of them can see the files"
        )
    plan = Dispatcher().plan(
        checkpoint,
        model=model,
        device_map=device_map,
        max_memory=max_memory,
        dtype=dtype,
        no_split_module_classes=no_split_module_classes,
        offload_buffers=offload_buffers,
        dequantize=dequantize,
        expert_offload=expert_offload,
        weights=weights,
        tag=tag,
    )
    unread = plan.audit.unexpected
    if strict and unread:
        text = f"strict: the model has no place for {len(unread)} tensors of the checkpoint"
        raise PlanError(plan.refusal(f"{text}: {shown(unread)}"))
    if plan.ok:
        tell((*_unread(unread), *plan.all_findings))
    return plan.execute(
        model,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        expert_cache=expert_cache,
        copy=copy,
        load_memory=load_memory,
        verify=verify,
        digest=digest,
    )


def _unread(names: Sequence[str]) -> list[Finding]:
    """Return accelerate's warning, in the words by which its log is searched, with the names."""
    text = (
        f"{len(names)} tensors of the checkpoint were not used when it was loaded, since the "
        f"model has no place for them: {shown(names)}"
    )
    return [Finding("unexpected", "warning", text)] if names else []
