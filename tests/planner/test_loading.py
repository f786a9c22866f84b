"""Making tensors in memory: in pieces, on threads, within a bound, and all or nothing."""

import importlib.util
import json
import math
import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, load_checkpoint_and_dispatch
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.execution import loading
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.execution.execute import ExecutionError, ExecutionReport, execute
from modelquirks.planner.execution.helper import Helper
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.pages import fresh, let_go, prepare, read_in
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.pool import run
from modelquirks.planner.execution.reader import Reader, ReadError
from modelquirks.planner.execution.upload import Upload
from modelquirks.quirks.recipe import Concat, Node, Source, Stack, Transpose

Located = Callable[[Path], dict[str, StoredTensor]]
Region = tuple[tuple[int, int], ...]
MIB = 1 << 20


def sibling(name: str) -> Any:
    """Return another test module of this folder, for its strategy of recipes."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recipes_of = sibling("test_evaluate")


def item(
    name: str, node: Node, shape: tuple[int, ...], dtype: str = "F32", device: Any = "cpu"
) -> LoadItem:
    return LoadItem(name=name, node=node, env={}, dtype=dtype, shape=shape, device=device)


def located_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a dict as a checkpoint lists them, one after the other."""
    found: dict[str, StoredTensor] = {}
    begin = 0
    for name, tensor in tensors.items():
        place = (begin, begin + tensor.nbytes)
        shape = tuple(tensor.shape)
        found[name] = StoredTensor(name, "a.safetensors", from_torch(tensor.dtype), shape, *place)
        begin += tensor.nbytes
    return found


# The pool


@settings(max_examples=150, deadline=None)
@given(recipe=recipes_of.recipes(), data=st.data())
def test_pieces_from_any_number_of_threads_are_the_evaluation_of_the_whole(
    recipe: tuple[Node, Any, tuple[int, ...]], data: st.DataObject
) -> None:
    node, stored, shape = recipe
    whole = stored.make(node)
    limit = data.draw(st.integers(1, 40), "values in a piece")
    n_threads = data.draw(st.integers(1, 4), "threads")
    wanted = item("w", node, shape, from_torch(whole.dtype))

    def write(item: LoadItem, region: Region, out: torch.Tensor) -> None:
        evaluate(
            item.node,
            item.env,
            read=stored.read,
            types=stored.types,
            schemes=recipes_of.SCHEMES,
            region=region,
            out=out,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_PIECE", limit)
        patch.setattr(loading, "available_cpus", lambda: n_threads)
        made = loading.load(
            [(wanted, "cpu")],
            write=write,
            tensors=located_in(stored.tensors),
            options=LoadOptions(),
        )
    assert made.tensors["w"].dtype == whole.dtype
    assert torch.equal(made.tensors["w"], whole)
    assert made.n_bytes == whole.nbytes


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(0, 50), max_size=40),
    limit=st.integers(1, 100),
    n_threads=st.integers(1, 5),
)
def test_jobs_are_done_once_and_never_cost_more_than_the_limit_together(
    costs: list[int], limit: int, n_threads: int
) -> None:
    """But for one that costs more by itself, which is alone."""
    lock = threading.Lock()
    done: list[int] = []
    in_use: dict[int, int] = {}
    sums: list[tuple[int, int]] = []

    def work(job: int) -> None:
        with lock:
            in_use[job] = costs[job]
            sums.append((len(in_use), sum(in_use.values())))
        with lock:
            done.append(job)
            del in_use[job]

    peak = run(range(len(costs)), work, n_threads=n_threads, cost=costs.__getitem__, limit=limit)
    assert sorted(done) == list(range(len(costs)))
    assert all(together <= limit or n == 1 or together <= peak for n, together in sums)
    assert peak <= max([limit, *costs])


def test_the_first_failure_ends_the_run_and_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(job: int) -> None:
        begun.append(job)
        if job == 3:
            raise ValueError("number 3")

    with pytest.raises(ValueError, match="number 3"):
        run(range(1000), work, n_threads=1, cost=lambda _: 1, limit=10)
    assert begun == [0, 1, 2, 3]


def test_a_failure_wakes_those_that_wait_for_room() -> None:
    def work(job: int) -> None:
        raise ValueError(f"number {job}")

    with pytest.raises(ValueError, match="number 0"):
        run([0, 1, 2, 3], work, n_threads=3, cost=lambda _: 8, limit=10)


