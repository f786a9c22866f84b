"""Damage to names: tensors lost, renamed, doubled, strange."""

from __future__ import annotations

import re

from mutations_copy import Copy, Place
from mutations_kinds import damage

_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


@damage("names")
def tensor_dropped(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, _ = found
    _without(copy, place)
    return copy.tell(f"{place.name!r} taken out of {place.file!r} and the index", place.name)


def _without(copy: Copy, place: Place) -> None:
    tensors = copy.tensors(place.file)
    del tensors[place.name]
    copy.set_tensors(place.file, tensors)


@damage("names")
def tensor_renamed(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, tensor = found
    at = copy.chance.randrange(len(place.name))
    new = place.name[:at] + copy.chance.choice("xq_Z0\u043e") + place.name[at + 1 :]
    if new == place.name or new in copy.tensors(place.file):
        return False
    copy.change(place, tensor, name=new)
    return copy.tell(f"{place.name!r} renamed {new!r}", place.name, new)


@damage("names")
def layer_renumbered(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: _NUMBER.search(name) is not None)
    if found is None:
        return False
    place, tensor = found
    number = copy.chance.randint(4, 40)
    new = _NUMBER.sub(f".{number}.", place.name, count=1)
    copy.change(place, tensor, name=new)
    return copy.tell(f"{place.name!r} renamed {new!r}", place.name, new)


@damage("names")
def prefix_on_part(copy: Copy) -> bool:
    prefix = copy.chance.choice(("module.", "model.", "foo.", "_orig_mod.", "base_model.model."))
    return _prefixed(copy, prefix, some=True)


@damage("names")
def prefix_on_all(copy: Copy) -> bool:
    prefix = copy.chance.choice(("module.", "foo.", "_orig_mod.", "net.", "model.model."))
    return _prefixed(copy, prefix, some=False)


def _prefixed(copy: Copy, prefix: str, *, some: bool) -> bool:
    named: list[str] = []
    for file in copy.flat:
        if copy.subject.adapter and not file.startswith(copy.subject.adapter):
            continue
        tensors = copy.tensors(file)
        chosen = [n for n in tensors if not some or copy.chance.random() < 0.3]
        if not {prefix + n for n in chosen}.isdisjoint(tensors):
            continue
        named += [prefix + n for n in chosen] + chosen
        held = {prefix + n if n in chosen else n: t for n, t in tensors.items()}
        copy.set_tensors(file, held)
    return bool(named) and copy.tell(f"{prefix!r} before {len(named) // 2} names", *named)


@damage("names")
def prefix_off_part(copy: Copy) -> bool:
    named: list[str] = []
    for file in copy.flat:
        tensors = copy.tensors(file)
        chosen = {
            n: n.partition(".")[2]
            for n in tensors
            if "." in n and copy.chance.random() < 0.3 and n.partition(".")[2] not in tensors
        }
        named += [*chosen, *chosen.values()]
        copy.set_tensors(file, {chosen.get(n, n): t for n, t in tensors.items()})
    return bool(named) and copy.tell(f"{len(named) // 2} names cut at the first dot", *named)


@damage("names")
def extra_tensor(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, tensor = found
    stem, _, leaf = place.name.rpartition(".")
    new = f"{stem}.{copy.chance.choice(('extra_', 'old_', 'ema_'))}{leaf}"
    tensors = copy.tensors(place.file)
    copy.set_tensors(place.file, {**tensors, new: tensor.clone()})
    return copy.tell(f"{new!r} added to {place.file!r}", new)


@damage("names")
def extra_layer(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: _NUMBER.search(name) is not None)
    if found is None:
        return False
    number = next(iter(_NUMBER.findall(found[0].name)))
    named: list[str] = []
    for file in copy.flat:
        tensors = copy.tensors(file)
        more = {
            _NUMBER.sub(".7.", name, count=1): tensor.clone()
            for name, tensor in tensors.items()
            if f".{number}." in name and _NUMBER.findall(name)[0] == number
        }
        named += more
        copy.set_tensors(file, {**tensors, **more})
    return copy.tell(f"a layer 7 added, {len(named)} tensors", *named)


@damage("names")
def same_name_in_two_files(copy: Copy) -> bool:
    return _doubled(copy)


@damage("names")
def same_name_in_two_files_without_an_index(copy: Copy) -> bool:
    if copy.index_name is None:
        return False
    if not _doubled(copy):
        return False
    copy.files.pop(copy.index_name)
    return True


def _doubled(copy: Copy) -> bool:
    files = [f for f in copy.flat if not copy.subject.adapter]
    if len(files) < 2 or (found := copy.pick()) is None:
        return False
    place, tensor = found
    other = copy.chance.choice([file for file in files if file != place.file])
    index = copy.files.get(copy.index_name or "")
    twice = tensor.reshape(-1).roll(1).reshape(tensor.shape)
    copy.set_tensors(other, {**copy.tensors(other), place.name: twice})
    if index is not None:
        copy.set_index(index.decode())
    return copy.tell(f"{place.name!r} of other values also in {other!r}", place.name)


@damage("experts")
def expert_gap(copy: Copy) -> bool:
    """Take out one expert of a layer, or number the last one higher."""
    found = _expert(copy)
    if found is None:
        return False
    start, number, names = found
    new = str(int(number) + 3)
    drop = copy.chance.random() < 0.5
    for file in copy.flat:
        tensors = copy.tensors(file)
        if names.isdisjoint(tensors):
            continue
        held = {
            name.replace(f"{start}{number}.", f"{start}{new}.") if name in names else name: tensor
            for name, tensor in tensors.items()
            if not (drop and name in names)
        }
        copy.set_tensors(file, held)
    what = "taken out" if drop else f"numbered {new}"
    return copy.tell(f"expert {start}{number} {what}", *names, f"{start}{new}.", start[:-1])


@damage("experts")
def expert_loses_a_part(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: _EXPERT.match(name) is not None)
    if found is None:
        return False
    _without(copy, found[0])
    return copy.tell(f"{found[0].name!r} taken out", found[0].name)


@damage("experts", unseen=True)
def experts_permuted(copy: Copy) -> bool:
    return _permuted(copy, "")


@damage("experts", unseen=True)
def one_part_of_experts_permuted(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: _EXPERT.match(name) is not None)
    matched = None if found is None else _EXPERT.match(found[0].name)
    return matched is not None and _permuted(copy, matched[3])


def _permuted(copy: Copy, end: str) -> bool:
    found = _expert(copy)
    if found is None:
        return False
    start, number, _ = found
    numbers = {m[2] for p in copy.places() if (m := _EXPERT.match(p.name)) and m[1] == start}
    other = copy.chance.choice(sorted(numbers - {number}))
    swap = {number: other, other: number}

    def renamed(name: str) -> str:
        matched = _EXPERT.match(name)
        if matched is None or matched[1] != start or not matched[3].endswith(end):
            return name
        return f"{start}{swap.get(matched[2], matched[2])}{matched[3]}"

    held = {p: copy.tensors(p.file)[p.name] for p in copy.places()}
    for file in copy.flat:
        tensors = {
            p.name: held[q]
            for p in held
            if p.file == file
            for q in held
            if q.name == renamed(p.name)
        }
        copy.set_tensors(file, tensors)
    copy.may_be_unseen = True
    return copy.tell(f"experts {number} and {other} of {start!r} exchanged, {end!r}")


def _expert(copy: Copy) -> tuple[str, str, set[str]] | None:
    found = copy.pick(lambda name, _: _EXPERT.match(name) is not None)
    matched = None if found is None else _EXPERT.match(found[0].name)
    if matched is None:
        return None
    start, number = matched[1], matched[2]
    names = {p.name for p in copy.places() if p.name.startswith(f"{start}{number}.")}
    return start, number, names


@damage("ties")
def tied_head_stored_otherwise(copy: Copy) -> bool:
    """Store the other name of a tie, with other values."""
    for names in copy.subject.truth.ties:
        stored = [p for p in copy.places() if p.name in names]
        absent = [name for name in names if name not in {p.name for p in stored}]
        if stored and absent:
            place, name = stored[0], copy.chance.choice(absent)
            tensors = copy.tensors(place.file)
            copy.set_tensors(place.file, {**tensors, name: tensors[place.name].clone().roll(1, 0)})
            return copy.tell(f"{name!r}, tied to {place.name!r}, stored with other values", name)
    return False


@damage("ties")
def tied_head_stored_as_well(copy: Copy) -> bool:
    for names in copy.subject.truth.ties:
        stored = [p for p in copy.places() if p.name in names]
        absent = [name for name in names if name not in {p.name for p in stored}]
        if stored and absent:
            place, name = stored[0], copy.chance.choice(absent)
            tensors = copy.tensors(place.file)
            copy.set_tensors(place.file, {**tensors, name: tensors[place.name].clone()})
            return copy.tell(f"{name!r}, tied to {place.name!r}, stored as well", name)
    return False


@damage("ties")
def untied_head_dropped(copy: Copy) -> bool:
    found = copy.pick(lambda name, _: name == "lm_head.weight")
    if found is None:
        return False
    _without(copy, found[0])
    return copy.tell("the head of an untied model taken out", "lm_head.weight")


@damage("ties", unseen=True)
def untied_head_equals_embedding(copy: Copy) -> bool:
    head = copy.pick(lambda name, _: name == "lm_head.weight")
    table = copy.pick(lambda name, _: name == "model.embed_tokens.weight")
    if head is None or table is None:
        return False
    copy.change(head[0], table[1].clone())
    copy.may_be_unseen = True
    return copy.tell("the head has the values of the embedding", "lm_head.weight")
