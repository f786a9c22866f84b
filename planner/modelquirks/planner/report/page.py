"""The page: a report as one HTML file, which asks the network for nothing.

Its Content-Security-Policy forbids everything but the style and the script in it, by their digests
(CSP level 3, ``hash-source``), so that no name in a checkpoint can become code or a request.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from modelquirks.planner.placement.memory import show_bytes
from modelquirks.planner.report.areas import drawn, label_of
from modelquirks.planner.report.content import Area, Note, Report
from modelquirks.planner.report.markup import Html, breakable, cell, joined, table, tag
from modelquirks.planner.wording import counted

__all__ = ["document", "note_filters", "page", "sharing"]

_CAPTION = "Findings, and the account of the tensors"
_SEVERITIES = ("error", "warning", "info", "ok")


def page(report: Report) -> str:
    """Return *report* as the text of an HTML file, in UTF-8."""
    memory = drawn(report.areas)
    style = f"{memory.wide}@media (max-width: 640px) {{\n{memory.narrow}}}\n"
    sections = [
        _summary(report),
        _memory(report, memory.body),
        _placement(report),
        _audit(report),
    ]
    shown = [(id_, title, body) for id_, title, body in sections if body]
    links = (tag("li", tag("a", title, href=f"#{id_}")) for id_, title, _ in shown)
    return document(
        report.title,
        tag("p", report.summary),
        tag("nav", tag("ul", *links), aria_label="Parts of the report"),
        joined(
            tag("section", tag("h2", title, id=id_, tabindex="-1"), body, aria_labelledby=id_)
            for id_, title, body in shown
        ),
        style=style,
    )


def document(title: str, about: Html, nav: Html, body: Html, *, style: str = "") -> str:
    """Return a whole document with the style and the script of reports."""
    css, script = _resource("page.css") + style, _resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_source(css)}; script-src {_source(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} - modelquirks"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(css)),
    )
    content = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        tag("header", tag("h1", title), about, nav),
        tag("main", body, id="main", tabindex="-1"),
        tag("footer", tag("p", f"Made by modelquirks {_version()} from headers alone.")),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


def _resource(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Return how a policy names a style or script: by the digest of its text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _version() -> str:
    try:
        return version("modelquirks")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _summary(report: Report) -> tuple[str, str, Html]:
    facts = [part for label, text in report.facts for part in (tag("dt", label), tag("dd", text))]
    suggestions = [
        part
        for text, option in report.suggestions
        for part in (
            tag("p", text.removesuffix(option).rstrip()),
            tag("pre", tag("code", option), tabindex="0"),
        )
    ]
    devices = [_device_row(area) for area in report.areas if area.kind == "device"]
    titles = ("Device", "Used", "Of", "Free", "Full", "Kept free")
    body = [
        tag("p", f"{report.verdict}.", class_=f"verdict {'ok' if report.is_ok else 'error'}"),
        tag("ul", *(tag("li", text) for text in report.problems)) if report.problems else "",
        tag("h3", "What would mend it") if suggestions else "",
        *suggestions,
        tag("dl", *facts),
        table("Memory of the devices", titles, devices, numbers=("Used", "Of", "Free"))
        if devices
        else "",
    ]
    return "summary", "Summary", joined(body)


def _device_row(area: Area) -> Html:
    used, capacity = area.used_bytes or 0, area.capacity_bytes
    free = "" if capacity is None else show_bytes(max(0, capacity - used))
    share = used / capacity if capacity else 0.0
    cells = [
        ("Device", area.name, "device"),
        ("Used", show_bytes(used), "number"),
        ("Of", show_bytes(capacity), "number"),
        ("Free", free, "number"),
        ("Full", joined([f"{share:.0%}", _bar(share)]) if capacity else "", "wide"),
        ("Kept free", joined(tag("p", text) for text in area.kept_free), "how wide"),
    ]
    return tag(
        "tr",
        *(cell(label, text, kind) for label, text, kind in cells),
        role="row",
    )


def _bar(share: float) -> Html:
    width = f"{min(1.0, share) * 100:.1f}"
    return tag(
        "svg",
        tag("rect", width=width, height="10"),
        class_="bar",
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _memory(report: Report, body: Html) -> tuple[str, str, Html]:
    devices = [("", "All"), *((area.name, label_of(area)) for area in report.areas)]
    buttons = (
        tag("button", label, type="button", data_device=name, aria_pressed="false")
        for name, label in devices
    )
    controls = tag(
        "div",
        tag("fieldset", tag("legend", "Show"), *buttons),
        tag(
            "div",
            tag("label", "Find a tensor, such as layers.17.mlp", for_="find"),
            tag("input", type="search", id="find", autocomplete="off", spellcheck="false"),
            class_="field",
        ),
        tag("output", id="found", class_="soft", for_="find"),
        sharing(),
        class_="controls",
    )
    title = "Memory" if any(area.kind == "device" for area in report.areas) else "Tensors"
    return "memory", title, joined([controls, body]) if report.areas else Html("")


def _placement(report: Report) -> tuple[str, str, Html]:
    if not report.places:
        return "placement", "", Html("")
    rows = (
        tag(
            "tr",
            cell("Modules", _names(place.modules), "name"),
            cell("Device", place.device, "device"),
            cell("Why there", place.reason),
            role="row",
        )
        for place in report.places
    )
    caption = "Modules in the order of the model, and why each is where it is"
    body = [
        table(caption, ("Modules", "Device", "Why there"), rows),
        tag(
            "details",
            tag("summary", "device_map, as accelerate takes it"),
            tag("pre", tag("code", _lines(report.device_map)), tabindex="0"),
        ),
    ]
    return "placement", "Where things go, and why", joined(body)


def _names(names: tuple[str, ...]) -> Html:
    return Html(", ".join(map(breakable, names)))


def _lines(text: str) -> Html:
    """Return lines as lines: what ends them prints here."""
    return Html("\n".join(tag("span", line) for line in text.splitlines()))


def _audit(report: Report) -> tuple[str, str, Html]:
    if not report.notes:
        return "audit", "", Html("")
    titles = ("Severity", "Code", "Tensors", "What", "How")
    body = [
        _filters(report),
        table(_CAPTION, titles, map(_note, report.notes), numbers=("Tensors",)),
        tag("p", f"… and {counted(report.n_left_out, 'more line')}; --json has them all.")
        if report.n_left_out
        else "",
    ]
    return "audit", "Audit", joined(body)


def _filters(report: Report) -> Html:
    counts = {s: sum(n.severity == s for n in report.notes) for s in _SEVERITIES}
    boxes = (
        tag(
            "label",
            tag("input", type="checkbox", name="severity", value=severity, checked=True),
            f"{severity} ({counts[severity]:,})",
            class_="check",
        )
        for severity in _SEVERITIES
        if counts[severity]
    )
    severities = tag("fieldset", tag("legend", "Severity"), *boxes)
    return note_filters((note.code for note in report.notes), label="Code", first=severities)


def note_filters(codes: Iterable[str], *, label: str, first: str = "", more: str = "") -> Html:
    """Return the controls that filter rows by their code, called *label*, and their text."""
    options = (tag("option", code, value=code) for code in sorted({*codes}))
    return tag(
        "div",
        first,
        tag(
            "div",
            tag("label", label, for_="code"),
            tag("select", tag("option", "all", value=""), *options, id="code"),
            class_="field short",
        ),
        tag(
            "div",
            tag("label", "Text", for_="text"),
            tag("input", type="search", id="text", autocomplete="off", spellcheck="false"),
            class_="field",
        ),
        tag("output", id="counted", class_="soft"),
        more,
        class_="controls",
    )


def sharing() -> Html:
    """Return the link to what is shown now, and the button that shows everything again."""
    return joined(
        [
            tag("a", "Link to this view", href="", id="share"),
            tag("button", "Reset", type="button", id="reset"),
            tag("output", id="copied", class_="soft"),
        ]
    )


def _note(note: Note) -> Html:
    tensors = "" if note.n_tensors is None else f"{note.n_tensors:,}"
    cells = [
        cell("Severity", note.severity, f"severity {note.severity}"),
        cell("Code", tag("code", note.code), "code"),
        cell("Tensors", tensors, "number"),
    ]
    if note.n_tensors is None:
        cells.append(cell("What", note.text, colspan="2"))
    else:
        cells.append(cell("What", _family(note), "name"))
        cells.append(cell("How", joined(tag("p", text) for text in note.how), "how wide"))
    return tag(
        "tr",
        *cells,
        role="row",
        data_severity=note.severity,
        data_code=note.code,
    )


def _family(note: Note) -> Html:
    indices = "; ".join(note.indices)
    more = tag("p", f"indices {indices}", class_="soft") if indices else ""
    return joined([breakable(note.text), more])
