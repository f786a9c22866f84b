"""Forward passes with offloaded weights that code uses without calling their module."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import disk_offload, init_empty_weights
from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
from accelerate.utils import align_module_device
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution.placeholder import (
    OffloadedWriteError,
    UnfilledTensorError,
    is_placeholder,
)

DISK = {"": "disk"}
ROWS = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def loaded(
    folder: Path, expected: nn.Module, device_map: Mapping[str, Any] = DISK, **options: Any
) -> Any:
    """Store *expected* and load it into a model of the same class without weights."""
    folder.mkdir(exist_ok=True)
    stored = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        model = type(expected)()
    plan = Dispatcher().plan(
        folder,
        model=model,
        device_map=device_map,
        offload_buffers=bool(options.pop("offload_buffers", False)),
    )
    assert plan.ok, plan.problems
    plan.load_into(model, **options)
    return model.train(expected.training)


def by_accelerate_alone(model: nn.Module, folder: Path) -> Any:
    return disk_offload(copy.deepcopy(model), str(folder), execution_device=torch.device("cpu"))


class Block(nn.Module):
    """A parent that uses weights of its children in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        self.mix = nn.ParameterList([nn.Parameter(torch.rand(4, 4)) for _ in range(2)])
        self.norm: Any = nn.BatchNorm1d(4)


class Product(Block):
    def forward(self, x: Any) -> Any:
        return x @ self.up.weight


class Called(Block):
    def forward(self, x: Any) -> Any:
        x = self.up(x) * self.up.weight.sum() + self.down(x)
        return F.linear(x, self.down.weight, self.up.bias)


class Views(Block):
    def forward(self, x: Any) -> Any:
        weight = torch.cat([self.up.weight.t(), self.down.weight[:2].detach().half().float()])
        return F.conv1d(x[:, :, None], weight[:, :, None])[:, :, 0]


class Listed(Block):
    def forward(self, x: Any) -> Any:
        for weight in self.mix:
            x = x.mm(weight)
        return torch.einsum("ij,jk->ik", x, torch.stack([*self.mix]).mean(0))


class Buffers(Block):
    def forward(self, x: Any) -> Any:
        return self.norm(x) - self.norm.running_mean + self.norm.running_var.sqrt()


class Places(Block):
    """Sends its input to where a child says that its weights are, as Llama4 does."""

    def forward(self, x: Any) -> Any:
        x = x.to(self.up.weight.device) + torch.ones(1, device=self.up.weight.device)
        return self.up(x) if self.up.weight.is_cpu else x


class Gets(Block):
    """Gives a child to another one, which uses its weight, as Perceiver does."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Uses()

    def forward(self, x: Any) -> Any:
        return self.other(x, owner=self.up)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, owner: nn.Linear) -> torch.Tensor:
        return F.linear(x, owner.weight, self.bias)


class Bypassed(Block):
    """Calls another method of a child than its forward, as JetMoe does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Mapped()

    def forward(self, x: Any) -> Any:
        return self.child.mapped(x)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 4))
        self.inner = nn.Linear(4, 4)

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.inner(x), self.scale)


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.lstm(x[None])[0][0]


class Attends(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fused = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.fused(self.attention(x[None], x[None], x[None])[0])[0]


BLOCKS = [Product, Called, Views, Listed, Buffers, Places, Gets, Bypassed, Recurrent, Attends]


def made(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    model = kind()
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand_like(tensor, dtype=torch.float32))
    return model.eval()


def test_accelerate_alone_answers_nonsense_or_fails(tmp_path: Path) -> None:
    """If this fails, torch or accelerate have learnt it, and placeholders may go."""
    model, expected = by_accelerate_alone(made(Product), tmp_path), made(Product)
    assert not torch.equal(model(ROWS), expected(ROWS))  # no error, whatever is in memory
    model = by_accelerate_alone(made(Places), tmp_path / "places")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(ROWS)


@pytest.mark.parametrize("device_map", [DISK, {"mix": "cpu", "norm": "cpu"}], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_that_a_parent_uses_are_right(
    tmp_path: Path, kind: type[nn.Module], device_map: Mapping[str, str]
) -> None:
    expected = made(kind)
    devices = dict.fromkeys((name for name, _ in expected.named_children()), "disk")
    model = loaded(
        tmp_path, expected, device_map if "" in device_map else {**devices, **device_map}
    )
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            got, wanted = model(ROWS), expected(ROWS)
        assert torch.equal(got, wanted)
        assert got.requires_grad == wanted.requires_grad


@pytest.mark.parametrize("kind", [Buffers, Called])
def test_offloaded_buffers_that_a_parent_uses_are_right(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = loaded(tmp_path, made(kind), offload_buffers=True)
    assert is_placeholder(model.norm.running_mean)
    assert torch.equal(model(ROWS), made(kind)(ROWS))


def test_between_passes_weights_are_on_the_meta_device_and_in_no_memory(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Called))
    before = dict(model.named_parameters())
    model(ROWS)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_meta
        assert parameter.device == torch.device("meta")
        assert parameter.untyped_storage().device == torch.device("meta")


def test_values_outside_of_a_pass_are_right_as_well(tmp_path: Path) -> None:
    model, expected = loaded(tmp_path, made(Called)), made(Called)
    assert torch.equal(model.up.weight + 0, expected.up.weight + 0)
    assert torch.equal(model.up.weight.data.clone(), expected.up.weight.data)
    assert model.up.weight.tolist() == expected.up.weight.tolist()


def test_one_weight_is_read_once_by_operations_in_a_row(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Listed))
    weights = model.mix._hf_hook.weights_map.dataset.state_dict
    before = weights.bytes_read
    model(ROWS)
    assert weights.bytes_read - before == 2 * 4 * 4 * 4


def test_after_an_error_the_weights_are_let_go(tmp_path: Path) -> None:
    """accelerate alone keeps those of all modules that were in their forward pass."""
    model = loaded(tmp_path, made(Called))
    with pytest.raises(RuntimeError):
        model(ROWS[:, :3])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(ROWS), made(Called)(ROWS))


