"""A model's outline by family is that of its tensors one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.planner.placement.outline import outlined
from modelquirks.planner.placement.touched import Experts
from modelquirks.quirks.recipe import Concat, Source, TensorType

N_EXPERTS = 3
WITHIN = (
    "attn.q.weight",
    "norm.weight",
    "mlp.experts.{e}.up.weight",
    "mlp.experts.{e}.scale",
    "mlp.experts.all",
)
COMPUTED = "attn.inv_freq"


@st.composite
def models(draw: st.DrawFn) -> ModelTree:
    """Give a model of up to five layers, some of them units, with oddities."""
    shapes = st.sampled_from([(3, 5, 4), (4, 6), (1000, 700), (2048, 2048)])
    kinds = st.sampled_from(["parameter", "parameter", "buffer"])
    tensors: dict[str, ModelTensor] = {}
    modules = {"": "Model", "model": "Inner", "model.embed": "Embedding", "model.layers": "List"}

    def enter(name: str, shape: tuple[int, ...], kind: Any) -> None:
        tensors[name] = ModelTensor(name, "BF16", shape, kind)
        parts = name.split(".")
        for n in range(1, len(parts)):
            modules.setdefault(".".join(parts[:n]), "Part")

    enter("model.embed.weight", (100, 8), "parameter")
    layers = draw(st.integers(1, 5))
    for text in draw(st.permutations(WITHIN)):
        shape, kind = draw(shapes), draw(kinds)
        for layer in range(layers):
            if draw(st.booleans()) or draw(st.booleans()):
                for e in range(N_EXPERTS if "{e}" in text else 1):
                    odd = draw(st.integers(0, 20)) == 0
                    name = f"model.layers.{layer}.{text.format(e=e)}"
                    enter(name, draw(shapes) if odd else shape, kind)
    if draw(st.booleans()):
        enter("model.layers.0." + COMPUTED, (16,), "computed")
    order = [n for n in tensors if n.startswith("model.layers.")]
    modules |= dict.fromkeys({".".join(n.split(".")[:3]) for n in order}, "Layer")
    if draw(st.integers(0, 4)) == 0 and "model.layers.1" in modules:
        modules["model.layers.1"] = "Other"
    if draw(st.integers(0, 4)) == 0 and "model.layers.0.mlp" in modules:
        modules["model.layers.0.mlp"] = "Layer"
    enter("head.weight", (100, 8), "parameter")
    in_order = {m: kind for name in sorted(modules) for m, kind in [(name, modules[name])]}
    skeleton = Skeleton("a test", tensors, in_order, no_split=frozenset({"Layer"}))
    alike = [n for n in order if tensors[n].kind == "parameter"]
    ties: dict[str, str] = {}
    if draw(st.booleans()):
        ties["head.weight"] = "model.embed.weight"
    if len(alike) > 1 and draw(st.booleans()):
        ties[alike[1]] = alike[0]
    return ModelTree(skeleton, draw(recipes(skeleton)), ties)


@st.composite
def recipes(draw: st.DrawFn, skeleton: Skeleton) -> list[FamilyRecipe]:
    """Give recipes for some families, or for some of a family."""
    found: list[FamilyRecipe] = []
    for template, family in skeleton.families.items():
        if draw(st.booleans()):
            continue
        variables = tuple(f"i{n}" for n in range(family.n_slots))
        target = template.format(*(f"{{{variable}}}" for variable in variables))
        members = family.members[: len(family) if draw(st.booleans()) else 1]
        source = Source(f"stored.{target}")
        node = source if draw(st.booleans()) else Concat((source, source), 0)
        type_ = TensorType(draw(st.sampled_from(["BF16", "F32"])), (512, draw(st.integers(1, 9))))
        found.append(FamilyRecipe(target, node, variables, members, type_))
    return found


@settings(deadline=None, max_examples=300)
@given(
    models(),
    st.sampled_from([None, Experts(N_EXPERTS, 1)]),
    st.integers(1, 200),
    st.booleans(),
    st.booleans(),
)
def test_an_outline_by_family_is_that_of_every_tensor(
    model: ModelTree, experts: Experts | None, batch: int, by_expert: bool, indexed: bool
) -> None:
    outline = model.outline(experts, batch=batch, by_expert=by_expert, indexed=indexed)

    found, expected = outline.coarse, outlined(outline.whole).coarse
    assert found.sizes == expected.sizes
    assert (found.units, found.aliases) == (expected.units, expected.aliases)
    assert found.modules == expected.modules
    kept = [name for name in expected.sizes if name in expected.buffers]
    assert kept == [name for name in expected.sizes if name in found.buffers]
    computed = [name for name in expected.sizes if name in expected.computed]
    assert computed == [name for name in expected.sizes if name in found.computed]
    for name in ("read", "streamed", "at_once", "made", "padding"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one == pytest.approx(other), name
