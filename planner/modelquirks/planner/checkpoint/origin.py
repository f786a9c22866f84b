"""``HubOrigin``: which commit of which repository a checkpoint is, if it is one on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["HubOrigin"]

_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_FORMS = {
    "repository": re.compile(rf"{_PART}(/{_PART})?"),
    "revision": re.compile(r"(?!/)(?!.*//)(?!.*\.\.)[^\x00-\x20\\]+(?<!/)"),
    "commit": re.compile("[0-9a-f]{40}"),
    "path": re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\x00\\]*"),
}
"""What is no name of a place elsewhere: all but the commit become paths in the caches."""


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
        """Return what :meth:`to_json` gave; TypeError if it is something else.

        ValueError if a part of it would lead out of the folders that are made of them.
        """
        if not all(isinstance(value, str) for value in data.values()):
            raise TypeError(f"an origin of strings was expected, found {dict(data)!r:.80}")
        found = cls(**data)
        for name, form in _FORMS.items():
            if not form.fullmatch(value := getattr(found, name)):
                raise ValueError(f"{name} {value!r:.80} is none that a hub has")
        return found
