"""The page as a file: well formed, harmless, small, and readable by what reads it to people."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.plan import Plan
from modelquirks.planner.report.gather import of_manifest, of_plan
from modelquirks.planner.report.page import page

MANIFESTS = Path(__file__).parents[1] / "data" / "manifests"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "manifests"
VOID = {"input", "link", "meta", "rect", "wbr"}
PACKAGE = files("modelquirks.planner.report")


@dataclass
class Element:
    """One element with its text, that of its children left out."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str = "") -> list[Element]:
        """Return the elements below, in order."""
        found: list[Element] = []
        for child in self.children:
            found += [child] if tag in ("", child.tag) else []
            found += child.all(tag)
        return found

    def whole(self) -> str:
        """Return the text of this and all below."""
        return self.text + "".join(child.whole() for child in self.children)


class Reader(HTMLParser):
    """Reads a page and fails on what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], "something is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read(text: str) -> Element:
    return Reader(text).root


@pytest.fixture(scope="module")
def pages(big: Path, hostile: Path, faulty: Plan) -> dict[str, str]:
    """Give pages of each kind."""
    opened = open_manifest(hostile)
    plan = Dispatcher().plan(open_manifest(big), max_memory={0: "8GiB", "cpu": "64GiB"})
    return {
        "big": page(of_plan(plan, open_manifest(big))),
        "hostile": page(of_plan(Dispatcher().plan(opened), opened)),
        "hostile alone": page(of_manifest(opened)),
        "faulty": page(of_plan(faulty)),
        "index": page(of_manifest(open_manifest(MANIFESTS / "gpt-oss-20b"))),
    }


def test_a_page_holds_one_style_and_one_script_which_are_ours(pages: dict[str, str]) -> None:
    script = PACKAGE.joinpath("page.js").read_text(encoding="utf-8")
    style = PACKAGE.joinpath("page.css").read_text(encoding="utf-8")
    for text in pages.values():
        root = read(text)
        assert [element.text for element in root.all("script")] == [script]
        (found,) = root.all("style")
        assert found.text.startswith(style)
        assert re.fullmatch(r"[-\d#.%a-z{}:;@() \n]*", found.text.removeprefix(style))


def test_the_policy_allows_that_style_and_that_script_and_nothing_else(
    pages: dict[str, str],
) -> None:
    for text in pages.values():
        root = read(text)
        (meta,) = [m for m in root.all("meta") if m.attributes.get("http-equiv")]
        policy = meta.attributes["content"] or ""
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for tag in ("style", "script"):
            (element,) = root.all(tag)
            digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}';" in policy


def test_no_name_becomes_an_element_an_attribute_or_an_address(pages: dict[str, str]) -> None:
    known = {
        "", "a", "article", "b", "body", "button", "caption", "code", "dd", "details", "div",
        "dl", "dt", "fieldset", "footer", "h1", "h2", "h3", "head", "header", "html", "i",
        "input", "label", "legend", "li", "link", "main", "meta", "nav", "option", "output",
        "p", "pre", "rect", "script", "section", "select", "span", "style", "summary", "svg",
        "table", "tbody", "td", "th", "thead", "title", "tr", "ul", "wbr",
    }  # fmt: skip
    for text in pages.values():
        for element in read(text).all():
            assert element.tag in known
            assert not [name for name in element.attributes if name.startswith("on")]
            assert "style" not in element.attributes
            assert element.attributes.get("src") is None
            address = element.attributes.get("href")
            assert address in (None, "", "data:,") or re.fullmatch("#[a-z]+", address or "")


def test_names_are_shown_as_they_are_and_what_does_not_print_as_escapes(
    pages: dict[str, str],
) -> None:
    for kind in ("hostile", "hostile alone"):
        text = pages[kind]
        assert all(char.isprintable() or char == "\n" for char in text)
        shown = read(text).whole()
        assert "</script><script>hacked=1</script>" in shown
        assert "\\x1b[31m\\u202etxt.\\x07weight\\u2028" in shown
        assert "&lt;b&gt;.weight" in shown
        assert "layers.*.<!--.w" in shown


def test_the_page_of_35743_tensors_is_under_a_megabyte(pages: dict[str, str]) -> None:
    assert "35,743 tensors, 57 families" in pages["big"]
    assert len(pages["big"].encode()) < 1_000_000
    rows = [row for row in read(pages["big"]).all("tr") if "data-family" in row.attributes]
    assert {"0", "cpu", "files"} <= {
        article.attributes["data-area"] for article in read(pages["big"]).all("article")
    }
    assert len(rows) > 57


@pytest.mark.shared
def test_the_page_of_the_real_index_is_under_a_megabyte() -> None:
    folder = SHARED / "gemma4-26b-a4b-ct-int4"
    if not folder.is_dir():
        pytest.skip("the real manifests are not here")
    text = page(of_manifest(open_manifest(folder)))
    assert "35,743 tensors" in text
    assert len(text.encode()) < 1_000_000


def test_a_page_of_very_many_families_lists_the_largest_and_counts_the_rest(
    tmp_path: Path,
) -> None:
    names = ", ".join(f'"layer_{number}.weight": "m.safetensors"' for number in range(5000))
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(f'{{"metadata": {{}}, "weight_map": {{{names}}}}}')
    text = page(of_manifest(open_manifest(index)))
    assert "… and 4,600 smaller families." in text
    assert len(text.encode()) < 1_000_000


def test_ids_are_unique_and_what_refers_to_one_finds_it(pages: dict[str, str]) -> None:
    for text in pages.values():
        elements = read(text).all()
        ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
        assert len(set(ids)) == len(ids)
        for element in elements:
            for name in ("for", "aria-labelledby"):
                assert element.attributes.get(name) in (None, *ids)
            if (element.attributes.get("href") or "").startswith("#"):
                assert (element.attributes["href"] or "")[1:] in ids


def test_people_who_listen_to_a_page_get_landmarks_labels_and_table_heads(
    pages: dict[str, str],
) -> None:
    for text in pages.values():
        root = read(text)
        (html,) = root.all("html")
        assert html.attributes["lang"] == "en"
        assert all(len(root.all(tag)) == 1 for tag in ("main", "header", "footer", "nav", "h1"))
        labels = {label.attributes.get("for") for label in root.all("label")}
        inside = {id(field) for label in root.all("label") for field in label.all("input")}
        for entry in (*root.all("input"), *root.all("select")):
            assert entry.attributes.get("id") in labels or id(entry) in inside
        for table in root.all("table"):
            assert table.all("caption")[0].whole()
            assert all(head.attributes["scope"] == "col" for head in table.all("th"))
            titles = [head.whole() for head in table.all("th")]
            for cell in table.all("td"):
                assert cell.attributes["data-label"] in titles
        for button in root.all("button"):
            assert button.attributes["type"] == "button"
            assert button.whole().strip()


def test_headings_go_down_one_step_at_a_time(pages: dict[str, str]) -> None:
    for text in pages.values():
        levels = [int(e.tag[1]) for e in read(text).all() if re.fullmatch("h[1-6]", e.tag)]
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_has_enough_contrast_in_light_dark_and_print() -> None:
    """4.5 to 1 for text, 3 to 1 for what shows where a control is (WCAG 2.2, 1.4.3 and 1.4.11)."""
    css = PACKAGE.joinpath("page.css").read_text(encoding="utf-8")
    palettes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(
        r":root \{(.*?)\}", css, re.DOTALL
    )]  # fmt: skip
    assert len(palettes) == 3
    for palette in palettes:
        for name in ("ink", "soft", "link", "error", "warning", "info", "ok"):
            for ground in ("paper", "raised"):
                assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
        for number in range(8):
            assert contrast(palette["tile-ink"], palette[f"g{number}"]) >= 4.5, number
        assert contrast(palette["link"], palette["paper"]) >= 3


def test_the_same_report_is_the_same_page(faulty: Plan) -> None:
    assert page(of_plan(faulty)) == page(of_plan(faulty))


def test_the_command_writes_the_page_beside_its_report(
    big: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["inspect"], ["plan", "--dry-run", "--max-memory", "cpu=64GiB"]):
        path = tmp_path / f"{words[0]}.html"
        assert main([*words, str(big), "--html", str(path)]) == 0
        assert "35,743 tensors" in capsys.readouterr().out
        assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_a_bad_call(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "report.html"
    assert main(["inspect", str(hostile), "--html", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_the_pictures_in_the_docs_are_there_and_small() -> None:
    docs = Path(__file__).parents[2] / "docs"
    named = re.findall(r"\]\((images/[^)]+)\)", (docs / "reports.md").read_text(encoding="utf-8"))
    assert len(named) == 2
    for name in named:
        assert (docs / name).read_bytes().startswith(b"\x89PNG")
        assert (docs / name).stat().st_size < 150_000
