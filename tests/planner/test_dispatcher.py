"""From a checkpoint and a model to a plan: every tensor in one class, with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan
from modelquirks.quirks.recipe import (
    Chunk,
    Concat,
    Interleave,
    Node,
    Source,
    Split,
    Stack,
    Transpose,
)
from modelquirks.quirks.record import Convert, Match, ModelQuirks, Pack, Tie
from modelquirks.quirks.registry import Registry


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(3, 8, 4))
        self.down = nn.Parameter(torch.zeros(3, 4, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def stacked(name: str) -> Stack:
    return Stack(Source(f"layers.{{layer}}.experts.{{expert}}.{name}.weight"), "expert")


MOE = ModelQuirks(
    name="test.moe",
    role="architecture",
    match=Match(any_of=("layers.{layer}.experts.{expert}.**",)),
    conversions=(
        Convert("layers.{layer}.experts.gate_up", Concat((stacked("gate"), stacked("up")), 1)),
        Convert("layers.{layer}.experts.down", stacked("down")),
    ),
    ties=(Tie(("embed.weight", "head.weight")),),
    why="experts one by one",
)


def registry_of(*records: ModelQuirks) -> Registry:
    class Plugin:
        @staticmethod
        def modelquirks_records() -> tuple[ModelQuirks, ...]:
            return records

    from modelquirks.quirks.hookspecs import hookimpl

    hookimpl(Plugin.modelquirks_records)
    registry = Registry()
    registry.register(Plugin(), name="test", distribution="test-quirks", version="1.0")
    return registry


def tensors(*, without: str = "") -> dict[str, torch.Tensor]:
    """One tensor an expert, as a training framework saves them."""
    torch.manual_seed(0)
    found = {"embed.weight": torch.randn(6, 4), "head.weight": torch.randn(6, 4)}
    for layer in range(2):
        found[f"layers.{layer}.norm.weight"] = torch.randn(4)
        found[f"layers.{layer}.norm.bias"] = torch.randn(4)
        for expert in range(3):
            for which in ("gate", "up", "down"):
                name = f"layers.{layer}.experts.{expert}.{which}.weight"
                found[name] = torch.randn(4, 4)
    found.pop(without, None)
    return found


def saved(
    folder: Path, stored: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "test"}))
    return folder


def planned(folder: Path, model: nn.Module | None = None, **options: Any) -> Plan:
    options = {"device_map": {"": "cpu"}} | options
    return Dispatcher(registry_of(MOE)).plan(folder, model=model or Model(), **options)


def reason_of(plan: Plan, name: str) -> str:
    entries = [e for e in (*plan.audit.model, *plan.audit.stored) if name in e.names]
    return entries[0].reason


def test_experts_stored_one_by_one_are_stacked_and_arrive(tmp_path: Path) -> None:
    stored = tensors()
    plan = planned(saved(tmp_path, stored), model := Model())
    assert plan.ok and plan.audit.coverage == 1.0
    assert plan.audit.by_class() == {"matched": 6, "made": 4, "used": 24}
    plan.execute(model)
    gate = stored["layers.1.experts.2.gate.weight"]
    up = stored["layers.1.experts.2.up.weight"]
    block = model.get_submodule("layers.1.experts")
    assert torch.equal(block.get_parameter("gate_up")[2], torch.cat([gate, up]))


def test_gap_in_the_experts_is_refused_by_the_name_that_is_not_there(tmp_path: Path) -> None:
    lost = "layers.1.experts.1.up.weight"
    plan = planned(saved(tmp_path, tensors(without=lost)))
    assert not plan.ok and plan.audit.missing == ("layers.1.experts.gate_up",)
    left = {reason_of(plan, name) for name in plan.audit.unexpected}
    assert left == {"a part of 'layers.1.experts.gate_up', which cannot be made"}
    assert repr(lost) in reason_of(plan, "layers.1.experts.gate_up")


def test_last_expert_missing_everywhere_is_a_mismatch_with_both_shapes(tmp_path: Path) -> None:
    stored = {n: t for n, t in tensors().items() if ".experts.2." not in n}
    plan = planned(saved(tmp_path, stored))
    assert not plan.ok and "layers.0.experts.gate_up" in plan.audit.mismatched
    text = reason_of(plan, "layers.0.experts.gate_up")
    assert "[2, 8, 4]" in text and "[3, 8, 4]" in text


def test_one_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    stored = tensors()
    stored["layers.0.experts.1.gate.weight"] = torch.zeros(5, 4)
    plan = planned(saved(tmp_path, stored))
    assert plan.audit.mismatched == ("layers.0.experts.gate_up",)
    assert "'layers.0.experts.1.gate.weight'" in reason_of(plan, "layers.0.experts.gate_up")


def test_stacked_and_single_experts_together_are_duplicates_not_a_guess(tmp_path: Path) -> None:
    stored = tensors() | {"layers.0.experts.down": torch.zeros(3, 4, 4)}
    plan = planned(saved(tmp_path, stored))
    assert not plan.ok
    assert plan.audit.duplicates == tuple(
        f"layers.0.experts.{expert}.down.weight" for expert in range(3)
    )
    assert "layers.0.experts.down" in reason_of(plan, plan.audit.duplicates[0])


def test_two_stored_keys_for_one_name_are_duplicates(tmp_path: Path) -> None:
    stored = tensors() | {"wrapped.head.weight": torch.zeros(6, 4)}
    plan = planned(saved(tmp_path, stored), aliases=["wrapped.**=**"])
    assert not plan.ok and len(plan.audit.duplicates) == 1
    assert any("'head.weight'" in problem for problem in plan.problems)


def test_one_copy_serves_both_when_the_config_ties(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors(without="head.weight"), {"tie_word_embeddings": True})
    plan = planned(folder, model := Model())
    assert plan.ok and plan.audit.ties == (("embed.weight", "head.weight"),)
    plan.execute(model)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"model_type": "test"}])
def test_untied_config_means_missing_and_the_tie_is_proposed(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    folder = saved(tmp_path, tensors(without="head.weight"), config)
    plan = planned(folder)
    assert plan.audit.missing == ("head.weight",)
    (proposal,) = plan.audit.suggestions
    assert proposal.option == "--tie 'head.weight=embed.weight'"
    assert planned(folder, ties=["head.weight=embed.weight"]).ok


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tie_of_the_model_is_kept_whichever_copy_is_stored(tmp_path: Path, kept: str) -> None:
    lost = "head.weight" if kept == "embed.weight" else "embed.weight"
    stored = tensors(without=lost)
    plan = planned(saved(tmp_path, stored), model := Model(tied=True))
    assert plan.ok
    plan.execute(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, stored[kept])


def test_different_copies_of_a_tie_are_both_kept_and_said(tmp_path: Path) -> None:
    stored = tensors()
    plan = planned(saved(tmp_path, stored), model := Model(tied=True))
    assert plan.ok and plan.audit.unequal_ties == (("embed.weight", "head.weight"),)
    report = plan.load_into(model)
    assert torch.equal(model.embed.weight, stored["embed.weight"])
    assert torch.equal(model.head.weight, stored["head.weight"])
    assert any("embed.weight" in note.message for note in report.notes)


def test_prefix_is_proposed_never_applied_and_works_when_given(tmp_path: Path) -> None:
    stored = {f"net.{name}": tensor for name, tensor in tensors().items()}
    folder = saved(tmp_path, stored)
    plan = planned(folder)
    assert not plan.ok and plan.audit.coverage == 0.0
    best = plan.audit.suggestions[0]
    assert best.option == "--alias 'net.**=**'" and best.n_matched == 6
    assert planned(folder, aliases=["net.**=**"]).audit.coverage == 1.0


def test_a_proposal_counts_what_the_model_ties_to_it(tmp_path: Path) -> None:
    stored = {f"net.{n}": t for n, t in tensors(without="head.weight").items()}
    (best,) = planned(saved(tmp_path, stored), Model(tied=True)).audit.suggestions
    assert "layers.0.norm.weight" in Model().state_dict()
    assert best.text.startswith("6 of 10 match if the prefix 'net.' is stripped")
    assert best.n_matched == 6


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"aliases": ["nett.**=**"]}, "alias-unused", "'nett.**=**' fits no name"),
        ({"allow_missing": ["haed.*"]}, "waiver-unused", "'haed.*' may be missing"),
        ({"ties": ["embed.weight=layers.0.norm.weight"]}, "tie-shapes-differ", "[4] cannot be"),
    ],
)
def test_a_request_that_has_no_effect_is_told(
    tmp_path: Path, options: Mapping[str, Any], code: str, said: str
) -> None:
    plan = planned(saved(tmp_path, tensors()), **options)
    (message,) = [f.message for f in plan.all_findings if f.code == code]
    assert said in message


def test_what_needs_a_model_is_told_where_there_is_none(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors())
    plan = Dispatcher(registry_of()).plan(folder, min_coverage=0.9, allow_missing=["head.*"])
    (message,) = [f.message for f in plan.findings if f.code == "needs-model"]
    assert message == "what may be missing and coverage mean nothing without a model: give one"


def test_proposals_together_account_for_everything_and_harm_nothing(tmp_path: Path) -> None:
    """``model.`` → ``model.language_model.`` must not also catch what is new under ``model.``."""
    stored = {"visual.a.weight": torch.zeros(2), "model.b.weight": torch.zeros(3)}

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = nn.ParameterDict({"a": nn.ParameterDict({"weight": torch.zeros(2)})})
            self.language_model = nn.ParameterDict(
                {"b": nn.ParameterDict({"weight": torch.zeros(3)})}
            )

    model = nn.ModuleDict({"model": Inner()})
    folder = saved(tmp_path, stored)
    options = [s.option for s in planned(folder, model).audit.suggestions]
    aliases = [part.split("'")[1] for option in options for part in option.split("--alias ")[1:]]
    assert planned(folder, model, aliases=aliases).audit.coverage == 1.0


def test_missing_is_waived_by_name_only(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors(without="head.weight"))
    assert not planned(folder, allow_missing=["layers.**"]).ok
    plan = planned(folder, allow_missing=["head.*"])
    assert plan.ok and plan.audit.names("waived") == ("head.weight",)


def test_waived_tensor_of_a_model_on_meta_is_told_of_before_execution_refuses(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path, tensors(without="head.weight"))
    with torch.device("meta"):
        model = Model()
    plan = planned(folder, model, allow_missing=["head.*"])
    (told,) = [f for f in plan.all_findings if f.code == "no-value"]
    assert plan.ok and "'head.weight'" in told.message
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        plan.execute(model)


def test_coverage_below_the_threshold_is_refused_even_when_waived(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors(without="head.weight"))
    assert planned(folder, allow_missing=["**"], min_coverage=0.9).ok
    plan = planned(folder, allow_missing=["**"], min_coverage=0.95)
    assert not plan.ok and "9 of 10" in plan.problems[0]


def test_vocabulary_of_another_size_is_told_as_such(tmp_path: Path) -> None:
    stored = tensors() | {"embed.weight": torch.zeros(7, 4)}
    plan = planned(saved(tmp_path, stored))
    assert plan.audit.mismatched == ("embed.weight",)
    assert "another vocabulary: 7 rows stored, 6" in reason_of(plan, "embed.weight")


def test_integer_codes_are_never_taken_for_weights(tmp_path: Path) -> None:
    stored = tensors() | {"head.weight": torch.ones(6, 4, dtype=torch.int8)}
    plan = planned(saved(tmp_path, stored))
    assert plan.audit.mismatched == ("head.weight",)
    assert "I8" in reason_of(plan, "head.weight")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "scale_weight"])
def test_f8_beside_an_unread_scale_is_refused(tmp_path: Path, scale: str) -> None:
    stored = tensors() | {
        "head.weight": torch.ones(6, 4).to(torch.float8_e4m3fn),
        f"head.{scale}": torch.ones(()),
    }
    plan = planned(saved(tmp_path, stored))
    assert not plan.ok
    assert any("'head.weight'" in p and scale in p for p in plan.problems)


def test_f8_without_a_scale_is_cast_and_said(tmp_path: Path) -> None:
    stored = tensors() | {"head.weight": torch.ones(6, 4).to(torch.float8_e4m3fn)}
    plan = planned(saved(tmp_path, stored))
    assert plan.ok and any(f.code == "cast-without-scale" for f in plan.all_findings)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, torch.float32), ("auto", torch.bfloat16), ("F16", torch.float16)],
)
def test_dtype_does_not_depend_on_the_placement(
    tmp_path: Path, asked: str | None, expected: torch.dtype
) -> None:
    stored = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    folder = saved(tmp_path, stored)
    for device_map in (
        {"": "cpu"},
        {"": "disk"},
        {"embed": "cpu", "layers": "disk", "head": "cpu"},
    ):
        model = Model()
        planned(folder, model, device_map=device_map, dtype=asked).execute(model)
        assert {p.dtype for p in model.parameters()} == {expected}


def test_packed_weight_without_a_companion_is_refused_by_name(tmp_path: Path) -> None:
    packed = ModelQuirks(
        name="test.packed",
        role="quantization",
        match=Match(any_of=("**.codes",)),
        packs=(Pack("nobody_knows", "**.weight", (("codes", "**.codes"), ("s", "**.s"))),),
    )
    dispatcher = Dispatcher(registry_of(packed))
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    codes = torch.zeros(4, 2, dtype=torch.uint8)
    stored = {"a.codes": codes, "a.s": torch.ones(4), "b.codes": codes.clone()}
    plan = dispatcher.plan(saved(tmp_path, stored), model=model, device_map={"": "cpu"})
    assert plan.audit.missing == ("b.weight",) and plan.audit.mismatched == ("a.weight",)
    assert "'b.s' belongs to 'b.codes'" in reason_of(plan, "b.weight")
    assert "nobody_knows" in reason_of(plan, "a.weight")


def test_module_that_keeps_the_packed_form_gets_it_as_it_lies(tmp_path: Path) -> None:
    """A pack whose codes bear the weight's own name: raw for a module that wants the scale."""
    packed = ModelQuirks(
        name="test.packed",
        role="quantization",
        match=Match(any_of=("**.weight_scale_inv",)),
        packs=(Pack("f8", "**.weight", (("w", "**.weight"), ("s", "**.weight_scale_inv"))),),
    )

    class Linear8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.zeros(4, 4).to(torch.float8_e4m3fn)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale_inv = nn.Parameter(torch.zeros(1, 1))

    stored = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    }
    folder = saved(tmp_path, stored)
    dispatcher = Dispatcher(registry_of(packed))
    keeps = nn.ModuleDict({"a": Linear8()})
    plan = dispatcher.plan(folder, model=keeps, device_map={"": "cpu"})
    assert plan.ok and plan.audit.by_class() == {"matched": 2, "used": 2}
    plain = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False)})
    plan = dispatcher.plan(folder, model=plain, device_map={"": "cpu"})
    assert plan.audit.mismatched == ("a.weight",)


