"""``HubOrigin``: which commit of which repository a checkpoint is, if it is one on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelquirks.planner.finding import brief

__all__ = ["HubOrigin"]


@dataclass(frozen=True, slots=True)
class HubOrigin:
    """Where files that may not be here yet come from: one commit, so that they cannot change."""

    repository: str
    """``org/name``, as the hub calls it now."""
    revision: str
    """What was asked for: a branch, a tag, or a commit."""
    commit: str
    path: str = ""
    """Folder or file within the repository, with ``/``; ``""``: the whole."""
    token: str | bool | None = field(default=None, repr=False, compare=False)
    """As in huggingface_hub. It is never written anywhere."""

    def __str__(self) -> str:
        """Return what names it for people.

        >>> str(HubOrigin("org/name", "main", "0a1b2c3d4e5f6071829304a5b6c7d8e9f0a1b2c3", "unet"))
        'org/name@0a1b2c3d/unet'
        """
        return f"{self.repository}@{self.commit[:8]}{'/' * bool(self.path)}{self.path}"

    def to_json(self) -> dict[str, str]:
        """Return it as plain data, without the token."""
        return {
            "repository": self.repository,
            "revision": self.revision,
            "commit": self.commit,
            "path": self.path,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HubOrigin:
        """Return what :meth:`to_json` gave; TypeError if it is something else."""
        if not all(isinstance(value, str) for value in data.values()):
            raise TypeError(f"an origin of strings was expected, found {brief(dict(data), 80)}")
        if not re.fullmatch("[0-9a-f]{40}", data["commit"]):  # it is the name of a folder
            raise ValueError(f"{brief(data['commit'])} is no commit: 40 hexadecimal digits")
        return cls(**data)
