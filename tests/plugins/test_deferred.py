"""Expressions of the conversion table, compiled when they are first used."""

from __future__ import annotations

import copy
import pickle
import re
from types import ModuleType
from typing import Any

import pytest

from modelquirks.plugins.bridge.deferred import Deferred, compiled_later


def module_with_re() -> Any:
    module: Any = ModuleType("core")
    module.re = re
    return module


def test_a_deferred_expression_does_what_the_compiled_one_does() -> None:
    module = module_with_re()
    with compiled_later(module):
        made = module.re.compile("A(?P<g>b)", re.IGNORECASE)
        assert module.re.search("b", "ab") is not None

    assert isinstance(made, Deferred)
    assert made._made is None
    assert made.search("xab").group("g") == "b"
    assert made.groupindex == {"g": 1}
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made
    assert pickle.loads(pickle.dumps(made)) == re.compile("A(?P<g>b)", re.IGNORECASE)


def test_what_is_wrong_with_an_expression_is_raised_where_it_is_used() -> None:
    made = Deferred("(")

    with pytest.raises(re.error, match="unterminated"):
        made.search("a")


def test_the_module_has_re_again_also_after_an_error() -> None:
    module = module_with_re()

    with pytest.raises(ValueError, match="inside"), compiled_later(module):
        assert module.re is not re
        raise ValueError("inside")

    assert module.re is re


def test_a_module_that_compiles_in_another_way_is_left_alone() -> None:
    module: Any = ModuleType("core")

    with compiled_later(module):
        assert not hasattr(module, "re")
