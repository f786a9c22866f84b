"""Which tensors in the value of a ``torch.save`` file are the weights, and under which names.

Such a file is often a dictionary of a training run with the weights under one of its keys. The
choice is made by rule, never by guess, and said: a known key that holds tensors; else the only
entry that holds any, if its own keys are dotted names as a state dict has them, or a known key;
else everything, nested names joined with dots. States of optimizers are never weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.pickle_machine import Opaque
from modelquirks.planner.checkpoint.pickle_names import TENSOR_LIKE
from modelquirks.planner.checkpoint.rank_share import is_share
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.finding import Finding, brief, shown

__all__ = ["Weights", "find_weights"]

_WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "params",
    "weights",
    "net",
    "network",
    "generator",
    "ema",
    "ema_state_dict",
    "state_dict_ema",
    "model_ema",
    "params_ema",
)
_OPTIMIZER = re.compile(
    r"(base_)?optimizers?(_states?)?(_dict)?\.|optim\.|state\.[^.]+\.(exp_avg|step)"
)
_OPTIMIZER_KEY = re.compile(
    r"(base_|model_)?(optimizers?|optim|opt)(_states?)?(_dict)?(_[a-z0-9])?"
)
_MAX_KEYS = 1000
_MAX_NODES = 3_000_000
_MAX_DEPTH = 64


class Weights(NamedTuple):
    """The tensors of a file by name, what they were wrapped in, and what to say of it."""

    tensors: dict[str, TensorRecord]
    container: str
    findings: tuple[Finding, ...]


class _TooMuch(ValueError):
    """Containers within containers without end."""


def find_weights(shard: str, value: Any) -> Weights:
    """Return the weights in *value*, the content of the file *shard*."""
    try:
        inner, keys = _unwrapped(value)
        named = list(_walk(inner))
    except _TooMuch as error:
        text = f"{shard!r} holds {error}: it is not a checkpoint, or is meant to exhaust memory."
        return Weights({}, "", (Finding("pickle-invalid", "error", text),))
    tensors = {name: item for name, item in named if isinstance(item, TensorRecord)}
    if tensors and (_is_optimizer(inner) or all(map(_OPTIMIZER.match, tensors))):
        text = f"{shard!r} holds the state of an optimizer, not weights: {shown(tensors, 3)}."
        return Weights(tensors, "", (Finding("optimizer-state", "error", text),))
    beside: list[str] = []
    if not keys and isinstance(value, dict):
        beside = [str(key) for key in _holders(value) if _is_optimizer(value[key], key)]
        named = [pair for pair in named if not pair[0].startswith(tuple(f"{k}." for k in beside))]
        tensors = {name: item for name, item in named if isinstance(item, TensorRecord)}
    findings = [
        *_about_megatron(shard, value),
        *_container_findings(shard, value, keys),
        *_about_several(shard, inner, beside),
        *_left_out(shard, named),
    ]
    if isinstance(inner, Opaque) and tensors:
        where = f" under {'.'.join(keys)!r}" if keys else ""
        text = (
            f"{shard!r} {'holds' if keys else 'is'} a whole {inner.kind}{where}, saved with its "
            "class; its tensors are read, the class is not imported. Save its state_dict() instead."
        )
        findings.append(Finding("whole-module", "warning", text))
    return Weights(tensors, _container(value, keys), tuple(findings))


def _container(value: Any, keys: tuple[str, ...]) -> str:
    if isinstance(value, dict) and "pytorch-lightning_version" in value:
        return "lightning"
    if isinstance(value, dict) and "ds_version" in value and keys[:1] == ("module",):
        return "deepspeed"
    if _is_megatron(value) and keys:
        return "megatron"
    return ".".join(keys)


def _unwrapped(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the part of *value* that holds the weights, and the keys that lead there."""
    keys: tuple[str, ...] = ()
    while isinstance(value, dict) and len(keys) < 4:
        holders = [key for key in _holders(value) if not _is_optimizer(value[key], key)]
        single = [item for item in value.values() if isinstance(item, TensorRecord)]
        if not holders or any(map(_is_weight, single)):  # more than counters beside it
            break
        key = next((key for key in _WRAPPERS if key in holders), None)
        if key is None and len(holders) == 1 and _leads_on(value[holders[0]]):
            key = holders[0]
        if key is None:
            break
        value, keys = value[key], (*keys, str(key))
    return value, keys


def _is_weight(tensor: TensorRecord) -> bool:
    """Tell whether a tensor beside the weights may be one: no counter, no state of a generator."""
    return tensor.span > 1 and not (tensor.dtype == "U8" and len(tensor.shape) == 1)


def _leads_on(value: Any) -> bool:
    """Tell whether the weights are in *value*, whatever key it was under."""
    if _is_state_dict(value):
        return True
    return isinstance(value, dict) and any(key in _WRAPPERS for key in _holders(value))


def _is_optimizer(value: Any, key: Any = "") -> bool:
    """Tell whether *value* is the state of an optimizer, by its form or by its *key*."""
    if isinstance(key, str) and _OPTIMIZER_KEY.fullmatch(key):
        return True
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return isinstance(groups, list) and "state" in value


def _holders(value: dict[Any, Any]) -> list[Any]:
    if len(value) > _MAX_KEYS:  # a dict of that size is the weights themselves
        return []
    return [key for key, item in value.items() if _holds_tensors(item)]


def _is_state_dict(value: Any) -> bool:
    items = _children(value)
    tensors = [key for key, item in items.items() if isinstance(item, TensorRecord)]
    return bool(tensors) and any("." in str(key) for key in tensors)


