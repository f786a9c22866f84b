"""Models that transformers knows: built from config.json alone, never with remote code."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelquirks.quirks.hookspecs import hookimpl

__all__ = ["modelquirks_model", "plain_config"]

_DROPPED = frozenset(
    (
        *("quantization_config", "compression_config", "auto_map", "custom_pipelines"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("use_kernels", "kernel_config"),
    )
)
"""Keys of a config and its sub-configs that must not reach the model: packed weights are made
plain by recipes, and code from elsewhere is never run. An implementation of attention or experts
may be a repository with a compiled kernel (``integrations/hub_kernels.py`` of transformers 5.24),
which is how a model computes, and the business of whoever runs it."""

_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)
"""Tables of transformers to look a model type up in, when config.json names no known class."""

_LARGE = 1 << 24
"""Elements of a tensor that is not worth allocating only to be moved to meta."""


@hookimpl
def modelquirks_model(config: Mapping[str, Any], folder: Path) -> Any:
    """Return the model that *config* describes: parameters on meta, computed buffers real.

    The class is the first one that ``architectures`` names, else the one that transformers has
    for ``model_type``, preferably with a language-model head. The model is a plain one, also if
    the checkpoint is quantised, in the dtype of the config, tied as the config says, and in
    evaluation mode. None if transformers is not installed, or knows neither class nor type;
    RuntimeError if it knows them but cannot build them.
    """
    del folder  # everything is in config.json
    if find_spec("transformers") is None:
        return None
    plain = plain_config(config)
    if not isinstance(plain.get("architectures"), list):  # which up to 5.16 is an error there
        plain.pop("architectures", None)
    named = _named_class(plain)
    if named is None and not _known_type(plain):
        return None
    what = named.__name__ if named else plain["model_type"]
    try:
        settings = _settings(plain, named)
        return _built(named or _class_for(settings), settings)
    except Exception as error:
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__} cannot build {what!r} from config.json: "
            f"{type(error).__name__}: {error}"
        ) from error


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of *config* without what must not reach the model, sub-configs included."""
    return {key: _decoded(value) for key, value in config.items() if key not in _DROPPED}


def _decoded(value: Any) -> Any:
    """Return a value of config.json with the numbers that JSON does not have.

    transformers writes infinity as ``{"__float__": "Infinity"}`` (``_encode_special_floats``,
    5.24).
    """
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("__float__")
    if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
        return float(tag)
    return plain_config(value)


def _known_type(config: Mapping[str, Any]) -> bool:
    import transformers

    return config.get("model_type") in transformers.CONFIG_MAPPING


def _named_class(config: Mapping[str, Any]) -> type | None:
    """Return the class of transformers that ``architectures`` names first, if there is one."""
    import transformers

    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(found, type) and hasattr(found, "_from_config")
    return found if is_model else None


def _settings(config: Mapping[str, Any], named: type | None) -> Any:
    """Return the config object; the type in the file decides, unless transformers has no such.

    Raises ValueError if the file is for another kind of model than the class that it names.
    """
    import transformers

    wanted = getattr(named, "config_class", None)
    if not _known_type(config):
        return wanted.from_dict(dict(config))  # type: ignore[union-attr]
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    if wanted is None or isinstance(settings, wanted):
        return settings
    if settings.sub_configs.get("text_config") is wanted:
        return settings.get_text_config()
    raise ValueError(
        f"the file has model_type {config['model_type']!r}, but this class wants "
        f"{wanted.model_type!r}; name the right class in 'architectures', or give the model "
        "yourself"
    )


def _class_for(settings: Any) -> type:
    """Return the class that transformers has for this kind of config."""
    import transformers

    for table in _HEADS:
        mapping = getattr(transformers, table)
        if type(settings) in mapping:
            found: Any = mapping[type(settings)]
            first: type = found[0] if isinstance(found, tuple) else found
            return first
    raise ValueError(f"no model class is known for {type(settings).__name__}")


def _built(model_class: Any, settings: Any) -> Any:
    with _large_on_meta():
        model = _instance(model_class, settings)
    if any(buffer.is_meta for buffer in _computed_buffers(model)):
        model = _instance(model_class, settings)  # one of them is large itself
    return model


def _instance(model_class: Any, settings: Any) -> Any:
    from modelquirks.planner.model.build import empty_weights, without_network

    with empty_weights(), without_network():
        model = model_class._from_config(settings)
    _give_computed_values(model)
    return model.eval()


def _give_computed_values(model: Any) -> None:
    """Compute the parameters that no checkpoint holds (sinusoidal positions), as they are made.

    A checkpoint that has them all the same is loaded over them.
    """
    from modelquirks.plugins.bridge.computed import computable, computed

    for name, value in computed(model, computable(model)).items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = value


@contextmanager
def _large_on_meta() -> Generator[None, None, None]:
    """Give large tensors without an explicit device no memory at all.

    ``empty_weights`` moves each parameter to meta after it was made. The stacked experts of
    one layer can be larger than the memory of the machine on which a plan is made.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    sized = (torch.empty, torch.zeros, torch.ones)

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in sized and kwargs.get("device") is None and _count(args, kwargs) >= _LARGE:
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **kwargs)

    with Mode():
        yield


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of elements that a factory call asks for; 0 if that cannot be told."""
    sizes = kwargs.get("size", args)
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
        sizes = sizes[0]
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return 0
        count *= size
    return count


def _computed_buffers(model: Any) -> Iterator[Any]:
    """Yield the buffers that no checkpoint holds."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                yield buffer