def test_threads_and_several_models_do_not_disturb_each_other(tmp_path: Path) -> None:
    model, other = loaded(tmp_path / "a", made(Called)), loaded(tmp_path / "b", made(Listed))
    wrong: list[int] = []

    def run(count: int) -> None:
        for _ in range(count):
            if not torch.equal(model(ROWS), expected) or not torch.equal(other(ROWS), wanted):
                wrong.append(1)

    expected, wanted = made(Called)(ROWS), made(Listed)(ROWS)
    threads = [threading.Thread(target=run, args=(20,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_reads_by_its_own_hooks(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Product))
    other = copy.deepcopy(model)
    assert other.up.weight.origin.hook is other.up._hf_hook
    assert other.up.weight is not model.up.weight
    assert torch.equal(other(ROWS), made(Product)(ROWS))


@pytest.mark.parametrize("remove", [remove_hook_from_submodules, remove_hook_from_module])
def test_without_hooks_weights_are_plain_again(
    tmp_path: Path, remove: Callable[[nn.Module], Any]
) -> None:
    model = loaded(tmp_path, made(Product))
    remove(model if remove is remove_hook_from_submodules else model.up)
    assert type(model.up.weight) is nn.Parameter
    assert not model.up.weight.is_meta
    assert torch.equal(model(ROWS), made(Product)(ROWS))


def test_a_state_dict_can_be_saved_with_its_values(tmp_path: Path) -> None:
    """accelerate alone saves tensors without data, and says nothing."""
    model = loaded(tmp_path, made(Called))
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    saved, expected = torch.load(tmp_path / "saved.pt"), made(Called).state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_third_parties_align_modules_as_before(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Called))
    with align_module_device(model.up, torch.device("cpu")):
        assert type(model.up.weight) is nn.Parameter
        assert torch.equal(model.up.weight, made(Called).get_parameter("up.weight"))
    assert model.up.weight.is_meta


def test_the_whole_model_in_another_dtype_computes_in_it(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Called)).double()
    assert model.up.weight.dtype == torch.float64
    assert torch.equal(model(ROWS.double()), made(Called).double()(ROWS.double()))


def set_item(weight: torch.Tensor) -> None:
    weight[0] = 1.0


def multiply(weight: torch.Tensor) -> None:
    weight = weight.detach()
    weight *= 2


def add_into(weight: torch.Tensor) -> None:
    torch.add(weight, 1, out=weight)


def copy_into(weight: torch.Tensor) -> None:
    weight.data.copy_(torch.ones(4, 4))


@pytest.mark.parametrize("write", [set_item, multiply, add_into, copy_into, nn.init.ones_])
def test_writing_to_an_offloaded_weight_is_refused_by_name(
    tmp_path: Path, write: Callable[[torch.Tensor], Any]
) -> None:
    """accelerate alone writes into a tensor without data."""
    model = loaded(tmp_path, made(Product))
    with torch.no_grad(), pytest.raises(OffloadedWriteError, match=r"'up\.weight', which is off"):
        write(model.up.weight)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_loading_a_state_dict_over_offloaded_weights_is_refused(tmp_path: Path) -> None:
    """torch copies into the tensor without data, with no more than a warning."""
    model = loaded(tmp_path, made(Product))
    with pytest.raises(RuntimeError, match=r"copy_ would write to 'up\.weight'"):
        model.load_state_dict(made(Product).state_dict())


