"""Models that the command line names: a factory of the user's, or the class in config.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.planner.cli.command import CallError
from modelquirks.planner.model.build import empty_weights, model_config

if TYPE_CHECKING:
    import argparse

    import torch

    from modelquirks.planner.adapter.adapter import Adapter
    from modelquirks.planner.checkpoint.manifest import Manifest
    from modelquirks.quirks.registry import Registry

__all__ = ["TRANSFORMERS", "Built", "add_model", "build"]

TRANSFORMERS = "transformers"


class Built(NamedTuple):
    """A model on the meta device and what to call its origin in reports."""

    model: torch.nn.Module
    source: str


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model``."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help=f"function that returns the model, called without arguments; or {TRANSFORMERS!r}, "
        "the class that config.json names",
    )


def build(
    spec: str, manifest: Manifest, registry: Registry, *, adapter: Adapter | None = None
) -> Built:
    """Return the model that *spec* names. :class:`CallError` if there is none to be had.

    The class that config.json names gets places for *adapter*; a factory gives a model that has
    them.
    """
    if spec == TRANSFORMERS:
        _not_an_adapter(manifest)
        built = _from_config(model_config(manifest), manifest.root, registry)
        return built if adapter is None else _with_places(built, adapter)
    return Built(_from_factory(spec), spec)


def _from_config(config: Mapping[str, Any], folder: Path, registry: Registry) -> Built:
    found = registry.model(config, folder)
    if found is None:
        named = config.get("architectures") or config.get("model_type")
        said = f"its config names {named!r}" if named else "it has no config.json that names one"
        raise CallError(
            f"no plugin builds a model for {str(folder)!r}: {said}. Give --model module:factory, "
            "or leave the model out with --dry-run"
        )
    model, origin = found
    return Built(model, f"{origin.plugin} {type(model).__name__}")


def _not_an_adapter(manifest: Manifest) -> None:
    """Raise CallError if there is no model to be had because the checkpoint is an adapter."""
    for finding in manifest.findings:
        if finding.code == "adapter" and not manifest.config:
            raise CallError(f"{str(manifest.path)!r} is no model by itself: {finding.message}")


def _with_places(built: Built, adapter: Adapter) -> Built:
    from modelquirks.planner.adapter.places import AdapterPlacesError, with_places

    try:
        return Built(with_places(built.model, adapter), f"{built.source} with PEFT")
    except AdapterPlacesError as error:
        raise CallError(str(error)) from error


def _from_factory(spec: str) -> torch.nn.Module:
    """Call the factory under :func:`empty_weights`: its parameters take no memory."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise CallError(
            f"--model {spec!r} must be 'module:factory' (found no name on one side of ':') "
            f"or {TRANSFORMERS!r}"
        )
    if module_name.endswith(".py"):
        name = module_name.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise CallError(
            f"--model {spec!r} names a file, expected a module that can be imported from here: "
            f"--model {name}:{attribute}"
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    from torch import nn

    try:
        factory = attrgetter(attribute)(import_module(module_name))
        with empty_weights():
            model = factory()
    except Exception as error:
        raise CallError(f"--model {spec!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise CallError(f"--model {spec!r} gave a {type(model).__name__}, expected an nn.Module")
    return model
