"""The part of the page that shows memory: of each device a treemap, and a table by family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.report.content import Area, FamilyRow
from modelquirks.planner.report.markup import Html, breakable, cell, joined, table, tag
from modelquirks.planner.report.treemap import Rect, squarified
from modelquirks.planner.wording import counted

__all__ = ["Drawn", "drawn", "label_of"]

_WIDE, _NARROW = 3.0, 0.9
"""Width by height of a treemap, as in page.css."""
_SMALL = 0.004
"""Families below this share of an area have no tile of their own."""
_COLOURS = 7
_TITLES = ("Family", "Indices", "Tensors", "Dtype", "Shape", "Size", "Share")
_NUMBERS = ("Tensors", "Size", "Share")


class Drawn(NamedTuple):
    """Areas as markup, and the rules that put each tile in its place."""

    body: Html
    wide: str
    narrow: str


class _Tile(NamedTuple):
    label: str
    weight: float
    part: str
    family: FamilyRow | None


def drawn(areas: Sequence[Area]) -> Drawn:
    """Return the areas with a legend; colours stand for parts of the model, the same in all."""
    colours = _colours(areas)
    articles: list[Html] = []
    wide: list[str] = []
    narrow: list[str] = []
    for number, area in enumerate(areas):
        tiles = _tiles(area)
        weights = [tile.weight for tile in tiles]
        wide += _rules(number, squarified(weights, aspect=_WIDE))
        narrow += _rules(number, squarified(weights, aspect=_NARROW))
        articles.append(_article(number, area, tiles, colours))
    return Drawn(joined([_legend(colours), *articles]), "".join(wide), "".join(narrow))


def label_of(area: Area) -> str:
    """Return what an area is called: ``Device 0``, ``cpu``, ``In the files``."""
    if area.kind == "device":
        return f"Device {area.name}" if area.name.isdigit() else area.name
    return {"files": "In the files", "unplaced": "Not placed"}[area.kind]


def _headline(area: Area) -> str:
    """Return what an area is, and how full."""
    label = label_of(area)
    if area.used_bytes is None:
        return label
    if area.kind != "device":
        return f"{label}: {show_bytes(area.used_bytes)}"
    used = f"{label}: {show_bytes(area.used_bytes)} used of {show_bytes(area.capacity_bytes)}"
    if not area.capacity_bytes:
        return used
    return f"{used}, {show_bytes(max(0, area.capacity_bytes - area.used_bytes))} free"


def _weight(row: FamilyRow, *, by_bytes: bool) -> float:
    return float(row.n_bytes or 0) if by_bytes else float(row.n_tensors)


def _by_bytes(area: Area) -> bool:
    return any(row.n_bytes for row in area.families)


def _colours(areas: Iterable[Area]) -> Mapping[str, int]:
    """Return the number of the colour of each part; those with most in them have one each."""
    weights: dict[str, float] = {}
    for area in areas:
        by_bytes = _by_bytes(area)
        total = sum(_weight(row, by_bytes=by_bytes) for row in area.families) or 1
        for row in area.families:
            share = _weight(row, by_bytes=by_bytes) / total
            weights[row.part] = weights.get(row.part, 0.0) + share
    ranked = sorted((p for p in weights if weights[p] >= _SMALL), key=lambda part: -weights[part])
    return {part: number for number, part in enumerate(ranked[:_COLOURS])}


def _legend(colours: Mapping[str, int]) -> Html:
    items = [
        tag("li", tag("i", class_=f"g{number}", aria_hidden="true"), part)
        for part, number in colours.items()
    ]
    other = tag("li", tag("i", class_=f"g{_COLOURS}", aria_hidden="true"), "everything else")
    return tag("ul", *items, other, class_="legend", aria_label="Colours: parts of the model")


def _tiles(area: Area) -> list[_Tile]:
    """Return the tiles of an area, the largest first; small families share one."""
    by_bytes = _by_bytes(area)
    total = sum(_weight(row, by_bytes=by_bytes) for row in area.families) + area.rest_bytes
    tiles: list[_Tile] = []
    small: list[FamilyRow] = []
    for row in area.families:
        weight = _weight(row, by_bytes=by_bytes)
        if weight >= total * _SMALL and weight:
            tiles.append(_Tile(row.template, weight, row.part, row))
        else:
            small.append(row)
    rest = sum(_weight(row, by_bytes=by_bytes) for row in small)
    if rest:
        label = counted(len(small), "smaller family", "smaller families")
        tiles.append(_Tile(label, rest, "", None))
    if area.rest_bytes and by_bytes:
        tiles.append(_Tile("not told by family", area.rest_bytes, "", None))
    return sorted(tiles, key=lambda tile: -tile.weight)


def _rules(area: int, rects: Sequence[Rect]) -> Iterator[str]:
    """Yield where each tile is: in a style sheet, as attributes with styles are not allowed."""
    for number, rect in enumerate(rects):
        left, top, width, height = (f"{value:.2f}%" for value in rect)
        yield f"#t{area}-{number}{{left:{left};top:{top};width:{width};height:{height}}}\n"


def _article(number: int, area: Area, tiles: Sequence[_Tile], colours: Mapping[str, int]) -> Html:
    title = _headline(area)
    n_families = len(area.families) + area.n_left_out
    rows = [_row(area, row) for row in area.families]
    titles = (*_TITLES, "Why there") if area.kind == "device" else _TITLES
    return tag(
        "article",
        tag("h3", title, id=f"a{number}"),
        *(tag("p", f"Kept free: {text}", class_="soft") for text in area.kept_free),
        _treemap(number, area, tiles, colours),
        tag("div", class_="picked", aria_live="polite"),
        tag(
            "details",
            tag("summary", f"{counted(n_families, 'family', 'families')} as a table"),
            table(f"{title}, by family", titles, rows, numbers=_NUMBERS),
            _left_out(area.n_left_out),
        ),
        data_area=area.name,
        aria_labelledby=f"a{number}",
    )


def _left_out(number: int) -> Html:
    if not number:
        return Html("")
    return tag(
        "p", f"… and {counted(number, 'smaller family', 'smaller families')}.", class_="soft"
    )


def _treemap(number: int, area: Area, tiles: Sequence[_Tile], colours: Mapping[str, int]) -> Html:
    if not tiles:
        return tag("p", "Nothing.", class_="soft")
    by_bytes = _by_bytes(area)
    measure = "bytes" if by_bytes else "number of tensors, as their bytes are not known"
    total = sum(tile.weight for tile in tiles)
    buttons = [
        _button(f"t{number}-{at}", tile, colours, by_bytes=by_bytes, share=tile.weight / total)
        for at, tile in enumerate(tiles)
    ]
    note = tag("p", f"Areas are in proportion to the {measure}.", class_="soft")
    label = f"Families in proportion to the {measure}; arrow keys move between them"
    return joined(
        [tag("div", *buttons, class_="treemap", role="group", aria_label=label)]
        + ([] if by_bytes else [note])
    )


def _button(
    id_: str, tile: _Tile, colours: Mapping[str, int], *, by_bytes: bool, share: float
) -> Html:
    size = show_bytes(int(tile.weight)) if by_bytes else counted(int(tile.weight), "tensor")
    said = f"{tile.label}, {size}, {share:.1%}"
    return tag(
        "button",
        tag("b", breakable(_short(tile.label))),
        tag("span", size),
        type="button",
        id=id_,
        class_=f"tile g{colours.get(tile.part, _COLOURS)}",
        title=said,
        aria_label=said,
        data_family=None if tile.family is None else tile.family.template,
        data_rest=tile.family is None,
    )


def _short(template: str) -> str:
    """Return what tells a family from its neighbours: what is behind the first index.

    >>> _short("model.layers.*.mlp.up_proj.weight"), _short("lm_head.weight")
    ('mlp.up_proj.weight', 'lm_head.weight')
    """
    return template.partition(".*.")[2] or template


def _row(area: Area, row: FamilyRow) -> Html:
    total = area.used_bytes
    known = row.n_bytes is not None
    share = f"{(row.n_bytes or 0) / total:.1%}" if known and total else ""
    indices = "; ".join(row.indices) + ("" if row.is_whole else " (not every combination)")
    cells: list[tuple[str, str]] = [
        ("Family", breakable(row.template)),
        ("Indices", indices),
        ("Tensors", f"{row.n_tensors:,}"),
        ("Dtype", ", ".join(row.dtypes)),
        ("Shape", ", ".join(row.shapes)),
        ("Size", show_bytes(row.n_bytes) if known else "?"),
        ("Share", share),
    ]
    if area.kind == "device":
        cells.append(("Why there", joined(tag("p", text) for text in row.why)))
    classes = {"Family": "name", **dict.fromkeys(_NUMBERS, "number"), "Why there": "how wide"}
    return tag(
        "tr",
        *(cell(label, text, classes.get(label, "")) for label, text in cells),
        role="row",
        data_family=row.template,
        data_indices=json.dumps(row.indices),
    )
