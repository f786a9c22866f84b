"""What accelerate 1.15.0 gets wrong when it loads a large model: what its tests here share.

Each test has in its docstring what a user of ``load_checkpoint_and_dispatch`` sees with accelerate
alone, shows that first where it is cheap, and then that ours loads it right or refuses it by name,
with the model as it was. ``Case n`` in a docstring is one of these ten:

1. a tie overwrites the loaded embedding;
2. ``strict=True`` never sees missing keys;
3. names of experts, one by one or packed;
4. names with another prefix;
5. persistent buffers of modules on disk are never loaded;
6. quantised values without their scale;
7. an offload folder that is used again;
8. the wrong file wins;
9. errors that come late or name nothing;
10. the planner.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import PlanError, load_checkpoint_and_dispatch


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A language model in small: every tensor counts in its output."""

    def __init__(self, *, tied: bool = False, words: int = 12, width: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Said(NamedTuple):
    """What accelerate did."""

    model: nn.Module
    warnings: list[str]
    """Of its loggers and of ``warnings``."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


@pytest.fixture
def net() -> Callable[..., nn.Module]:
    """Give the function that makes a small model: real with values of its own, or on meta."""

    def make(*, meta: bool = False, tied: bool = False) -> nn.Module:
        if not meta:
            return Net(tied=tied).eval()
        with init_empty_weights():
            model = Net().eval()
        if tied:
            model.head.weight = model.wte.weight
        return model

    return make


@pytest.fixture
def logits() -> Callable[[nn.Module], torch.Tensor]:
    """Give the function that runs a model on a few words."""

    @torch.no_grad()
    def run(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([[1, 4, 2, 8, 5, 7]]))
        return result

    return run


@pytest.fixture
def save() -> Callable[..., Path]:
    """Give the function that writes tensors to a safetensors file, without some, and renamed."""

    def write(
        state: Mapping[str, torch.Tensor],
        path: Path,
        *,
        without: tuple[str, ...] = (),
        prefix: str = "",
    ) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {prefix + k: v.clone() for k, v in state.items() if k not in without}
        save_file(kept, path, metadata={"format": "pt"})
        return path

    return write


@pytest.fixture
def shard() -> Callable[..., dict[str, str]]:
    """Give the function that writes a state in several files and an index; it returns the map."""

    def write(state: Mapping[str, torch.Tensor], folder: Path, count: int = 3) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        names = list(state)
        weight_map: dict[str, str] = {}
        for number in range(count):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            part = names[number * len(names) // count : (number + 1) * len(names) // count]
            save_file({n: state[n].clone() for n in part}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return weight_map

    return write


@pytest.fixture
def theirs(caplog: pytest.LogCaptureFixture) -> Callable[..., Said]:
    """Give accelerate's own function, with what it said."""

    def load(*args: Any, **options: Any) -> Said:
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = accelerate.load_checkpoint_and_dispatch(*args, **options)
        return Said(model, [*caplog.messages, *(str(w.message) for w in caught)])

    return load


@pytest.fixture
def refused() -> Callable[..., str]:
    """Give the function that asserts that a load is refused, and the model left as it was."""

    def load(model: nn.Module, *args: Any, naming: tuple[str, ...], **options: Any) -> str:
        before = tensors_of(model)
        values = {name: tensor.clone() for name, tensor in before.items() if not tensor.is_meta}
        with pytest.raises(PlanError) as caught:
            load_checkpoint_and_dispatch(model, *args, **options)
        message = str(caught.value)
        for name in naming:
            assert repr(name) in message
        after = tensors_of(model)
        assert all(after[name] is tensor for name, tensor in before.items())
        assert all(torch.equal(after[name], value) for name, value in values.items())
        assert not hasattr(model, "hf_device_map")
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
        return message

    return load
