"""Discovery: which plugins are installed, without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from modelquirks.quirks.hookspecs import GROUP

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = ["Candidate", "Origin", "PluginError", "canonical", "discover", "said"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something comes from: a plugin, and the distribution that installed it.

    >>> str(Origin("gpt_oss", "modelquirks", "0.1.0"))
    'gpt_oss (modelquirks 0.1.0)'
    """

    plugin: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        """Return plugin, distribution and version as people read them."""
        package = f"{self.distribution} {self.version}".strip()
        return f"{self.plugin} ({package})" if package else self.plugin


class PluginError(RuntimeError):
    """A plugin that cannot be used. What it raised itself, if anything, is the cause."""

    def __init__(self, origin: Origin, error: str) -> None:
        """Keep *error*, a sentence that lists every fault found, and whose it is."""
        super().__init__(f"plugin {origin}: {error}")
        self.origin = origin
        self.error = error


class Candidate(NamedTuple):
    """A plugin that is there and not loaded yet."""

    origin: Origin
    module: str
    """As in the entry point: ``package.module`` or ``package.module:attribute``."""
    load: Callable[[], object]


def discover() -> tuple[list[Candidate], list[str]]:
    """Return the installed plugins by name, and a sentence for each distribution that is broken.

    Of two installations of one distribution the first on ``sys.path`` counts, as it does for
    imports. Of distributions that do not name our group only ``entry_points.txt`` is read.
    """
    from importlib.metadata import distribution, distributions

    candidates: list[Candidate] = []
    problems: list[str] = []
    seen: set[str] = set()
    for found in distributions():
        try:
            if f"[{GROUP}]" not in (found.read_text("entry_points.txt") or ""):
                continue
            name = _field(found, "Name")
            if canonical(name) in seen:
                continue
            candidates += _candidates(distribution(name) if name else found)
            seen.update({canonical(name)} - {""})
        except Exception as error:
            problems.append(
                f"the entry points of distribution {_field(found, 'Name')!r} cannot be read "
                f"({said(error)}), so none of its plugins is used; install it again"
            )
    return sorted(candidates, key=lambda c: (c.origin.plugin, c.origin.distribution)), problems


def canonical(distribution: str) -> str:
    """Return the name of a distribution as indexes compare it: ``Acme_X`` is ``acme-x``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def said(error: BaseException) -> str:
    """Return type and text of *error* on one line.

    >>> said(ValueError("a\\n  b"))
    'ValueError: a b'
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _candidates(distribution: Distribution) -> list[Candidate]:
    name, version = _field(distribution, "Name"), _field(distribution, "Version")
    points = distribution.entry_points.select(group=GROUP)
    return [Candidate(Origin(p.name, name, version), p.value, p.load) for p in points]


def _field(distribution: Distribution, key: str) -> str:
    """Return a field of METADATA, empty if it is not there: half-deleted installations exist."""
    metadata = distribution.metadata
    return metadata[key] if metadata and key in metadata else ""
