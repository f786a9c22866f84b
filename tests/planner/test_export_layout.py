"""Where tensors lie in the files of an export: rules that hold for any tensors."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelquirks.planner.dtypes import BITS, nbytes
from modelquirks.planner.export.layout import index_of, lay_out


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


def of_sizes(*sizes: int) -> list[Tensor]:
    return [Tensor(f"t{number}", "U8", (size,)) for number, size in enumerate(sizes)]


dtypes = st.sampled_from(["U8", "F16", "BF16", "F32", "I64", "BOOL", "F8_E4M3"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
tensors = st.dictionaries(names, st.tuples(dtypes, shapes), min_size=1).map(
    lambda found: [Tensor(name, *kind) for name, kind in found.items()]
)


@given(tensors, st.integers(1, 200))
def test_every_tensor_lies_once_aligned_and_without_gaps(found: list[Tensor], limit: int) -> None:
    files = lay_out(found, shard_bytes=limit, stem="model", metadata={"format": "pt"})
    assert sorted(n for file in files for n in file.places) == sorted(t.name for t in found)
    wanted = {tensor.name: tensor for tensor in found}
    for file in files:
        end = len(file.head)
        for name, place in file.places.items():
            assert place.begin is not None and place.begin == end
            assert (place.dtype, place.shape) == wanted[name][1:]
            assert place.begin % (BITS[wanted[name].dtype] // 8) == 0
            end = place.begin + wanted[name].nbytes
        assert file.size_bytes == end
        header = json.loads(file.head[8:])
        assert len(file.head) == 8 + int.from_bytes(file.head[:8], "little")
        assert [name for name in header if name != "__metadata__"] == [*file.places]


@given(tensors, st.integers(1, 200))
def test_a_file_is_over_the_limit_only_for_a_single_tensor(found: list[Tensor], limit: int) -> None:
    for file in lay_out(found, shard_bytes=limit, stem="model", metadata={}):
        held = [place.nbytes or 0 for place in file.places.values()]
        assert sum(held) <= limit or sum(map(bool, held)) == 1


def test_files_are_filled_in_order_and_nothing_is_optimised() -> None:
    files = lay_out(of_sizes(6, 6, 2, 6, 2, 2), shard_bytes=10, stem="model", metadata={})
    assert [sum(p.nbytes or 0 for p in f.places.values()) for f in files] == [6, 8, 10]
    assert [f.name for f in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_one_file_has_no_number() -> None:
    (file,) = lay_out(of_sizes(6), shard_bytes=10, stem="adapter_model", metadata={})
    assert file.name == "adapter_model.safetensors"


@pytest.mark.parametrize("ties", [{}, {"head": "emb"}])
def test_the_index_says_the_file_of_each_tensor_and_all_bytes(ties: dict[str, str]) -> None:
    files = lay_out(of_sizes(6, 6), shard_bytes=10, stem="model", metadata={})
    assert json.loads(index_of(files, ties)) == {
        "metadata": {"total_size": 12, **ties},
        "weight_map": {
            "t0": "model-00001-of-00002.safetensors",
            "t1": "model-00002-of-00002.safetensors",
        },
    }
