"""Families: all names that differ only in integer indices.

``model.layers.0.mlp.w1.weight`` and ``model.layers.31.mlp.w1.weight`` are two members of the
family ``model.layers.{0}.mlp.w1.weight``. The 35,743 tensors of one real index are 57 families,
so rules, audit and reports that work by family stay small however large the checkpoint is.

An index is a whole part of a name between ``.``, ``/`` or ``:`` (or an end) that is written as
Python would write it: ``01`` and numbers of more than nine digits are text.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, islice
from operator import itemgetter, ne
from typing import TypeVar, cast

from modelquirks.quirks.block import Block

__all__ = ["Family", "group", "indices_of", "show", "template_of"]

_T = TypeVar("_T")

_INTEGER = r"(?:0|[1-9][0-9]{0,8})(?=[./:\n])"
# One expression per separator: each starts with a literal, which `re` finds four times as fast
# as a set of characters.
_INDEX = {sep: re.compile(re.escape(sep) + _INTEGER) for sep in "./:\n"}
_VALUE = re.compile(rf"[./:\n]({_INTEGER})")
_SLOT = re.compile(r"(?<!\{)\{\d+\}(?!\})")
# Whether a segment is an index does not depend on its digits, but for a 0 in front.
_ALIKE = bytes.maketrans(b"123456789", b"1" * 9)
_SEPARATORS = bytes.maketrans(b"/:\n", b"...")
_DIGIT = re.compile(r"[0-9]")
_PART = 4096
"""Names that are taken apart at once: so few stay in the cache of a processor."""
_BETWEEN = bytes(byte for byte in range(256) if byte not in b"0123456789./:\n")

Indices = tuple[tuple[int, ...], ...]
_Pick = Callable[[Sequence[str]], Sequence[str]]
_Digits = tuple[str, tuple[int, ...], int]
"""Digits of all names, which of them are indices, and how many there are in a name."""


@dataclass(frozen=True)
class Family:
    """Names that share one template.

    ``template`` is in the syntax of :meth:`str.format` with numbered slots, so that
    ``template.format(*indices)`` is the name of a member; braces that a name really contains are
    doubled.
    """

    template: str
    names: tuple[str, ...]
    _known: dict[_Digits, Indices] = field(default_factory=dict, compare=False, repr=False)
    """Members of families that were grouped together: those of companions are the same."""
    _digits: bytes = field(default=b"", compare=False, repr=False)
    """Digits and separators of all names, if they were at hand when it was made."""

    @cached_property
    def members(self) -> Indices:
        """Indices of each name, in the order of ``names``."""
        if not self.n_slots:
            return ((),) * len(self.names)
        cut = _utf8(_SLOT.sub("\0", self.template)).translate(_SEPARATORS).split(b".")
        slots = tuple(at for at, segment in enumerate(cut) if segment == b"\0")
        digits = (self._digits or _digits(self.names)).decode()
        known = (digits, slots, len(cut))  # '0', '1' and '0.w1' have the same digits
        if known not in self._known:
            segments = digits.split(".")
            columns = [map(int, segments[slot :: len(cut)]) for slot in slots]
            self._known[known] = tuple(zip(*columns, strict=True))
        return self._known[known]

    @cached_property
    def n_slots(self) -> int:
        """Number of index slots in the template."""
        return len(next(indices_of(self.names[:1])))

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.names)


def group(names: Iterable[str]) -> dict[str, Family]:
    """Group *names* into families, by template, in the order of first appearance.

    >>> [(f.template, len(f)) for f in group(["a.0.w", "a.1.w", "b"]).values()]
    [('a.{0}.w', 2), ('b', 1)]
    """
    listed = list(names)
    return grouped([listed], [raw_templates(listed)])


def grouped(
    blocks: Sequence[Sequence[str]], templates: Sequence[Sequence[str]]
) -> dict[str, Family]:
    """Return the families of the names in *blocks*.

    *templates* are the :func:`raw_templates` of each block; of alike ones they are one object.
    """
    members: dict[str, list[str]] = {}
    digits: dict[str, list[bytes]] = {}
    times = Counter(map(id, templates))
    picks: dict[int, Mapping[str, _Pick]] = {}
    for names, raws in zip(blocks, templates, strict=True):
        if times[id(raws)] == 1:
            found = _by_template(names, raws)
        else:
            if id(raws) not in picks:
                picks[id(raws)] = _picks(raws)
            found = ((raw, pick(names)) for raw, pick in picks[id(raws)].items())
        for raw, some in found:
            members.setdefault(raw, []).extend(some)
            digits.setdefault(raw, []).append(_digits(some))
    known: dict[_Digits, Indices] = {}
    families = (
        Family(numbered(raw), tuple(some), known, b".".join(digits[raw]))
        for raw, some in members.items()
    )
    return {family.template: family for family in families}


def _by_template(
    names: Sequence[_T], templates: Sequence[str]
) -> Iterator[tuple[str, Sequence[_T]]]:
    """Yield names with their template; a template comes again for each part of many names."""
    for begin in range(0, len(names), _PART):
        part: dict[str, list[_T]] = defaultdict(list)
        here = slice(begin, begin + _PART)
        entered = map(list.append, map(part.__getitem__, templates[here]), names[here])
        deque(entered, maxlen=0)  # at the speed of C, as a loop of so little in it is not
        yield from part.items()


def _picks(templates: Sequence[str]) -> Mapping[str, _Pick]:
    """Return what takes the names of each template out of those of a block."""
    places: dict[str, list[int]] = {}
    for raw, some in _by_template(range(len(templates)), templates):
        places.setdefault(raw, []).extend(some)
    return {raw: _pick(some) for raw, some in places.items()}


def _pick(places: Sequence[int]) -> _Pick:
    step = places[1] - places[0] if len(places) > 1 else 1
    evenly = range(places[0], places[-1] + 1, step)
    if [*evenly] == [*places]:  # most often: a dozen tensors of each expert, in one order
        return itemgetter(slice(evenly.start, evenly.stop, step))
    return lambda names: [*map(names.__getitem__, places)]


def distinct(
    templates: Sequence[Sequence[str]], values: Iterable[_T]
) -> tuple[list[str], list[_T]]:
    """Return *templates* of blocks, and the *values* beside them, without blocks that repeat one.

    >>> layer, other = ["w", "b"], ["w"]
    >>> distinct([layer, layer, other], [1, 2, 1, 2, 1])
    (['w', 'b', 'w'], [1, 2, 1])
    """
    keys: list[str] = []
    kept: list[_T] = []
    known: dict[int, list[_T]] = {}
    rest = iter(values)
    for raws in templates:
        here = [*islice(rest, len(raws))]
        if known.setdefault(id(raws), here) is here or known[id(raws)] != here:
            keys += raws
            kept += here
    if [*islice(rest, 1)]:
        raise ValueError("there are more values than templates")
    return keys, kept


def uneven(keys: Sequence[str], values: Sequence[object]) -> frozenset[str]:
    """Return those of *keys* that stand beside values that are not all equal.

    Of 200,000 keys, at the speed of C where all are even.

    >>> uneven(["a", "b", "a", "b"], [1, 2, 1, 3])
    frozenset({'b'})
    """
    last = dict(zip(keys, values, strict=True))
    expected = [*map(last.__getitem__, keys)]
    if expected == [*values]:  # of one object twice no content is looked at
        return frozenset()
    return frozenset(compress(keys, map(ne, expected, values)))


def _digits(names: Iterable[str]) -> bytes:
    """Return all digits in *names*, with a dot for each separator and between two names."""
    return _utf8("\n".join(names)).translate(_SEPARATORS, _BETWEEN)


def template_of(name: str) -> str:
    """Return the template of one name.

    >>> template_of("model.layers.7.mlp.experts.31.w1.weight")
    'model.layers.{0}.mlp.experts.{1}.w1.weight'
    """
    return numbered(raw_templates([name])[0])


def indices_of(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the indices in each name, in order.

    >>> list(indices_of(["a.3.b.14", "c"]))
    [(3, 14), ()]
    """
    for name in names:
        yield tuple(map(int, _VALUE.findall(f"\n{name}\n")))


