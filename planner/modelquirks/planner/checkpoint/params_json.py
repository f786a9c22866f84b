"""``params.json``: what Meta and Mistral give beside their own files instead of config.json.

Its fields are the arguments of their model classes. Rules speak of the fields of config.json, so
those that say the same get the names that transformers has for them.

Sources: ``llama/model.py`` of github.com/meta-llama/llama (ModelArgs),
``src/mistral_inference/args.py`` of github.com/mistralai/mistral-inference (TransformerArgs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["config_of_params"]

_SAME = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_NEEDED = ("dim", "n_heads", "n_layers")


def config_of_params(params: Any) -> Mapping[str, Any]:
    """Return the content of params.json under the names that config.json has for it.

    Empty if it is no such file: not every params.json describes a model.

    >>> config = config_of_params({"dim": 64, "n_heads": 4, "n_layers": 2, "vocab_size": -1})
    >>> config["num_key_value_heads"], config["head_dim"], "vocab_size" in config
    (4, 16, False)
    """
    inner = params.get("model", params) if isinstance(params, dict) else None
    if not isinstance(inner, dict) or not all(_is_size(inner.get(name)) for name in _NEEDED):
        return {}
    kept = {key: value for key, value in inner.items() if key not in _SAME}
    found = {new: inner[old] for old, new in _SAME.items() if _is_size(inner.get(old))}
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    moe = inner.get("moe")
    if isinstance(moe, dict) and _is_size(moe.get("num_experts")):
        found["num_local_experts"] = moe["num_experts"]
    if found["hidden_size"] % found["num_attention_heads"] == 0:
        found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    return {**kept, **found}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
