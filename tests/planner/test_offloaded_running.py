"""Forward passes over weights on disk: equal to those in memory, ahead of time, within bounds."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.utils import align_module_device
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution import order
from modelquirks.planner.execution.ahead import Ahead
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.execution.execute import execute
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.placeholder import is_placeholder
from modelquirks.planner.execution.reader import ReadError
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.quirks.recipe import (
    Concat,
    Dequantize,
    Part,
    Region,
    Scheme,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
)

ROWS = torch.linspace(-1, 1, 24).reshape(3, 8)
N = 6
WEIGHT = 8 * 8 * 4
"""Bytes of one weight in float32."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("accelerate").setLevel(logging.ERROR)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each layer be a chunk, and the smallest weight worth the background."""
    monkeypatch.setattr(order, "_LEAST_BYTES", 1)
    monkeypatch.setattr(order, "_WORTH_BYTES", 1)


def stack(n: int = N) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(n))).eval()


def loaded(
    folder: Path,
    expected: nn.Module,
    *,
    stored: torch.dtype = torch.float32,
    device_map: Any = None,
    **options: Any,
) -> Any:
    """Store *expected* in *stored* and load it into a copy without weights, in float32.

    *expected* has afterwards what was stored.
    """
    folder.mkdir(exist_ok=True)
    state = {
        k: t.to(stored) if t.is_floating_point() else t for k, t in expected.state_dict().items()
    }
    expected.load_state_dict(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = copy.deepcopy(expected).to("meta")
    plan = Dispatcher().plan(
        folder,
        model=model,
        device_map=device_map or {"": "disk"},
        dtype="float32",
        offload_buffers=bool(options.pop("offload_buffers", False)),
        max_memory=options.pop("max_memory", None),
    )
    assert plan.ok, plan.problems
    plan.load_into(model, **options)
    return model


def weights_of(model: nn.Module) -> WeightsMap:
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    return next(w for hook in hooks if isinstance(w := getattr(hook, "weights", None), WeightsMap))


def ahead_of(model: nn.Module) -> Ahead:
    return weights_of(model).ahead


def settled(model: nn.Module) -> Ahead:
    """Return what makes ahead, once it has nothing more to do."""
    ahead = ahead_of(model)
    deadline = time.monotonic() + 10
    while ahead._is_making and time.monotonic() < deadline:
        time.sleep(0.005)
    return ahead


def let_it_settle(layer: nn.Module, *_: Any) -> None:
    """Give the background the time that it wants after *layer*."""
    settled(layer)


STORED = pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["views", "cast"])


# Equal results -----------------------------------------------------------------------------------


@STORED
@pytest.mark.parametrize("ahead_bytes", [0, WEIGHT, 1 << 30])
@pytest.mark.usefixtures("eager")
def test_passes_over_weights_on_disk_are_those_in_memory(
    tmp_path: Path, stored: torch.dtype, ahead_bytes: int
) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored, ahead_bytes=ahead_bytes)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got, wanted = model(ROWS), expected(ROWS)
        assert torch.equal(got, wanted)
        assert got.requires_grad == wanted.requires_grad
        assert all(is_placeholder(p) and p.is_meta for p in model.parameters())


class Made(nn.Module):
    """Weights that are stacked, concatenated, transposed, cut, packed, and as they are."""

    stacked: torch.Tensor
    joined: torch.Tensor
    turned: torch.Tensor
    cut: torch.Tensor
    plain: torch.Tensor
    packed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        shapes = {"stacked": (3, 4, 8), "joined": (8, 8), "turned": (8, 4), "cut": (2, 8)}
        for name, shape in (shapes | {"plain": (4, 8), "packed": (4, 8)}).items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.joined) @ self.stacked.sum(0).t() @ self.turned.t()
        return x @ self.plain.t() @ self.cut.repeat(2, 1) @ self.packed.t()


class PerRow(Scheme):
    """A small packing: int8 codes, one float32 scale for each row."""

    name = "per_row"
    roles: tuple[str, ...] = ("codes", "scales")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        return TensorType("F32", parts["codes"].shape)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Any
    ) -> Mapping[str, Region]:
        return {"codes": region, "scales": region[:1]}

    def evaluate(self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any) -> Any:
        return (parts["codes"].float() * parts["scales"][:, None]).to(dtype)


PACKED = Dequantize("per_row", (Part("codes", Source("codes")), Part("scales", Source("scales"))))


