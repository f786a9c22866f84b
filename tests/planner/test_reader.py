import copy
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.reader import Reader, ReadError
from modelquirks.quirks.recipe import TensorType

Located = Callable[[Path], dict[str, StoredTensor]]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
needs_f4 = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this version of torch has no dtype for F4"
)
OTHER_VERSIONS = bool(os.environ.get("VERSIONS_ROW"))
"""Whether benchmarks/versions.py tries other versions than those of constraints.txt."""


def example(dtype: torch.dtype) -> torch.Tensor:
    """Return a 3×4 tensor of that dtype with different, valid values."""
    values = torch.arange(1, 13).reshape(3, 4)
    if dtype == torch.bool:
        return values % 2 == 0
    return values.to(torch.float32).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def written(folder: Path, data: bytes, begin: int, dtype: str, *shape: int) -> Reader:
    """Return a reader of one tensor ``x`` at a place of our choice in a file of our making."""
    (folder / "x.safetensors").write_bytes(bytes(begin) + data)
    stored = StoredTensor("x", "x.safetensors", dtype, shape, begin, begin + len(data))
    return Reader(folder, {"x": stored})


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_as_safetensors_wrote_it(
    tmp_path: Path, located: Located, name: str
) -> None:
    tensor = example(DTYPES[name])
    try:
        save_file({"x": tensor}, tmp_path / "model.safetensors")
    except KeyError:
        if not OTHER_VERSIONS:
            raise
        pytest.skip("this version of safetensors cannot write it")
    reader = Reader(tmp_path, located(tmp_path))
    assert reader.type_of("x") == TensorType(name, (3, 4))
    read = reader.read("x")
    assert read.dtype == tensor.dtype
    assert bits(read) == bits(tensor)
    assert bits(reader.read("x", ((1, 3), (2, 3)))) == bits(tensor[1:3, 2:3])


