"""The classes of the zoo: every model class of transformers that has weights of its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["class_named", "class_names"]

_OTHERS = (
    "Config", "Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor", "ImageProcessor",
    "ImageProcessorPil", "ImageProcessorFast", "Output",
)  # fmt: skip
"""Endings of names that are no models; importing them all would take minutes."""


def class_named(name: str) -> Any:
    """Return the class of transformers of that name."""
    import transformers

    return getattr(transformers, name)


def class_names(known: Path | None = None) -> tuple[str, ...]:
    """Return the names of all public model classes of transformers, sorted.

    Finding them imports every model, which takes half a minute: a list for the same version is
    read from the file *known*, and else written to it.

    A class counts if it has a config class and is not only the base of others
    (``...PreTrainedModel``, which builds no layers).
    """
    this = version("transformers")
    if known is not None and known.exists():
        listed = json.loads(known.read_text())
        if listed["transformers"] == this:
            return tuple(listed["names"])
    names = tuple(sorted(_found()))
    if known is not None:
        known.write_text(json.dumps({"transformers": this, "names": names}))
    return names


def _found() -> Iterator[str]:
    import transformers

    for name in dir(transformers):
        if (
            not name[0].isupper()
            or name.endswith(_OTHERS)
            or "PreTrainedModel" in name
            or "PretrainedModel" in name
        ):
            continue
        try:
            found: Any = getattr(transformers, name)
        except Exception:  # needs a package that is not there: transformers raises at access
            continue
        is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
        if is_model and getattr(found, "config_class", None) is not None:
            yield name