@pytest.mark.usefixtures("eager")
def test_stacked_joined_turned_cut_and_packed_weights_are_those_in_memory(
    tmp_path: Path, located: Any
) -> None:
    torch.manual_seed(1)
    state = {f"w.{i}": torch.rand(4, 8) for i in range(3)}
    state |= {"codes": torch.arange(32, dtype=torch.int8).reshape(4, 8), "scales": torch.rand(4)}
    save_file(state, tmp_path / "model.safetensors")
    w = [Source(f"w.{i}") for i in range(3)]
    nodes: list[tuple[str, Any, tuple[int, ...]]] = [
        ("stacked", Stack(Source("w.{i}"), "i", 3), (3, 4, 8)),
        ("joined", Concat((w[0], w[1]), 0), (8, 8)),
        ("turned", Transpose(w[2]), (8, 4)),
        ("cut", Slice(w[1], 0, 1, 3), (2, 8)),
        ("plain", w[0], (4, 8)),
        ("packed", PACKED, (4, 8)),
    ]
    results: list[torch.Tensor] = []
    for device in ("disk", "cpu"):
        model = Made().to("meta")
        items = [LoadItem(name, node, {}, "F32", shape, device) for name, node, shape in nodes]
        execute(
            model,
            items,
            device_map={"": device},
            root=tmp_path,
            tensors=located(tmp_path),
            schemes={"per_row": PerRow()},
        )
        results += [model(ROWS).detach() for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)


@STORED
def test_gradients_of_the_input_flow_through_weights_on_disk(
    tmp_path: Path, stored: torch.dtype
) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored)
    for _ in range(2):
        ours, theirs = ROWS.clone().requires_grad_(), ROWS.clone().requires_grad_()
        model(ours).square().sum().backward()
        expected(theirs).square().sum().backward()
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert all(place.ready is None or place.ready.grad is None for place in places(model))


def places(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from getattr(getattr(module, "_hf_hook", None), "places", ())


@STORED
def test_what_requires_gradients_can_be_changed_between_passes(
    tmp_path: Path, stored: torch.dtype
) -> None:
    model = loaded(tmp_path, stack(), stored=stored)
    seen: list[bool] = []
    inner = model[0]._old_forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(model[0].weight.requires_grad)
        out: torch.Tensor = inner(x)
        return out

    model[0]._old_forward = watched
    with torch.no_grad():
        model(ROWS)
        model.requires_grad_(False)
        model(ROWS)
    assert not model(ROWS).requires_grad
    model.requires_grad_(True)
    assert model(ROWS).requires_grad
    assert seen == [True, False, False, True]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, extra: Any = None) -> Any:
        y = self.up(self.norm(x))
        return y if extra is None else (y, extra)


@STORED
def test_buffers_on_disk_are_fetched_if_that_is_asked_for(
    tmp_path: Path, stored: torch.dtype
) -> None:
    expected = Normed().eval()
    expected.norm.running_mean.uniform_()
    model = loaded(tmp_path, expected, stored=stored, offload_buffers=True)
    for _ in range(3):
        assert is_placeholder(model.norm.running_mean)
        assert torch.equal(model(ROWS), expected(ROWS))


def test_inputs_reach_the_module_as_they_were_given(tmp_path: Path) -> None:
    """accelerate alone gives modules copies of lists and dicts, also where nothing moves."""
    model = loaded(tmp_path, Normed().eval())
    extra = {"list": [ROWS, None], "text": "as is"}
    assert model(ROWS, extra=extra)[1] is extra


