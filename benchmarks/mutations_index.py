"""Damage to the index: entries moved, lost, exchanged, or the index of another save."""

from __future__ import annotations

import json
from typing import Any

from mutations_copy import Copy
from mutations_kinds import damage


def _index(copy: Copy) -> tuple[dict[str, Any], str] | None:
    """Return the index and one name in it, by chance."""
    if copy.index_name is None:
        return None
    try:  # an earlier damage may have left none
        index = copy.index
    except ValueError:
        return None
    if not isinstance(index.get("weight_map"), dict):
        return None
    names = [name for name, file in index["weight_map"].items() if isinstance(file, str)]
    if len(names) < len(index["weight_map"]):
        return None
    return (index, copy.chance.choice(names)) if names else None


@damage("index")
def index_lost(copy: Copy) -> bool:
    if copy.index_name is None:
        return False
    name = copy.index_name
    del copy.files[name]
    return copy.tell("no index", "index", name)


@damage("index")
def index_no_json(copy: Copy) -> bool:
    if copy.index_name is None:
        return False
    text = copy.files[copy.index_name].decode()
    at = copy.chance.randrange(len(text))
    copy.set_index(copy.chance.choice((text[:at], "", "[]", "null", text + "]", "{}", '"x"')))
    return copy.tell("the index is not JSON, or other JSON", copy.index_name, "index")


@damage("index")
def index_without_an_entry(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    del index["weight_map"][name]
    copy.set_index(index)
    return copy.tell(f"{name!r} gone from the index", name)


@damage("index")
def index_entry_moved(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    others = sorted({*index["weight_map"].values()} - {index["weight_map"][name]})
    if not others:
        return False
    index["weight_map"][name] = copy.chance.choice(others)
    copy.set_index(index)
    return copy.tell(f"the index gives {name!r} to another file", name)


@damage("index")
def index_entries_exchanged(copy: Copy) -> bool:
    """Exchange the files of two names, of equal shapes if there are such."""
    if (found := _index(copy)) is None or (twins := copy.twins()) is None:
        return False
    index = found[0]
    one, other = (place.name for place in twins)
    places = index["weight_map"]
    if places.get(one) == places.get(other) or not {one, other} <= places.keys():
        return False
    places[one], places[other] = places[other], places[one]
    copy.set_index(index)
    return copy.tell(f"{one!r} and {other!r} exchanged in the index", one, other)


@damage("index")
def index_names_exchanged_with_their_neighbours(copy: Copy) -> bool:
    """Rotate all values of the index by one file."""
    if (found := _index(copy)) is None:
        return False
    index = found[0]
    files = list(dict.fromkeys(index["weight_map"].values()))
    if len(files) < 2:
        return False
    turn = dict(zip(files, files[1:] + files[:1], strict=True))
    index["weight_map"] = {name: turn[file] for name, file in index["weight_map"].items()}
    copy.set_index(index)
    return copy.tell("every name in the index given to the next file", *index["weight_map"])


@damage("index")
def index_with_a_name_more(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    new = f"{name}_more"
    index["weight_map"][new] = index["weight_map"][name]
    copy.set_index(index)
    return copy.tell(f"{new!r} in the index and in no file", new)


@damage("index")
def index_with_a_file_that_is_not_there(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    new = copy.chance.choice(("model-00099-of-00099.safetensors", "../x.safetensors", "", "/x.bin"))
    index["weight_map"][name] = new
    copy.set_index(index)
    return copy.tell(f"the index gives {name!r} to {new!r}", name, repr(new))


@damage("index")
def index_of_another_save(copy: Copy) -> bool:
    name = copy.index_name
    other = None if name is None else copy.subject.elsewhere.get(name)
    if name is None or other is None or other == copy.files[name]:
        return False
    copy.files[name] = other
    named = {*json.loads(other)["weight_map"].values()}
    return copy.tell("the index of a save that is cut otherwise", *named, *copy.weights)


@damage("index")
def index_key_twice(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    files = list(dict.fromkeys(index["weight_map"].values()))
    entry = json.dumps({name: copy.chance.choice(files)})[1:-1]
    text = json.dumps(index).replace('"weight_map": {', f'"weight_map": {{{entry}, ', 1)
    if copy.chance.random() < 0.5:
        text = f"{json.dumps(index)[:-2]}, {entry}}}}}"
    copy.set_index(text)
    return copy.tell(f"{name!r} twice in the index", name)


@damage("index")
def index_size_lies(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index = found[0]
    size = index.setdefault("metadata", {}).get("total_size", 0)
    odd = (0, -1, size * 2, size + 1, 10**40, "12", None, True, 1.5)
    index["metadata"]["total_size"] = copy.chance.choice(odd)
    copy.set_index(index)
    return copy.tell("the index lies about the size", "index", "total_size")


@damage("index")
def index_value_no_file(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    index["weight_map"][name] = copy.chance.choice((None, 3, ["x"], {"a": 1}, True))
    copy.set_index(index)
    return copy.tell(f"the index maps {name!r} to no file name", name)


@damage("index")
def index_all_in_one_file(copy: Copy) -> bool:
    if (found := _index(copy)) is None:
        return False
    index, name = found
    if len({*index["weight_map"].values()}) < 2:
        return False
    index["weight_map"] = dict.fromkeys(index["weight_map"], index["weight_map"][name])
    copy.set_index(index)
    return copy.tell("the index gives every name to one file", *index["weight_map"])
