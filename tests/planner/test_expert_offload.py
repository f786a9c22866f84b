"""Stacked experts on disk, brought one by one when a module indexes them."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from modelquirks.planner import Dispatcher, Plan, load_checkpoint_and_dispatch
from modelquirks.planner.cli import main
from modelquirks.planner.execution.execute import ExecutionReport
from modelquirks.planner.execution.expert_index import pick
from modelquirks.planner.execution.experts import ExpertOffload, expert_offload
from modelquirks.planner.execution.placeholder import OffloadedWriteError, is_placeholder
from modelquirks.planner.execution.weights import Row, WeightsMap
from modelquirks.planner.model.build import empty_weights

DISK = {"": "disk"}
LAYERS, HIDDEN, INNER, WORDS, N, K = 2, 32, 64, 64, 8, 2
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": WORDS,
    "num_experts_per_tok": K,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
IDS = torch.tensor([[5, 9, 33, 2, 41]])


@pytest.fixture(autouse=True)
def quiet() -> None:
    for name in ("accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Case(NamedTuple):
    """A checkpoint, how to build its model, and that model in memory."""

    folder: Path
    build: Callable[[], Any]
    expected: Any


def saved(folder: Path, kind: Any, config: Any) -> Case:
    torch.manual_seed(0)
    model: Any = kind(copy.deepcopy(config))
    model.eval()
    model.save_pretrained(folder)
    on_a_boundary(folder / "model.safetensors")
    return Case(folder, lambda: kind(copy.deepcopy(config)), model)


def on_a_boundary(path: Path) -> None:
    """Have the tensors begin at a multiple of 64 bytes, as those in memory do.

    At other addresses MKL rounds a product otherwise on CPUs without AVX-512 (seen with torch
    2.13), and nothing that was loaded rightly would have equal logits.
    """
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size] + b" " * (-(8 + size) % 64)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


def mixtral(folder: Path) -> Case:
    return saved(folder, MixtralForCausalLM, MixtralConfig(num_local_experts=N, **SIZES))


def qwen(folder: Path) -> Case:
    config = Qwen3MoeConfig(num_experts=N, moe_intermediate_size=INNER, **SIZES)
    return saved(folder, Qwen3MoeForCausalLM, config)


def gpt_oss(folder: Path) -> Case:
    """Experts packed as released: blocks of two four-bit values a byte, and scales."""
    layers = ["sliding_attention", "full_attention"]
    config = GptOssConfig(num_local_experts=N, layer_types=layers, dtype="bfloat16", **SIZES)
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        _, rows, columns = stored.pop(name).shape
        blocks = torch.randint(0, 256, (N, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    expected: Any = GptOssForCausalLM(config).bfloat16()
    expected.eval()
    planned(folder, expected, {"": "cpu"}).execute(expected)
    return Case(folder, lambda: GptOssForCausalLM(copy.deepcopy(config)).bfloat16(), expected)


def planned(
    folder: Path, model: nn.Module, device_map: str | Mapping[str, Any] = DISK, **options: Any
) -> Plan:
    plan = Dispatcher().plan(
        folder, model=model, device_map=device_map, dtype="auto", dequantize=True, **options
    )
    assert plan.ok, plan.problems
    return plan


def offloaded(case: Case, **options: Any) -> tuple[Any, ExecutionReport]:
    with empty_weights():
        model = case.build().eval()
    return model, planned(case.folder, model).load_into(model, **options)


def experts(report: ExecutionReport) -> ExpertOffload:
    assert report.experts is not None
    return report.experts


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    made: torch.Tensor = model(ids, use_cache=False, **options).logits
    return made


@pytest.fixture(params=[mixtral, qwen, gpt_oss], ids=lambda make: str(make.__name__))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    found: Case = request.param(tmp_path / "model")
    found.expected.set_experts_implementation("eager")
    return found


@pytest.fixture
def small(tmp_path: Path) -> Case:
    found = mixtral(tmp_path / "model")
    found.expected.set_experts_implementation("eager")
    return found


# Models of transformers ---------------------------------------------------------------------------


def test_logits_are_equal_bit_for_bit(case: Case) -> None:
    model, report = offloaded(case)
    for _ in range(2):  # the second time from the cache
        assert torch.equal(logits(model), logits(case.expected))
    told = experts(report).report()
    assert told.hits > 0 and told.made > 0 and told.whole == {}


def test_a_token_reads_its_experts_and_no_others(case: Case) -> None:
    model, report = offloaded(case, expert_cache=0)
    each = 0
    for name, tensor in load_file(case.folder / "model.safetensors").items():
        if ".experts." in name:
            each += tensor.nbytes
    logits(model, IDS[:, :1])
    assert experts(report).report().bytes_read == each * K // N


def test_generated_tokens_are_equal(case: Case) -> None:
    model, report = offloaded(case)
    asked = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **asked), case.expected.generate(IDS, **asked))
    assert experts(report).report().whole == {}


def test_biases_of_the_experts_come_with_them(tmp_path: Path) -> None:
    _, report = offloaded(gpt_oss(tmp_path / "model"))
    first = {name.rpartition(".")[2] for name in experts(report).names if ".0." in name}
    assert first == {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}


def test_the_implementation_that_reads_all_experts_is_switched_and_told(small: Case) -> None:
    model, report = offloaded(small)
    assert model.get_experts_implementation() == {"": "eager"}
    (note,) = [note for note in report.notes if note.code == "experts-eager"]
    assert "set_experts_implementation({'': 'grouped_mm'})" in note.message
    model.set_experts_implementation({"": "grouped_mm"})
    small.expected.set_experts_implementation("grouped_mm")
    assert torch.equal(logits(model), logits(small.expected))
    told = experts(report).report()
    assert set(told.whole) == experts(report).names and set(told.whole.values()) == {1}
    assert told.whole_bytes == LAYERS * N * 3 * HIDDEN * INNER * 4 and told.bytes_read == 0


def test_the_implementation_that_indexes_already_stays(small: Case) -> None:
    with empty_weights():
        model = small.build().eval()
    model.set_experts_implementation("batched_mm")
    small.expected.set_experts_implementation("batched_mm")
    report = planned(small.folder, model).load_into(model)
    assert model.get_experts_implementation() == {"": "batched_mm"}
    assert torch.equal(logits(model), logits(small.expected))
    assert experts(report).report().whole == {}


def test_without_it_all_is_as_accelerate_does(small: Case) -> None:
    small.expected.set_experts_implementation("grouped_mm")
    model, report = offloaded(small, expert_offload=False)
    assert report.experts is None and expert_offload(model) is None
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    assert torch.equal(logits(model), logits(small.expected))


def test_the_plan_carries_the_option(small: Case, tmp_path: Path) -> None:
    with empty_weights():
        model = small.build().eval()
    planned(small.folder, model, expert_offload=False).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").load_into(model).experts is None


def test_models_in_memory_are_left_alone(small: Case) -> None:
    with empty_weights():
        model = small.build().eval()
    report = planned(small.folder, model, {"": "cpu"}).load_into(model)
    assert report.experts is None and model.get_experts_implementation() == {"": "grouped_mm"}


def test_the_drop_in_takes_the_options(small: Case) -> None:
    with empty_weights():
        model = small.build().eval()
    load_checkpoint_and_dispatch(model, small.folder, device_map=DISK, expert_cache="1KiB")
    found = expert_offload(model)
    assert found is not None and found.report().limit_bytes == 1024


def test_the_command_line_takes_the_options(
    small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.json").write_text(json.dumps(DISK))
    call = ["plan", str(small.folder), "--device-map", str(tmp_path / "map.json"), "--json"]
    main([*call, "--expert-cache", "2KiB"])
    assert json.loads(capsys.readouterr().out)["loaded"]["experts"]["limit_bytes"] == 2048
    main([*call, "--no-expert-offload"])
    assert json.loads(capsys.readouterr().out)["loaded"]["experts"] is None
    assert main([*call, "--no-expert-offload", "--expert-cache", "1"]) != 0


# The cache ----------------------------------------------------------------------------------------


def test_the_cache_keeps_its_bound(small: Case) -> None:
    one = 2 * HIDDEN * INNER * 4  # gate_up_proj; the other lies in the file as it is needed
    model, report = offloaded(small, expert_cache=3 * one + 5)
    for _ in range(3):
        assert torch.equal(logits(model), logits(small.expected))
    told = experts(report).report()
    assert told.peak_bytes == told.held_bytes == {"cpu": 3 * one}
    assert told.views > 0 and told.made > 0


def streaming(plan: Plan) -> int:
    return sum(r.n_bytes for r in plan.placement.reserves if r.what == "streaming")


def test_room_is_kept_for_two_experts_at_a_time_if_the_model_indexes_them(small: Case) -> None:
    memory = {0: "300KiB", "cpu": "1GiB"}
    model = small.build()
    each = planned(small.folder, model, "auto", max_memory=memory)
    whole = planned(small.folder, model, "auto", max_memory=memory, expert_offload=False)
    stacked = sum(t.nbytes for n, t in model.state_dict().items() if ".0.mlp.experts" in n)
    assert streaming(whole) - streaming(each) == stacked * (N - 2) // N

    wrapped = nn.Module()  # which nobody could ask to index them
    wrapped.inner = model
    names = ["**=inner.**"]
    unsure = planned(small.folder, wrapped, "auto", max_memory=memory, aliases=names)
    assert streaming(unsure) == streaming(whole)


def test_there_are_two_experts_of_a_parameter_at_a_time(
    small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = offloaded(small, expert_cache=0)
    alive: dict[str, list[weakref.ref[torch.Tensor]]] = {}
    most = 0
    brought = WeightsMap.row

    def row(self: WeightsMap, name: str, number: int) -> Row:
        nonlocal most
        found = brought(self, name, number)
        refs = [ref for ref in alive.get(name, ()) if ref() is not None]
        alive[name] = [*refs, weakref.ref(found.tensor)]
        most = max(most, len(alive[name]))
        return found

    monkeypatch.setattr(WeightsMap, "row", row)
    model(IDS)
    assert 1 <= most <= 2


def test_the_least_recently_used_expert_goes(small: Case) -> None:
    one = 2 * HIDDEN * INNER * 4
    model, report = offloaded(small, expert_cache=2 * one)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    for number in (0, 1, 0, 2, 0, 1):  # 1 goes for 2, then 2 for 1
        weight[number]
    told = experts(report).report()
    assert (told.hits, told.made) == (2, 4) and told.hit_rate == pytest.approx(1 / 3)


def test_what_is_left_by_the_plan_bounds_the_default(small: Case) -> None:
    with empty_weights():
        model = small.build().eval()
    device_map = {"model.layers": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu"}
    device_map |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    memory = {"cpu": "40KiB", "disk": "1GiB"}
    plan = planned(small.folder, model, device_map, max_memory=memory)
    limit = experts(plan.load_into(model)).report().limit_bytes
    assert 0 < limit <= 40 * 1024 - 2 * WORDS * HIDDEN * 4


def test_a_write_to_an_expert_is_not_silent(small: Case) -> None:
    model, _ = offloaded(small)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    before = weight[3].detach().clone()
    with torch.no_grad():
        weight[3].mul_(2)
        with pytest.raises(OffloadedWriteError, match=r"expert 3 of 'model\.layers\.0"):
            weight[3]
    assert torch.equal(weight[3], before)


def test_experts_made_in_inference_mode_serve_training_later(small: Case) -> None:
    model, _ = offloaded(small)
    with torch.inference_mode():
        model(IDS, use_cache=False)
    model(IDS, use_cache=False, labels=IDS).loss.backward()


def test_counting_starts_again_and_the_cache_is_let_go(small: Case) -> None:
    model, report = offloaded(small)
    logits(model)
    experts(report).reset()
    experts(report).clear()
    told = experts(report).report()
    assert told.hits == told.made == told.bytes_read == 0 and told.held_bytes == {}
    assert told.hit_rate == 0.0


# As placeholders do -------------------------------------------------------------------------------


def test_writing_is_refused(small: Case) -> None:
    model, _ = offloaded(small)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    with torch.no_grad(), pytest.raises(OffloadedWriteError, match="gate_up_proj"):
        weight[0] = 0


def test_a_copy_has_a_cache_of_its_own(small: Case) -> None:
    model, report = offloaded(small)
    logits(model)
    experts(report).reset()
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), logits(small.expected))
    found = expert_offload(other)
    assert found is not None and found is not report.experts
    assert found.report().made > 0 and experts(report).report().made == 0


def test_pickling_a_parameter_keeps_its_values(small: Case) -> None:
    model, _ = offloaded(small)
    weight = model.model.layers[0].mlp.experts.down_proj
    whole = small.expected.model.layers[0].mlp.experts.down_proj
    assert torch.equal(pickle.loads(pickle.dumps(weight)), whole)


def test_a_state_dict_and_a_saved_model_have_the_values(small: Case, tmp_path: Path) -> None:
    model, _ = offloaded(small)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor + 0, small.expected.state_dict()[name]), name
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in load_file(small.folder / "model.safetensors").items():
        assert torch.equal(again[name], tensor), name


def test_without_hooks_the_experts_are_in_memory(small: Case) -> None:
    model, _ = offloaded(small)
    remove_hook_from_submodules(model)
    weight = model.model.layers[1].mlp.experts.gate_up_proj
    assert not is_placeholder(weight) and expert_offload(model) is None
    assert torch.equal(logits(model), logits(small.expected))


def test_two_threads_get_their_own_right_answers(small: Case) -> None:
    model, _ = offloaded(small, expert_cache=2 * HIDDEN * INNER * 4 * 3)
    inputs = [torch.randint(2, WORDS, (1, 4)) for _ in range(12)]
    wanted = [logits(small.expected, ids) for ids in inputs]
    made: list[torch.Tensor | None] = [None] * len(inputs)

    def work(first: int) -> None:
        for number in range(first, len(inputs), 2):
            made[number] = logits(model, inputs[number])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        got is not None and torch.equal(got, want) for got, want in zip(made, wanted, strict=True)
    )


# Modules of one's own -----------------------------------------------------------------------------


class Experts(nn.Module):
    """Routes by the sum of the input; takes one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 6, 6))
        self.b = nn.Parameter(torch.rand(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.sum().long() % 4
        return x @ self.w[chosen] + self.b[chosen]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.heads = nn.Parameter(torch.rand(4, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.experts(x) @ self.heads.sum(0)
        return made


class Bmm(Own):
    """Computes with all experts at once, as Llama4 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(4, *x.shape), self.experts.w).sum(0)


def own(folder: Path, kind: Callable[[], nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    expected = kind()
    folder.mkdir(exist_ok=True)
    save_file(dict(expected.state_dict()), folder / "model.safetensors")
    with empty_weights():
        model = kind()
    report = planned(folder, model).load_into(model, **options)
    return model, expected, report


def test_a_module_of_ones_own_profits_as_well(tmp_path: Path) -> None:
    model, expected, report = own(tmp_path, Own)
    x = torch.rand(2, 6)
    assert torch.equal(model(x), expected(x))
    assert report.experts.names == {"experts.w", "experts.b"}
    told = report.experts.report()
    assert told.bytes_read == (6 * 6 + 6) * 4 and told.whole == {}


def test_whole_use_is_right_and_counted(tmp_path: Path) -> None:
    model, expected, report = own(tmp_path, Bmm)
    x = torch.rand(2, 6)
    assert torch.equal(model(x), expected(x))
    assert report.experts.report().whole == {"experts.w": 1}


def test_written_experts_are_read_one_by_one_too(tmp_path: Path) -> None:
    case = mixtral(tmp_path / "model")
    case.expected.set_experts_implementation("eager")
    model, report = offloaded(case, materialize=True, offload_folder=tmp_path / "off")
    assert torch.equal(logits(model), logits(case.expected))
    told = experts(report).report()
    assert told.made == 0 and told.views > 0 and told.held_bytes == {"cpu": 0}


# Indices ------------------------------------------------------------------------------------------


numbers = st.integers(-4, 3)
tensors = st.one_of(
    numbers.map(torch.tensor),
    numbers.map(lambda n: torch.tensor(n, dtype=torch.int16)),
    st.lists(numbers, max_size=5).map(lambda ns: torch.tensor(ns, dtype=torch.int64)),
    st.lists(numbers, min_size=1, max_size=3).map(lambda ns: torch.tensor([ns, ns]).int()),
    st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor),
)
slices = st.slices(4).filter(lambda s: (s.step or 1) > 0)
firsts = st.one_of(numbers, tensors, slices, st.lists(numbers, min_size=1), st.booleans())
rests = st.lists(
    st.one_of(st.just(0), st.just(slice(1, None)), st.none(), st.just(slice(None))), max_size=2
)
indices = st.one_of(
    firsts,
    st.tuples(firsts, rests).map(lambda both: (both[0], *both[1])),
    st.sampled_from([..., None, (), (..., 0), (slice(None), 1), (slice(None), torch.tensor([1]))]),
    st.tuples(numbers, tensors),
)


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    model, expected, _ = own(tmp_path_factory.mktemp("own"), Own)
    return model.experts.w, expected.experts.w


@given(index=indices)
@example(index=torch.tensor(1, dtype=torch.uint8))
@example(index=(2, slice(None), torch.tensor([0, 1])))
@settings(max_examples=150, deadline=None)
def test_any_index_gives_what_the_plain_tensor_gives(
    placed: tuple[torch.Tensor, torch.Tensor], index: Any
) -> None:
    placeholder, plain = placed
    try:
        wanted = plain[index]
    except (IndexError, ValueError, TypeError) as error:
        with pytest.raises(type(error)):
            placeholder[index]
        return
    got = placeholder[index]
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("index", [4, -5, torch.tensor(4), torch.tensor([0, -5]), [7]])
def test_an_expert_that_is_not_there_is_an_index_error(
    placed: tuple[torch.Tensor, torch.Tensor], index: Any
) -> None:
    with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 4"):
        placed[0][index]


def test_other_guises_of_the_parameter_are_indexed_by_expert_too(tmp_path: Path) -> None:
    model, expected, report = own(tmp_path, Own)
    weight = model.experts.w
    for guise in (weight.detach(), weight.data, weight.to(torch.bfloat16)):
        wanted = expected.experts.w[1].to(guise.dtype)
        assert is_placeholder(guise) and torch.equal(guise[1], wanted)
    assert report.experts.report().whole == {}


@given(st.integers(1, 5), st.data())
@settings(max_examples=50, deadline=None)
def test_no_expert_is_asked_for_that_is_not_wanted(n: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=4))
    picked = pick(torch.tensor(wanted), n)
    assert picked is not None and picked.numbers == tuple(number % n for number in wanted)


# GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_experts_are_kept_on_a_gpu(tmp_path: Path, home: str) -> None:
    case = mixtral(tmp_path / "model")
    case.expected.set_experts_implementation("eager")
    with empty_weights():
        model = case.build().eval()
    device_map = {"model.embed_tokens": 0, "model.layers": home, "model.norm": 0}
    device_map |= {"model.rotary_emb": 0, "lm_head": 0}
    report = planned(case.folder, model, device_map).load_into(model)
    wanted = logits(case.expected.to(0), IDS.to(0))
    for _ in range(2):
        assert torch.equal(logits(model, IDS.to(0)), wanted)
    told = experts(report).report()
    assert told.views == 0 and told.hits > 0 and told.held_bytes["cuda:0"] > 0
    assert told.whole == {}
