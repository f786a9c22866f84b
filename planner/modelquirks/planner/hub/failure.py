"""``HubFailure``: why a file of the hub cannot be read, on its way out of the readers."""

from __future__ import annotations

__all__ = ["HubFailure"]


class HubFailure(Exception):
    """Something with the hub or the way to it.

    It is neither an OSError nor a ValueError, which the readers of headers take for trouble with
    one file: what goes wrong on the network says nothing about the checkpoint.
    """