@pytest.mark.parametrize("name", [*DTYPES, "C128", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_unaligned_data_is_copied_to_an_aligned_place(tmp_path: Path, name: str) -> None:
    tensor = example(to_torch(name))
    reader = written(tmp_path, bits(tensor), 13, name, 3, 4)
    read = reader.read("x")
    assert bits(read) == bits(tensor)
    assert read.data_ptr() % tensor.element_size() == 0
    assert bits(reader.read("x", ((1, 2), (1, 4)))) == bits(tensor[1:2, 1:4])


def test_aligned_data_is_a_view_and_the_mapping_is_shared(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    whole, rows = reader.read("x"), reader.read("x", ((2, 3), (0, 4)))
    assert rows.data_ptr() == whole.data_ptr() + 2 * 4 * 4


def test_writing_to_a_view_does_not_reach_the_file(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    before = (tmp_path / "x.safetensors").read_bytes()
    view = reader.read("x")
    view.zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == before
    fresh = copy.deepcopy(reader).read("x")
    assert torch.equal(fresh, example(torch.float32))


def test_a_view_outlives_its_reader(tmp_path: Path) -> None:
    view = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4).read("x")
    assert torch.equal(view, example(torch.float32))


def test_nothing_warns_that_a_buffer_is_not_writable(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.int16)), 64, "I16", 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.read("x")


@needs_f4
def test_f4_has_two_values_in_each_element_of_the_last_dimension(tmp_path: Path) -> None:
    reader = written(tmp_path, bytes(range(12)), 8, "F4", 3, 8)
    read = reader.read("x")
    assert read.dtype == torch.float4_e2m1fn_x2
    assert read.shape == (3, 4)
    assert bits(reader.read("x", ((1, 3), (2, 6)))) == bytes([5, 6, 9, 10])
    with pytest.raises(ReadError, match="cuts a byte of two F4 values"):
        reader.read("x", ((0, 3), (1, 4)))


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bits(torch.tensor(3.5)))
    stored = {
        "scalar": StoredTensor("scalar", "x.safetensors", "F32", (), 0, 4),
        "empty": StoredTensor("empty", "x.safetensors", "BF16", (0, 5), 4, 4),
    }
    reader = Reader(tmp_path, stored)
    assert reader.read("scalar").item() == 3.5
    assert reader.read("empty").shape == (0, 5)
    assert reader.read("empty").dtype == torch.bfloat16


def test_an_unaligned_scalar(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(torch.tensor(3.5)), 3, "F32")
    assert torch.equal(reader.read("x"), torch.tensor(3.5))


@pytest.mark.parametrize("begin", [64, 65], ids=["aligned", "unaligned"])
def test_strided_tensors_of_torch_save(tmp_path: Path, begin: int) -> None:
    base = torch.arange(20, dtype=torch.float32)
    (tmp_path / "x.safetensors").write_bytes(bytes(begin) + bits(base))
    strided = base.as_strided((3, 4), (1, 5))
    stored = StoredTensor("x", "x.safetensors", "F32", (3, 4), begin, begin + 18 * 4, (1, 5))
    reader = Reader(tmp_path, {"x": stored})
    assert torch.equal(reader.read("x"), strided)
    assert torch.equal(reader.read("x", ((1, 2), (0, 3))), strided[1:2, 0:3])


def test_an_expanded_tensor_gets_memory_for_each_element(tmp_path: Path) -> None:
    """Writing to one element of a stride-0 view would change all."""
    (tmp_path / "x.safetensors").write_bytes(bits(torch.tensor([7.0])))
    reader = Reader(tmp_path, {"x": StoredTensor("x", "x.safetensors", "F32", (3,), 0, 4, (0,))})
    read = reader.read("x")
    read[0] = 1
    assert read.tolist() == [1, 7, 7]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_region_is_the_slice_of_the_whole_and_only_it_is_counted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple), "shape")
    offset = data.draw(st.integers(0, 9), "offset")
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    ends = [(data.draw(st.integers(0, n)), data.draw(st.integers(0, n))) for n in shape]
    region = tuple((min(pair), max(pair)) for pair in ends)
    folder = tmp_path_factory.mktemp("region")
    reader = written(folder, bits(tensor), offset, "I16", *shape)
    expected = tensor[tuple(slice(a, b) for a, b in region)]
    assert torch.equal(reader.read("x", region), expected)
    assert reader.bytes_read == expected.numel() * 2


def test_a_truncated_file_is_an_error_and_no_crash(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 8000, "F32", 3, 4)
    message = r"tensor 'x' should end at byte 8048 of 'x\.safetensors', but the file has only 8000"
    reader.read("x")
    os.truncate(tmp_path / "x.safetensors", 8000)
    with pytest.raises(ReadError, match=message):  # mapped before
        reader.read("x")
    with pytest.raises(ReadError, match=message):  # mapped now
        copy.deepcopy(reader).read("x")


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("gone.bin", "cannot open 'gone.bin': .*No such file"),
        ("empty.bin", "'empty.bin' is empty"),
        ("folder", "'folder' is not a file"),
        ("fifo", "'fifo' is not a file"),
        ("../outside.bin", "outside of"),
        ("/etc/passwd", "outside of"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, shard: str, message: str) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "empty.bin").touch()
    (tmp_path / "outside.bin").write_bytes(bytes(99))
    if hasattr(os, "mkfifo"):
        os.mkfifo(root / "fifo")
    reader = Reader(root, {"x": StoredTensor("x", shard, "F32", (2,), 0, 8)})
    with pytest.raises(ReadError, match=message) as caught:
        reader.read("x")
    assert "'x'" in str(caught.value)
    assert reader.faults(["x"]) == [str(caught.value)]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (StoredTensor("x", "x.safetensors"), "only the index was there"),
        (
            StoredTensor("x", "x.safetensors", "F32", (3,), 0, 8),
            r"takes 12 bytes, '.*' has 8",
        ),
        (
            StoredTensor("x", "x.safetensors", "F32", (1,), 0, 8),
            r"takes 4 bytes, '.*' has 8",
        ),
        (StoredTensor("x", "x.safetensors", "F32", (2, 2), 0, 8, (1, 1)), "takes 12 bytes"),
        (StoredTensor("x", "x.safetensors", "F6_E2M3", (4,), 0, 3), "no dtype for 'F6_E2M3'"),
        pytest.param(
            StoredTensor("x", "x.safetensors", "F4", (3,), 0, 2),
            "does not fill whole bytes",
            marks=needs_f4,
        ),
    ],
)
def test_what_cannot_be_a_tensor_is_refused(
    tmp_path: Path, stored: StoredTensor, message: str
) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(8))
    with pytest.raises(ReadError, match=message) as caught:
        Reader(tmp_path, {"x": stored}).read("x")
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize("region", [((0, 4), (0, 4)), ((2, 1), (0, 4)), ((0, 3),), ((-1, 1),) * 2])
def test_a_region_outside_of_the_tensor_is_refused(
    tmp_path: Path, region: tuple[tuple[int, int], ...]
) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    with pytest.raises(ReadError, match=r"is not inside tensor 'x' \[3, 4\]"):
        reader.read("x", region)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="tensor 'y' is not in the checkpoint"):
        Reader(tmp_path, {}).read("y")


