"""A difference as one HTML file, in the manner of the reports."""

from __future__ import annotations

from modelquirks.planner.diff.compare import Difference, Group
from modelquirks.planner.diff.wording import details, verdict
from modelquirks.planner.report.markup import Html, breakable, cell, joined, table, tag
from modelquirks.planner.report.page import document, note_filters, sharing

__all__ = ["page"]


def page(found: Difference) -> str:
    """Return *found* as the text of an HTML file, in UTF-8."""
    before, after = found.summaries
    sides = [
        part
        for label, title, about in (("A", found.before, before), ("B", found.after, after))
        for part in (tag("dt", label), tag("dd", f"{title}: {about}"))
    ]
    kind = "ok" if found.is_same else "error"
    summary = [
        tag("p", f"{verdict(found)}", class_=f"verdict {kind}"),
        tag("dl", *sides),
        *(tag("p", note, class_="soft") for note in found.notes),
        _facts(found),
    ]
    sections = [("summary", "Summary", joined(summary))]
    if found.groups:
        sections.append(("differences", "Differences", _differences(found)))
    links = (tag("li", tag("a", title, href=f"#{id_}")) for id_, title, _ in sections)
    return document(
        f"Two {found.kind}s compared",
        Html(""),
        tag("nav", tag("ul", *links), aria_label="Parts of the report"),
        joined(
            tag("section", tag("h2", title, id=id_, tabindex="-1"), body, aria_labelledby=id_)
            for id_, title, body in sections
        ),
    )


def _facts(found: Difference) -> Html:
    if not found.facts:
        return Html("")
    rows = (
        tag("tr", cell("What", label), cell("A", before), cell("B", after), role="row")
        for label, before, after in found.facts
    )
    return table("Beside the tensors, these differ", ("What", "A", "B"), rows)


def _differences(found: Difference) -> Html:
    titles = ("Difference", "Tensors", "Family", "Details")
    kinds = [", ".join(group.kinds) for group in found.groups]
    controls = note_filters(kinds, label="Difference", more=sharing())
    caption = "Tensors that differ, by family"
    return joined([controls, table(caption, titles, map(_row, found.groups), numbers=("Tensors",))])


def _row(group: Group) -> Html:
    kinds = ", ".join(group.kinds)
    names = dict.fromkeys(filter(None, (group.before, group.after)))
    indices = "; ".join(group.indices)
    family = [
        Html(" → ".join(map(breakable, names))),
        tag("p", f"indices {indices}", class_="soft") if indices else "",
    ]
    return tag(
        "tr",
        cell("Difference", kinds, "severity"),
        cell("Tensors", f"{group.n_tensors:,}", "number"),
        cell("Family", joined(family), "name"),
        cell("Details", joined(tag("p", text) for text in details(group)), "how wide"),
        role="row",
        data_severity="difference",
        data_code=kinds,
    )
