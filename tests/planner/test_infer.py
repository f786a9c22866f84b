"""Inference of quirks: what is proposed from names and shapes alone, and how sure it is."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.infer.hungarian import assignment
from modelquirks.planner.infer.inference import Inference, infer
from modelquirks.planner.infer.kin import kins_of
from modelquirks.planner.infer.quirkfile import quirk_text, record_of, text_of_test
from modelquirks.quirks.pattern import Pattern, rename
from modelquirks.quirks.recipe import Chunk, Concat, Node, Source, Stack, TensorType, Transpose
from modelquirks.quirks.recipe_json import from_json
from modelquirks.quirks.record import Alias, ModelQuirks

DATA = Path(__file__).parents[1] / "data" / "infer"
LISTINGS = sorted(path.stem for path in DATA.glob("*.json"))

Shapes = Mapping[str, tuple[int, ...]]


def types(shapes: Shapes) -> dict[str, TensorType]:
    """Return F32 tensors of these shapes."""
    return {name: TensorType("F32", shape) for name, shape in shapes.items()}


def proposals(found: Inference) -> dict[str, tuple[Node, str]]:
    """Return recipe and tier of each tensor of the model that has a proposal."""
    return {name: (node, c.tier) for c in found.claims for name, node in c.items()}


LAYER: Shapes = {
    "attn.q.weight": (8, 8),
    "attn.k.weight": (4, 8),
    "attn.v.weight": (4, 8),
    "attn.o.weight": (8, 8),
    "mlp.up.weight": (24, 8),
    "mlp.down.weight": (8, 24),
    "norm_a.weight": (8,),
    "norm_b.weight": (8,),
}


def layers(prefix: str, n: int = 3, layer: Shapes = LAYER) -> dict[str, tuple[int, ...]]:
    """Return the tensors of *n* layers below *prefix*."""
    return {f"{prefix}.{i}.{name}": shape for i in range(n) for name, shape in layer.items()}


def test_equal_names_and_shapes_are_certain() -> None:
    both = types(layers("layers"))
    found = infer(both, both)
    assert found.count("certain") == len(both)
    assert found.rules == ()
    assert found.missing == found.unread == ()


def test_a_prefix_that_is_called_otherwise_is_one_certain_rule() -> None:
    stored, model = types(layers("transformer.h")), types(layers("model.layers"))
    found = infer(stored, model)
    assert [rule.rule for rule in found.rules] == [Alias("transformer.**", "model.**")] or [
        rule.rule for rule in found.rules
    ] == [Alias("transformer.h.**", "model.layers.**")]
    assert found.count("certain") == len(model)


def test_experts_stored_one_by_one_are_stacked_and_joined_as_the_name_says() -> None:
    experts = {
        f"layers.{i}.experts.{e}.{proj}.weight": shape
        for i in range(2)
        for e in range(4)
        for proj, shape in (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6)))
    }
    model = {
        **{f"layers.{i}.experts.gate_up_proj": (4, 12, 8) for i in range(2)},
        **{f"layers.{i}.experts.down_proj": (4, 8, 6) for i in range(2)},
    }
    got = proposals(infer(types(experts), types(model)))
    name = "layers.1.experts.{e}.%s_proj.weight"
    halves = tuple(Stack(Source(name % half), "e") for half in ("gate", "up"))
    assert got["layers.1.experts.gate_up_proj"] == (Concat(halves, 1), "likely")
    assert got["layers.1.experts.down_proj"][0] == Stack(Source(name % "down"), "e")


def test_a_fused_matrix_is_cut_in_the_order_of_its_name() -> None:
    stored = {f"layers.{i}.attn.qkv.weight": (24, 8) for i in range(2)}
    model = {f"layers.{i}.attn.{p}_proj.weight": (8, 8) for i in range(2) for p in "vkq"}
    got = proposals(infer(types(stored), types(model)))
    for part, proj in enumerate("qkv"):
        node, tier = got[f"layers.0.attn.{proj}_proj.weight"]
        assert node == Chunk(Source("layers.0.attn.qkv.weight"), 0, 3, part)
        assert tier == "likely"


def test_renamed_queries_are_never_certain_as_their_rows_may_be_in_another_order() -> None:
    was, now = {**LAYER}, {**LAYER}
    was["attn.wq.weight"] = was.pop("attn.q.weight")
    found = infer(types(layers("layers", layer=was)), types(layers("layers", layer=now)))
    node, tier = proposals(found)["layers.0.attn.q.weight"]
    assert node == Source("layers.0.attn.wq.weight")
    assert tier == "likely"
    (claim,) = (c for c in found.claims if "attn.q." in c.target)
    assert any("rotary" in other for other in claim.others)


def test_a_square_matrix_beside_transposed_ones_is_left_open() -> None:
    stored = layers("h", layer={"c_fc.weight": (8, 24), "c_proj.weight": (8, 8)})
    model = layers("h", layer={"c_fc.weight": (24, 8), "c_proj.weight": (8, 8)})
    got = proposals(infer(types(stored), types(model)))
    assert got["h.0.c_fc.weight"] == (Transpose(Source("h.0.c_fc.weight"), 0, 1), "likely")
    assert got["h.0.c_proj.weight"][1] == "open"


def test_what_is_counted_from_another_number_is_not_certain() -> None:
    stored = layers("h", layer={"norm0.weight": (8,), "norm1.weight": (8,)})
    model = layers("h", layer={"norm1.weight": (8,), "norm2.weight": (8,)})
    tiers = {tier for _, tier in proposals(infer(types(stored), types(model))).values()}
    assert "certain" not in tiers


def test_two_towers_of_one_shape_are_not_told_apart() -> None:
    stored = {**layers("first_tower"), **layers("second_tower")}
    model = {**layers("left_body"), **layers("right_body")}
    assert infer(types(stored), types(model)).count("certain") == 0


def test_what_is_left_alone_is_never_certain_for_that() -> None:
    stored = {**layers("layers"), "something.weight": (5, 7)}
    model = {**layers("layers"), "other.weight": (5, 7)}
    assert proposals(infer(types(stored), types(model)))["other.weight"][1] != "certain"


def test_ties_need_one_copy_only() -> None:
    both = {"embed.weight": (9, 8), **layers("layers")}
    model = {**both, "head.weight": (9, 8)}
    found = infer(types(both), types(model), [("embed.weight", "head.weight")])
    assert found.missing == ()


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_nothing_certain_is_wrong(listing: str, seed: int | None) -> None:
    data = json.loads((DATA / f"{listing}.json").read_text())
    stored, model = _side(data["stored"]), _side(data["model"])
    if seed is not None:
        stored = _without(stored, random.Random(f"{seed}s{listing}"))
        model = _without(model, random.Random(f"{seed}m{listing}"))
    found = infer(stored, model, data["ties"])
    certain = {n: node for n, (node, tier) in proposals(found).items() if tier == "certain"}
    wrong = {n: node for n, node in certain.items() if not _is_true(n, node, data)}
    assert wrong == {}
    assert certain


@pytest.mark.parametrize("listing", ["ASTModel", "DeepseekV4ForCausalLM", "KimiLinearModel"])
def test_whole_mappings_are_recovered(listing: str) -> None:
    data = json.loads((DATA / f"{listing}.json").read_text())
    got = proposals(infer(_side(data["stored"]), _side(data["model"]), data["ties"]))
    renamed = {n: t for n, t in data["truth"].items() if isinstance(t, str)}
    assert {n: got[n][0] for n in renamed} == {n: Source(t) for n, t in renamed.items()}


def _side(data: Mapping[str, Any]) -> dict[str, TensorType]:
    return {name: TensorType(dtype, tuple(shape)) for name, (dtype, shape) in data.items()}


def _without(side: Mapping[str, TensorType], chance: random.Random) -> dict[str, TensorType]:
    modules = sorted({name.rpartition(".")[0] for name in side})
    gone = {module for module in modules if chance.random() < 0.1}
    return {n: t for n, t in side.items() if n.rpartition(".")[0] not in gone}


def _is_true(name: str, node: Node, data: Mapping[str, Any]) -> bool:
    group = next((g for g in data["ties"] if name in g), [name])
    owners = [*group, *(data["aliases"][n] for n in group if n in data["aliases"])]
    truths = [data["truth"][n] for n in owners if n in data["truth"]]
    return any(node == (Source(t) if isinstance(t, str) else from_json(t)) for t in truths)


@given(st.permutations(sorted(LAYER)), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_the_order_of_names_changes_nothing(order: list[str], seed: int) -> None:
    stored = layers("body.h", layer={name: LAYER[name] for name in order})
    names = [*stored]
    random.Random(seed).shuffle(names)
    model = types(layers("model.layers"))
    first = proposals(infer(types({n: stored[n] for n in names}), model))
    assert first == proposals(infer(types(layers("body.h")), model))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_assignment_is_the_best_there_is(rows: list[list[int]]) -> None:
    from itertools import permutations

    def total(columns: tuple[int, ...]) -> int:
        return sum(row[c] for row, c in zip(rows, columns, strict=True) if c < 3)

    best = max(map(total, permutations(range(3 + len(rows)), len(rows))))
    found = assignment(rows)
    assert sum(row[c] for row, c in zip(rows, found, strict=True) if c >= 0) == best
    assert len({c for c in found if c >= 0}) == sum(c >= 0 for c in found)


def test_steps_of_a_sequence_are_names_and_layers_are_not() -> None:
    shapes = {**layers("h", layer={"w": (2,)}), "mlp.0.w": (2,), "mlp.2.w": (2,)}
    assert sorted(map(str, kins_of(types(shapes)))) == ["h.*.w", "mlp.0.w", "mlp.2.w"]


def test_the_quirk_is_python_that_makes_the_record(tmp_path: Path) -> None:
    data = json.loads((DATA / "DeepseekV4ForCausalLM.json").read_text())
    found = infer(_side(data["stored"]), _side(data["model"]), data["ties"])
    scope: dict[str, Any] = {}
    exec(compile(quirk_text(found, {}, "Acme v4"), "quirk.py", "exec"), scope)
    record = scope["RECORD"]
    assert isinstance(record, ModelQuirks)
    assert record == record_of(found, {}, "Acme v4")
    assert record.name == "acme_v4"
    assert scope["modelquirks_records"]() == [record]
    compile(text_of_test(found, {}, "acme", "quirk"), "test_quirk.py", "exec")


@pytest.mark.parametrize("listing", LISTINGS)
def test_the_aliases_of_a_record_give_just_the_names_that_were_proposed(listing: str) -> None:
    data = json.loads((DATA / f"{listing}.json").read_text())
    found = infer(_side(data["stored"]), _side(data["model"]), data["ties"])
    record = record_of(found, {"model_type": "acme"}, "acme")
    for claim in found.claims:
        if claim.tier == "open" or not isinstance(claim.recipe, Source):
            continue
        for name, node in claim.items():
            if isinstance(node, Source) and claim.model.over is None:
                assert _called(node.name, record) == name


def _called(stored: str, record: ModelQuirks) -> str:
    outcomes = (rename(Pattern(a.stored), Pattern(a.model), stored) for a in record.aliases)
    return next((found[0] for found in outcomes if found is not None), stored)
