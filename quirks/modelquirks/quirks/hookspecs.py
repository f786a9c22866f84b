"""The hooks a plugin may implement. Mark an implementation with :data:`hookimpl`.

Every hook returns plain data or small objects; the order of plugins never means anything. Hooks
are called one plugin at a time: one that raises is reported by name, distribution and version,
and the others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pluggy

from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.record import ModelQuirks

__all__ = ["GROUP", "LibraryPlugin", "ModelPlugin", "RecordsPlugin", "SchemesPlugin", "hookimpl"]

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
