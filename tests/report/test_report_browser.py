"""The page in a browser: light and dark, wide and narrow, by mouse and by keys."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.diff.compare import compare
from modelquirks.planner.diff.page import page as difference_page
from modelquirks.planner.diff.sides import of_checkpoint
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.plan import Plan
from modelquirks.planner.report.gather import of_plan
from modelquirks.planner.report.page import page
from modelquirks.quirks.registry import Registry

if TYPE_CHECKING:
    from tests.report.conftest import Browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

SHOWN = "e => e.getClientRects().length > 0"


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, big: Path, hostile: Path, faulty: Plan
) -> dict[str, Path]:
    """Give files with pages."""
    folder = tmp_path_factory.mktemp("pages")
    plans = {
        "big": (Dispatcher().plan(big, max_memory={0: "6GiB", "cpu": "64GiB"}), big),
        "hostile": (Dispatcher().plan(hostile, max_memory={"cpu": "1GiB"}), hostile),
        "faulty": (faulty, faulty.root),
    }
    for name, (plan, root) in plans.items():
        text = page(of_plan(plan, open_manifest(root)))
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    manifests = [open_manifest(folder) for folder in (big, hostile)]
    sides = [of_checkpoint(manifest, Registry.load()) for manifest in manifests]
    (folder / "diff.html").write_text(difference_page(compare(*sides)), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in (*plans, "diff")}


def shown(browser: Browser, selector: str) -> list[str]:
    """Return the texts of the elements that can be seen."""
    script = f"[...document.querySelectorAll('{selector}')].filter({SHOWN}).map(e => e.innerText)"
    found: list[str] = browser.run(script)
    return found


def address(browser: Browser) -> str:
    found: str = browser.run("decodeURIComponent(location.hash.replaceAll('+', ' '))")
    return found


@pytest.mark.parametrize("name", ["big", "hostile", "faulty", "diff"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 375])
def test_a_page_shows_without_a_complaint_a_request_or_a_sideways_scroll(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    browser.look(width=width, scheme=scheme)
    browser.open(pages[name])
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.said == []
    assert browser.requested == [pages[name].as_uri()]
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")


def test_nothing_in_a_name_runs(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["hostile"])
    browser.run("document.querySelectorAll('.tile, summary').forEach(e => e.click())")
    assert browser.run("typeof hacked") == "undefined"
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.said == []


def test_the_policy_stops_scripts_and_requests_that_get_into_the_page_all_the_same(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["faulty"])
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', "
        '\'<img src="https://example.org/x.png"><img src=data:, onerror="window.hacked=1">\');'
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.hacked = 1'}));"
    )
    blocked = browser.run("fetch('https://example.org/').then(() => 'sent', () => 'blocked')")
    assert blocked == "blocked"
    assert browser.run("typeof hacked") == "undefined"
    assert [url for url in browser.requested if url.startswith("http")] == []
    assert any("Content Security Policy" in text for text in browser.said)


def test_a_tile_that_is_clicked_tells_what_is_in_it_and_why_it_is_there(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.look(width=1280)
    browser.open(pages["big"])
    family = "model.language_model.layers.*.experts.*.gate_proj.weight_packed"
    browser.click(f'article[data-area="0"] .tile[data-family="{family}"]')
    first, *_ = shown(browser, ".picked")
    assert first.startswith(family)
    assert "Indices: " in first
    assert "0-127" in first
    assert "Dtype: I32" in first
    assert "Why there: fits on the main device" in first
    assert address(browser) == f"#family={family}"
    browser.press("Escape")
    assert shown(browser, ".picked") == []
    assert address(browser) == ""


def test_a_link_shows_what_its_sender_saw(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["faulty"])
    browser.click('button[data-device="cpu"]')
    browser.click('article[data-area="cpu"] .tile[data-family="layers.*.up.weight"]')
    browser.type("#find", "layers.")
    browser.click('input[value="ok"]')
    browser.type("#text", "down")
    link: str = browser.run("document.querySelector('#share').href")

    def seen() -> Sequence[Any]:
        return (
            shown(browser, "article h3"),
            shown(browser, ".picked"),
            shown(browser, "tr[data-severity]"),
            shown(browser, "tr[data-family]"),
            browser.run("document.querySelector('#find').value"),
        )

    before = seen()
    assert len(before[0]) == 1
    assert before[1]
    browser.open(pages["faulty"], fragment=f"#{link.partition('#')[2]}")
    assert seen() == before


def test_a_link_to_what_is_no_longer_there_shows_everything(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["faulty"], fragment="#device=7&family=gone")
    assert len(shown(browser, "article h3")) == 4
    assert browser.said == []


@pytest.mark.parametrize(
    ("text", "template", "is_found"),
    [
        ("layers.11.up", "layers.*.up.weight", True),
        ("layers.1", "layers.*.up.weight", True),
        ("LAYERS.0.UP", "layers.*.up.weight", True),
        ("layers.*.up", "layers.*.up.weight", True),
        ("layers.12.up", "layers.*.up.weight", False),
        ("layers.2.", "layers.*.down.weight", True),
        ("layers.5.", "layers.*.down.weight", False),
        ("1.up", "layers.*.up.weight", True),
        ("head", "layers.*.up.weight", False),
        ("layers.01.up", "layers.*.up.weight", False),
    ],
)
def test_a_tensor_is_found_by_its_own_number(
    browser: Browser, pages: dict[str, Path], text: str, template: str, is_found: bool
) -> None:
    browser.look(width=1280)
    browser.open(pages["faulty"], fragment=f"#device=files&find={quote(text)}")
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found = shown(browser, 'article[data-area="files"] tr[data-family] td:first-child')
    assert (template in found) == is_found
    dimmed = shown(browser, 'article[data-area="files"] .tile.dim')
    assert bool(dimmed)


def test_the_audit_is_filtered_by_severity_code_and_text(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.look(width=1280)
    browser.open(pages["faulty"])
    everything = shown(browser, "tr[data-severity]")
    for severity in ("warning", "info", "ok"):
        browser.run(f"document.querySelector('input[value={severity}]')?.click()")
    errors = shown(browser, "tr[data-severity]")
    assert 0 < len(errors) < len(everything)
    assert all(text.startswith("error") for text in errors)
    assert shown(browser, "#counted") == [f"{len(errors)} of {len(everything)} shown"]
    browser.run(
        "document.querySelector('#code').value = 'missing';"
        "document.querySelector('#code').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    (missing,) = shown(browser, "tr[data-severity]")
    assert "layers.*.down.weight" in missing
    browser.type("#text", "no such text")
    assert shown(browser, "tr[data-severity]") == []
    browser.click("#reset")
    assert shown(browser, "tr[data-severity]") == everything


def test_differences_are_filtered_too(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["diff"], fragment="#code=added&text=onerror")
    (row,) = shown(browser, "tr[data-severity]")
    assert row.startswith("added")
    assert browser.said == []


def test_keys_move_between_tiles_and_choose_one(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["faulty"])
    assert browser.run(
        "[...document.querySelectorAll('.treemap')].every(m => "
        "m.querySelectorAll('[tabindex=\"0\"]').length === 1)"
    )
    browser.run("document.querySelector('article[data-area=files] .tile').focus()")
    first = browser.run("document.activeElement.dataset.family")
    browser.press("ArrowRight")
    second = browser.run("document.activeElement.dataset.family")
    assert first != second
    browser.run("document.activeElement.click()")
    assert address(browser) == f"#family={second}"
    browser.press("Home")
    assert browser.run("document.activeElement.dataset.family") == first


def test_every_control_has_a_name_for_those_who_do_not_see_it(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["faulty"])
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"main", "banner", "navigation", "contentinfo", "table", "columnheader"} <= roles
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in ("button", "textbox", "link", "region"):
            assert node["name"]["value"].strip(), node


def test_in_a_narrow_window_a_table_is_still_a_table(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.look(width=375)
    browser.open(pages["faulty"])
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert roles.count("row") > 5
    assert roles.count("cell") > 20


def test_it_is_there_without_scripts_too(browser: Browser, pages: dict[str, Path]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.look(width=1280)
        browser.call("Page.navigate", url="about:blank")
        browser.open(pages["faulty"])
        assert shown(browser, ".controls") == []
        assert len(shown(browser, "article h3")) == 4
        assert len(shown(browser, ".tile")) > 5
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_printing_opens_what_is_folded(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["faulty"])
    printed = browser.call("Page.printToPDF")
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    assert browser.run("[...document.querySelectorAll('details')].every(d => d.open)")
