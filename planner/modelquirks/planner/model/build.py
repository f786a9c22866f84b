"""Models without weights: parameters on meta, ties kept, computed buffers real."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from modelquirks.planner.dtypes import is_float, torch_name

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.checkpoint.manifest import Manifest

__all__ = ["empty_weights", "model_config", "without_network"]

_offline = Lock()
_building = 0
_was: list[bool] = []
"""How huggingface_hub was set before the first of several that build at once."""


@contextmanager
def empty_weights() -> Generator[None, None, None]:
    """Put every parameter that a module registers on the meta device; buffers stay real.

    As accelerate's ``init_empty_weights``, which makes each registration a tensor of its own and
    so breaks the ties made inside it: here one parameter stays one.
    """
    from torch import nn

    register = nn.Module.register_parameter
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_empty(
        module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        register(module, name, param)
        if param is None or param.device.type == "meta":
            return
        known = seen.get(id(param))
        if known is None or known[0]() is not param:
            empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            seen[id(param)] = known = weakref.ref(param), empty
        module._parameters[name] = known[1]

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def without_network() -> Generator[None, None, None]:
    """Put huggingface_hub into its offline mode while a library builds what a config describes.

    A config may name repositories: kernels, backbones, adapters of adapters. What nobody asked for
    is not fetched.
    """
    from huggingface_hub import constants

    global _building
    with _offline:
        _building += 1
        if _building == 1:
            _was.append(constants.HF_HUB_OFFLINE)
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _offline:
            _building -= 1
            if not _building:
                constants.HF_HUB_OFFLINE = _was.pop()


def model_config(manifest: Manifest) -> Mapping[str, Any]:
    """Return config.json with the dtype that the model is to be built in.

    Where the config is silent it is that of the first floating-point tensor stored, as in
    transformers' ``from_pretrained`` (5.24, ``_get_dtype``); F8 and packed dtypes do not count.
    """
    config = manifest.config
    if not config or config.get("dtype") or config.get("torch_dtype"):
        return config
    plain = (t.dtype for t in manifest.tensors.values() if is_float(t.dtype))
    first = next((d for d in plain if d in ("BF16", "F16", "F32", "F64")), None)
    return config if first is None else {**config, "dtype": torch_name(first)}