def show(template: str) -> str:
    """Return a template as people read it: each slot as ``*``.

    >>> show("model.layers.{0}.mlp.weight")
    'model.layers.*.mlp.weight'
    """
    return re.sub(r"(?<!\{)\{\d+\}(?!\})", "*", template).replace("{{", "{").replace("}}", "}")


def raw_templates(names: Sequence[str]) -> list[str]:
    """Return each name with ``{}`` for each index.

    >>> raw_templates(["a.0.w", "a.1.w"])
    ['a.{}.w', 'a.{}.w']
    """
    return _raw_in_parts(names, _Raw())


def templates_of(blocks: Sequence[Block]) -> list[Sequence[str]]:
    """Return the raw templates of each block: one object for all that are alike.

    >>> from modelquirks.quirks.block import Tails
    >>> tails = Tails(["w"])
    >>> templates_of([Block("h.1.", tails), Block("h.2.", tails)])
    [['h.{}.w'], ['h.{}.w']]
    """
    told = _Raw()
    known: dict[tuple[str, int], Sequence[str]] = {}
    found: list[Sequence[str]] = []
    for block in blocks:
        key = (_raw_in_parts([block.head], told)[0], id(block.tails))
        if key not in known:
            known[key] = _raw_in_parts(block.names, told)
        found.append(known[key])
    return found