class Holds(nn.Module):
    """Keeps a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.table = torch.rand(4, 4)

    def forward(self, x: Any) -> Any:
        return self.up(x) @ self.table


def test_a_tensor_that_nothing_fills_is_refused_by_name(tmp_path: Path) -> None:
    expected = made(Holds)
    save_file(expected.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model: Any = Holds()
    plan = Dispatcher().plan(tmp_path, model=model, device_map=DISK)
    assert [note.code for note in plan.load_into(model).notes] == ["meta-attribute"]
    for each in (model, copy.deepcopy(model)):
        assert each.table.shape == (4, 4)
        with pytest.raises(UnfilledTensorError, match="would compute with 'table'"):
            each(ROWS)
        each.table = expected.table
        assert torch.equal(each(ROWS), expected(ROWS))


def test_models_without_offloaded_weights_are_not_touched(tmp_path: Path) -> None:
    model = loaded(tmp_path, made(Product), {"": "cpu"})
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert "forward" not in vars(model)


def test_compiled_models_are_right(tmp_path: Path) -> None:
    model, expected = loaded(tmp_path, made(Product)), made(Product)
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(ROWS), expected(ROWS))
        assert torch.equal(compiled(ROWS), expected(ROWS))


class Helped(Block):
    """Reaches weights by roundabout ways."""

    @property
    def chosen(self) -> nn.Module:
        return self.up

    def get(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, x: Any) -> Any:
        first, second = self.chosen, self.get("down")
        for layer, _ in zip([first], range(2), strict=False):
            x = helper(layer, x)
        if self.norm.weight is not None and isinstance(self.norm.bias, nn.Parameter):
            x = x.to(self.norm.weight.dtype)

        def later() -> Any:
            return x + second.bias

        return later()


def helper(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight=layer.weight)


def test_weights_reached_by_helpers_and_properties_are_right(tmp_path: Path) -> None:
    assert torch.equal(loaded(tmp_path, made(Helped))(ROWS), made(Helped)(ROWS))


def test_modules_without_source_are_right(tmp_path: Path) -> None:
    space: dict[str, Any] = {"Block": Block}
    exec(
        "class Hidden(Block):\n    def forward(self, x):\n        return x @ self.up.weight", space
    )
    kind: type[nn.Module] = space["Hidden"]
    assert torch.equal(loaded(tmp_path, made(kind))(ROWS), made(kind)(ROWS))


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
WORDS = torch.arange(16).reshape(2, 8) + 1


def mobilebert(t: Any) -> Any:
    config = t.MobileBertConfig(
        **SIZES, num_attention_heads=2, embedding_size=8, intra_bottleneck_size=8
    )
    return t.MobileBertForMaskedLM(config), {"input_ids": WORDS}


def prophetnet(t: Any) -> Any:
    sizes = {"encoder_ffn_dim": 16, "num_encoder_layers": 1, "num_encoder_attention_heads": 2}
    sizes |= {"decoder_ffn_dim": 16, "num_decoder_layers": 1, "num_decoder_attention_heads": 2}
    config = t.ProphetNetConfig(vocab_size=40, hidden_size=16, max_position_embeddings=32, **sizes)
    inputs = {"input_ids": WORDS, "decoder_input_ids": WORDS}
    return t.ProphetNetForConditionalGeneration(config), inputs


def perceiver(t: Any) -> Any:
    sizes = {"num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1}
    sizes |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    sizes |= {"d_model": 16, "d_latents": 16, "qk_channels": 16, "v_channels": 16}
    config = t.PerceiverConfig(vocab_size=40, max_position_embeddings=8, **sizes)
    return t.PerceiverForMaskedLM(config), {"inputs": WORDS}


def llama4(t: Any) -> Any:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = t.Llama4TextConfig(
        **SIZES, **sizes, intermediate_size_mlp=32, num_local_experts=2, pad_token_id=0
    )
    return t.Llama4ForCausalLM(config), {"input_ids": WORDS}


def jetmoe(t: Any) -> Any:
    config = t.JetMoeConfig(**SIZES, num_key_value_heads=2, kv_channels=8, num_local_experts=2)
    return t.JetMoeForCausalLM(config), {"input_ids": WORDS}


@pytest.mark.parametrize("place", ["disk", "mixed"])
@pytest.mark.parametrize("family", [mobilebert, prophetnet, perceiver, llama4, jetmoe])
def test_transformers_models_that_use_weights_of_children_are_right(
    tmp_path: Path, family: Callable[[Any], Any], place: str
) -> None:
    torch.manual_seed(0)
    expected, inputs = family(pytest.importorskip("transformers"))
    expected.eval().save_pretrained(tmp_path)
    with init_empty_weights():
        model = type(expected)(copy.deepcopy(expected.config))
    model.tie_weights()
    plan = Dispatcher().plan(
        tmp_path, model=model, device_map=DISK if place == "disk" else mixed(model)
    )
    assert plan.ok, plan.problems
    plan.load_into(model.eval())
    with torch.no_grad():
        wanted = expected(**inputs).logits
        for _ in range(2):
            assert torch.equal(model(**inputs).logits, wanted)


def mixed(model: nn.Module) -> dict[str, str]:
    """Return a map that changes device with every module that has tensors, ties kept together."""
    tensors = model.state_dict(keep_vars=True)
    holders = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    homes: dict[int, str] = {}
    for name, tensor in tensors.items():
        place = holders.index(name.rpartition(".")[0])
        homes.setdefault(id(tensor), ("cpu", "disk")[place % 2])
    return {name: homes[id(tensor)] for name, tensor in tensors.items()}
