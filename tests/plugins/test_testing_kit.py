"""``modelquirks.plugins.testing``: what an author's tests use, without anything heavy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.plugins.testing import (
    Listing,
    ListingError,
    applied,
    canonical_names,
    check_plugin,
    check_record,
    plan_of,
    registry_of,
)
from modelquirks.quirks import (
    Alias,
    Convert,
    Match,
    ModelQuirks,
    Pack,
    PluginError,
    Source,
    Stack,
    hookimpl,
)

DATA = Path(__file__).parents[1] / "data"
ACME = {"model_type": "acme"}


class Plugin:
    """A plugin of the records that it is made with."""

    def __init__(self, *records: ModelQuirks) -> None:
        self.records = records

    @hookimpl
    def modelquirks_records(self) -> Iterable[ModelQuirks]:
        return self.records


RENAMES = ModelQuirks(
    name="acme",
    role="architecture",
    match=Match(model_types=("acme",)),
    aliases=(Alias("body.{i}.**", "layers.{i}.**"),),
    conversions=(Convert("layers.{i}.experts", Stack(Source("layers.{i}.expert_{e}"), "e")),),
    why="because",
)
PACKS = ModelQuirks(
    name="acme.packed",
    role="quantization",
    match=Match(any_of=("**.w_blocks",)),
    packs=(Pack("mine", "**.w", (("blocks", "**.w_blocks"), ("scales", "**.w_scales"))),),
    why="because",
)


def test_a_quirk_can_be_tested_in_ten_lines_without_torch(tmp_path: Path) -> None:
    """As the documentation shows it, in a fresh interpreter."""
    (tmp_path / "test_acme.py").write_text(
        "import sys\n"
        "from modelquirks.plugins import gpt_oss, wrappers\n"
        "from modelquirks.plugins.testing import Listing, canonical_names\n"
        "at = 'model.layers.0.mlp.experts.down_proj'\n"
        "listing = Listing.named([f'_orig_mod.{at}_blocks', f'_orig_mod.{at}_scales'],\n"
        "    {'model_type': 'gpt_oss', 'quantization_config': {'quant_method': 'mxfp4'}})\n"
        "names = canonical_names(gpt_oss, listing, beside=[wrappers])\n"
        "assert set(names.values()) == {at}, names\n"
        "heavy = {'torch', 'numpy', 'accelerate', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "test_acme.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_stored_names_get_the_names_of_the_model() -> None:
    listing = Listing.named(["body.3.norm.w", "head.w"], ACME)
    names = canonical_names(Plugin(RENAMES), listing)
    assert names == {"body.3.norm.w": "layers.3.norm.w", "head.w": "head.w"}
    assert applied(Plugin(RENAMES), listing) == {"acme": "model_type 'acme'"}
    assert applied(Plugin(RENAMES), Listing.named(["head.w"])) == {}


def test_parts_of_a_packed_weight_are_called_by_the_weight() -> None:
    listing = Listing.named(["body.0.w_blocks", "body.0.w_scales"], ACME)
    names = canonical_names(Plugin(RENAMES, PACKS), listing)
    assert set(names.values()) == {"layers.0.w"}


def test_a_plan_says_what_is_made_and_what_is_missing() -> None:
    listing = Listing(
        {
            "body.0.expert_0": "BF16 [2, 3]",
            "body.0.expert_1": "BF16 [2, 3]",
            "body.0.norm": "BF16 [3]",
        },
        ACME,
    )
    model = {"layers.0.experts": "BF16 [2, 2, 3]", "layers.0.norm": "BF16 [3]"}
    assert plan_of(Plugin(RENAMES), listing, model).ok
    torn = plan_of(Plugin(RENAMES), listing, {**model, "head.weight": "BF16 [8, 3]"})
    assert torn.problems == ("1 missing: 'head.weight' (nothing in the checkpoint provides it)",)
    narrow = plan_of(Plugin(RENAMES), listing, {**model, "layers.0.norm": "BF16 [4]"})
    assert "1 mismatched: 'layers.0.norm'" in narrow.problems[0]


def test_records_in_conflict_are_raised() -> None:
    twin = ModelQuirks(name="twin", role="architecture", match=RENAMES.match, why="because")
    with pytest.raises(AssertionError, match="2 architecture quirks match equally well"):
        applied(Plugin(RENAMES, twin), Listing.named(["w"], ACME))


def test_a_record_that_is_not_sound_is_raised_with_all_its_faults() -> None:
    record = ModelQuirks(name="acme", role="architecture", match=RENAMES.match)
    with pytest.raises(AssertionError, match=r"record 'acme':\n- why is empty.*\n- no rule of the"):
        check_record(record, ["body.0.w"])
    check_record(RENAMES, ["body.0.w"])
    with pytest.raises(AssertionError, match="not sound:\n- record 'acme': why is empty"):
        check_plugin(Plugin(record))
    check_plugin(Plugin(RENAMES, PACKS))


def test_a_plugin_that_cannot_be_used_is_raised_with_its_fault() -> None:
    class Speller:
        @hookimpl
        def modelquirks_record(self) -> list[ModelQuirks]:
            return []

    with pytest.raises(PluginError, match="'modelquirks_records' meant"):
        check_plugin(Speller())
    assert registry_of(Plugin(RENAMES)).plugins[0].status == "loaded"


# Listings


@pytest.mark.parametrize("folder", ["gptq", "awq", "mlx"])
def test_a_listing_of_real_files_is_what_the_headers_say(folder: str, tmp_path: Path) -> None:
    file = next((DATA / folder).glob("*.safetensors"))
    manifest = open_manifest(file)
    Listing.of(manifest).write(tmp_path / "listing.json")
    again = Listing.read(tmp_path / "listing.json").manifest()
    assert list(again.tensors) == list(manifest.tensors)
    for name, tensor in manifest.tensors.items():
        assert again.tensors[name][2:4] == tensor[2:4]
        assert again.sizes[name] == manifest.sizes[name]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listing") / "listing.json"


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.tuples(
            st.sampled_from(["F32", "BF16", "F8_E4M3", "?"]),
            st.one_of(st.just("?"), st.lists(st.integers(0, 9)).map(lambda s: str(s)[1:-1])),
        ).map(lambda pair: f"{pair[0]} [{pair[1]}]"),
    ),
    st.dictionaries(st.text(), st.integers()),
)
def test_a_listing_comes_back_as_it_was_written(
    file: Path, tensors: dict[str, str], config: dict[str, int]
) -> None:
    listing = Listing(tensors, config)
    listing.write(file)
    assert Listing.read(file) == listing
    again = Listing.of(listing.manifest())
    assert again.tensors == tensors


def test_a_listing_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListingError, match=r"no dtype with a shape.*w: F33 \[2\]"):
        Listing({"w": "F33 [2]", "v": "F32 [2]"})
    path = tmp_path / "listing.json"
    for text, said in (("{", "is not JSON"), ("[]", "has no object 'tensors'")):
        path.write_text(text)
        with pytest.raises(ListingError, match=said):
            Listing.read(path)


def test_inspect_writes_a_listing_that_the_kit_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((DATA / "gptq").glob("*.safetensors"))
    assert main(["inspect", str(file), "--listing", str(tmp_path / "listing.json")]) == 0
    assert "safetensors" in capsys.readouterr().out
    assert Listing.read(tmp_path / "listing.json") == Listing.of(open_manifest(file))
