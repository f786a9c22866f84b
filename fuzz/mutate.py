"""A mutator that knows the forms: JSON, pickle, zip, length-prefixed headers, texts.

Half of the time it changes bytes as any fuzzer does; else it changes the structure and puts lengths
and checksums right, so that what comes behind them is reached.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["mutated"]

Mutator = Callable[[bytes, random.Random], bytes]

_EDGES = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65_535, 65_536),
    *((1 << 24) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1),
    *((1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**18, 10**30, 10**400),
)
_VALUES: tuple[Any, ...] = (
    *_EDGES,
    *(-1, -8, -(1 << 63), 0.5, 1.5, 1e308, -1e308, float("inf"), float("nan"), True, False, None),
    *("", "a", "0", "-1", "cpu", "disk", "\0", "\ud800", "../x", "/etc/passwd", "x" * 5000),
    *("F32", "BF16", "F4", "a.b.c", "a." * 300 + "a", "²", "{0}", "{", "**", "[]", "%s"),
    *([], {}, [[]], [0], [0, 0], [1, -1], [None], {"": None}, {"a": {"a": {"a": 0}}}),
)
_TOKENS = (
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"\\u0000", b"\\ud800", b"\0", b"\xff"),
    *(b"true", b"null", b"NaN", b"Infinity", b"-0", b"1e999", b"9" * 40, b"9" * 5000),
    *(b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"GGUF", b"ustar"),
    *(b"\x80\x02", b"(", b".", b"}", b"]", b")", b"R", b"b", b"u", b"e", b"t", b"0", b"\x93"),
    *(b"[" * 2000, b'{"a":' * 1500, b"a." * 700, b"{0..9}", b"{0..99999999}", b"**", b"*"),
)
_PICKLES = (
    *(b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_tensor_v2\n"),
    *(b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nFloatStorage\n", b"cos\nsystem\n"),
    *(b"c__builtin__\nset\n", b")R", b"}", b"]", b")", b"N", b"\x88", b"(", b"t", b"l", b"d"),
    *(b"0", b"1", b"2", b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"Q", b"\x94", b"\x8f"),
    *(b"q\x00", b"h\x00", b"h\x01", b"h\x02", b"j\x00\x00\x00\x00", b"K\x00", b"J\xff\xff\xff\xff"),
    *(b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024, b"I-1\n"),
    *(b"X\x01\x00\x00\x00a", b"X\xff\xff\xff\x7f", b"G" + struct.pack(">d", float("inf"))),
    *(b"2\x86" * 30, b"h\x00\x86" * 30, b"(h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00l" * 12),
)


def mutated(data: bytes, kind: str, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return *data*, of a *kind* of form, changed in one to six places; *others* are of it too."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 6))):
        form = _FORMS.get(kind)
        if others and rng.random() < 0.05:
            data = _spliced(data, rng.choice(others), rng)
        elif form is None or rng.random() < 0.35:
            data = _bytes(data, rng)
        else:
            data = form(data, rng)
    return data


def _spliced(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at, to = rng.randint(0, len(data)), rng.randint(0, len(other))
    return data[:at] + other[to:]


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes: flip, cut, repeat, insert a token, write a number at the edge."""
    content = bytearray(data or b"\0")
    at = rng.randrange(len(content))
    match rng.randrange(8):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            content[at] = rng.randrange(256)
        case 2:
            del content[at : at + rng.choice((1, 2, 4, 8, 64, 1024))]
        case 3:
            content[at:at] = content[at : at + rng.choice((1, 2, 4, 8, 64, 512))]
        case 4:
            content[at:at] = rng.choice(_TOKENS)
        case 5:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(_EDGES) & ((1 << 8 * size) - 1)
            content[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        case 6:
            content = content[:at]
        case _:
            other = rng.randrange(len(content))
            length = rng.choice((1, 4, 8, 32))
            content[at : at + length] = content[other : other + length]
    return bytes(content)


# ------------------------------------------------------------------------------------------ JSON


def _json(data: bytes, rng: random.Random) -> bytes:
    """Change a value of a JSON text somewhere, or its keys."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    text = json.dumps(_changed(value, rng), separators=rng.choice(((",", ":"), (", ", ": "))))
    if rng.random() < 0.05 and text.startswith("{"):  # a key that comes twice
        text = text[:-1] + "," + text[1:] if len(text) > 2 else text
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    places = [*_places(value)]
    if not places:
        return rng.choice(_VALUES)
    holder, key = rng.choice(places)
    other_holder, other_key = rng.choice(places)
    match rng.randrange(8):
        case 0 | 1 | 2:
            holder[key] = rng.choice(_VALUES)
        case 3:
            holder[key] = other_holder[other_key]
            return json.loads(json.dumps(value)) if _is_tree(value) else rng.choice(_VALUES)
        case 4:
            del holder[key]
        case 5 if isinstance(holder, dict):
            name = rng.choice(_VALUES)
            holder[name if isinstance(name, str) else str(key) + "x"] = holder.pop(key)
        case 6 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] + rng.choice((-1, 1, 2, 100))
        case _:
            holder[key] = [holder[key]] * rng.choice((1, 2, 70))
    return value


def _is_tree(value: Any) -> bool:
    try:
        json.dumps(value)
    except (ValueError, RecursionError):
        return False
    return True


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    keys: Any = value if isinstance(value, dict) else range(len(value) if _is_list(value) else 0)
    for key in list(keys)[:200]:
        found.append((value, key))
        if depth < 12:
            found += _places(value[key], depth + 1)
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


# ---------------------------------------------------------------------------------------- pickle


def _pickle(data: bytes, rng: random.Random) -> bytes:
    """Take out, repeat, move, put in or alter whole opcodes."""
    steps = _steps(data)
    if len(steps) < 2:
        return _bytes(data, rng)
    at = rng.randrange(len(steps))
    match rng.randrange(6):
        case 0:
            del steps[at : at + rng.choice((1, 1, 2, 5))]
        case 1:
            steps[at:at] = steps[at : at + rng.choice((1, 2, 10))] * rng.choice((1, 1, 3, 50))
        case 2:
            steps[at:at] = [rng.choice(_PICKLES)]
        case 3:
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        case 4:
            steps[at] = rng.choice(_PICKLES)
        case _:
            steps[at] = _number(steps[at], rng)
    return b"".join(steps)


def _number(step: bytes, rng: random.Random) -> bytes:
    """Return an opcode with another argument."""
    number = rng.choice(_EDGES)
    if step[:1] in b"KMJ\x8a":
        n_bytes = max(1, (number.bit_length() + 8) // 8)
        if n_bytes < 256:
            return b"\x8a" + bytes([n_bytes]) + number.to_bytes(n_bytes, "little")
    return _bytes(step, rng) if len(step) > 1 else bytes([rng.randrange(256)])


def _steps(data: bytes) -> list[bytes]:
    """Return the opcodes of all pickles that follow each other, and the rest as one piece."""
    bounds: list[int] = []
    base = 0
    while base < len(data) and len(bounds) < 20_000:
        file = io.BytesIO(data[base:])
        try:
            bounds += [base + (at or 0) for _, _, at in pickletools.genops(file)]
        except Exception:  # of whatever kind: it is no pickle from here on
            bounds.append(base)
            break
        base += file.tell()
    bounds = sorted({*bounds, len(data)})
    return [data[a:b] for a, b in pairwise(bounds)]


# ------------------------------------------------------------------------------------------- zip


def _zip(data: bytes, rng: random.Random) -> bytes:
    """Change a record, or a field of the directory."""
    if rng.random() < 0.5:
        return _directory(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # of whatever kind: it is no zip file any more
        return _bytes(data, rng)
    if not records:
        return _bytes(data, rng)
    at = rng.randrange(len(records))
    name, content = records[at]
    match rng.randrange(6):
        case 0 | 1:
            change = _pickle if name.endswith(".pkl") else _bytes
            records[at] = (name, change(content, rng))
        case 2:
            del records[at]
        case 3:
            records.append((name, content))
        case 4:
            records[at] = (_bytes(name.encode(), rng).decode("latin-1").replace("\0", "_"), content)
        case _:
            records[at] = (name, content * rng.choice((0, 2, 100)))
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that come twice
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return out.getvalue()


_FIELDS: Mapping[bytes, tuple[int, ...]] = {
    b"PK\x01\x02": (4, 6, 8, 10, 16, 20, 24, 28, 30, 32, 34, 36, 38, 42),
    b"PK\x03\x04": (4, 6, 8, 14, 18, 22, 26, 28),
    b"PK\x05\x06": (4, 6, 8, 10, 12, 16, 20),
    b"PK\x06\x06": (4, 12, 16, 24, 32, 40, 48),
    b"PK\x06\x07": (4, 8, 16),
}


def _directory(data: bytes, rng: random.Random) -> bytes:
    signature = rng.choice([*_FIELDS])
    starts = [i for i in range(len(data)) if data.startswith(signature, i)]
    if not starts:
        return _bytes(data, rng)
    content = bytearray(data)
    at = rng.choice(starts) + rng.choice(_FIELDS[signature])
    size = rng.choice((2, 4, 4, 8))
    number = rng.choice((*_EDGES, len(data), len(data) - 1)) & ((1 << 8 * size) - 1)
    content[at : at + size] = number.to_bytes(size, "little")
    return bytes(content)


# ---------------------------------------------------------------------------- headers with lengths


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the JSON of the header, mostly with the right length before it."""
    if len(data) < 9:
        return _bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        rest = rest[: rng.randint(0, len(rest))] + bytes(rng.choice((0, 1, 8)))
    header = _json(header, rng)
    told = len(header) if rng.random() < 0.93 else rng.choice(_EDGES) & ((1 << 64) - 1)
    return told.to_bytes(8, "little") + header + rest


def _numbers(data: bytes, rng: random.Random) -> bytes:
    """Write a number at the edge over one that is small: a length, a count, a type."""
    content = bytearray(data)
    size = rng.choice((4, 8))
    small = [i for i in range(len(content) - size) if not any(content[i + 1 : i + size])]
    if not small:
        return _bytes(data, rng)
    at = rng.choice(small)
    number = rng.choice((*range(20), *_EDGES)) & ((1 << 8 * size) - 1)
    content[at : at + size] = number.to_bytes(size, "little")
    return bytes(content)


def _marked(form: Mutator) -> Mutator:
    """Return *form* for what comes behind a first byte that chooses something."""

    def change(data: bytes, rng: random.Random) -> bytes:
        first, rest = data[:1] or b"\0", data[1:]
        if rng.random() < 0.05:
            first = bytes([rng.randrange(256)])
        return first + form(rest, rng)

    return change


def _lines(data: bytes, rng: random.Random) -> bytes:
    """Change, repeat, drop or put in a line."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines) if lines else b"")
        case 2:
            lines[at] = lines[at].replace(b"0", str(rng.choice(_EDGES)).encode()[:40], 1)
        case 3:
            lines[at] = lines[at].replace(b"1", rng.choice((b"99999", b"2", b"-1", b"00")), 1)
        case _:
            lines[at] = _bytes(lines[at], rng)
    return b"\n".join(lines)


_FORMS: Mapping[str, Mutator] = {
    "json": _json,
    "marked-json": _marked(_json),
    "pickle": _pickle,
    "marked-pickle": _marked(_pickle),
    "zip": _zip,
    "safetensors": _safetensors,
    "numbers": _numbers,
    "lines": _lines,
    "marked-lines": _marked(_lines),
}
