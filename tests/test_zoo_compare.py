"""The zoo's comparer must find what is wrong: one that calls it right is worse than none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """Yield the module that compares."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("zoo_compare")
    finally:
        sys.path.remove(str(BENCHMARKS))


class Model(nn.Module):
    """Ties, buffers of both kinds, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("positions", torch.arange(5), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)  # type: ignore[no-any-return]


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def truth(zoo: Any) -> Any:
    """Return what is true of a model as it should be."""
    right = model()
    ids = {"ids": torch.tensor([1, 5, 9])}
    with torch.no_grad():
        answer = right(**ids)
    forward = importlib.import_module("zoo_forward").Forward(ids, [answer])
    return importlib.import_module("zoo_models").truth_of(
        right, {"positions": torch.arange(5)}, forward
    )


def swap_two_values(m: Model) -> None:
    weight = m.get_parameter("layers.1.weight")
    weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()


def swap_two_layers(m: Model) -> None:
    m.layers[0], m.layers[1] = m.layers[1], m.layers[0]


def flip_the_sign_of_zero(m: Model) -> None:
    m.get_parameter("norm.bias")[0] = -0.0


def break_the_tie(m: Model) -> None:
    m.head.weight = nn.Parameter(m.embed.weight.clone())


def tie_what_is_not(m: Model) -> None:
    m.layers[1].weight = m.layers[0].weight


def leave_a_buffer_at_its_start(m: Model) -> None:
    m.get_buffer("scale")[0] = 1.0


def lose_a_buffer(m: Model) -> None:
    del m.scale


def forget_a_statistic(m: Model) -> None:
    m.norm.running_var = torch.rand(6)


def cast_one(m: Model) -> None:
    m.layers[0].weight = nn.Parameter(m.get_parameter("layers.0.weight").bfloat16())


def leave_one_on_meta(m: Model) -> None:
    m.layers[0].weight = nn.Parameter(m.get_parameter("layers.0.weight").to("meta"))


def compute_a_buffer_otherwise(m: Model) -> None:
    m.positions = torch.arange(5) + 1


WRONGS: dict[Callable[[Model], None], tuple[str, str]] = {
    swap_two_values: ("values", "layers.1.weight"),
    swap_two_layers: ("values", "layers.0.weight"),
    flip_the_sign_of_zero: ("values", "norm.bias"),
    break_the_tie: ("untied", "embed.weight"),
    tie_what_is_not: ("untied", "layers.1.weight"),
    leave_a_buffer_at_its_start: ("values", "scale"),
    lose_a_buffer: ("absent", "scale"),
    forget_a_statistic: ("values", "norm.running_var"),
    cast_one: ("dtype", "layers.0.weight"),
    leave_one_on_meta: ("meta", "layers.0.weight"),
    compute_a_buffer_otherwise: ("computed", "positions"),
}


def test_a_model_differs_in_nothing_from_itself(zoo: Any, truth: Any) -> None:
    assert zoo.differences(model(), truth) == []
    assert zoo.forward_difference(model(), truth) is None


@pytest.mark.parametrize("spoil", WRONGS, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_found_and_named(
    zoo: Any, truth: Any, spoil: Callable[[Model], None]
) -> None:
    loaded = model()
    with torch.no_grad():
        spoil(loaded)
    found = {(each.kind, each.name) for each in zoo.differences(loaded, truth)}
    assert WRONGS[spoil] in found


@pytest.mark.parametrize("spoil", [swap_two_values, swap_two_layers, None])
def test_a_wrong_weight_on_the_disk_is_found_through_its_hook(
    zoo: Any, truth: Any, spoil: Callable[[Model], None] | None, tmp_path: Path
) -> None:
    loaded = model()
    if spoil is not None:
        with torch.no_grad():
            spoil(loaded)
    places: Any = {"embed": "cpu", "head": "cpu", "norm": "cpu", "scale": "cpu", "layers": "disk"}
    with pytest.warns(UserWarning, match="do not match any"):  # accelerate, for the buffer
        dispatch_model(loaded, places, torch.device("cpu"), offload_dir=str(tmp_path))
    assert loaded.get_parameter("layers.1.weight").is_meta
    found = {(each.kind, each.name) for each in zoo.differences(loaded, truth)}
    if spoil is None:
        assert not found
    else:
        assert WRONGS[spoil] in found
        assert zoo.forward_difference(loaded, truth).kind == "forward"


def test_names_that_are_free_may_hold_anything_but_must_hold_something(
    zoo: Any, truth: Any
) -> None:
    loaded = model()
    with torch.no_grad():
        swap_two_values(loaded)
    assert zoo.differences(loaded, truth, free={"layers.1.weight"}) == []
    leave_one_on_meta(loaded)
    free = {"layers.0.weight", "layers.1.weight"}
    assert [d.kind for d in zoo.differences(loaded, truth, free=free)] == ["meta"]