def test_torch_has_its_threads_again_after_a_run() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run([0], lambda _: seen.append(torch.get_num_threads()), **ONE)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (seen, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(before)


def one(_: int) -> int:
    return 1


ONE: dict[str, Any] = {"n_threads": 1, "cost": one, "limit": 1}


@pytest.mark.parametrize("cpus", [1, 2, 64])
def test_every_thread_has_memory_to_work_with(cpus: int) -> None:
    assert LoadOptions.of(load_memory="16MiB").n_threads(cpus) == 1
    assert LoadOptions().n_threads(cpus) == min(cpus, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_memory": "1MiB"}, "is too little: give at least '16MiB'"),
        ({"load_memory": "much"}, "is not a number"),
        ({"verify": "some"}, "'some' is not known: it is 'samples' or 'full'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadOptions.of(**options)


def test_pieces_are_made_within_the_memory_of_a_thread() -> None:
    tensors = located_in({"a": torch.empty(1000, 1000, dtype=torch.bfloat16)})
    parts = list(loading.pieces(item("a", Source("a"), (1000, 1000)), tensors, memory=100_000))
    assert len(parts) > 10
    assert all(part.cost <= 100_000 for part in parts)
    assert sum(part.nbytes for part in parts) == 4_000_000
    # What is stored, and what is made of it, twice on the way to a device.
    assert sum(part.cost for part in parts) == 1_000_000 * (2 + 2 * 4)


# Memory


def test_fresh_memory_is_for_training_even_in_inference_mode() -> None:
    with torch.inference_mode():
        tensor = fresh((3, 4), torch.bfloat16)
    assert not tensor.is_inference()
    assert (tensor.shape, tensor.dtype) == ((3, 4), torch.bfloat16)
    assert fresh((), torch.float32).shape == ()
    assert fresh((0, 2), torch.float32).numel() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="advice to the Linux kernel")
def test_memory_that_was_prepared_is_there_and_what_is_in_it_stays() -> None:
    tensor = fresh((8 * MIB,), torch.uint8)
    tensor[3 * MIB] = 7
    prepare(tensor[2 * MIB : 6 * MIB])
    resident = Path("/proc/self/statm").read_text().split()[1]
    tensor[2 * MIB : 3 * MIB].fill_(1)
    grown = int(Path("/proc/self/statm").read_text().split()[1]) - int(resident)
    assert grown * mmap.PAGESIZE < MIB // 2
    assert tensor[3 * MIB] == 7


@pytest.mark.skipif(sys.platform != "linux", reason="advice to the Linux kernel")
def test_what_is_let_go_can_be_read_again_and_its_neighbours_stay(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=prot)
    view = torch.frombuffer(mapping, dtype=torch.uint8)
    view[10] = 7  # in the first page, which belongs to others as well
    part = view[100 : 3 * mmap.PAGESIZE]
    part[mmap.PAGESIZE] = 99
    read_in(part)
    let_go(part)
    assert view[10] == 7
    assert bytes(part.numpy()) == path.read_bytes()[100 : 3 * mmap.PAGESIZE]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this is not found out")
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Touching the mapping would kill the process."""
    path = tmp_path / "a"
    path.write_bytes(bytes(40 * mmap.PAGESIZE))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    with pytest.warns(UserWarning, match="not writable"):
        view = torch.frombuffer(mapping, dtype=torch.uint8)
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad address"):
        read_in(view)


def test_a_passing_reader_gives_what_a_reader_gives(tmp_path: Path, located: Located) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(300 + i, 130) for i in range(4)}
    save_file({"odd": torch.ones(3, dtype=torch.uint8), **tensors}, tmp_path / "a.safetensors")
    places = located(tmp_path)
    reader, plain = PassingReader(tmp_path, places), Reader(tmp_path, places)
    for _ in range(2):
        for name in tensors:
            for region in (None, ((5, 290), (0, 130)), ((5, 290), (3, 40)), ((2, 2), (0, 9))):
                assert torch.equal(reader.read(name, region), plain.read(name, region))
            reader.release()
    assert reader.bytes_read == plain.bytes_read


def test_after_many_small_reads_the_files_are_mapped_anew(tmp_path: Path, located: Located) -> None:
    save_file({"a": torch.arange(8)}, tmp_path / "a.safetensors")
    reader = PassingReader(tmp_path, located(tmp_path))
    first = reader.read("a")
    for _ in range(300):
        assert torch.equal(reader.read("a"), torch.arange(8))
        reader.release()
    assert reader.read("a").data_ptr() != first.data_ptr()
    assert torch.equal(first, torch.arange(8))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is mapped")
def test_small_reads_all_over_a_file_do_not_leave_it_mapped(
    tmp_path: Path, located: Located
) -> None:
    """Where the page cache holds the file in large folios, each fault maps 2 MiB."""
    size = 256 * MIB
    path = tmp_path / "a.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    os.truncate(path, 8 + len(header) + size)
    with path.open("rb", buffering=0) as file:  # large requests make large folios
        while file.read(16 * MIB):
            pass
    reader = PassingReader(tmp_path, located(tmp_path))
    before, most = mapped_bytes(), 0
    for begin in range(0, size, MIB):
        assert not reader.read("a", ((begin, begin + 100),)).any()
        reader.release()
        most = max(most, mapped_bytes() - before)
    assert most < 160 * MIB


def mapped_bytes() -> int:
    """Return what the process has mapped of files, and touched."""
    return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) << 10


# Whole loads


class Net(nn.Module):
    """Its weights are cast, stacked, transposed, and as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Parameter(torch.zeros(40, 30))
        self.cast = nn.Parameter(torch.zeros(40, 30))
        self.stacked = nn.Parameter(torch.zeros(3, 8, 5))
        self.turned = nn.Parameter(torch.zeros(30, 40))


class Case:
    """The checkpoint of a Net."""

    def __init__(self, root: Path, located: Located) -> None:
        torch.manual_seed(1)
        self.stored = {
            "same": torch.randn(40, 30),
            "cast": torch.randn(40, 30).bfloat16(),
            **{f"e{i}.{w}": torch.randn(4, 5) for i in range(3) for w in ("up", "gate")},
            "turned": torch.randn(40, 30),
        }
        save_file(self.stored, root / "model.safetensors")
        self.root, self.tensors = root, located(root)
        self.expected = {
            "same": self.stored["same"],
            "cast": self.stored["cast"].float(),
            "stacked": torch.stack(
                [torch.cat([self.stored[f"e{i}.up"], self.stored[f"e{i}.gate"]]) for i in range(3)]
            ),
            "turned": self.stored["turned"].T,
        }

    def items(self, device: Any = "cpu") -> list[LoadItem]:
        stacked = Stack(Concat((Source("e{i}.up"), Source("e{i}.gate"))), "i", 3)
        return [
            item("same", Source("same"), (40, 30), device=device),
            item("cast", Source("cast"), (40, 30), device=device),
            item("stacked", stacked, (3, 8, 5), device=device),
            item("turned", Transpose(Source("turned")), (30, 40), device=device),
        ]

    def load(
        self, model: nn.Module, items: Iterable[LoadItem] | None = None, **options: Any
    ) -> ExecutionReport:
        return execute(
            model,
            self.items() if items is None else items,
            device_map={"": "cpu"},
            root=self.root,
            tensors=self.tensors,
            schemes={},
            loading=LoadOptions.of(**options),
        )


@pytest.fixture
def case(tmp_path: Path, located: Located) -> Case:
    return Case(tmp_path, located)


def empty() -> Net:
    with init_empty_weights():
        return Net()


@pytest.mark.parametrize("copy", [False, True])
def test_loaded_is_what_torch_makes(case: Case, copy: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "_PIECE", 50)
    model = empty()
    report = case.load(model, copy=copy)
    for name, tensor in case.expected.items():
        assert torch.equal(getattr(model, name), tensor)
        assert getattr(model, name).is_contiguous()
    n_made = sum(t.nbytes for n, t in case.expected.items() if copy or n != "same")
    assert report.bytes_made == n_made
    assert report.bytes_read == sum(t.nbytes for t in case.stored.values())
    assert 0 < report.work_bytes <= 256 * MIB
    assert set(report.seconds_by_step) == {"check", "make", "dispatch", "verify"}
    assert sum(report.seconds_by_step.values()) == pytest.approx(report.seconds)


def test_only_copies_outlive_a_file_that_is_overwritten(case: Case) -> None:
    """The reason for copy=True: a mapped file that is written to changes the model, or worse."""
    mapped, copied = empty(), empty()
    case.load(mapped)
    case.load(copied, copy=True)
    path = case.root / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(case.tensors["same"].begin or 0)
        file.write(bytes(40 * 30 * 4))
    assert torch.equal(copied.same, case.expected["same"])
    assert torch.equal(mapped.same, torch.zeros(40, 30))


def test_what_is_made_can_be_trained_when_it_was_loaded_in_inference_mode(case: Case) -> None:
    model = empty()
    with torch.inference_mode():
        case.load(model)
    torch.autograd.backward(model.cast.sum() * 2)
    assert model.cast.grad is not None


def test_a_default_device_does_not_change_where_weights_are_made(case: Case) -> None:
    model = empty()
    with torch.device("meta"):
        case.load(model)
    assert torch.equal(model.cast, case.expected["cast"])


@pytest.mark.parametrize("name", ["cast", "stacked", "turned"])
def test_a_failure_in_a_thread_names_the_tensor_and_leaves_the_model(
    case: Case, name: str, monkeypatch: Any
) -> None:
    model = Net()
    before = dict(model.named_parameters())
    read = PassingReader.read
    bad = {"cast": "cast", "stacked": "e2.gate", "turned": "turned"}[name]

    def broken(self: PassingReader, name: str, region: Region | None = None) -> torch.Tensor:
        if name == bad:
            raise ReadError("the disk is gone")
        return read(self, name, region)

    monkeypatch.setattr(PassingReader, "read", broken)
    threads = threading.active_count()
    with pytest.raises(ExecutionError, match=rf"'{name}'.*the disk is gone"):
        case.load(model)
    assert threading.active_count() == threads
    assert all(model.get_parameter(n) is p for n, p in before.items())


def test_an_interrupt_ends_the_threads_and_leaves_the_model(case: Case, monkeypatch: Any) -> None:
    class Impatient(Helper):
        def join(self, timeout: float | None = None) -> None:
            if not interrupted:
                interrupted.append(self)
                raise KeyboardInterrupt
            super().join(timeout)

    interrupted: list[threading.Thread] = []
    monkeypatch.setattr("modelquirks.planner.execution.pool.Helper", Impatient)
    model = Net()
    before = dict(model.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        case.load(model)
    assert not any(isinstance(t, Impatient) for t in threading.enumerate())
    assert all(model.get_parameter(n) is p for n, p in before.items())


class Heard:
    """A listener that adds up."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}

    def begin(self, totals: Mapping[str, int]) -> None:
        self.totals |= totals

    def add(self, where: str, n_bytes: int) -> None:
        self.done[where] = self.done.get(where, 0) + n_bytes


def test_progress_hears_of_every_byte_that_is_made_or_compared(case: Case) -> None:
    heard = Heard()
    report = case.load(empty(), progress=heard, verify="full")
    everything = sum(t.nbytes for t in case.expected.values())
    assert heard.done == heard.totals
    assert heard.totals == {"cpu": report.bytes_made, "verification": everything}


# Comparing every byte


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_full_verification_compares_every_byte(case: Case, device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "_PIECE", 50)
    report = execute(
        empty(),
        case.items(device),
        device_map={"": device},
        root=case.root,
        tensors=case.tensors,
        schemes={},
        loading=LoadOptions.of(verify="full"),
    )
    assert report.verification.sampled_bytes == sum(t.nbytes for t in case.expected.values())


@pytest.mark.parametrize("verify", ["samples", "full"])
def test_one_wrong_bit_in_a_large_tensor_is_found_by_full_verification_alone(
    tmp_path: Path, located: Located, verify: Any, monkeypatch: Any
) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(1000, 1000))

    save_file({"w": torch.ones(1000, 1000, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    load = loading.load

    def spoiling(*args: Any, **kwargs: Any) -> loading.Loaded:
        made = load(*args, **kwargs)
        made.tensors["w"][444, 444] += 1
        return made

    monkeypatch.setattr("modelquirks.planner.execution.execute.load", spoiling)
    with init_empty_weights():
        model: Any = One()

    def loaded() -> ExecutionReport:
        return execute(
            model,
            [item("w", Source("w"), (1000, 1000))],
            device_map={"": "cpu"},
            root=tmp_path,
            tensors=located(tmp_path),
            schemes={},
            loading=LoadOptions.of(verify=verify),
        )

    if verify == "samples":
        assert loaded().verification.ok
        return
    with pytest.raises(ExecutionError, match=r"'w' differs from the checkpoint at \(\(0, 1000\)"):
        loaded()
    assert model.get_parameter("w").is_meta


# Through the public doors


def test_options_travel_from_the_public_functions(tmp_path: Path) -> None:
    def model() -> Any:
        with init_empty_weights():
            return nn.Linear(8, 8)

    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path, model=model(), device_map={"": "cpu"})
    assert plan.load_into(model()).bytes_made == 0
    report = plan.load_into(model(), copy=True, load_memory="32MiB", verify="full")
    assert report.bytes_made == report.verification.sampled_bytes == 8 * 9 * 4
    with pytest.raises(ValueError, match="too little"):
        plan.execute(model(), load_memory=5)
    options: Any = {"device_map": {"": "cpu"}, "copy": True, "verify": "full"}
    loaded: Any = load_checkpoint_and_dispatch(model(), tmp_path, **options)
    assert loaded.weight.untyped_storage().nbytes() == 8 * 8 * 4  # not that of a mapped file


MEASURED = """
import json, sys, torch
from pathlib import Path
from accelerate import init_empty_weights
from torch import nn
from modelquirks.planner import Dispatcher
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))

def high(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) << 10

def planned(model, dtype):
    return Dispatcher().plan(sys.argv[1], model=model, device_map={"": "cpu"}, dtype=dtype)

planned(model, torch.bfloat16).load_into(model)  # all imports, and nothing made
model.to("meta")
plan = planned(model, torch.float32)
before = high("VmHWM")
report = plan.load_into(model, load_memory="32MiB")
print(json.dumps([high("VmHWM") - before, report.bytes_made, report.work_bytes]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_load_takes_no_more_memory_than_its_result_and_what_is_allowed(tmp_path: Path) -> None:
    """The whole process, pages of mapped files included; 192 MiB are read and 384 made."""
    weights = {f"{i}.weight": torch.ones(2048, 2048, dtype=torch.bfloat16) for i in range(24)}
    save_file(weights, tmp_path / "model.safetensors")
    del weights
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown, made, work = (int(part) for part in done.stdout.strip("[]\n").split(","))
    assert made == 24 * 2048 * 2048 * 4
    assert work <= 32 * MIB
    assert grown <= made + 32 * MIB + 32 * MIB  # Python's own, and pages of the samples


# On the way to a device


def test_pieces_go_to_a_device_through_few_buffers() -> None:
    """With the CPU in place of a device: what a stream does can be seen on one alone."""
    upload = Upload(torch.device("cpu"), n_buffers=2, n_bytes=64)
    target = torch.zeros(10, 8)
    buffers: set[int] = set()

    def make(row: int) -> Callable[[torch.Tensor], None]:
        def fill(out: torch.Tensor) -> None:
            buffers.add(out.data_ptr())
            out.fill_(row)

        return fill

    for row in range(10):
        upload.send(target[row], make(row))
    upload.send(target[8:], make(99))  # larger than a buffer, and 0-d below
    upload.send(target[0, 0], make(5))
    upload.finish()
    assert len(buffers) <= 3
    assert target[:8, 1].tolist() == [*range(8)]
    assert bool((target[8:] == 99).all())
    assert target[0, 0] == 5


def test_a_buffer_is_free_again_after_a_failure() -> None:
    upload = Upload(torch.device("cpu"), n_buffers=1, n_bytes=64)
    target = torch.zeros(4)

    def fail(out: torch.Tensor) -> None:
        raise ReadError("no")

    for _ in range(3):
        with pytest.raises(ReadError):
            upload.send(target, fail)
    upload.send(target, lambda out: out.fill_(1))
    assert math.isclose(float(target.sum()), 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_gpu_are_those_of_the_files(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PIECE", 50)
    model = empty()
    execute(
        model,
        case.items(0),
        device_map={"": 0},
        root=case.root,
        tensors=case.tensors,
        schemes={},
        loading=LoadOptions.of(verify="full"),
    )
    for name, tensor in case.expected.items():
        assert model.get_parameter(name).device == torch.device("cuda:0")
        assert torch.equal(model.get_parameter(name).cpu(), tensor)