def test_split_sizes_come_from_the_config_or_the_lack_is_named(tmp_path: Path) -> None:
    split = ModelQuirks(
        name="test.split",
        role="architecture",
        match=Match(any_of=("qkv",)),
        conversions=tuple(
            Convert(name, Split(Source("qkv"), 0, ("heads*dim", "dim"), part))
            for part, name in enumerate(("q", "kv"))
        ),
    )
    dispatcher = Dispatcher(registry_of(split))
    model = nn.ParameterDict({"q": torch.zeros(6, 2), "kv": torch.zeros(3, 2)})
    stored = {"qkv": torch.arange(18.0).reshape(9, 2)}
    good = saved(tmp_path / "good", stored, {"heads": 2, "dim": 3})
    plan = dispatcher.plan(good, model=model, device_map={"": "cpu"})
    plan.execute(model)
    assert torch.equal(model["kv"], stored["qkv"][6:])
    bad = saved(tmp_path / "bad", stored, {"heads": 2})
    plan = dispatcher.plan(bad, model=model, device_map={"": "cpu"})
    assert not plan.ok
    assert set(plan.audit.missing) == {"q", "kv"} and "'dim'" in reason_of(plan, "q")
    plan = dispatcher.plan(bad, max_memory={"cpu": "1GB"})  # nobody wants 'q' and 'kv' here
    told = [f for f in plan.findings if f.code == "rule-unusable"]
    assert plan.ok and [f.severity for f in told] == ["warning"] * 2
    assert all("'dim'" in f.message for f in told)


