"""The hooks a plugin may implement. Mark an implementation with :data:`hookimpl`.

Every hook returns plain data or small objects; the order of plugins never means anything. Hooks
are called one plugin at a time: one that raises is reported by name, distribution and version,
and the others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pluggy

from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.record import ModelQuirks

__all__ = [
    "GROUP",
    "LibraryPlugin",
    "ModelPlugin",
    "OpenPlugin",
    "RecordsPlugin",
    "SchemesPlugin",
    "hookimpl",
]

GROUP = "modelquirks"
"""Name of the entry-point group, and prefix of every hook."""

_hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@_hookspec
def modelquirks_records() -> Iterable[ModelQuirks]:  # type: ignore[empty-body]
    """Return the records of this plugin.

    Called once per process. Must not import torch or touch the network.
    """


@_hookspec
def modelquirks_schemes() -> Iterable[Scheme]:  # type: ignore[empty-body]
    """Return the packing schemes that this plugin can turn into plain weights."""


@_hookspec
def modelquirks_model(config: Mapping[str, Any], folder: Path) -> Any:
    """Return an ``nn.Module`` on the meta device for *config*, or None if it is not ours.

    *config* is the content of ``config.json`` in *folder*. Called only when somebody asks for a
    model. Must never execute code that comes with the checkpoint.
    """


@_hookspec
def modelquirks_library(model: Any, names: Collection[str]) -> Any:
    """Return the :class:`~modelquirks.quirks.library.LibraryRules` for *model*, or None.

    For plugins that know a library with conversion rules of its own. *model* is the
    ``nn.Module`` that somebody wants to load, *names* are those of its parameters and persistent
    buffers. None if it is no model of that library.
    """


@_hookspec
def modelquirks_open(path: Path, names: Sequence[str], options: Any) -> Any:
    """Return what the checkpoint *path* holds if it is of the plugin's own format, or None.

    For formats that are more than files of named weights: shards of a training run, say. The
    result is an ``Opened`` of the planner (``modelquirks.planner.checkpoint.opened``): byte ranges
    in files, and for each tensor of the model that was saved the recipe over them.

    *path* is a folder, or a file that is no weight file by its name, or GGUF; *names* are those of
    the files and folders in the folder, sorted, and of a file its own. *options* is the planner's
    ``OpenOptions``: which of several states and weights somebody wants, all None for the usual
    ones. An implementation may leave it out of its parameters; the ``chosen`` of the result says
    what was heeded, and what was not is an error. Called unless the folder has weights under the
    usual names (an index, ``model.safetensors``…) and there are no such wishes. Whether the format
    is the plugin's must be told by names and a few bytes; then headers may be read, never weights.
    Must execute nothing of what it reads and import no training framework. What is wrong with the
    checkpoint is a finding in the result; raising means that the plugin is broken.
    """


class RecordsPlugin(Protocol):
    """For type checkers: ``plugin: RecordsPlugin = my_module`` accepts a right module."""

    def modelquirks_records(self) -> Iterable[ModelQuirks]:
        """See :func:`modelquirks_records`."""
        ...


class SchemesPlugin(Protocol):
    """As :class:`RecordsPlugin`, for :func:`modelquirks_schemes`."""

    def modelquirks_schemes(self) -> Iterable[Scheme]:
        """See :func:`modelquirks_schemes`."""
        ...


class LibraryPlugin(Protocol):
    """As :class:`RecordsPlugin`, for :func:`modelquirks_library`."""

    def modelquirks_library(self, model: Any, names: Collection[str]) -> Any:
        """See :func:`modelquirks_library`."""
        ...


class ModelPlugin(Protocol):
    """As :class:`RecordsPlugin`, for :func:`modelquirks_model`."""

    def modelquirks_model(self, config: Mapping[str, Any], folder: Path) -> Any:
        """See :func:`modelquirks_model`."""
        ...


class OpenPlugin(Protocol):
    """As :class:`RecordsPlugin`, for :func:`modelquirks_open`."""

    def modelquirks_open(self, path: Path, names: Sequence[str], options: Any) -> Any:
        """See :func:`modelquirks_open`."""
        ...