def _holds_tensors(value: Any) -> bool:
    """Tell whether there is a tensor anywhere in *value*, looking at each container once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        for item in _children(todo.pop()).values():
            if isinstance(item, TensorRecord):
                return True
            if id(item) not in seen:
                seen.add(id(item))
                todo.append(item)
    return False


def _children(value: Any) -> dict[Any, Any]:
    """Return what is in a container, by key; ``{}`` for anything that is none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple) and not isinstance(value, TensorRecord):
        nested = any(isinstance(item, list | tuple | dict | Opaque) for item in value)
        return dict(enumerate(value)) if nested else {}
    if isinstance(value, Opaque):
        state = value.state if isinstance(value.state, dict) else {}
        parts = [state.get(part) for part in ("_parameters", "_buffers", "_modules")]
        inside = [part for part in parts if isinstance(part, dict)]
        return {key: item for part in (value.items, *inside) for key, item in part.items()}
    return {}


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted name, in order; each container once on any path."""
    seen = 0
    todo: list[tuple[str, Any, tuple[int, ...]]] = [("", value, ())]
    while todo:
        name, item, path = todo.pop()
        children = _children(item)
        if not children:
            yield name, item
            continue
        if id(item) in path or len(path) >= _MAX_DEPTH:
            raise _TooMuch("containers that contain themselves, or are nested too deep")
        seen += len(children)
        if seen > _MAX_NODES:
            raise _TooMuch(f"more than {_MAX_NODES:,} values")
        inside = (*path, id(item))
        prefix = f"{name}." if name else ""
        todo += [(f"{prefix}{_text(key)}", child, inside) for key, child in children.items()][::-1]


def _text(key: Any) -> str:
    return key if isinstance(key, str) else brief(key)


def _container_findings(shard: str, value: Any, keys: tuple[str, ...]) -> Iterator[Finding]:
    if not keys:
        return
    path = ".".join(keys)
    others: list[str] = []
    copies: list[str] = []
    for key in (key for key in _holders(value) if key != keys[0]):
        alike = isinstance(key, str) and key in _WRAPPERS and not _is_optimizer(value[key], key)
        (copies if alike else others).append(str(key))
    beside = f"; not taken, though they hold tensors too: {shown(others)}" if others else ""
    text = f"{shard!r} holds the weights under {path!r}, which is no part of their names{beside}."
    yield Finding("container", "info", text)
    if copies:
        text = (
            f"{shard!r} has weights under {shown(copies)} too, an average or another model: those "
            f"under {path!r} are taken. For the others, save that part as a file of its own."
        )
        yield Finding("several-weights", "warning", text)


def _is_megatron(value: Any) -> bool:
    """Tell whether *value* is what one rank of Megatron-LM saves (its ``generate_state_dict``)."""
    return isinstance(value, dict) and {"args", "checkpoint_version", "model"} <= value.keys()


def _about_megatron(shard: str, value: Any) -> Iterator[Finding]:
    if _is_megatron(value):
        text = (
            f"{shard!r} is what one rank of Megatron saved, and only this file is read: layers and "
            "slices may be in those of other ranks. Give the folder that has all 'mp_rank_…'."
        )
        yield Finding("one-of-several", "warning", text)


def _about_several(shard: str, inner: Any, optimizers: list[str]) -> Iterator[Finding]:
    """Say what is beside each other where no key is known to hold the weights."""
    if optimizers:
        text = f"{shard!r}: the state of an optimizer is not loaded: {shown(optimizers)}."
        yield Finding("not-loaded", "info", text)
    held = _holders(inner) if isinstance(inner, dict) else []
    parts = [str(key) for key in held if str(key) not in optimizers and _is_state_dict(inner[key])]
    if len(parts) > 1:
        text = (
            f"{shard!r} holds several state dicts, and none under a key that is known: "
            f"{shown(parts)}. All are taken, with the key as the first part of their names; for a "
            f"model that is one of them say so by an alias ('{parts[0]}.**=**')."
        )
        yield Finding("several-weights", "warning", text)


def _left_out(shard: str, named: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Say what is under the names of weights and was not taken."""
    shares = [name for name, item in named if is_share(item)]
    if shares:
        text = (
            f"{shard!r} holds one rank's share of {len(shares)} tensors, as FSDP writes them: "
            f"{shown(shares)}. Give the folder with the files of all ranks."
        )
        yield Finding("tensor-sharded", "error", text)
    likes = [name for name, item in named if isinstance(item, Opaque) and item.kind in TENSOR_LIKE]
    if alike := [name for name in likes if name not in shares]:
        text = (
            f"{shard!r} holds tensors in a form that is not read (sparse, quantised, on no "
            f"device, numpy arrays, lazily conjugated): {shown(alike)}. Save them as plain tensors."
        )
        yield Finding("tensor-unreadable", "warning", text)
    if any(isinstance(item, TensorRecord) for _, item in named):
        rest = [
            name
            for name, item in named
            if not isinstance(item, TensorRecord) and name not in likes and not _is_empty(item)
        ]
        if rest:
            text = f"{shard!r} holds values that are no tensors, left out: {shown(rest)}."
            yield Finding("not-tensors", "info", text)
    names = [name for name, item in named if isinstance(item, TensorRecord)]
    if len(names) != len(set(names)):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        text = f"{shard!r} holds several tensors of one name, after joining nested names: "
        yield Finding("duplicate-name", "error", f"{text}{shown(twice)}.")


def _is_empty(item: Any) -> bool:
    return item is None or item == {} or item == [] or item == ()
