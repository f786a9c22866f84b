"""Damage to an adapter and to what joins it to its base."""

from __future__ import annotations

import json
from typing import Any

from mutations_copy import Copy
from mutations_kinds import damage


def _setting(copy: Copy, key: str, value: Any, *, unseen: bool = False) -> bool:
    name = f"{copy.subject.adapter}/adapter_config.json"
    if not copy.subject.adapter or name not in copy.files:
        return False
    config = json.loads(copy.files[name])
    config[key] = value
    copy.files[name] = json.dumps(config).encode()
    if unseen:
        copy.may_be_unseen = True
    names = (place.name for place in copy.places())
    return copy.tell(f"{key} of the adapter is {value!r}", key, str(value), *names)


@damage("adapter")
def adapter_rank(copy: Copy) -> bool:
    return _setting(copy, "r", copy.chance.choice((1, 2, 8, 0, -1, "x", None)))


@damage("adapter", unseen=True)
def adapter_alpha(copy: Copy) -> bool:
    return _setting(copy, "lora_alpha", copy.chance.choice((1, 8, 64)), unseen=True)


@damage("adapter")
def adapter_targets(copy: Copy) -> bool:
    targets = copy.chance.choice((["q_proj"], ["k_proj"], ["no_such"], ["q_proj", "k_proj"], None))
    return _setting(copy, "target_modules", targets)


@damage("adapter")
def adapter_of_another_kind(copy: Copy) -> bool:
    return _setting(copy, "peft_type", copy.chance.choice(("IA3", "LOHA", "BOFT", "XYZ", None)))


@damage("adapter")
def adapter_with_more(copy: Copy) -> bool:
    key, value = copy.chance.choice(
        (("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]),
         ("rank_pattern", {"q_proj": 8}))
    )  # fmt: skip
    return _setting(copy, key, value)


@damage("adapter")
def adapter_transposed(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: "lora_" in name)
    if found is None:
        return False
    place, tensor = found
    copy.change(place, tensor.t().contiguous())
    return copy.tell(f"{place.name!r} transposed", place.name)


@damage("adapter")
def adapter_half(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: "lora_" in name)
    if found is None:
        return False
    place, _ = found
    tensors = copy.tensors(place.file)
    del tensors[place.name]
    copy.set_tensors(place.file, tensors)
    return copy.tell(f"{place.name!r} taken out", place.name)


@damage("adapter")
def adapter_and_base_exchanged(copy: Copy) -> bool:
    if not copy.subject.adapter:
        return False
    swap = {"base": "adapter", "adapter": "base"}
    moved = {}
    for name, raw in copy.files.items():
        folder, _, rest = name.partition("/")
        moved[f"{swap[folder]}/{rest}"] = raw
    copy.files = moved
    return copy.tell("adapter and base exchanged", "adapter", "base")
