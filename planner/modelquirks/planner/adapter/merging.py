"""Merging: the offers of a base with an adapter's changes in their recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from modelquirks.planner.adapter.beside import marked
from modelquirks.planner.adapter.binding import Bound, Bounds
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.offers import Offer, Offers
from modelquirks.quirks.family import indices_of, template_of
from modelquirks.quirks.recipe import Merge, Node, Part, Source

__all__ = ["merged", "word_for"]

_Key = tuple[object, ...]


def merged(offers: Offers, bounds: Bounds) -> Offers:
    """Return *offers* in which each weight that *bounds* changes is made as these say.

    What the base stores for a weight that the adapter has whole is not used then.
    """
    changes = bounds.by_name()
    best = offers.ranked({template_of(name) for name in changes}).best
    alike: dict[_Key, tuple[Logical, list[tuple[int, ...]]]] = {}
    replaced = dict.fromkeys(map(marked, bounds.former), "a retrained copy takes its place")
    for name, several in changes.items():
        offer = best.get(name)
        if several[0].scheme == "whole":
            if offer is not None:
                why = "the adapter has a weight of its own in its place"
                replaced |= dict.fromkeys(offer.reads(), why)
        elif offer is None:
            continue  # the base lacks the weight, which the audit tells
        piece, member = _made(name, offer, several)
        key = (piece.name, piece.node, piece.rule, piece.quirks)
        alike.setdefault(key, (piece, []))[1].append(member)
    pieces = [replace(piece, members=tuple(members)) for piece, members in alike.values()]
    taken = frozenset(name for piece in pieces for name in piece.names)
    return replace(
        offers,
        packed=tuple(replace(p, weight=p.weight.without(taken)) for p in offers.packed),
        made=(*pieces, *_others(offers.made, taken)),
        unreadable=offers.unreadable | taken,
        replaced={**offers.replaced, **replaced},
    )


def _others(made: Sequence[Logical], taken: Collection[str]) -> Iterator[Logical]:
    for piece in made:
        if (rest := piece.without(taken)).members:
            yield rest


def _made(
    name: str, offer: Offer | None, bounds: Sequence[Bound]
) -> tuple[Logical, tuple[int, ...]]:
    """Return how one weight is made: a piece like those of its family, and its indices."""
    if offer is not None:
        template, member, quirks = offer.logical.name, offer.member, offer.logical.quirks
        node, rules = offer.logical.node, [offer.logical.rule]
    else:
        (member,) = indices_of([name])
        template, quirks, node, rules = template_of(name), (), Source(""), []
    for bound in bounds:
        node = _changed(node, bound, member)
        rules.append(word_for(bound))
    rule = "; ".join(filter(None, rules))
    return Logical(template, node, (), rule, quirks, reforms=True), member


def _changed(node: Node, bound: Bound, member: tuple[int, ...]) -> Node:
    parts = {role: Source(_leaf(stored, member)) for role, stored in bound.parts}
    if bound.scheme == "whole":
        return parts["weight"]
    listed = [Part("weight", node), *(Part(role, of) for role, of in parts.items())]
    return Merge(bound.scheme, tuple(listed), bound.settings)


def _leaf(stored: str, member: tuple[int, ...]) -> str:
    """Return the adapter's name as a template over the indices of the weight, if these agree."""
    name = marked(stored)
    (indices,) = indices_of([name])
    return template_of(name) if indices == member else name.replace("{", "{{").replace("}", "}}")


def word_for(bound: Bound) -> str:
    """Return what *bound* does to a weight, for people."""
    if bound.scheme == "whole":
        return "taken whole from the adapter"
    if bound.scheme == "trained_rows":
        return f"with rows {dict(bound.settings)['indices']} of the adapter"
    kind = "DoRA" if "magnitude" in dict(bound.parts) else "LoRA"
    strength = bound.strength
    told = "" if strength is None else f" of rank {strength.rank}, scaling {strength.scaling:.4g}"
    return f"merged with a {kind}{told}"
