"""Regular expressions of other people: those that may take for ever, and those that tools write."""

from __future__ import annotations

import pytest

from modelquirks.planner.expressions import may_run_on

USUAL = [
    r".*\.(q|k)_proj",
    r".*\.[^.]*\.(\d+)\.",
    "(?:.*?(?:vision|image|encoder|model).*?(?:attn|mlp|ffn).*?(?:q_proj|k_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj|k_proj))",
    "all-linear",
    "(",
]
ENDLESS = [
    *(r"(\w+\.)*proj", "(a|a)*b", "(aa?)*b", "(.*)*x", ".*" * 5, "(a*){16}b"),
    *("a?" * 40 + "b", "(a|a)" * 40 + "b", "((a?){16}){16}b", "x" * 30_000),
]


@pytest.mark.parametrize("text", USUAL)
def test_what_tools_write_is_taken(text: str) -> None:
    assert not may_run_on(text)


@pytest.mark.parametrize("text", ENDLESS)
def test_what_has_too_many_ways_to_fit_is_not(text: str) -> None:
    assert may_run_on(text)


def test_a_caller_may_allow_fewer_repeats() -> None:
    assert may_run_on(".*a.*b", repeats=1)
    assert not may_run_on(".*a.*b", repeats=2)
