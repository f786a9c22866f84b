"""Dotted names of tensors and modules, taken apart."""

from __future__ import annotations

__all__ = ["module_word", "parent"]


def parent(name: str) -> str:
    """Return the name of the module that a tensor or module belongs to.

    >>> parent("model.norm.weight"), parent("scale")
    ('model.norm', '')
    """
    return name.rpartition(".")[0]


def module_word(name: str) -> str:
    """Return the last word of a tensor's module, which says what the module is.

    >>> module_word("model.embed_tokens.weight"), module_word("scale")
    ('embed_tokens', '')
    """
    return parent(name).rpartition(".")[2]
