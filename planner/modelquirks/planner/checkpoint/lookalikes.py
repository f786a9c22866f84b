"""Names that look like others and are not, and names in which something is not seen.

``lm_head.weight`` with a Cyrillic ``a`` is another name for a program and the same for people, who
then look in vain for what differs. Every comparison here is of programs; people are told.

Source of what looks alike: Unicode Technical Standard 39, ``confusables.txt``, of which only the
letters are here that whole Latin words can be written with.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.finding import Finding
from modelquirks.planner.wording import clean

__all__ = ["about_names", "look_alikes"]

_LIKE = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u04bb\u0501\u051b\u051d\u04cf\u043a"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406\u0408\u0405"
    "\u03bf\u03b1\u03bd\u03c1\u03b9\u03ba\u03c5"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u0131\u0251\u0261\u2027\u2044\u2215",
    "aeopcyxijshdqwlkABEKMHOPCTYXIJSoavpikuABEZHIKMNOPTYXiag.//",
)
_LISTED = 10


def look_alikes(names: Iterable[str], others: Iterable[str]) -> Iterator[Finding]:
    """Yield a warning if one of *names* looks like one of *others* and is not that one."""
    pairs = [*_pairs([*names], [*others])]
    if pairs:
        told = "; ".join(f"{a!a} is not {b!a} ({_difference(a, b)})" for a, b in pairs[:_LISTED])
        more = f" … and {len(pairs) - _LISTED} more" if len(pairs) > _LISTED else ""
        text = f"names look alike and are different: {told}{more}."
        yield Finding("look-alike", "warning", text)


def about_names(names: Iterable[str]) -> Iterator[Finding]:
    """Yield what is odd about the letters in *names*, of one checkpoint."""
    listed = [*names]
    # A compact header has no control characters in it; looking for them takes its time.
    is_plain = str.isascii if isinstance(names, LazyTensors) else _is_plain
    if all(map(is_plain, listed)):
        return
    odd = [name for name in listed if clean(name) != name]
    if odd:
        more = f" … and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
        told = ", ".join(f"{name!a}" for name in odd[:_LISTED])
        text = f"names hold characters that do not print or are not seen: {told}{more}."
        yield Finding("name-unseen", "warning", text)
    yield from look_alikes(listed, listed)


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _pairs(names: list[str], others: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what looks alike, each pair once; names in ASCII look like themselves alone."""
    if "".join(names).isascii() and "".join(others).isascii():
        return
    by_look: dict[str, list[str]] = {}
    for other in others:
        by_look.setdefault(_look(other), []).append(other)
    seen: set[frozenset[str]] = set()
    for name in names:
        for other in _alike(name, by_look):
            if frozenset((name, other)) not in seen:
                seen.add(frozenset((name, other)))
                yield (other, name) if name.isascii() else (name, other)


def _alike(name: str, by_look: Mapping[str, list[str]]) -> Iterator[str]:
    return (other for other in by_look.get(_look(name), ()) if other != name)


def _look(name: str) -> str:
    """Return the same text for names that look the same."""
    if name.isascii():
        return name
    decomposed = unicodedata.normalize("NFKD", name)
    seen = (char for char in decomposed if clean(char) == char)
    return unicodedata.normalize("NFKC", "".join(seen).translate(_LIKE))


def _difference(a: str, b: str) -> str:
    """Return where the first difference is and what stands there, by its name in Unicode."""
    if unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b):
        return "the same letters, composed in one and decomposed in the other (Unicode NFC, NFD)"
    at = next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        at = min(len(a), len(b))
    here, there = (_told(name[at : at + 1]) for name in (a, b))
    return f"character {at + 1} is {here}, not {there}"


def _told(char: str) -> str:
    if not char:
        return "its end"
    return repr(char) if char.isascii() else f"U+{ord(char):04X} {unicodedata.name(char, '')}"
