"""Rules written for single names, applied to whole families of them.

A rule of transformers is a regular expression, and may mean a digit literally (``proj.0`` →
``proj.1``) or count with it (layers 2i and 2i+1 → layer i). So a family is not renamed by what
becomes of its first member: numbers that no rule has written are put in for its indices, twice,
and the result counts if both times the same came out with the numbers where they belong. Indices
that some rule has written are looked at as they are. Where this does not work out, each name is
renamed for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from modelquirks.planner.mapping.logical import slots

__all__ = ["Outcome", "by_family", "digits_in", "template_with"]

Index = tuple[int, ...]
_Tag = TypeVar("_Tag")
_SLOT = re.compile(r"(?<!\{)\{(\d+)\}(?!\})")
_NUMBER = re.compile(r"\d+")


Texts = tuple[str, ...]


class Outcome(NamedTuple, Generic[_Tag]):
    """What becomes of some members of a family."""

    templates: Texts
    """Over the slots of the family's template; a slot may be gone."""
    members: tuple[Index, ...]
    tag: _Tag


def digits_in(texts: Iterable[str]) -> frozenset[str]:
    """Return every number that is written in *texts*.

    >>> sorted(digits_in([r"proj\\.0\\.(\\d+)", "conv1d"]))
    ['0', '1']
    """
    return frozenset(number for text in texts for number in _NUMBER.findall(text))


def by_family(
    template: str,
    members: Sequence[Index],
    apply: Callable[[str], tuple[Texts, _Tag]],
    literals: frozenset[str],
) -> list[Outcome[_Tag]]:
    """Return what *apply* makes of the names ``template.format(*member)``, by equal outcome.

    *apply* gives names and a tag, which must be hashable. *literals* are the numbers that the
    rules behind it have written.
    """
    static = literals | digits_in([_SLOT.sub("", template)])
    alike: dict[tuple[Texts, _Tag], list[Index]] = {}
    for kind, group in _kinds(members, static).items():
        free = tuple("#" * len(str(what)) for what in kind)
        general = _probed(template, free, apply, static)
        probed = general if kind == free else _probed(template, kind, apply, static)
        if general is not None and probed == _restricted(general, kind):
            probed = general  # the rules have written these numbers, but mean others by them
        if probed is not None and not _holds(probed, template, (group[0], group[-1]), apply):
            probed = None
        for member in group:
            found = probed or _single(template, member, apply)
            alike.setdefault(found, []).append(member)
    return [Outcome(names, tuple(found), tag) for (names, tag), found in alike.items()]


_Kind = tuple[int | str, ...]
"""Per slot: the index itself if a rule has written it, else its number of digits as ``#``."""


def _kinds(members: Sequence[Index], static: frozenset[str]) -> dict[_Kind, list[Index]]:
    kinds: dict[_Kind, list[Index]] = {}
    known: dict[int, int | str] = {}
    for member in members:
        for index in member:
            if index not in known:
                text = str(index)
                known[index] = index if text in static else "#" * len(text)
        kinds.setdefault(tuple([known[index] for index in member]), []).append(member)
    return kinds


def _probed(
    template: str, kind: _Kind, apply: Callable[[str], tuple[Texts, _Tag]], static: frozenset[str]
) -> tuple[Texts, _Tag] | None:
    """Return the outcome for all members of one kind, as two probes agree on it."""
    probes = [_probe(kind, static, number) for number in (0, 1)]
    found: list[tuple[Texts, _Tag]] = []
    for probe in probes:
        if probe is None:
            return None
        texts, tag = apply(template.format(*probe))
        put_in = {str(value): slot for slot, value in _free(kind, probe)}
        given = static | {str(what) for what in kind}
        if digits_in(texts) - given - put_in.keys():
            return None  # a number that was not put in: the rules count
        templates = tuple(template_with(text, put_in) for text in texts)
        if any(len(set(kept)) < len(kept) for kept in map(slots, templates)):
            return None  # one number became another that was put in
        found.append((templates, tag))
    return found[0] if found[0] == found[1] else None


def _holds(
    outcome: tuple[Texts, _Tag],
    template: str,
    members: Iterable[Index],
    apply: Callable[[str], tuple[Texts, _Tag]],
) -> bool:
    """Tell whether *outcome* is what really becomes of *members*: two probes can be fooled."""
    texts, tag = outcome
    return all(
        apply(template.format(*member)) == (tuple(text.format(*member) for text in texts), tag)
        for member in members
    )


def _restricted(general: tuple[Texts, _Tag], kind: _Kind) -> tuple[Texts, _Tag]:
    """Return the outcome with the given indices of *kind* written out."""
    texts, tag = general

    def written(match: re.Match[str]) -> str:
        what = kind[int(match.group(1))]
        return match.group() if isinstance(what, str) else str(what)

    return tuple(_SLOT.sub(written, text) for text in texts), tag


def _free(kind: _Kind, probe: Index) -> Iterator[tuple[int, int]]:
    """Yield the slots that a probe stands for, with its number in each."""
    for slot, (what, value) in enumerate(zip(kind, probe, strict=True)):
        if isinstance(what, str):
            yield slot, value


def _probe(kind: _Kind, static: frozenset[str], number: int) -> Index | None:
    """Return indices of *kind*, those not given by it different and written nowhere else."""
    taken = {str(what) for what in kind if isinstance(what, int)} | static
    probe: list[int] = []
    for what in kind:
        if isinstance(what, int):
            probe.append(what)
            continue
        low, high = 10 ** (len(what) - 1), 10 ** len(what)
        # Upwards in one probe and downwards in the other, so that sums and differences differ.
        sign = 1 - 2 * number
        candidates = (low + (sign * 7 * step + 4) % (high - low) for step in range(high - low))
        value = next((v for v in candidates if str(v) not in taken), None)
        if value is None:
            return None
        taken.add(str(value))
        probe.append(value)
    return tuple(probe)


def template_with(text: str, slots: Mapping[str, int]) -> str:
    """Return *text* with each number of *slots* as that slot.

    >>> template_with("layers.47.norm", {"47": 0})
    'layers.{0}.norm'
    """

    def slot(match: re.Match[str]) -> str:
        number = slots.get(match.group())
        return match.group() if number is None else f"{{{number}}}"

    return _NUMBER.sub(slot, _escaped(text))


def _single(
    template: str, member: Index, apply: Callable[[str], tuple[Texts, _Tag]]
) -> tuple[Texts, _Tag]:
    texts, tag = apply(template.format(*member))
    return tuple(map(_escaped, texts)), tag


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
