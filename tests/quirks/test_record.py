"""Records: checked when made, every fault in one message, roles and specificity."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.quirks.recipe import (
    Cast,
    Concat,
    Dequantize,
    Node,
    Part,
    Source,
    Split,
    Stack,
    Transpose,
    View,
)
from modelquirks.quirks.record import (
    ROLES,
    Alias,
    Convert,
    Expected,
    Match,
    ModelQuirks,
    Pack,
    RecordError,
    Tie,
)

relaxed = settings(deadline=None)

BLOCKS = ("blocks", "l.{l}.w_blocks")
SCALES = ("scales", "l.{l}.w_scales")


def record(**fields: Any) -> ModelQuirks:
    base: dict[str, Any] = {
        "name": "acme",
        "role": "architecture",
        "match": Match(model_types=("acme",)),
    }
    return ModelQuirks(**(base | fields))


def faults(**fields: Any) -> str:
    with pytest.raises(RecordError) as raised:
        record(**fields)
    return str(raised.value)


def test_a_record_of_everything_is_accepted_and_frozen() -> None:
    made = record(
        name="acme.packed_4",
        aliases=(Alias("body.{i}.**", "layers.{i}.**"), Alias("*_emb.weight", "embed.*")),
        packs=(Pack("mxfp4", "l.{l}.w", (BLOCKS, SCALES), (("bias", "l.{l}.w_bias"),), (0, 1)),),
        conversions=(
            Convert(
                "l.{l}.experts",
                Transpose(Stack(Concat((Source("l.{l}.{e}.w1"), Source("l.{l}.{e}.w3"))), "e")),
            ),
            Convert("l.{l}.q", Split(Source("l.{l}.qkv"), 0, (8, "heads*head_dim"), 1)),
            Convert("l.{l}.k", View(Source("l.{l}.key"), (-1, 2, "text_config.dim/heads"))),
            Convert("l.{l}.d", Dequantize("x", (Part("blocks", Source("l.{l}.b")),))),
        ),
        ties=(Tie(("embed.weight", "head.weight")), Tie(("a.{i}.w", "b.{i}.w"), None)),
        extra=(Expected("**.inv_freq", "made from the config"),),
        absent=(Expected("mtp.**", "used for training only"),),
        no_split=("AcmeLayer",),
        keep_dtype=("**.router.weight",),
        overrides=frozenset({"other"}),
    )
    with pytest.raises(FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(made) == hash(record(**{f: getattr(made, f) for f in made.__slots__}))


def test_roles_compose_from_the_outside_in() -> None:
    assert ROLES == ("wrapper", "architecture", "quantization")


@pytest.mark.parametrize("name", ["Acme", "a..b", "", ".a", "a b", "a-b", "a."])
def test_a_name_is_lower_case_words_with_dots(name: str) -> None:
    assert "lower case words" in faults(name=name)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"role": "decoration"}, "role 'decoration' is none of wrapper, architecture"),
        ({"match": Match()}, "the match is empty"),
        ({"match": Match(none_of=("a",))}, "the match is empty"),
        ({"match": Match(any_of=("a..b",))}, "pattern 'a..b'"),
        ({"match": Match(model_types=("a",), all_of=("{",))}, "pattern '{'"),
        ({"overrides": frozenset({"acme"})}, "it overrides itself"),
        ({"keep_dtype": ("x**",)}, "pattern 'x**'"),
        ({"extra": (Expected("a.", "why"),)}, "pattern 'a.'"),
        ({"absent": (Expected("{A}", "why"),)}, "pattern '{A}'"),
    ],
)
def test_what_surrounds_the_rules_is_checked(fields: dict[str, Any], fault: str) -> None:
    assert fault in faults(**fields)


@pytest.mark.parametrize(
    ("stored", "model", "fault"),
    [
        ("a.{i}", "b.{i}.{j}", "{j} of 'b.{i}.{j}' is not bound by it"),
        ("a.{i}.{j}", "b.{i}", "{j} is lost in 'b.{i}'"),
        ("a.**", "b.*", "different wildcards"),
        ("a.*.**", "b.**.*", "different wildcards"),
        ("a.b", "a.b", "changes nothing"),
        ("a.", "b.c", "pattern 'a.'"),
    ],
)
def test_both_sides_of_an_alias_must_agree(stored: str, model: str, fault: str) -> None:
    assert fault in faults(aliases=(Alias(stored, model),))


@pytest.mark.parametrize(
    ("pack", "fault"),
    [
        (Pack("s", "l.{l}.w", ()), "pack 'l.{l}.w' has no parts"),
        (Pack("s", "l.{l}.w", (BLOCKS,), (BLOCKS,)), "two parts with the role 'blocks'"),
        (Pack("s", "l.{l}.w", (("b", "l.{m}.b"),)), "part 'l.{m}.b' of pack 'l.{l}.w' has other"),
        (Pack("s", "**.w", (("b", "*.w_b"),)), "has other holes"),
        (Pack("s", "w.", (("b", "w_b"),)), "pattern 'w.'"),
        (Pack("s", "w", (("b", "w_b."),)), "pattern 'w_b.'"),
    ],
)
def test_the_parts_of_a_pack_must_agree(pack: Pack, fault: str) -> None:
    assert fault in faults(packs=(pack,))


@pytest.mark.parametrize(
    ("target", "recipe", "fault"),
    [
        ("l.{l}.w", Source("l.{l}.{e}.w"), "{e} is neither in target 'l.{l}.w' nor stacked over"),
        ("l.{l}.w", Source("w"), "source 'w' does not have {l}"),
        ("l.{l}.w", Stack(Source("l.{l}.w"), "e"), "source 'l.{l}.w' does not have {e}"),
        ("l.{l}.w", Stack(Source("l.{l}.w"), "l"), "target 'l.{l}.w' has {l}, so nothing is"),
        ("**.w", Source("*.w"), "source '*.w' has other wildcards than target '**.w'"),
        ("w.", Source("w"), "pattern 'w.'"),
        ("w", Cast(Source("w."), "BF16"), "pattern 'w.'"),
        ("w", Concat(()), "the recipe for 'w' reads nothing"),
        ("w", Split(Source("v"), 0, (1, 2), 2), "split for 'w' has no part 2"),
        ("w", Split(Source("v"), 0, ("n+1",), 0), "size 'n+1' for 'w' is no product"),
        ("w", View(Source("v"), ("n.", 2)), "size 'n.' for 'w' is no product"),
        ("w", View(Source("v"), ("2*n/0", 2)), "size '2*n/0' for 'w' is no product"),
    ],
)
def test_the_variables_of_a_conversion_must_be_bound(target: str, recipe: Node, fault: str) -> None:
    assert fault in faults(conversions=(Convert(target, recipe),))


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (("a",), "needs two different names"),
        (("a", "a"), "needs two different names"),
        (("a.{i}", "b.{j}"), "have different holes"),
        (("a.*", "b"), "have different holes"),
        (("a", "b."), "pattern 'b.'"),
    ],
)
def test_the_names_of_a_tie_must_agree(names: tuple[str, ...], fault: str) -> None:
    assert fault in faults(ties=(Tie(names),))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"no_split": "AcmeLayer"}, "no_split is 'AcmeLayer', expected a tuple"),
        ({"aliases": Alias("a", "b")}, "expected a tuple: is a comma missing?"),
        ({"aliases": ("a", "b")}, "aliases has 'a', expected a Alias"),
        ({"match": Match(model_types="acme")}, "match.model_types is 'acme', expected a tuple"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ({"ties": (Tie("ab"),)}, "tie.names is 'ab', expected a tuple"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_forgotten_comma_is_told_as_such(fields: dict[str, Any], fault: str) -> None:
    assert fault in faults(**fields)


def test_every_fault_of_a_record_comes_in_one_message() -> None:
    message = faults(
        name="Acme",
        role="decoration",
        match=Match(),
        aliases=(Alias("a.{i}", "b"), Alias("a..b", "c")),
        packs=(Pack("s", "w", ()),),
        conversions=(Convert("w", Source("v.{i}")),),
        ties=(Tie(("a",)),),
        keep_dtype=("x**",),
    )
    assert message.startswith("quirks 'Acme': ")
    for fault in (
        "lower case words",
        "role 'decoration'",
        "the match is empty",
        "{i} is lost in 'b'",
        "pattern 'a..b'",
        "pack 'w' has no parts",
        "{i} is neither in target",
        "needs two different names",
        "pattern 'x**'",
    ):
        assert fault in message


_MATCH_FIELDS = ("architectures", "model_types", "quant_methods", "any_of", "all_of", "containers")


@relaxed
@given(st.sets(st.sampled_from(_MATCH_FIELDS)))
def test_the_most_telling_field_ranks_a_match(fields: set[str]) -> None:
    match = Match(**dict.fromkeys(fields, ("a",)))
    ranks = {"architectures": 4, "model_types": 3, "quant_methods": 2}
    assert match.specificity == max([1, *(ranks.get(field, 1) for field in fields)])
    assert match.is_empty == (not fields)