class Twice(nn.Module):
    """Runs a layer within itself, and the same one again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.depth = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.depth < 2:
            self.depth += 1
            x = self(x)
            self.depth -= 1
        result: torch.Tensor = self.up(self.up(x)) @ self.up.weight
        return result


@STORED
def test_modules_that_run_within_themselves_are_right(tmp_path: Path, stored: torch.dtype) -> None:
    expected = Twice().eval()
    model = loaded(tmp_path, expected, stored=stored)
    for _ in range(2):
        assert torch.equal(model(ROWS), expected(ROWS))
        assert is_placeholder(model.up.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x))
        return result


@STORED
@pytest.mark.usefixtures("eager")
def test_tied_weights_stay_tied(tmp_path: Path, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = Tied().eval()
    weight = expected.first.weight.detach().to(stored)
    expected.first.weight.data.copy_(weight)
    save_file({"first.weight": weight}, tmp_path / "model.safetensors")
    model = Tied().to("meta")
    model.last.weight = model.first.weight
    plan = Dispatcher().plan(tmp_path, model=model, device_map={"": "disk"}, dtype="float32")
    plan.load_into(model)
    for _ in range(3):
        assert torch.equal(model(ROWS), expected(ROWS))
        assert model.first.weight is model.last.weight


# Files -------------------------------------------------------------------------------------------


def test_files_are_opened_once_and_views_read_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, stack())
    model(ROWS)
    opened: list[Any] = []
    inner: Callable[..., int] = os.open

    def told(*args: Any, **kwargs: Any) -> int:
        opened.append(args)
        return inner(*args, **kwargs)

    monkeypatch.setattr(os, "open", told)
    pointers = [place.ready.data_ptr() for place in places(model)]
    model(ROWS)
    assert not opened
    assert [place.ready.data_ptr() for place in places(model)] == pointers


@STORED
@pytest.mark.parametrize("ahead_bytes", [0, 1 << 30])
@pytest.mark.usefixtures("eager")
def test_each_pass_asks_for_each_weight_once(
    tmp_path: Path, stored: torch.dtype, ahead_bytes: int
) -> None:
    model = loaded(tmp_path, stack(), stored=stored, ahead_bytes=ahead_bytes)
    weights = weights_of(model)
    per_pass = N * (64 + 8) * stored.itemsize
    for _ in range(4):
        before = weights.bytes_read
        model(ROWS)
        settled(model)
        assert weights.bytes_read - before == per_pass


@pytest.mark.parametrize("change", ["written", "truncated"])
@STORED
def test_a_file_that_changes_between_passes_is_an_error(
    tmp_path: Path, stored: torch.dtype, change: str
) -> None:
    model = loaded(tmp_path, stack(), stored=stored)
    model(ROWS)
    path = tmp_path / "model.safetensors"
    if change == "truncated":
        os.truncate(path, 400)
    os.utime(path, ns=(1, 1))
    with pytest.raises(Exception, match=r"written to|truncated") as caught:
        model(ROWS)
    assert isinstance(caught.value, ReadError) or stored is torch.bfloat16
    assert all(is_placeholder(parameter) for parameter in model.parameters())


# Ahead of time -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_from_the_second_pass_on_weights_are_made_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, stack(), stored=torch.bfloat16)
    makers = watched_makers(monkeypatch)
    model(ROWS)
    assert set(makers) == {threading.current_thread().name}
    makers.clear()
    for layer in model:  # gives the background the time
        layer.register_forward_hook(let_it_settle)
    model(ROWS)
    assert makers.count("modelquirks-ahead") >= 2 * (N - 1)
    assert len(makers) == 2 * N
    counts = settled(model).counts
    assert counts.used >= 2 * (N - 1)
    assert (counts.unused, counts.too_large) == (0, 0)


def watched_makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of the thread that makes a weight."""
    makers: list[str] = []

    def told(*args: Any, **kwargs: Any) -> torch.Tensor:
        makers.append(threading.current_thread().name)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr("modelquirks.planner.execution.loaditem.evaluate", told)
    return makers


@pytest.mark.parametrize("room", [WEIGHT, 2 * WEIGHT + 40, 5 * WEIGHT])
@pytest.mark.usefixtures("eager")
def test_no_more_is_made_ahead_than_there_is_room_for(tmp_path: Path, room: int) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=torch.bfloat16, ahead_bytes=room)
    for layer in model:
        layer.register_forward_hook(let_it_settle)
    for _ in range(3):
        assert torch.equal(model(ROWS), expected(ROWS))
    ahead = settled(model)
    assert 0 < ahead.counts.peak_bytes <= room
    assert ahead.held_bytes == 0, "between passes nothing is held"
    assert not ahead._made
    assert not ahead._pending


@pytest.mark.usefixtures("eager")
def test_a_weight_larger_than_the_room_is_made_when_it_is_needed(tmp_path: Path) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=torch.bfloat16, ahead_bytes=WEIGHT - 1)
    for _ in range(3):
        assert torch.equal(model(ROWS), expected(ROWS))
    counts = settled(model).counts
    assert counts.too_large > 0
    assert counts.peak_bytes < WEIGHT


@pytest.mark.parametrize(("cpu", "limit"), [(3 * WEIGHT, 3 * WEIGHT), ("40GiB", 1 << 30), (0, 1)])
def test_what_is_made_ahead_stays_within_what_the_plan_leaves_of_the_memory(
    tmp_path: Path, cpu: int | str, limit: int
) -> None:
    model = loaded(tmp_path, stack(), max_memory={"cpu": cpu, "disk": "1GiB"})

    assert settled(model).limit == limit


def test_how_much_is_made_ahead_can_be_said_as_a_size(tmp_path: Path) -> None:
    assert settled(loaded(tmp_path, stack(), ahead_bytes="2KiB")).limit == 2048


