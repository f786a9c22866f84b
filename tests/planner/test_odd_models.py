"""Models that are legal and rare: what would be wrong without a word is told or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution.execute import ExecutionError, ExecutionReport


def loaded(
    folder: Path, stored: Mapping[str, torch.Tensor], model: nn.Module, device: Any = "cpu"
) -> ExecutionReport:
    save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
    plan = Dispatcher().plan(folder, model=model, device_map={"": device})
    assert plan.ok, plan.problems
    return plan.load_into(model)


def random_state(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: Mapping[str, Any]) -> bool:
    return all(tensor is before[name] for name, tensor in model.state_dict(keep_vars=True).items())


class Keeps(nn.Module):
    """Holds its weight in further places than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 2))
        self.listed = [self.w]
        self.register_buffer("head", self.w.detach()[:2], persistent=False)
        self.register_buffer("other", torch.zeros(2), persistent=False)


def test_views_and_further_holders_of_a_replaced_tensor_are_named(tmp_path: Path) -> None:
    notes = loaded(tmp_path, {"w": torch.ones(4, 2)}, Keeps()).notes
    told = [note.message for note in notes if note.code == "left-behind"]
    assert [text.partition(" is ")[0] for text in told] == [
        "buffer 'head'",
        "attribute 'listed' of module ''",
    ]


def test_modules_that_keep_their_own_list_up_to_date_are_not_reported(tmp_path: Path) -> None:
    """An LSTM lists its parameters, and renews the list when one is set."""
    model = nn.LSTM(2, 2)
    assert loaded(tmp_path, random_state(model), model).notes == ()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_made_before_hooks_fetch_their_parts_are_right(tmp_path: Path, norm: Any) -> None:
    """torch 2.13 multiplies by a weight of the meta device without a word: random numbers."""
    expected, model = nn.Sequential(norm(nn.Linear(3, 3))), nn.Sequential(norm(nn.Linear(3, 3)))
    expected.load_state_dict(state := random_state(expected))
    loaded(tmp_path, state, model, "disk")
    rows = torch.rand(2, 3)
    assert torch.equal(model.eval()(rows), expected.eval()(rows))


def test_parametrized_weights_are_fetched_and_right(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))

    expected, model = make(), make()
    expected.load_state_dict(state := random_state(expected))
    loaded(tmp_path, state, model, "disk")
    rows = torch.rand(2, 3)
    assert torch.equal(model(rows), expected(rows))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_modules_are_loaded_but_not_offloaded(tmp_path: Path) -> None:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    state = random_state(model)
    loaded(tmp_path, state, model)
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"])
    with pytest.raises(ExecutionError, match="'0' is scripted and runs no hooks"):
        loaded(tmp_path, state, model, "disk")


def test_one_module_under_two_names_cannot_have_two_weights(tmp_path: Path) -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": shared})
    before = model.state_dict(keep_vars=True)
    stored = {"a.weight": torch.zeros(2, 2), "b.weight": torch.ones(2, 2)}
    with pytest.raises(ExecutionError, match=r"'a\.weight', 'b\.weight' belong to one module"):
        loaded(tmp_path, stored, model)
    assert unchanged(model, before)
    stored["b.weight"] = stored["a.weight"].clone()
    assert loaded(tmp_path, stored, model).n_tensors == 1


def test_module_under_two_names_has_its_weights_again_when_hooks_are_removed(
    tmp_path: Path,
) -> None:
    """It has a hook for each name, and the second one saw the weights on the meta device."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    state = {f"a.{name}": tensor for name, tensor in random_state(shared).items()}
    loaded(tmp_path, state, model, "disk")
    remove_hook_from_submodules(model)
    assert torch.equal(model.get_parameter("b.weight"), state["a.weight"])


def test_lazy_parameters_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight' of the model has no shape yet"):
        loaded(tmp_path, {"0.weight": torch.zeros(2, 2)}, model)


def test_device_that_torch_was_built_without_is_an_error_of_the_execution(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.state_dict(keep_vars=True)
    with pytest.raises(ExecutionError, match=r"'(weight|bias)' cannot be put on 'xpu:9'"):
        loaded(tmp_path, random_state(model), model, "xpu:9")
    assert unchanged(model, before)
