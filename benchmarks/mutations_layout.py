"""Damage to files: headers that lie, files cut, grown, lost, exchanged, of another save."""

from __future__ import annotations

import json
import struct
from typing import Any

from mutations_copy import Copy
from mutations_files import (
    Header,
    header_of,
    is_weights,
    is_zip,
    members_of,
    tensors_in,
    with_header,
    with_members,
)
from mutations_kinds import damage

_SAME_SIZE = {
    "F32": ("I32", "U32"),
    "BF16": ("F16", "I16", "U16"),
    "F16": ("BF16", "I16"),
    "U8": ("I8", "F8_E4M3", "F8_E5M2", "BOOL"),
    "I8": ("U8", "F8_E4M3"),
    "I32": ("F32", "U32"),
    "F8_E4M3": ("F8_E5M2", "U8", "I8"),
    "I64": ("F64", "U64"),
}
_OTHER_SIZE = {"F32": "BF16", "BF16": "F32", "F16": "F32", "U8": "I16", "I8": "I16", "I32": "I64"}


def _header(copy: Copy) -> tuple[str, Header, bytes, str, dict[str, Any]] | None:
    """Return a safetensors file with header and data, and one of its entries, by chance."""
    if not copy.safetensors:
        return None
    file = copy.chance.choice(copy.safetensors)
    if (parts := _parts(copy.files[file])) is None:
        return None
    header, data = parts
    names = [name for name, e in header.items() if name != "__metadata__" and isinstance(e, dict)]
    names = [n for n in names if {"dtype", "shape", "data_offsets"} <= header[n].keys()]
    if not names:
        return None
    name = copy.chance.choice(names)
    return file, header, data, name, header[name]


def _parts(raw: bytes) -> tuple[Header, bytes] | None:
    try:  # an earlier damage may have left none
        return header_of(raw)
    except (ValueError, struct.error):
        return None


def _entry(copy: Copy, done: str, **changes: Any) -> bool:
    """Change fields of an entry; a callable is given the entry."""
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, entry = found
    for key, change in changes.items():
        value = change(entry) if callable(change) else change
        if value is None:
            return False
        entry[key] = value
    copy.files[file] = with_header(header, data)
    return copy.tell(f"{done}: {name!r} in {file!r} now {entry}", name, *called(file))


# ---- headers


@damage("headers")
def header_dtype_of_the_same_size(copy: Copy) -> bool:
    def other(entry: Header) -> str | None:
        return copy.chance.choice(_SAME_SIZE.get(entry["dtype"], (None,)))

    return _entry(copy, "another dtype", dtype=other)