def test_same_name_in_another_form_is_reformed_also_when_square(tmp_path: Path) -> None:
    """Direct use of a transposed square matrix would be silently wrong."""
    turned = ModelQuirks(
        name="test.turned",
        role="architecture",
        match=Match(model_types=("turned",)),
        conversions=(Convert("w", Transpose(Source("w"))),),
    )
    stored = {"w": torch.arange(9.0).reshape(3, 3)}
    folder = saved(tmp_path, stored, {"model_type": "turned"})
    model = nn.ParameterDict({"w": torch.zeros(3, 3)})
    plan = Dispatcher(registry_of(turned)).plan(folder, model=model, device_map={"": "cpu"})
    assert plan.ok and not plan.audit.duplicates
    plan.execute(model)
    assert torch.equal(model["w"], stored["w"].T)


def test_model_without_a_checkpoint_of_its_own_is_compared_by_names_alone(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors(), "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = planned(tmp_path, device_map="auto")
    assert plan.audit.coverage == 1.0 and plan.checkpoint["total_bytes"] is None


def test_without_a_model_placement_is_by_stored_bytes(tmp_path: Path) -> None:
    stored = tensors()
    plan = Dispatcher(registry_of(MOE)).plan(
        saved(tmp_path, stored), max_memory={"cpu": 10**6, "disk": 0}
    )
    assert plan.model is None and plan.to_json()["audit"]["coverage"] is None
    used = sum(memory.used_bytes for memory in plan.placement.memory.values())
    assert used == sum(tensor.nbytes for tensor in stored.values())
    with pytest.raises(RuntimeError, match="without a model"):
        plan.execute(Model())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(dropped=st.sets(st.sampled_from(sorted(tensors()))), added=st.integers(0, 3))
def test_every_tensor_of_both_sides_is_in_exactly_one_class(
    tmp_path: Path, dropped: set[str], added: int
) -> None:
    stored = {n: t for n, t in tensors().items() if n not in dropped}
    stored |= {f"spare.{i}": torch.zeros(1) for i in range(added)}
    if not stored:
        return
    model = Model()
    plan = planned(saved(tmp_path, stored), model)
    names = [name for entry in plan.audit.model for name in entry.names]
    assert sorted(names) == sorted(model.state_dict())
    seen = [name for entry in plan.audit.stored for name in entry.names]
    assert sorted(seen) == sorted(stored)
    assert plan.ok is (not dropped)


def test_interleaved_halves_are_the_even_and_odd_rows(tmp_path: Path) -> None:
    record = ModelQuirks(
        name="test.interleave",
        role="architecture",
        match=Match(any_of=("gate",)),
        conversions=(Convert("both", Interleave((Source("gate"), Source("up")), 0)),),
    )
    stored = {"gate": torch.ones(2, 3), "up": torch.zeros(2, 3)}
    model = nn.ParameterDict({"both": torch.zeros(4, 3)})
    plan = Dispatcher(registry_of(record)).plan(
        saved(tmp_path, stored), model=model, device_map={"": "cpu"}
    )
    plan.execute(model)
    assert model["both"][:, 0].tolist() == [1, 0, 1, 0]


def converting(*conversions: Convert, name: str = "test.converting") -> ModelQuirks:
    """A record that applies whenever asked for by name; several may."""
    return ModelQuirks(
        name=name,
        role="quantization",
        match=Match(any_of=("**",)),
        conversions=conversions,
    )


def test_rules_that_make_one_tensor_of_the_same_sources_differently_are_a_conflict(
    tmp_path: Path,
) -> None:
    """Both have the right shape, so nobody can tell which one is right."""
    parts = (Source("a"), Source("b"))
    joined = converting(Convert("ab", Concat(parts)), name="test.joined")
    mixed = converting(Convert("ab", Interleave(parts)), name="test.mixed")
    folder = saved(tmp_path, {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)})
    model = nn.ParameterDict({"ab": torch.zeros(4, 3)})
    both = Dispatcher(registry_of(joined, mixed))
    plan = both.plan(folder, model=model, device_map={"": "cpu"})
    (problem,) = plan.problems
    assert "'test.joined'" in problem and "'test.mixed'" in problem and "'ab'" in problem
    assert both.plan(folder, model=model, device_map={"": "cpu"}, no_quirks=["test.mixed"]).ok


