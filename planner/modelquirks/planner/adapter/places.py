"""Places: a model without weights gets those of an adapter, as PEFT makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from modelquirks.planner.finding import shown

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.adapter.adapter import Adapter

__all__ = ["AdapterPlacesError", "with_places"]


_REACHING = {
    "XLORA": "loads other adapters, from the hub too",
    "SHADOW": "loads another model, from the hub too",
    "CARTRIDGE": "loads what its config names",
}
"""Kinds that do more than make places when PEFT puts them on a model (0.21.2)."""
_NOT_OURS = {
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "tokenizer_name_or_path": None,
    "tokenizer_kwargs": None,
}
"""Fields that name what is imported or fetched, and how they are by default.

``tuners/lora/tp_layer.py`` imports the module that ``megatron_core`` names, before 0.20 whatever
it is; a prompt may come from a tokenizer with remote code."""


class AdapterPlacesError(ValueError):
    """PEFT is not there, or does not take the model; the message says what to do."""


def with_places(model: torch.nn.Module, adapter: Adapter) -> torch.nn.Module:
    """Return *model* as a PEFT model with places for *adapter*, on meta where the model is.

    This is the one thing that needs peft, which is imported here; none of the adapter's weights
    is read. Raises :class:`AdapterPlacesError`.
    """
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise AdapterPlacesError(
            "an adapter that is not merged is loaded into a model of PEFT, which is not installed: "
            "install modelquirks[peft], or merge the adapter with --merge"
        ) from error
    from modelquirks.planner.model.build import empty_weights, without_network

    if why := _REACHING.get(adapter.config.kind):
        raise AdapterPlacesError(
            f"{str(adapter.path)!r} is of the kind {adapter.config.kind}, which {why}: build the "
            "PEFT model yourself (in Python), and give that"
        )
    folder = adapter.path if adapter.path.is_dir() else adapter.path.parent
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        for name, usual in _NOT_OURS.items():
            if hasattr(config, name):
                setattr(config, name, usual)
        with empty_weights(), without_network():
            placed: torch.nn.Module = get_peft_model(cast(Any, model), config)
    except Exception as error:
        raise AdapterPlacesError(
            f"PEFT does not put {str(folder)!r} on this model: {type(error).__name__}: {error}"
        ) from error
    lost = [name for name, buffer in placed.named_buffers() if buffer.is_meta]
    if lost:
        raise AdapterPlacesError(
            f"PEFT fills {shown(lost)} from the weights of the model when it puts the adapter "
            "there, and here are none yet: build the PEFT model with weights (in Python), or merge "
            "the adapter with --merge"
        )
    return placed
