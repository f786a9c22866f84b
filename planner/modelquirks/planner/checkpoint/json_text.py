"""JSON that may be anything: pointers, web pages, two documents in one file, bombs.

Nothing here raises for what a text holds; a problem comes back as a code and the rest of a
sentence whose subject is the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.file_kind import look, pointer_text
from modelquirks.planner.checkpoint.filepath import FilePath

__all__ = [
    "MAX_JSON_BYTES",
    "JsonProblem",
    "has_duplicates",
    "n_controls",
    "parse_json",
    "read_json",
]

MAX_JSON_BYTES = 1 << 29
"""Larger files are not read. The index of 208,550 tensors has 20 MB."""
_ABSENT = "No such file or directory"
_CONTROLS = bytes((*range(32), 127))


class JsonProblem(NamedTuple):
    """Why there is no value: a code, and what to say after the name of the file."""

    code: str
    text: str


def read_json(
    path: FilePath, quick: Callable[[bytes], Any] = lambda raw: None
) -> tuple[Any | JsonProblem, bytes]:
    """Return the value in the file *path* or the problem with it, and the bytes read.

    *quick* is asked first for the value of a text, in bytes; None: it cannot tell.
    """
    seen = look(path)
    problem: JsonProblem | None = None
    match seen.kind:
        case "absent" | "special" | "unreadable":
            problem = JsonProblem("file-unreadable", f"cannot be read: {seen.trouble or _ABSENT}")
        case "empty":
            problem = JsonProblem("file-empty", "is empty (0 bytes)")
        case "lfs-pointer":
            text = f"is a git-LFS pointer{pointer_text(seen.head)}; fetch it with `git lfs pull`"
            problem = JsonProblem("lfs-pointer", text)
        case "html":
            problem = JsonProblem("html-page", "is a web page: the download was not answered")
        case _ if seen.size_bytes > MAX_JSON_BYTES:
            problem = JsonProblem("file-too-big", f"has {seen.size_bytes:,} bytes: not read")
        case _:
            pass
    if problem is not None:
        return problem, b""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return JsonProblem("file-unreadable", f"cannot be read: {error.strerror}"), b""
    try:
        value = quick(raw)
        return (parse_json(raw.decode("utf-8-sig")) if value is None else value), raw
    except UnicodeDecodeError as error:
        return JsonProblem("not-json", f"is not UTF-8 text ({error.reason})"), raw


def parse_json(
    text: str, *, strict: bool = False, duplicates: dict[str, bool] | None = None
) -> Any | JsonProblem:
    """Return the JSON value in *text*, or the problem with it.

    *strict*: refuse NaN and lone surrogates, as readers in other languages do. *duplicates* is
    filled with the keys that occur twice in one object, and whether their values differ (which
    takes three times as long).
    """
    hook = None if duplicates is None else _noting(duplicates)
    try:
        value = json.loads(text, object_pairs_hook=hook, parse_constant=_forbid if strict else None)
        if strict and "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return JsonProblem("not-json", "holds half a surrogate pair, which is no character")
    except RecursionError:
        return JsonProblem("json-too-deep", "is nested too deep to be read")
    except json.JSONDecodeError as error:
        return _why(text, error)
    except ValueError as error:  # NaN, or an integer of more than 4,300 digits
        return JsonProblem("not-json", f"is not JSON that can be read: {str(error).split(';')[0]}")
    return value


def n_controls(raw: bytes) -> int:
    """Return how many control characters of ASCII there are.

    A JSON string must not have one in it but DEL, which nobody means either.
    """
    return len(raw) - len(raw.translate(None, _CONTROLS))


def has_duplicates(raw: bytes, *, n_keys: int, strings: Iterable[str] = ()) -> bool:
    """Tell whether a key may occur twice in one object: False is sure, True is a suspicion.

    Every key is followed by a colon, so a text with as many colons as the parsed value has keys
    (*n_keys*) has lost none. *strings* are those of the value in which colons may be.
    """
    colons = raw.count(b":")
    if colons == n_keys:
        return False
    return b"\\u" in raw or colons != n_keys + "\n".join(strings).count(":")


def _noting(duplicates: dict[str, bool]) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: dict[str, Any] = {}
            for key, value in pairs:
                if key in seen:
                    duplicates[key] = duplicates.get(key, False) or seen[key] != value
                seen[key] = value
        return found

    return hook


def _forbid(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _why(text: str, error: json.JSONDecodeError) -> JsonProblem:
    if error.msg.startswith("Extra data"):
        try:
            json.loads(text[error.pos :])
        except (ValueError, RecursionError):
            what = f"has other text behind its JSON, from line {error.lineno}"
            return JsonProblem("json-trailing-text", what)
        return JsonProblem(
            "json-glued", f"holds two JSON documents, the second from line {error.lineno}"
        )
    where = f"line {error.lineno}, column {error.colno}"
    return JsonProblem("not-json", f"is not JSON: {error.msg[0].lower()}{error.msg[1:]} ({where})")