def test_rules_that_say_the_same_in_other_words_are_no_conflict(tmp_path: Path) -> None:
    one, other = (
        converting(Convert("all", Stack(Source(f"e.{{{over}}}"), over)), name=f"test.{over}")
        for over in ("expert", "number")
    )
    folder = saved(tmp_path, {"e.0": torch.zeros(2), "e.1": torch.ones(2)})
    model = nn.ParameterDict({"all": torch.zeros(2, 2)})
    plan = Dispatcher(registry_of(one, other)).plan(folder, model=model, device_map={"": "cpu"})
    assert plan.ok, plan.problems


def test_stack_over_a_variable_named_as_a_slot_reads_the_right_tensors(tmp_path: Path) -> None:
    rule = Convert("l.{layer}", Stack(Source("l.{layer}.e.{s0}"), "s0"))
    stored = {f"l.{i}.e.{j}": torch.full((2,), 10.0 * i + j) for i in range(3) for j in range(3)}
    model = nn.ModuleDict({"l": nn.ParameterList(torch.zeros(3, 2) for _ in range(3))})
    plan = Dispatcher(registry_of(converting(rule))).plan(
        saved(tmp_path, stored), model=model, device_map={"": "cpu"}
    )
    plan.execute(model)
    assert model.get_parameter("l.2")[:, 0].tolist() == [20.0, 21.0, 22.0]