@pytest.mark.usefixtures("eager")
def test_without_room_nothing_is_made_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, stack(), stored=torch.bfloat16, ahead_bytes=0)
    makers = watched_makers(monkeypatch)
    for _ in range(3):
        model(ROWS)
    assert "modelquirks-ahead" not in makers


class Chosen(nn.Module):
    """Runs its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(N))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for i in chosen:
            x = self.layers[i](x)
        return x


ORDERS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 5], [2, 2, 2], [], [0, 1, 2, 3, 4, 5], [3]]


@STORED
@pytest.mark.usefixtures("eager")
def test_a_pass_in_another_order_is_right_and_what_was_made_in_vain_goes(
    tmp_path: Path, stored: torch.dtype
) -> None:
    expected = Chosen().eval()
    model = loaded(tmp_path, expected, stored=stored)
    for chosen in [*ORDERS, *ORDERS[::-1], *[ORDERS[1]] * 3]:
        assert torch.equal(model(ROWS, chosen), expected(ROWS, chosen))
        settled(model)
        assert ahead_of(model).held_bytes == 0


@pytest.mark.usefixtures("eager")
def test_an_order_that_comes_again_is_learned(tmp_path: Path) -> None:
    model = loaded(tmp_path, Chosen().eval(), stored=torch.bfloat16)
    state = model.layers[0]._hf_hook.state
    for chosen, known in ((ORDERS[0], 0), (ORDERS[1], 0), (ORDERS[2], 0), (ORDERS[2], 2)):
        model(ROWS, chosen)
        paths = [step.prefix for step in state._orders[model].steps]
        assert paths == [f"layers.{i}." for i in ORDERS[known]]


def test_blocks_are_chunks_and_small_ones_come_together() -> None:
    class Step:
        ahead = None

        def __init__(self, prefix: str, nbytes: int) -> None:
            self.prefix, self._nbytes = prefix, nbytes

        def needs(self) -> list[order.Need]:
            return [order.Need(self.prefix, self._nbytes, True, ())]

        def count(self, nbytes: int) -> None: ...

    mib = 1 << 20
    steps = [Step("embed.", 1 * mib)]
    steps += [Step(f"h.{i}.{part}.", 10 * mib) for i in (0, 1) for part in "abc"]
    steps += [Step("h.2.a.", 255 * mib), Step("h.2.b.", 3 * mib), Step("h.2.c.", mib)]
    groups = [[step.prefix for step in group] for group in order._groups(steps)]
    assert groups == [
        ["embed.", "h.0.a.", "h.0.b.", "h.0.c."],
        ["h.1.a.", "h.1.b.", "h.1.c."],
        ["h.2.a.", "h.2.b."],
        ["h.2.c."],
    ]


@pytest.mark.usefixtures("eager")
def test_what_cannot_be_made_ahead_is_told_by_the_pass_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=torch.bfloat16)
    model(ROWS)

    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.current_thread().name == "modelquirks-ahead" or broken:
            raise RuntimeError("no such luck")
        return evaluate(*args, **kwargs)

    broken = False
    monkeypatch.setattr("modelquirks.planner.execution.loaditem.evaluate", fails)
    for _ in range(2):
        assert torch.equal(model(ROWS), expected(ROWS))
    broken = True
    with pytest.raises(RuntimeError, match="no such luck"):
        model(ROWS)
    broken = False
    assert torch.equal(model(ROWS), expected(ROWS))
    assert settled(model).held_bytes == 0


@STORED
@pytest.mark.usefixtures("eager")
def test_after_an_error_in_a_pass_nothing_is_held(tmp_path: Path, stored: torch.dtype) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored)
    for _ in range(2):
        model(ROWS)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model[3].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        model(ROWS)
    handle.remove()
    assert settled(model).held_bytes == 0
    assert all(is_placeholder(parameter) for parameter in model.parameters())
    assert torch.equal(model(ROWS), expected(ROWS))


# Threads, processes, several models --------------------------------------------------------------


@STORED
@pytest.mark.usefixtures("eager")
def test_threads_in_the_same_models_do_not_disturb_each_other(
    tmp_path: Path, stored: torch.dtype
) -> None:
    pairs = [(loaded(tmp_path / str(n), e := stack(n), stored=stored), e) for n in (3, 6)]
    wanted = [expected(ROWS) for _, expected in pairs]
    wrong: list[Any] = []

    def run() -> None:
        try:
            for _ in range(15):
                for (model, _), result in zip(pairs, wanted, strict=True):
                    if not torch.equal(model(ROWS), result):
                        wrong.append(model)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for model, _ in pairs:
        assert settled(model).held_bytes == 0
        assert all(is_placeholder(parameter) for parameter in model.parameters())


FORKS = """
import logging, os, sys, torch
from pathlib import Path
sys.path.insert(0, {here!r})
import test_offloaded_running as t
from modelquirks.planner.execution import order
logging.disable(logging.WARNING)
torch.set_num_threads(1)
order._LEAST_BYTES = order._WORTH_BYTES = 1
expected = t.stack()
model = t.loaded(Path({folder!r}), expected, stored=torch.bfloat16)
wanted = expected(t.ROWS)
for _ in range(3):
    assert torch.equal(model(t.ROWS), wanted)