def _raw_in_parts(names: Sequence[str], told: _Raw) -> list[str]:
    found: list[str] = []
    for begin in range(0, len(names), _PART):
        found += _raw_templates(names[begin : begin + _PART], told)
    return found


class _Raw(dict[bytes, str | None]):
    """What names are whose digits but 0 are all 1 → template; None: it depends on the digits."""

    def __missing__(self, alike: bytes) -> str | None:
        raw = _without_indices(alike.decode("utf-8", "surrogatepass"))
        found = self[alike] = None if _DIGIT.search(raw) else raw
        return found


def _raw_templates(names: Sequence[str], told: _Raw) -> list[str]:
    text = "\n".join(names)
    if "{" in text or "}" in text:
        names = [name.replace("{", "{{").replace("}", "}}") for name in names]
        text = "\n".join(names)
    # Names that differ only in digits have one template, unless a digit of it is no index.
    alike = _utf8(text).translate(_ALIKE).split(b"\n")
    if len(alike) > len(names):  # some name has a line break in it
        return [_without_indices(name) for name in names]
    found = [*map(told.__getitem__, alike)]
    if None not in found:
        return cast(list[str], found)
    rest = [name for name, raw in zip(names, found, strict=True) if raw is None]
    by_name = iter(_without_indices("\n".join(rest)).split("\n"))
    return [next(by_name) if raw is None else raw for raw in found]


def _utf8(text: str) -> bytes:
    """Return *text* as bytes, of which tables can be used that are ten times as fast."""
    return text.encode("utf-8", "surrogatepass")


def _without_indices(text: str) -> str:
    text = f"\n{text}\n"
    for separator, index in _INDEX.items():
        if separator in text:
            text = index.sub(separator + "{}", text)
    return text[1:-1]


def numbered(raw: str) -> str:
    """Return a raw template with its slots numbered.

    >>> numbered("a.{}.b.{}")
    'a.{0}.b.{1}'
    """
    parts = re.split(r"(?<!\{)\{\}(?!\})", raw)
    slots = iter(range(len(parts)))
    return parts[0] + "".join(f"{{{next(slots)}}}{part}" for part in parts[1:])