def test_a_pickled_reader_opens_the_files_again(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    reader.read("x")
    again = pickle.loads(pickle.dumps(reader))
    assert torch.equal(again.read("x"), example(torch.float32))
    assert again.bytes_read == 48


def test_threads_share_one_mapping_and_lose_no_count(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(reader.read, ["x"] * 400))
    assert len({tensor.data_ptr() for tensor in read}) <= 8  # one, and what racing threads mapped
    assert len({tensor.data_ptr() for tensor in read[-50:]}) == 1
    assert reader.bytes_read == 400 * 48


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_what_its_parent_had_mapped(tmp_path: Path) -> None:
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    reader.read("x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: torch has threads
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(reader.read("x"), example(torch.float32)) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    """With the default overcommit policy a plain private mapping of it fails with ENOMEM."""
    size = 1 << 42
    try:
        with (tmp_path / "x.safetensors").open("wb") as file:
            file.truncate(size)  # a hole, which takes no space
    except OSError:
        pytest.skip("the file system does not have files of this size")
    stored = StoredTensor("x", "x.safetensors", "F32", (2,), size - 8, size)
    assert Reader(tmp_path, {"x": stored}).read("x").tolist() == [0, 0]


def test_a_file_written_to_while_in_use_is_refused_and_not_read_anew(tmp_path: Path) -> None:
    """Same size, same names, other bytes: nothing else would tell."""
    reader = written(tmp_path, bits(example(torch.float32)), 64, "F32", 3, 4)
    reader.read("x")
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.write(b"other bytes")
    os.utime(tmp_path / "x.safetensors", ns=(0, 1))
    with pytest.raises(ReadError, match=r"'x\.safetensors' was written to"):
        reader.read("x")


def test_a_file_that_was_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    expected = example(torch.float32)
    reader = written(tmp_path, bits(expected), 64, "F32", 3, 4)
    reader.read("x")
    (tmp_path / "new").write_bytes(bytes(2000))
    (tmp_path / "new").replace(tmp_path / "x.safetensors")
    assert torch.equal(reader.read("x"), expected)


def test_a_torch_file_is_copied_because_torch_save_truncates_it(tmp_path: Path) -> None:
    expected = example(torch.float32)
    (tmp_path / "x.pt").write_bytes(bits(expected))
    stored = StoredTensor("x", "x.pt", "F32", (3, 4), 0, expected.nbytes)
    tensor = Reader(tmp_path, {"x": stored}).read("x")
    os.truncate(tmp_path / "x.pt", 0)
    assert torch.equal(tensor, expected)