@damage("headers")
def all_header_dtypes_of_the_same_size(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    old = found[4]["dtype"]
    new = copy.chance.choice(_SAME_SIZE.get(old, (None,)))
    if new is None:
        return False
    named: list[str] = []
    for file in copy.safetensors:
        if (parts := _parts(copy.files[file])) is None:
            continue
        for name, entry in parts[0].items():
            if isinstance(entry, dict) and entry.get("dtype") == old:
                entry["dtype"] = new
                named.append(name)
        copy.files[file] = with_header(*parts)
    return copy.tell(f"{old} called {new} throughout", *named)


@damage("headers")
def header_dtype_of_another_size(copy: Copy) -> bool:
    def other(entry: Header) -> str | None:
        return _OTHER_SIZE.get(entry["dtype"])

    return _entry(copy, "another dtype", dtype=other)


@damage("headers")
def header_dtype_unknown(copy: Copy) -> bool:
    return _entry(copy, "unknown dtype", dtype=copy.chance.choice(("F99", "", "bf16", None, 7)))


@damage("headers")
def header_shape_turned(copy: Copy) -> bool:
    def turned(entry: dict[str, Any]) -> list[int] | None:
        shape = entry["shape"]
        return shape[::-1] if shape != shape[::-1] else None

    return _entry(copy, "shape turned round", shape=turned)


@damage("headers")
def header_shape_other(copy: Copy) -> bool:
    def other(entry: dict[str, Any]) -> Any:
        shape, at = list(entry["shape"]), copy.chance.randrange(max(1, len(entry["shape"])))
        odd = (float("nan"), -1, 1 << 63, 1 << 64, 1.5, "4", None, True, [2])
        value = copy.chance.choice((*odd, 0, 1, 3))
        return [*shape[:at], value, *shape[at + 1 :]] if shape[at : at + 1] != [value] else None

    return _entry(copy, "another shape", shape=other)


@damage("headers")
def header_offsets_moved(copy: Copy) -> bool:
    def moved(entry: dict[str, Any]) -> list[int]:
        begin, end = entry["data_offsets"]
        n = copy.chance.choice((-64, -4, -2, 2, 4, 8, 64, 1 << 40))
        return [max(0, begin + n), max(0, end + n)]

    return _entry(copy, "range moved", data_offsets=moved)


@damage("headers")
def header_range_of_another(copy: Copy) -> bool:
    """Let two tensors have the bytes of one."""
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, entry = found
    like = [
        n
        for n, e in header.items()
        if n not in ("__metadata__", name)
        and e["dtype"] == entry["dtype"]
        and e["shape"] == entry["shape"]
        and e["data_offsets"] != entry["data_offsets"]
    ]
    if not like:
        return False
    other = copy.chance.choice(like)
    entry["data_offsets"] = header[other]["data_offsets"]
    copy.files[file] = with_header(header, data)
    return copy.tell(f"{name!r} has the range of {other!r}", name, other)


@damage("headers", unseen=True)
def header_ranges_exchanged(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, entry = found
    like = [
        n
        for n, e in header.items()
        if n not in ("__metadata__", name)
        and e["dtype"] == entry["dtype"]
        and e["shape"] == entry["shape"]
        and e["data_offsets"] != entry["data_offsets"]
    ]
    if not like:
        return False
    other = copy.chance.choice(like)
    its = header[other]
    entry["data_offsets"], its["data_offsets"] = its["data_offsets"], entry["data_offsets"]
    copy.files[file] = with_header(header, data)
    copy.may_be_unseen = True
    text = f"{name!r} and {other!r} exchanged in the header of {file!r}"
    return copy.tell(text, name, other, *called(file))


@damage("headers")
def header_hole(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, entry = found
    begin, n = entry["data_offsets"][0], copy.chance.choice((1, 2, 64))
    for each in (e for k, e in header.items() if k != "__metadata__"):
        if each["data_offsets"][0] >= begin:
            each["data_offsets"] = [at + n for at in each["data_offsets"]]
    copy.files[file] = with_header(header, data[:begin] + b"\1" * n + data[begin:])
    return copy.tell(f"{n} bytes before {name!r} that belong to nothing", name, file)


@damage("headers")
def header_key_twice(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, _ = found
    others = [e for n, e in header.items() if n not in ("__metadata__", name)]
    more = json.dumps({name: copy.chance.choice(others)}) if others else json.dumps({name: {}})
    text = json.dumps(header)
    text = f"{text[:-1]}, {more[1:]}" if copy.chance.random() < 0.5 else f"{more[:-1]}, {text[1:]}"
    copy.files[file] = with_header(text, data)
    return copy.tell(f"{name!r} twice in the header of {file!r}", name, *called(file))


@damage("headers")
def header_entry_without_a_field(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, entry = found
    gone = copy.chance.choice(("dtype", "shape", "data_offsets"))
    del entry[gone]
    copy.files[file] = with_header(header, data)
    return copy.tell(f"{name!r} without {gone}", name, file)


@damage("headers")
def header_entry_gone(copy: Copy) -> bool:
    """Take an entry out of the header and leave its bytes."""
    if (found := _header(copy)) is None:
        return False
    file, header, data, name, _ = found
    del header[name]
    copy.files[file] = with_header(header, data)
    return copy.tell(f"{name!r} gone from the header of {file!r}", name, *called(file))


@damage("headers")
def header_no_json(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file, header, data, _, _ = found
    text = json.dumps(header)
    at = copy.chance.randrange(len(text))
    bad = copy.chance.choice(
        (text[:at], text[:at] + "\0" + text[at:], "[]", "null", "", "{" * 5000, text + "x")
    )
    copy.files[file] = with_header(bad, data)
    return copy.tell(f"no JSON in the header of {file!r}", *called(file))


@damage("headers")
def header_length_lies(copy: Copy) -> bool:
    if (found := _header(copy)) is None:
        return False
    file = found[0]
    raw = copy.files[file]
    (length,) = struct.unpack("<Q", raw[:8])
    other = copy.chance.choice((0, 1, length - 8, length + 8, len(raw), 1 << 40, (1 << 64) - 1))
    copy.files[file] = struct.pack("<Q", other) + raw[8:]
    return copy.tell(f"{file!r} says that its header has {other} bytes", *called(file))


# ---- whole files


def _file(copy: Copy) -> str | None:
    return copy.chance.choice(copy.weights) if copy.weights else None


@damage("files")
def file_cut(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    raw = copy.files[file]
    n = copy.chance.randrange(len(raw)) if copy.chance.random() < 0.7 else len(raw) - 1
    copy.files[file] = raw[: max(n, 0)]
    return copy.tell(f"{file!r} cut from {len(raw)} to {n} bytes", *called(file))


@damage("files")
def file_grown(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    n = copy.chance.choice((1, 8, 4096))
    copy.files[file] += copy.chance.choice((b"\0", b"\1", b"x")) * n
    return copy.tell(f"{file!r} with {n} bytes more at its end", *called(file))


@damage("files")
def file_emptied(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    copy.files[file] = b""
    return copy.tell(f"{file!r} has no bytes", *called(file))


@damage("files")
def file_zeroed(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    copy.files[file] = bytes(len(copy.files[file]))
    return copy.tell(f"{file!r} has only zeros", *called(file))


@damage("files")
def file_replaced_by_something_else(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    copy.files[file] = copy.chance.choice(
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 123\n",
            b"<!DOCTYPE html><html>404</html>",
            b'{"error": "not found"}',
            b"PK\x03\x04" + bytes(100),
            b"\x80\x02}q\x00.",
            b"\x1f\x8b\x08" + bytes(50),
        )
    )
    return copy.tell(f"{file!r} is {copy.files[file][:20]!r}", *called(file))


@damage("files")
def file_missing(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    inside = copy.tensors(file) if file in copy.flat else {}
    del copy.files[file]
    folder = copy.subject.path or ""
    left = [name for name in copy.weights if name.startswith(folder)]
    left = [*copy.subject.truth.tensors] if left else ["holds no checkpoint"]
    return copy.tell(f"{file!r} is not there", *called(file), *inside, *left)


@damage("files")
def files_exchanged(copy: Copy) -> bool:
    if len(copy.weights) < 2:
        return False
    one, other = copy.chance.sample(copy.weights, 2)
    copy.files[one], copy.files[other] = copy.files[other], copy.files[one]
    inside = [name for file in (one, other) if file in copy.flat for name in copy.tensors(file)]
    return copy.tell(f"{one!r} and {other!r} exchanged", *called(one), *called(other), *inside)


@damage("files", unseen=True)
def files_of_equal_parameters_exchanged(copy: Copy) -> bool:
    """Exchange two files that hold a parameter of one shape each, and no name (universal)."""
    pairs = [(a, b) for a in copy.weights for b in copy.weights if a < b and _alike(copy, a, b)]
    if not pairs:
        return False
    one, other = copy.chance.choice(pairs)
    copy.files[one], copy.files[other] = copy.files[other], copy.files[one]
    copy.may_be_unseen = True
    return copy.tell(f"{one!r} and {other!r} exchanged", *called(one), *called(other))


def _alike(copy: Copy, one: str, other: str) -> bool:
    """Tell whether two files, one for each parameter, differ in their values at most."""
    both = [copy.files[name] for name in (one, other)]
    return all(name.endswith("/fp32.pt") for name in (one, other)) and len({*map(len, both)}) == 1


@damage("files")
def file_is_a_copy_of_another(copy: Copy) -> bool:
    if len(copy.weights) < 2:
        return False
    one, other = copy.chance.sample(copy.weights, 2)
    inside = [name for file in (one, other) if file in copy.flat for name in copy.tensors(file)]
    copy.files[one] = copy.files[other]
    return copy.tell(f"{one!r} has the bytes of {other!r}", *called(one), *inside)


@damage("files")
def file_copied_beside(copy: Copy) -> bool:
    if (file := _file(copy)) is None:
        return False
    path, _, end = file.rpartition(".")
    new = copy.chance.choice((f"{path} (1).{end}", f"{path}-old.{end}", f"copy/{file}"))
    copy.files[new] = copy.subject.other.get(file, copy.files[file])
    return copy.tell(f"{new!r} beside", new)


@damage("files")
def file_of_a_differently_cut_save(copy: Copy) -> bool:
    """Put a file of a save that is cut otherwise in the place of one of several."""
    if copy.index_name is None:
        return False
    others = [name for name in copy.subject.elsewhere if is_weights(name)]
    file = copy.chance.choice(copy.weights)
    if not others or {*copy.subject.elsewhere} >= {*copy.weights}:
        return False
    inside, raw = copy.tensors(file), copy.subject.elsewhere[copy.chance.choice(others)]
    if inside.keys() == tensors_in(file, raw).keys():  # cut alike just here
        return False
    copy.files[file] = raw
    return copy.tell(f"{file!r} of another save, cut otherwise", *called(file), *inside)


@damage("files", unseen=True)
def file_of_another_save(copy: Copy) -> bool:
    both = [n for n in copy.weights if n in copy.subject.other]
    if not both:
        return False
    file = copy.chance.choice(both)
    copy.files[file] = copy.subject.other[file]
    copy.may_be_unseen = True
    names = copy.subject.truth.tensors
    return copy.tell(f"{file!r} of another save of the same model", *called(file), *names)


@damage("files", unseen=True)
def data_zeroed(copy: Copy) -> bool:
    """Zero what a file holds and leave its header."""
    if (file := _file(copy)) is None:
        return False
    raw = copy.files[file]
    if file.endswith(".safetensors") and (parts := _parts(raw)) is not None:
        copy.files[file] = with_header(parts[0], bytes(len(parts[1])))
    elif is_zip(raw):
        members = members_of(raw)
        inside = [n for n in members if "/data/" in n and members[n].strip(b"\0")]
        if not inside:
            return False
        name = copy.chance.choice(inside)
        members[name] = bytes(len(members[name]))
        copy.files[file] = with_members(members)
    else:
        return False
    copy.may_be_unseen = True
    names = copy.subject.truth.tensors  # a packing that keeps settings in values may say so
    return copy.tell(f"the values in {file!r} zeroed", *called(file), *names)


@damage("files")
def second_checkpoint_beside(copy: Copy) -> bool:
    """Put another save of the model into the folder, under other usual names."""
    others = copy.subject.elsewhere or copy.subject.other
    if not others or copy.subject.adapter:
        return False
    new = {
        name: raw
        for name, raw in others.items()
        if name not in copy.files and name.rpartition("/")[2] != "config.json"
    }
    if not new:
        return False
    copy.files |= new
    return copy.tell(f"beside it: {sorted(new)}", *new)


def called(file: str) -> tuple[str, ...]:
    """Return what a report may call a file: with its folder, without, or by that of a rank."""
    folder = file.rpartition("/")[0].rpartition("/")[2]
    return file, file.rpartition("/")[2], folder if "rank" in folder or "." in folder else ""