@pytest.mark.parametrize(
    ("conversions", "lost"),
    [
        ([Split(Source("qkv"), 0, (4, 2, 2), part) for part in range(3)], "number 8 to 11"),
        ([Chunk(Source("qkv"), 0, 3, part) for part in (0, 2)], "number 4 to 7"),
    ],
)
def test_rows_of_a_cut_tensor_that_the_model_does_not_take_are_an_error(
    tmp_path: Path, conversions: list[Node], lost: str
) -> None:
    """A config.json of another model gives sizes that fit this one and leave rows over."""
    names = "qkv"[: len(conversions)]
    rules = [Convert(name, node) for name, node in zip(names, conversions, strict=True)]
    sizes = (4, 2, 2) if len(names) == 3 else (4, 4)
    model = nn.ParameterDict({n: torch.zeros(s, 3) for n, s in zip(names, sizes, strict=True)})
    folder = saved(tmp_path, {"qkv": torch.rand(12, 3)})
    plan = Dispatcher(registry_of(converting(*rules))).plan(
        folder, model=model, device_map={"": "cpu"}
    )
    (problem,) = plan.problems
    assert f"'qkv' holds 12, the model takes 8: {lost} of dimension 0 would be lost" in problem


def test_two_tensors_made_of_one_stored_tensor_do_not_share_its_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"y": torch.ones(2)})
    model = nn.ParameterDict({"x": torch.zeros(2), "y": torch.zeros(2)})
    rule = converting(Convert("x", Source("y")))
    Dispatcher(registry_of(rule)).plan(folder, model=model, device_map={"": "cpu"}).execute(model)
    with torch.no_grad():
        model["x"].add_(1)
    assert (model["x"].tolist(), model["y"].tolist()) == ([2.0, 2.0], [1.0, 1.0])


