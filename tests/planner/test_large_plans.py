"""What makes planning of large checkpoints quick gives what the plain ways would give."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.fingerprint import layout_digest
from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.checkpoint.manifest import DtypeAndShape, Manifest, StoredTensor
from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.mapping.logical import from_renamed
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.outline import Outline, outlined
from modelquirks.planner.placement.placement import place
from modelquirks.planner.placement.tree import tree_of_checkpoint
from modelquirks.quirks.block import Block, Tails
from modelquirks.quirks.family import group
from modelquirks.quirks.resolve import Renamed

relaxed = settings(deadline=None)

segments = st.sampled_from(["a", "b", "layers", "0", "1", "07", "10", "x/3", "{0}", "٣"])
names = st.lists(
    st.lists(segments, min_size=1, max_size=4).map(".".join), min_size=1, max_size=9, unique=True
)


def written(folder: Path, *files: dict[str, int], odd: bool = False) -> Path:
    """Write int8 tensors of those lengths; *odd*: as no library writes it, so read by entry."""
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(files, 1):
        shard = f"model-{number}-of-{len(files)}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name, size in sizes.items():
            header[name] = {"dtype": "I8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = shard
        raw = json.dumps(header, separators=(",", ": " if odd else ":")).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    index = {"metadata": {"total_size": 1}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "quick", tmp_path / "plain"]
    for folder in made:
        folder.mkdir()
    return made


def test_tensors_made_on_demand_are_those_read_one_by_one(tmp_path: Path) -> None:
    files = {"layers.1.w": 3, "layers.0.w": 4, "norm": 0}, {"layers.2.w": 5, "head": 6}
    quick, plain = folders(tmp_path)

    lazy = open_manifest(written(quick, *files))
    read = open_manifest(written(plain, *files, odd=True))

    assert isinstance(lazy.tensors, LazyTensors)
    assert not isinstance(read.tensors, LazyTensors)
    assert [*lazy.tensors] == [*read.tensors]
    assert {n: t[2:4] for n, t in lazy.tensors.items()} == {
        n: t[2:4] for n, t in read.tensors.items()
    }
    assert lazy.sizes == read.sizes
    assert (lazy.total_bytes, lazy.has_headers) == (read.total_bytes, True) == (18, True)
    assert [f.code for f in lazy.findings] == [f.code for f in read.findings]
    assert lazy.families == read.families


def test_types_by_family_are_those_of_each_tensor(tmp_path: Path) -> None:
    files = {"layers.1.w": 3, "layers.0.w": 3, "h.0": 4}, {"layers.2.w": 3, "h.1": 6, "norm": 0}
    quick, plain = folders(tmp_path)

    for manifest in (
        open_manifest(written(quick, *files)),
        open_manifest(written(plain, *files, odd=True)),
    ):
        assert manifest.even_types == {"layers.{0}.w": ("I8", (3,)), "norm": ("I8", (0,))}
        assert manifest.uneven_types == {"h.{0}": [("I8", (4,)), ("I8", (6,))]}


def test_asking_for_types_never_costs_more_than_a_table_of_all() -> None:
    tails = Tails(["a", "b"])
    blocks = [Block(f"h.{number}.", tails) for number in range(3)]
    types = [(number, "I8", (number,)) for number in range(6)]
    lazy = LazyTensors(blocks, types, frozenset(), (), dict)

    assert [lazy.type_of(name) for name in ("h.1.b", "h.2.a")] == [types[3], types[4]]
    assert "by_name" not in vars(lazy)
    assert [lazy.type_of(name) for name in lazy] == types
    assert "by_name" in vars(lazy)
    with pytest.raises(KeyError):
        lazy.type_of("h.3.a")


kinds = ({"a": 3, "b.0": 3, "b.1": 3}, {"a": 3, "b.0": 3, "b.1": 4}, {"a": 5}, {"b.1": 3, "a": 3})
layers = st.lists(st.sampled_from(kinds), min_size=1, max_size=6)


@relaxed
@given(layers, st.booleans(), st.booleans())
def test_layers_in_files_of_their_own_are_read_as_they_would_be_one_by_one(
    drawn: list[dict[str, int]], with_index: bool, with_head: bool
) -> None:
    files = [
        {f"h.{number}.{tail}": size for tail, size in sizes.items()}
        for number, sizes in enumerate(drawn)
    ]
    files += [{"head": 2}] * with_head
    with TemporaryDirectory() as quick, TemporaryDirectory() as plain:
        lazy, read = (
            opened(Path(at), files, odd=odd, with_index=with_index)
            for at, odd in ((quick, False), (plain, True))
        )

        assert isinstance(lazy.tensors, LazyTensors)
        assert not isinstance(read.tensors, LazyTensors)
        assert [*lazy.tensors] == [*read.tensors]
        assert {n: t[2:4] for n, t in lazy.tensors.items()} == {
            n: t[2:4] for n, t in read.tensors.items()
        }
        assert all(lazy.dtype_of(name) == "I8" for name in read.tensors)
        assert lazy.sizes == read.sizes
        assert lazy.families == read.families
        assert [f.members for f in lazy.families.values()] == [
            f.members for f in read.families.values()
        ]
        assert (lazy.even_types, lazy.uneven_types) == (read.even_types, read.uneven_types)
        assert lazy.even_sizes == {
            t: size for t, kind in lazy.even_types.items() for size in sizes_in([kind])
        }
        assert lazy.uneven_sizes == {t: [*sizes_in(k)] for t, k in lazy.uneven_types.items()}


def opened(
    folder: Path, files: Sequence[dict[str, int]], *, odd: bool, with_index: bool
) -> Manifest:
    written(folder, *files, odd=odd)
    if not with_index:
        (folder / "model.safetensors.index.json").unlink()
    return open_manifest(folder)


def sizes_in(kinds: Sequence[DtypeAndShape]) -> Iterator[int]:
    return (shape[0] for _, shape in kinds if shape)


@relaxed
@given(names, st.data())
def test_a_model_takes_the_families_of_a_checkpoint_with_its_names_only(
    listed: list[str], data: st.DataObject
) -> None:
    wanted = data.draw(st.one_of(st.just(listed), st.permutations(listed), names))
    skeleton = Skeleton("test", {n: ModelTensor(n, "I8", (1,)) for n in wanted}, {})
    tensors = {n: StoredTensor(n, "f", "I8", (1,), 0, 1) for n in listed}

    skeleton.take_families(Manifest(Path(), Path(), "safetensors", tensors, (), {}))

    assert [*skeleton.families.items()] == [*group(wanted).items()]


def test_the_layout_tells_which_file_each_tensor_is_from(tmp_path: Path) -> None:
    one, other = folders(tmp_path)
    first = open_manifest(written(one, {"a": 1, "b": 1}, {"c": 1}))
    moved = open_manifest(written(other, {"a": 1}, {"b": 1, "c": 1}))

    assert layout_digest(first.tensors) == layout_digest(open_manifest(one).tensors)
    assert layout_digest(first.tensors) != layout_digest(moved.tensors)


@relaxed
@given(names, st.data())
def test_the_outline_of_a_checkpoint_is_that_of_its_whole_tree(
    listed: list[str], data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(0, 3)) for _ in listed]
    tensors = {
        n: StoredTensor(n, "f", "I8", (s,), 0, s) for n, s in zip(listed, sizes, strict=True)
    }
    types = [(size, "I8", (size,)) for size in sizes]
    lazy = LazyTensors([Block("", Tails(listed))], types, frozenset(), (), lambda: tensors)
    pieces = [from_renamed(Renamed(f, f.template)) for f in group(listed).values()]
    for held in (tensors, lazy):
        manifest = Manifest(Path(), Path(), "safetensors", held, (), {})

        outline = tree_of_checkpoint(manifest, pieces)

        assert outline is not None
        again = outlined(outline.whole).coarse
        assert outline.coarse == again
        assert [*outline.coarse.sizes.items()] == [*again.sizes.items()]
        assert outline.whole.sizes == dict(zip(listed, sizes, strict=True))


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    """Give a tree of up to four blocks of two levels, with ties, buffers and loose tensors."""
    sizes = {"embed.w": draw(st.integers(1, 9)), "scale": 1}
    buffers: set[str] = set()
    for block in range(draw(st.integers(1, 4))):
        for name in ("w", "attn.w", "attn.mask", "mlp.up.w"):
            if draw(st.booleans()):
                sizes[f"blocks.{block}.{name}"] = draw(st.integers(0, 9))
                if name == "attn.mask":
                    buffers.add(f"blocks.{block}.{name}")
    known = sorted(sizes)
    aliases = {"head.w": draw(st.sampled_from(known))} if draw(st.booleans()) else {}
    return ModuleTree(
        sizes=sizes,
        modules=("",),
        units=frozenset(f"blocks.{block}" for block in range(4)),
        aliases=aliases,
        buffers=frozenset(buffers),
        computed=frozenset(name for name in buffers if draw(st.booleans())),
        together=(("embed.w", draw(st.sampled_from(known))),) if draw(st.booleans()) else (),
    )


@relaxed
@given(
    trees(),
    st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"]),
    st.fixed_dictionaries(
        {"cpu": st.integers(0, 60)},
        optional={0: st.integers(0, 60), 1: st.integers(0, 60), "disk": st.none()},
    ),
    st.booleans(),
)
def test_counting_a_unit_as_one_tensor_places_it_as_its_tensors_would_be(
    tree: ModuleTree, policy: str, memory: Any, offload_buffers: bool
) -> None:
    whole = Outline(tree, lambda: tree)

    short = place(tree, device_map=policy, max_memory=memory, offload_buffers=offload_buffers)
    full = place(whole, device_map=policy, max_memory=memory, offload_buffers=offload_buffers)

    assert short == full
    assert list(short.devices) == list(full.devices)


@pytest.mark.parametrize("name", ["expert_{0}", "{0}x"])
def test_a_slot_inside_a_word_makes_no_block(name: str) -> None:
    family = group(["h.0.w", "h.1.w"])["h.{0}.w"]
    tensors = {n: StoredTensor(n, "f", "I8", (1,), 0, 1) for n in family.names}
    manifest = Manifest(Path(), Path(), "safetensors", tensors, (), {})

    outline = tree_of_checkpoint(manifest, [from_renamed(Renamed(family, f"h.{name}.w"))])

    assert outline is not None
    assert outline.coarse.units == frozenset()


def test_planning_without_a_model_imports_no_torch(tmp_path: Path) -> None:
    written(tmp_path, {"layers.0.w": 3}, {"layers.1.w": 4})
    code = (
        "import sys\n"
        "from modelquirks.planner import Dispatcher\n"
        f"plan = Dispatcher().plan({str(tmp_path)!r}, max_memory={{0: 4, 'cpu': 8}})\n"
        "assert plan.device_map, plan.problems\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
