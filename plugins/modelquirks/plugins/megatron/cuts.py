"""How tensor-parallel slices go together, by the name of the parameter.

Column-parallel layers are cut along dimension 0, weight and bias; row-parallel ones along
dimension 1, their bias is whole on every rank; the vocabulary along 0. A gated MLP has gate and up
one below the other *on every rank*. Source: ``megatron/core/tensor_parallel/layers.py``,
``megatron/core/transformer/mlp.py`` (``apply_swiglu_sharded_factory``) of megatron-core 0.16, and
Megatron-LM's ``megatron/legacy/model`` for the older names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from modelquirks.quirks.recipe import Concat, Node, RecipeError, Slice

__all__ = ["Cut", "cut_of", "joined"]

Cut = Literal["rows", "columns", "gated", "whole"]

_ROWS = (
    *("word_embeddings", "output_layer", "lm_head", "word_embeddings_for_head"),
    *("linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "query_key_value", "query"),
    *("key_value", "linear_q_up_proj", "linear_kv_up_proj"),
)
_GATED = ("linear_fc1", "dense_h_to_4h")
_COLUMNS = ("linear_proj", "linear_fc2", "dense_4h_to_h")
_WHOLE = (
    *("router", "position_embeddings", "tokentype_embeddings", "linear_q_down_proj"),
    *("linear_kv_down_proj", "shared_expert_gate", "gate"),
)


def cut_of(name: str, shape: tuple[int, ...], *, gated: bool) -> Cut | None:
    """Return how the parameter *name* of *shape* on one rank is cut; None: not known."""
    *modules, kind = name.split(".")
    module = modules[-1] if modules else ""
    if "norm" in kind or "norm" in module:
        return "whole"
    if module in _WHOLE or kind == "expert_bias":
        return "whole"
    if module in _GATED:
        return "gated" if gated else "rows"
    if module in _ROWS:
        return "rows"
    if module in _COLUMNS or name.endswith(("attention.dense.weight", "attention.dense.bias")):
        return "columns" if len(shape) > 1 else "whole"
    return None


def joined(slices: Sequence[Node], shape: tuple[int, ...], cut: Cut) -> Node:
    """Return the whole of *slices*, each of *shape*, in the order of the ranks."""
    if len(slices) == 1 or cut == "whole":
        return slices[0]
    if cut != "gated":
        return Concat(tuple(slices), 1 if cut == "columns" else 0)
    if shape[0] % 2:
        raise RecipeError(f"gate and up of {list(shape)} are not of equal size")
    half = shape[0] // 2
    gates = (Slice(one, 0, 0, half) for one in slices)
    ups = (Slice(one, 0, half, shape[0]) for one in slices)
    return Concat((*gates, *ups), 0)
