"""Computed parameters: those that no checkpoint holds, because the model makes them itself.

transformers names them in ``_keys_to_ignore_on_load_missing`` and computes them in
``_init_weights`` when they are missing (``initialize_weights``, 5.24): sinusoidal positions as a
rule. Tied names are in that list too; they are no business of this module.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["computable", "computed"]


def computable(model: Any) -> list[str]:
    """Return the parameters of *model* without data that may be missing in a checkpoint."""
    patterns = model._keys_to_ignore_on_load_missing
    if not patterns:
        return []
    wanted = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)))
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name not in model.all_tied_weights_keys and wanted.search(name)
    ]


def computed(model: Any, names: Collection[str]) -> Mapping[str, Any]:
    """Return the values that *model* gives to these of its parameters; it stays as it is."""
    import torch

    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, []).append(leaf)
    values: dict[str, Any] = {}
    for path, leaves in by_module.items():
        module = copy.copy(model.get_submodule(path))
        module._parameters = dict(module._parameters)
        for leaf in leaves:
            old = module._parameters[leaf]
            empty = torch.zeros_like(old, device="cpu")
            value = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
            module._parameters[leaf] = values[f"{path}.{leaf}" if path else leaf] = value
        with torch.no_grad():
            model._init_weights(module)
    return values
