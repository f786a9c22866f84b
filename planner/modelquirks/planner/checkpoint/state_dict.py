"""Which tensors in the value of a ``torch.save`` file are the weights, and under which names.

Such a file is often a dictionary of a training run with the weights under one of its keys. The
choice is made by rule, never by guess, and said: a known key that holds tensors; else the only
entry that holds any, if its own keys are dotted names as a state dict has them; else everything,
nested names joined with dots.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.pickle_machine import Opaque
from modelquirks.planner.checkpoint.pickle_names import TENSOR_LIKE
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.finding import Finding, shown

__all__ = ["Weights", "find_weights"]

_WRAPPERS = (
    "state_dict",
    "model_state_dict",
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
    if tensors and all(_OPTIMIZER.match(name) for name in tensors):
        text = f"{shard!r} holds the state of an optimizer, not weights: {shown(tensors, 3)}."
        return Weights(tensors, "", (Finding("optimizer-state", "error", text),))
    findings = [*_container_findings(shard, value, keys), *_left_out(shard, named)]
    if isinstance(value, Opaque) and tensors:
        text = (
            f"{shard!r} is a whole {value.kind}, saved with its class; its tensors are read, the "
            "class is not imported. Save its state_dict() instead."
        )
        findings.append(Finding("whole-module", "warning", text))
    return Weights(tensors, _container(value, keys), tuple(findings))


def _container(value: Any, keys: tuple[str, ...]) -> str:
    if isinstance(value, dict) and "pytorch-lightning_version" in value:
        return "lightning"
    if isinstance(value, dict) and "ds_version" in value and keys[:1] == ("module",):
        return "deepspeed"
    return ".".join(keys)


def _unwrapped(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the part of *value* that holds the weights, and the keys that lead there."""
    keys: tuple[str, ...] = ()
    while isinstance(value, dict) and len(keys) < 4:
        holders = _holders(value)
        single = [item for item in value.values() if isinstance(item, TensorRecord)]
        if not holders or any(item.span > 1 for item in single):  # more than counters beside it
            break
        known = [key for key in _WRAPPERS if key in holders]
        if not known and not (len(holders) == 1 and _is_state_dict(value[holders[0]])):
            break
        key = known[0] if known else holders[0]
        value, keys = value[key], (*keys, str(key))
    return value, keys


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
    return key if isinstance(key, str) else repr(key)


def _container_findings(shard: str, value: Any, keys: tuple[str, ...]) -> Iterator[Finding]:
    if not keys:
        return
    path = ".".join(keys)
    others = [str(key) for key in _holders(value) if key != keys[0]]
    beside = f"; not taken, though they hold tensors too: {shown(others)}" if others else ""
    text = f"{shard!r} holds the weights under {path!r}, which is no part of their names{beside}."
    yield Finding("container", "info", text)


def _left_out(shard: str, named: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Say what is under the names of weights and was not taken."""
    alike = [name for name, item in named if isinstance(item, Opaque) and item.kind in TENSOR_LIKE]
    if alike:
        text = (
            f"{shard!r} holds tensors in a form that is not read (sparse, quantised, on no "
            f"device, numpy arrays, lazily conjugated): {shown(alike)}. Save them as plain tensors."
        )
        yield Finding("tensor-unreadable", "warning", text)
    if any(isinstance(item, TensorRecord) for _, item in named):
        rest = [
            name
            for name, item in named
            if not isinstance(item, TensorRecord) and name not in alike and not _is_empty(item)
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
