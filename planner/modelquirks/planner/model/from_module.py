"""Skeletons of real models: any ``nn.Module``, on meta or not, with its ties whole or broken.

torch is imported by whoever made the module; nothing here reads a weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.model.skeleton import Kind, ModelTensor, Skeleton
from modelquirks.planner.model.walk import entries_of, modules_of
from modelquirks.quirks.family import group

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.model.walk import Entry

__all__ = [
    "declared",
    "declared_ties",
    "identity",
    "pattern_of",
    "skeleton_of",
    "telling",
    "ties_of",
]


def skeleton_of(model: torch.nn.Module, *, source: str = "") -> Skeleton:
    """Return what *model* needs.

    Ties are found by identity, by shared storage, and in what a transformers model declares
    (``all_tied_weights_keys``), since building under ``init_empty_weights`` breaks the first two.
    Shapes are element counts as in safetensors: a torch ``float4_e2m1fn_x2`` of ``[8]`` is
    ``F4 [16]``.
    """
    modules = modules_of(model)
    entries = list(entries_of(modules))
    tensors = {name: _described(name, kind, tensor) for name, kind, tensor in entries}
    distinct = telling(modules.values())
    return Skeleton(
        source=source or f"{type(model).__module__}.{type(model).__qualname__}",
        tensors=tensors,
        modules={name: type(module).__name__ for name, module in modules.items()},
        ties=ties_of(model, entries),
        no_split=declared(distinct, "_no_split_modules"),
        keep_dtype=_kept(declared(distinct, "_keep_in_fp32_modules_strict"), tensors),
        keep_dtype_f16=_kept(declared(distinct, "_keep_in_fp32_modules"), tensors),
        config=_config(model),
        turned=frozenset(n for n, m in modules.items() if m.__dict__.get("is_transposed") is True),
    )


def ties_of(model: torch.nn.Module, entries: Sequence[Entry]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that share one tensor, or that *model* declares to."""
    keys = [id(tensor) if kind == "computed" else identity(tensor) for _, kind, tensor in entries]
    same: dict[object, list[str]] = {}
    if len(set(keys)) < len(keys):
        shared = {key for key, n_names in Counter(keys).items() if n_names > 1}
        for key, (name, kind, _) in zip(keys, entries, strict=True):
            if key in shared and kind != "computed":
                same.setdefault(key, []).append(name)
    found: list[Sequence[str]] = [names for names in same.values() if len(names) > 1]
    if pairs := declared_ties(model):
        known = {name for name, kind, _ in entries if kind != "computed"}
        found += [pair for pair in pairs if known.issuperset(pair)]
    return _joined(found)


def telling(modules: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those of *modules* that may declare something for :func:`declared`.

    Of a class one is enough, beside modules with parts and settings of their own: transformers 5
    gathers at ``post_init`` what the parts declare.
    """
    by_type = dict(zip(map(type, modules), modules, strict=True))
    own = [
        module
        for module in modules
        if module._modules
        and (
            "_no_split_modules" in (settings := module.__dict__)
            or "_keep_in_fp32_modules" in settings
            or "_keep_in_fp32_modules_strict" in settings
        )
    ]
    return [*by_type.values(), *own]


def declared(modules: Iterable[torch.nn.Module], attribute: str) -> frozenset[str]:
    """Return the words in a list of that name of any of *modules*."""
    found: set[str] = set()
    for module in modules:
        words: object = getattr(module, attribute, None)
        if isinstance(words, (list, tuple, set, frozenset)):
            found.update(map(str, words))
    return frozenset(found)


def _described(name: str, kind: Kind, tensor: torch.Tensor) -> ModelTensor:
    try:
        dtype = _name_of(tensor.dtype)
        shape = tuple(tensor.shape)
    except ValueError as error:
        raise ValueError(f"{name!r} of the model: {error}") from None
    except RuntimeError as error:  # an uninitialized parameter of a lazy module
        raise ValueError(
            f"{name!r} of the model has no shape yet: run the model once before planning ({error})"
        ) from None
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return ModelTensor(name, dtype, shape, kind, tensor.is_meta)


_name_of = cache(from_torch)


def identity(tensor: torch.Tensor) -> object:
    """Return a key that two names of a tensor share if they stand for one."""
    if tensor.is_meta:
        return id(tensor)
    try:
        if tensor.numel() == 0:
            return id(tensor)
        if address := tensor.data_ptr():
            return address, tuple(tensor.shape), tensor.stride(), tensor.dtype
        return id(tensor)  # a DTensor says 0
    except (RuntimeError, NotImplementedError, ValueError):
        return id(tensor)  # a subclass without storage of its own, or one without a shape yet


def declared_ties(model: torch.nn.Module) -> list[Sequence[str]]:
    """Return the pairs that a transformers model says it ties, owner first."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, Mapping):
        return [(str(owner), str(target)) for target, owner in declared.items()]
    return []


def _joined(groups: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Join groups that have a name in common; order inside a group is order of appearance."""
    home: dict[str, dict[str, None]] = {}
    for names in groups:
        merged: dict[str, None] = {}
        for known in {id(home[name]): home[name] for name in names if name in home}.values():
            merged |= known
        merged |= dict.fromkeys(names)
        home |= dict.fromkeys(merged, merged)
    return tuple(tuple(names) for names in {id(names): names for names in home.values()}.values())


def _kept(entries: frozenset[str], tensors: Mapping[str, ModelTensor]) -> tuple[str, ...]:
    """Return patterns of the tensors that a transformers model keeps in float32."""
    if (wanted := pattern_of(entries)) is None:
        return ()
    families = group(name for name in tensors if wanted.search(name))
    return tuple(re.sub(r"\{(\d+)\}", r"{i\1}", template) for template in families)


def pattern_of(entries: Collection[str]) -> re.Pattern[str] | None:
    """Return what to search names for to find those that any of *entries* means; None for none.

    transformers searches each entry anywhere in the name (``_get_dtype_plan``, 5.24), with ``*``
    for any text.
    """
    if not entries:
        return None
    return re.compile("|".join(re.escape(e).replace(r"\*", ".*") for e in sorted(entries)))


def _config(model: torch.nn.Module) -> Mapping[str, Any]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return {}
    data = to_dict()
    return data if isinstance(data, dict) else {}
