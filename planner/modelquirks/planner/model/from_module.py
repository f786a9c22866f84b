"""Skeletons of real models: any ``nn.Module``, on meta or not, with its ties whole or broken.

torch is imported by whoever made the module; nothing here reads a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.model.skeleton import Kind, ModelTensor, Skeleton
from modelquirks.quirks.family import group

if TYPE_CHECKING:
    import torch

__all__ = ["skeleton_of"]


def skeleton_of(model: torch.nn.Module, *, source: str = "") -> Skeleton:
    """Return what *model* needs.

    Ties are found by identity, by shared storage, and in what a transformers model declares
    (``all_tied_weights_keys``), since building under ``init_empty_weights`` breaks the first two.
    Shapes are element counts as in safetensors: a torch ``float4_e2m1fn_x2`` of ``[8]`` is
    ``F4 [16]``.
    """
    modules: dict[str, str] = {}
    tensors: dict[str, ModelTensor] = {}
    same: dict[object, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules[prefix] = type(module).__name__
        for name, kind, tensor in _direct(module):
            full = f"{prefix}.{name}" if prefix else name
            tensors[full] = _described(full, kind, tensor)
            if kind != "computed":
                same.setdefault(_identity(tensor), []).append(full)
    found = [names for names in same.values() if len(names) > 1]
    declared = [pair for pair in _declared_ties(model) if all(name in tensors for name in pair)]
    return Skeleton(
        source=source or f"{type(model).__module__}.{type(model).__qualname__}",
        tensors=tensors,
        modules=modules,
        ties=_joined([*found, *declared]),
        no_split=frozenset(_no_split(model)),
        keep_dtype=_kept(model, "_keep_in_fp32_modules_strict", tensors),
        keep_dtype_f16=_kept(model, "_keep_in_fp32_modules", tensors),
        config=_config(model),
    )


def _direct(module: torch.nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, "parameter", parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            computed = name in module._non_persistent_buffers_set
            yield name, "computed" if computed else "buffer", buffer


def _described(name: str, kind: Kind, tensor: torch.Tensor) -> ModelTensor:
    try:
        dtype = from_torch(tensor.dtype)
        shape = tuple(tensor.shape)
    except ValueError as error:
        raise ValueError(f"{name!r} of the model: {error}") from None
    except RuntimeError as error:  # an uninitialized parameter of a lazy module
        raise ValueError(
            f"{name!r} of the model has no shape yet: run the model once before planning ({error})"
        ) from None
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return ModelTensor(name, dtype, shape, kind, tensor.device.type == "meta")


def _identity(tensor: torch.Tensor) -> object:
    """Return a key that two names share if they stand for one tensor."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # a subclass without storage of its own
        return id(tensor)


def _declared_ties(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return the pairs that a transformers model says it ties, owner first."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, Mapping):
        return [(str(owner), str(target)) for target, owner in declared.items()]
    return []


def _joined(groups: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Join groups that have a name in common; order inside a group is order of appearance."""
    joined: list[dict[str, None]] = []
    for names in groups:
        merged = dict.fromkeys(names)
        apart: list[dict[str, None]] = []
        for known in joined:
            if known.keys() & merged.keys():
                merged = {**known, **merged}
            else:
                apart.append(known)
        joined = [*apart, merged]
    return tuple(tuple(names) for names in joined)


def _no_split(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        declared: object = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set, frozenset)):
            yield from (str(name) for name in declared)


def _kept(
    model: torch.nn.Module, attribute: str, tensors: Mapping[str, ModelTensor]
) -> tuple[str, ...]:
    """Return patterns of the tensors that a transformers model keeps in float32.

    transformers searches each entry anywhere in the name (``_get_dtype_plan``, 5.24), with ``*``
    for any text.
    """
    entries: set[str] = set()
    for module in model.modules():
        declared: object = getattr(module, attribute, None)
        if isinstance(declared, (list, tuple, set, frozenset)):
            entries |= {str(entry) for entry in declared}
    if not entries:
        return ()
    wanted = re.compile("|".join(re.escape(e).replace(r"\*", ".*") for e in sorted(entries)))
    families = group(name for name in tensors if wanted.search(name))
    return tuple(re.sub(r"\{(\d+)\}", r"{i\1}", template) for template in families)


def _config(model: torch.nn.Module) -> Mapping[str, Any]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return {}
    data = to_dict()
    return data if isinstance(data, dict) else {}
