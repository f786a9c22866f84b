"""Markup: elements as text, of which everything is escaped that is not an element itself.

Names and messages come from files that anybody may have made. Text becomes :class:`Html` only by
:func:`escaped` or :func:`tag`, so that none of it can end a tag or a script; characters that do not
print, among them those that turn the direction of text, are shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from modelquirks.planner.wording import clean

__all__ = ["Html", "breakable", "cell", "escaped", "joined", "table", "tag"]

_VOID = frozenset({"input", "link", "meta", "rect", "wbr"})


class Html(str):
    """Markup: it is not escaped again."""


def escaped(text: str) -> Html:
    r"""Return *text* as markup that shows it; markup stays as it is.

    >>> escaped("<b>\x00")
    '&lt;b&gt;\\x00'
    """
    return text if isinstance(text, Html) else Html(escape(clean(text)))


def joined(parts: Iterable[str]) -> Html:
    """Return the parts one after another, those that are text escaped."""
    return Html("".join(map(escaped, parts)))


def tag(name: str, /, *content: str, **attributes: str | bool | None) -> Html:
    """Return an element; ``class_`` is ``class``.

    Attributes that are None or False are left out, and an empty class.

    >>> tag("p", "1 < 2", class_="a", data_x='"', hidden=True)
    '<p class="a" data-x="&quot;" hidden>1 &lt; 2</p>'
    """
    told = ""
    for attribute, value in attributes.items():
        if value is None or value is False or (value == "" and attribute == "class_"):
            continue
        label = attribute.rstrip("_").replace("_", "-")
        told += f" {label}" if value is True else f' {label}="{escaped(value)}"'
    if name in _VOID:
        return Html(f"<{name}{told}>")
    return Html(f"<{name}{told}>{joined(content)}</{name}>")


def breakable(name: str) -> Html:
    """Return a name that may go on in the next line behind each dot and underscore.

    >>> breakable("a.b_<c")
    'a.<wbr>b_<wbr>&lt;c'
    """
    return Html("<wbr>".join(map(escaped, re.findall(r"[^._]*[._]|[^._]+", name))))


def cell(label: str, content: str, class_: str = "", *, colspan: str | None = None) -> Html:
    """Return a cell of a :func:`table`; *label* is the title of its column."""
    return tag("td", content, role="cell", class_=class_, data_label=label, colspan=colspan)


def table(
    caption: str, titles: Sequence[str], rows: Iterable[str], *, numbers: Sequence[str] = ()
) -> Html:
    """Return a table that a narrow page shows row by row; *numbers* are the titles set right."""
    heads = (
        tag("th", title, scope="col", role="columnheader", class_="number" * (title in numbers))
        for title in titles
    )
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads, role="row"), role="rowgroup"),
        tag("tbody", *rows, role="rowgroup"),
        class_="stacks",
        # Roles are written out: where rows become blocks, browsers forget that it is a table.
        role="table",
    )