@pytest.mark.parametrize("copies", ["all", "one"])
def test_sources_of_a_conversion_stored_twice_are_duplicates(tmp_path: Path, copies: str) -> None:
    """Which copy a stack is made of must not be a matter of order."""
    stored = tensors()
    twice = [name for name in stored if ".experts." in name]
    more = {f"old.{name}": stored[name] + 1 for name in twice[: None if copies == "all" else 1]}
    plan = planned(saved(tmp_path, stored | more), aliases=["old.**=**"])
    assert not plan.ok and len(plan.audit.duplicates) + len(plan.audit.missing) == len(more)


@pytest.mark.parametrize(
    ("alias", "fault"),
    [
        ("l.{i}.w=x", "{i} is lost"),
        ("l.*.w=x", "different wildcards"),
        ("l.w=x.{i}", "{i} of 'x.{i}' is not bound"),
        ("a..b=c", "empty segment"),
    ],
)
def test_alias_that_would_give_several_tensors_one_name_is_refused(
    tmp_path: Path, alias: str, fault: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        planned(saved(tmp_path, tensors()), aliases=[alias])


def test_pattern_of_what_may_be_missing_is_checked_also_if_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty segment"):
        planned(saved(tmp_path, tensors()), allow_missing=["a..b"])


def test_tie_with_a_name_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor 'embd\.weight'.*'embed\.weight'"):
        planned(saved(tmp_path, tensors()), ties=["head.weight=embd.weight"])


def test_copies_that_the_user_ties_are_compared_on_loading(tmp_path: Path) -> None:
    stored = tensors()
    different = saved(tmp_path / "different", stored)
    plan = planned(different, model := Model(), ties=["head.weight=embed.weight"])
    assert [note.code for note in plan.load_into(model).notes] == ["copies-differ"]
    assert torch.equal(model.head.weight, stored["head.weight"])
    stored["head.weight"] = stored["embed.weight"].clone()
    equal = saved(tmp_path / "equal", stored)
    planned(equal, model := Model(), ties=["head.weight=embed.weight"]).execute(model)
    assert model.head.weight is model.embed.weight


def test_integers_arrive_in_a_wider_dtype(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    stored = model.state_dict() | {"num_batches_tracked": torch.tensor(7, dtype=torch.int32)}
    folder = saved(tmp_path, stored)
    Dispatcher(Registry()).plan(folder, model=model, device_map={"": "cpu"}).execute(model)
    found = model.get_buffer("num_batches_tracked")
    assert (found.dtype, found.item()) == (torch.int64, 7)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_values_that_share_bytes_are_not_cast_to(tmp_path: Path, dtype: str) -> None:
    plan = planned(saved(tmp_path, tensors()), dtype=dtype)
    assert "head.weight" in plan.audit.mismatched
    assert "less than 8 bits" in reason_of(plan, "head.weight")


def test_cast_to_float8_without_a_scale_is_told(tmp_path: Path) -> None:
    """Values above 448 are cut off without a word otherwise."""
    plan = planned(saved(tmp_path, tensors()), dtype="F8_E4M3")
    told = [finding for finding in plan.all_findings if finding.code == "cast-without-scale"]
    assert any("'head.weight'" in finding.message for finding in told)
