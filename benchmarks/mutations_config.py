"""Damage to config.json: another model, other packing; what no tensor shows is declared."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mutations_copy import Copy
from mutations_kinds import damage, is_companion
from zoo_models import slots


def _changed(copy: Copy, key: str, *values: Any) -> bool:
    """Give the setting *key* one of *values* that it has not."""
    if key not in copy.config or not _models(copy):
        return False
    others = [value for value in values if value != copy.config[key]]
    if not others:
        return False
    value = copy.chance.choice(others)
    done = f"{key} is {value!r}, not {copy.config[key]!r}"
    copy.set_config(**{key: value})
    return copy.tell(done, key, *_names_of(copy))


def _models(copy: Copy) -> bool:
    return "model_type" in copy.config


def _names_of(copy: Copy) -> list[str]:
    """Return every name of both models and of the files: shapes decide which are concerned."""
    names = [*copy.subject.truth.tensors]
    with suppress(Exception):  # the judge will meet it, too
        names += [name for name, _ in slots(copy.subject.build(copy.config))]
    return [*names, *(place.name for place in copy.places())]


@damage("config")
def config_layers(copy: Copy) -> bool:
    n = copy.config.get("num_hidden_layers", 0)
    if "layer_types" in copy.config and copy.config["model_type"] in ("gpt_oss", "qwen3_moe"):
        return False
    return _changed(copy, "num_hidden_layers", n - 1, n + 1, n * 2)


@damage("config")
def config_hidden_size(copy: Copy) -> bool:
    return _changed(copy, "hidden_size", 64, 16)


@damage("config")
def config_intermediate_size(copy: Copy) -> bool:
    return _changed(copy, "intermediate_size", 96, 24, 32)


@damage("config")
def config_key_value_heads(copy: Copy) -> bool:
    return _changed(copy, "num_key_value_heads", 1, 4)


@damage("config")
def config_vocabulary(copy: Copy) -> bool:
    n = copy.config.get("vocab_size", 0)
    return _changed(copy, "vocab_size", n - 1, n + 1, n * 2)


@damage("config")
def config_experts(copy: Copy) -> bool:
    key = next((k for k in ("num_local_experts", "num_experts") if k in copy.config), "")
    n = copy.config.get(key, 0)
    return _changed(copy, key, n - 1, n + 1, n * 2)


@damage("config")
def config_ties(copy: Copy) -> bool:
    tied = copy.config.get("tie_word_embeddings", True)
    if copy.config.get("model_type") in (None, "bert"):
        return False
    copy.set_config(tie_word_embeddings=not tied)
    return copy.tell(f"tie_word_embeddings is {not tied}", *_names_of(copy))


@damage("config")
def config_another_class(copy: Copy) -> bool:
    if copy.config.get("model_type") != "llama":
        return False
    copy.set_config(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    return copy.tell("model_type is 'gpt2'", *_names_of(copy))


@damage("config", unseen=True)
def config_class_of_the_same_names(copy: Copy) -> bool:
    """Name another class whose tensors have the same names and shapes, and that computes else."""
    if copy.config.get("model_type") != "llama" or "quantization_config" in copy.config:
        return False
    copy.set_config(model_type="gemma", architectures=["GemmaForCausalLM"])
    copy.may_be_unseen = copy.behaves_otherwise = True
    return copy.tell("model_type is 'gemma'", *_names_of(copy))


@damage("config")
def config_dtype(copy: Copy) -> bool:
    key = next((k for k in ("dtype", "torch_dtype") if k in copy.config), "")
    return _changed(copy, key, "float16", "bfloat16", "float32")


@damage("config", unseen=True)
def config_heads_of_another_width(copy: Copy) -> bool:
    """Half the heads, twice as wide: every matrix keeps its shape."""
    heads, kv = (copy.config.get(k) for k in ("num_attention_heads", "num_key_value_heads"))
    if copy.config.get("model_type") not in ("llama", "mixtral") or heads is None or kv is None:
        return False
    if heads % 2 or kv % 2:
        return False
    more = {"head_dim": 2 * copy.config["head_dim"]} if copy.config.get("head_dim") else {}
    copy.set_config(num_attention_heads=heads // 2, num_key_value_heads=kv // 2, **more)
    copy.may_be_unseen = copy.behaves_otherwise = True
    return copy.tell("half the heads, twice as wide")


@damage("config", unseen=True)
def config_what_no_tensor_shows(copy: Copy) -> bool:
    if not _models(copy):
        return False
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        "rms_norm_eps": 0.25,
        "hidden_act": "relu",
        "num_experts_per_tok": 1,
        "layer_norm_eps": 0.5,
    }
    keys = [k for k in settings if k in copy.config and copy.config["model_type"] != "gpt_oss"]
    if not keys:
        return False
    key = copy.chance.choice(keys)
    copy.set_config(**{key: settings[key]})
    copy.may_be_unseen = copy.behaves_otherwise = True
    return copy.tell(f"{key} is {settings[key]!r}", key)


@damage("config")
def config_of_no_use(copy: Copy) -> bool:
    """Leave config.json empty, cut or away; the model is made from the right one all the same."""
    names = [name for name in copy.files if name.rpartition("/")[2] == "config.json"]
    if not names:
        return False
    raw = copy.files[names[0]]
    bad = copy.chance.choice((b"", b"{}", raw[: len(raw) // 2], b"[]", b"\xff\xfe", None))
    if bad is None:
        del copy.files[names[0]]
    else:
        copy.files[names[0]] = bad
    return copy.tell("config.json is gone or no use", "config.json", *_names_of(copy))


# ---- packing


def _packing(copy: Copy) -> dict[str, Any] | None:
    found = copy.config.get("quantization_config")
    return dict(found) if isinstance(found, dict) and found else None


@damage("packing")
def packing_not_declared(copy: Copy) -> bool:
    if _packing(copy) is None:
        return False
    copy.set_config(quantization_config=None)
    return copy.tell("no quantization_config", "quantization_config", *_names_of(copy))


@damage("packing")
def packing_of_another_method(copy: Copy) -> bool:
    if (packing := _packing(copy)) is None:
        return False
    methods = ("awq", "gptq", "fp8", "mxfp4", "bitsandbytes", "hqq", "no-such", None, 3)
    others = [m for m in methods if m != packing.get("quant_method")]
    packing["quant_method"] = method = copy.chance.choice(others)
    copy.set_config(quantization_config=packing)
    return copy.tell(f"quant_method is {method!r}", "quant", *_names_of(copy))


@damage("packing")
def packing_on_plain_weights(copy: Copy) -> bool:
    if copy.config.get("model_type") != "llama" or _packing(copy) is not None:
        return False
    copy.set_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    return copy.tell("declared as GPTQ, and plain", "quantization_config", *_names_of(copy))


@damage("packing")
def packing_of_other_bits(copy: Copy) -> bool:
    if (packing := _packing(copy)) is None or "bits" not in packing:
        return False
    packing["bits"] = bits = copy.chance.choice((2, 3, 8, 5, "x"))
    copy.set_config(quantization_config=packing)
    return copy.tell(f"bits is {bits}", *_names_of(copy))


@damage("packing")
def packing_of_another_group_size(copy: Copy) -> bool:
    if (packing := _packing(copy)) is None or "group_size" not in packing:
        return False
    packing["group_size"] = size = copy.chance.choice((16, 64, 256, -1))
    copy.set_config(quantization_config=packing)
    return copy.tell(f"group_size is {size}", *_names_of(copy))


@damage("packing")
def packing_of_another_block_size(copy: Copy) -> bool:
    if (packing := _packing(copy)) is None or "weight_block_size" not in packing:
        return False
    packing["weight_block_size"] = size = copy.chance.choice(([8, 8], [32, 32], [16, 32], None))
    copy.set_config(quantization_config=packing)
    return copy.tell(f"weight_block_size is {size}", *_names_of(copy))


@damage("packing")
def companion_missing(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: is_companion(name))
    if found is None:
        return False
    place, _ = found
    tensors = copy.tensors(place.file)
    del tensors[place.name]
    copy.set_tensors(place.file, tensors)
    return copy.tell(f"{place.name!r} taken out", place.name, *_stems(place.name))


@damage("packing")
def companion_of_another_shape(copy: Copy) -> bool:
    found = copy.pick(lambda name, t: is_companion(name) and t.dim() > 0 and t.shape[0] > 1)
    if found is None:
        return False
    place, tensor = found
    flat = tensor.reshape(-1)
    ways = [tensor[: tensor.shape[0] // 2], tensor[:1], flat, tensor[..., :1]]
    ways += [tensor.t()] if tensor.dim() == 2 else []
    ways = [way for way in ways if way.shape != tensor.shape]
    if not ways:
        return False
    changed = copy.chance.choice(ways).contiguous().clone()
    copy.change(place, changed)
    done = f"{place.name!r} of shape {list(changed.shape)}, not {list(tensor.shape)}"
    return copy.tell(done, place.name, *_stems(place.name))


@damage("packing")
def companion_more(copy: Copy) -> bool:
    found = copy.pick(lambda name, t: name.endswith("proj.weight") and t.dim() == 2)
    if found is None:
        return False
    place, tensor = found
    new = f"{place.name}{copy.chance.choice(('_scale', '_scale_inv', '_absmax'))}"
    tensors = copy.tensors(place.file)
    if new in tensors:
        return False
    copy.set_tensors(place.file, {**tensors, new: tensor[:, :1].float().clone()})
    return copy.tell(f"{new!r} added", new)


def _stems(name: str) -> tuple[str, ...]:
    """Return what else a report may call the weight that a companion belongs to."""
    module = name.rpartition(".")[0]
    return (f"{module}.weight",) if module else ()