children = []
for i in range(4):
    if i % 2:  # while the background is busy
        t.ahead_of(model).want({{f"{{n}}.weight": t.WEIGHT for n in range(t.N)}})
    pid = os.fork()
    if not pid:
        good = all(torch.equal(model(t.ROWS), wanted) for _ in range(5))
        used = t.ahead_of(model).counts.used
        os._exit(0 if good and t.settled(model).held_bytes == 0 else 1)
    children.append(pid)
    assert torch.equal(model(t.ROWS), wanted)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 4, codes
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_go_on_by_themselves(tmp_path: Path) -> None:
    code = FORKS.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@STORED
@pytest.mark.usefixtures("eager")
def test_models_are_freed(tmp_path: Path, stored: torch.dtype) -> None:
    model = loaded(tmp_path, stack(), stored=stored)
    for _ in range(3):
        model(ROWS)
    settled(model)
    kept = weakref.ref(weights_of(model)), weakref.ref(model[0]), weakref.ref(ahead_of(model))
    del model
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_the_thread_ends_when_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelquirks.planner.execution import background

    monkeypatch.setattr(background, "_LINGER", 0.02)
    worker = background._Worker()
    for _ in range(2):
        done = threading.Event()
        assert worker.submit(done.set)
        assert done.wait(5)
        deadline = time.monotonic() + 5
        while worker._thread is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert worker._thread is None
    worker.close()
    assert not worker.submit(lambda: None)


@STORED
@pytest.mark.usefixtures("eager")
def test_a_deep_copy_runs_by_itself(tmp_path: Path, stored: torch.dtype) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored)
    for _ in range(2):
        model(ROWS)
    other = copy.deepcopy(model)
    assert ahead_of(other) is not ahead_of(model)
    assert ahead_of(other).limit == ahead_of(model).limit
    del model
    gc.collect()
    for _ in range(3):
        assert torch.equal(other(ROWS), expected(ROWS))
    ours = {id(module) for module in other.modules()}
    assert all(id(place.owner) in ours for place in places(other))


# Third parties -----------------------------------------------------------------------------------


@STORED
def test_without_hooks_the_model_is_as_one_in_memory(tmp_path: Path, stored: torch.dtype) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored)
    model(ROWS)
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert torch.equal(model(ROWS), expected(ROWS))


@STORED
def test_hooks_are_accelerates_and_align_as_those(tmp_path: Path, stored: torch.dtype) -> None:
    expected = stack()
    model = loaded(tmp_path, expected, stored=stored)
    assert all(isinstance(layer._hf_hook, AlignDevicesHook) for layer in model)
    assert model.hf_device_map == {"": "disk"}
    devices: list[Any] = [None, "cpu", torch.device("cpu")]
    for device in devices:
        with align_module_device(model[0], device):
            assert type(model[0].weight) is nn.Parameter
            assert torch.equal(model[0].weight, expected.get_parameter("0.weight"))
        assert is_placeholder(model[0].weight)


def test_a_hook_with_another_map_takes_the_weights_from_there(tmp_path: Path) -> None:
    """PEFT so merges its adapters into weights that are offloaded."""
    expected = stack()
    model = loaded(tmp_path, expected)
    model(ROWS)
    changed = {name: t.detach() * 2 for name, t in expected[0].named_parameters()}
    model[0]._hf_hook.weights_map = changed
    expected[0].load_state_dict(changed)
    assert torch.equal(model(ROWS), expected(ROWS))


def test_a_hook_that_was_changed_is_called(tmp_path: Path) -> None:
    model = loaded(tmp_path, stack())
    called: list[str] = []
    inner: Callable[..., Any] = model[0]._hf_hook.post_forward

    def told(*args: Any) -> Any:
        called.append("post")
        return inner(*args)

    model[0]._hf_hook.post_forward = told
    model(ROWS)
    assert called == ["post"]
