"""Every weight of real DeepSpeed checkpoints, bit for bit, from byte ranges alone."""

import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.execution.reader import Region
from modelquirks.plugins.deepspeed.files import locate, parsed
from modelquirks.plugins.deepspeed.offers import logical_tensors, stored_pieces
from modelquirks.plugins.deepspeed.parameter import Parameter, recipe
from modelquirks.plugins.deepspeed.pieces import (
    addresses,
    from_partitions,
    from_shares,
    numel,
    partition_length,
    share_length,
)
from modelquirks.plugins.deepspeed.slices import joining
from modelquirks.plugins.deepspeed.structure import Structure, read_structure
from modelquirks.quirks.recipe import Reshape, TensorType, sources

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
CASES = sorted(
    path.parent.name
    for path in DATA.glob("*/truth.json")
    if path.parent.name != "universal_from_round_robin"  # has wrong values, and is refused
)
PLAIN = [case for case in CASES if not case.startswith("universal")]


def raw(folder: Path, stored: StoredTensor) -> torch.Tensor:
    """Read one byte range and nothing else."""
    assert stored.begin is not None and stored.end is not None and stored.dtype is not None
    with (folder / stored.shard).open("rb") as file:
        file.seek(stored.begin)
        content = bytearray(file.read(stored.end - stored.begin))
    assert len(content) == stored.nbytes
    dtype = to_torch(stored.dtype)
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat if stored.stride is None else flat.as_strided(stored.shape or (), stored.stride)


def value(folder: Path, parameter: Parameter) -> torch.Tensor:
    """Assemble a parameter by its definition."""
    fragments = [
        torch.cat([raw(folder, piece).reshape(-1) for piece in fragment.pieces]).reshape(
            fragment.shape
        )
        for fragment in parameter.fragments
    ]
    if not parameter.takes:
        return fragments[0]
    slabs = [
        fragments[take.fragment].narrow(parameter.dim, take.start, take.stop - take.start)
        for take in parameter.takes
    ]
    return torch.cat(slabs, parameter.dim)


def evaluated(folder: Path, parameter: Parameter, region: Region | None = None) -> torch.Tensor:
    """Assemble a parameter by its recipe, as plans do."""
    stored = {piece.name: piece for piece in parameter.pieces}
    assert len(stored) == len([*parameter.pieces])

    def read(name: str, part: Region | None) -> torch.Tensor:
        found = raw(folder, stored[name]).reshape(stored[name].shape or ())
        return found if part is None else found[tuple(slice(*bounds) for bounds in part)]

    def types(name: str) -> TensorType:
        return TensorType(stored[name].dtype, stored[name].shape)

    return evaluate(recipe(parameter), {}, read=read, types=types, schemes={}, region=region)


def assert_equal(
    structure: Structure, found: Mapping[str, Parameter], truth: Mapping[str, torch.Tensor]
) -> None:
    for name, expected in truth.items():
        parameter = found[name]
        assert parameter.shape == tuple(expected.shape), name
        for got in (
            value(structure.folder.path, parameter),
            evaluated(structure.folder.path, parameter),
        ):
            dtype = to_torch(parameter.dtype)
            assert got.dtype == dtype, name
            assert torch.equal(got, expected.to(dtype)), name


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_the_trained_one_bit_for_bit(case: str) -> None:
    structure = read_structure(DATA / case)
    truth = load_file(DATA / case / "truth.safetensors")
    best = structure.best()
    assert {*best} == {*truth}
    assert_equal(structure, best, truth)
    # What was trained is there in fp32 (ZeRO 0 in fp32 has no other), nothing is only a rounding.
    assert {p.dtype for p in best.values() if p.origin == "master"} <= {"F32"}
    assert not structure.lost_masters
    left_out = ["frozen-excluded"] if case == "zero2_exclude_frozen" else []
    assert [f.code for f in structure.findings if f.severity != "info"] == left_out


@pytest.mark.parametrize("case", PLAIN)
def test_training_weights_come_from_the_model_files_alone(case: str) -> None:
    structure = read_structure(DATA / case)
    truth = load_file(DATA / case / "truth.safetensors")
    if structure.grid.stage == "3":
        rest = set() if "autotp" in case else {"frozen.weight", "frozen.bias", "scale", "count"}
        assert {*structure.training} == rest
        truth = {name: t for name, t in truth.items() if name in rest}
    assert_equal(structure, structure.training, truth)
    files = {piece.shard for p in structure.training.values() for piece in p.pieces}
    assert not any("optim" in file for file in files)


def test_bf16_training_weights_are_rounded_masters() -> None:
    structure = read_structure(DATA / "zero1_bf16")
    assert structure.training["emb.weight"].dtype == "BF16"
    assert structure.masters["emb.weight"].dtype == "F32"
    assert structure.grid.stage == "bf16"


@pytest.mark.parametrize(
    ("case", "stage", "sizes"),
    [
        ("zero0_fp32", "0", (2, 1, 1)),
        ("zero1_fp32", "1", (2, 1, 1)),
        ("zero2_bf16", "2", (2, 1, 1)),
        ("zero3_hpz", "3", (2, 1, 1)),
        ("zero3_subgroups", "3", (2, 1, 1)),
        ("zero1_elastic", "1", (2, 1, 1)),
        ("pipeline_pp2_bf16_zero0", "bf16", (1, 2, 1)),
        ("autotp2_zero3", "3", (1, 1, 2)),
        ("autotp2_zero3_four_ranks", "3", (2, 1, 2)),
        ("zero2_three_ranks", "2", (3, 1, 1)),
        ("zero3_three_ranks", "3", (3, 1, 1)),
        ("pipeline_pp2_zero1", "1", (1, 2, 1)),
        ("pipeline_pp1_dp2_zero1", "1", (2, 1, 1)),
        ("autotp2_zero1", "1", (1, 1, 2)),
        ("moe_ep2_zero2", "2", (2, 1, 1)),
    ],
)
def test_stage_and_ranks_come_from_the_files(
    case: str, stage: str, sizes: tuple[int, int, int]
) -> None:
    grid = read_structure(DATA / case).grid
    assert (grid.stage, (grid.dp, grid.pp, grid.tp)) == (stage, sizes)
    assert grid.missing == grid.extra == ()


def test_ties_are_told_by_the_checkpoint() -> None:
    for case in ("zero1_fp32", "zero3_fp32"):
        assert read_structure(DATA / case).ties == {"head.weight": "emb.weight"}


def test_frozen_parameters_of_zero_1_are_taken_and_named() -> None:
    structure = read_structure(DATA / "zero1_fp32")
    assert structure.best()["frozen.weight"].origin == "frozen"
    (text,) = [f.message for f in structure.findings if f.code == "frozen-no-master"]
    assert "'frozen.weight', 'frozen.bias'" in text


def test_the_last_finding_says_what_can_be_loaded() -> None:
    last = read_structure(DATA / "zero3_fp32").findings[-1]
    assert last.code == "can-load" and "fp32 masters: yes, all 11" in last.message


def test_nothing_of_deepspeed_or_torch_is_imported() -> None:
    code = (
        "import sys; from modelquirks.plugins.deepspeed.structure import read_structure\n"
        f"s = read_structure({str(DATA / 'zero2_fp32')!r}); assert len(s.best()) == 12\n"
        "print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- names and folders


@pytest.mark.parametrize(
    ("name", "kind", "numbers"),
    [
        ("mp_rank_00_model_states.pt", "model", (0, 0)),
        ("zero_pp_rank_10_mp_rank_123_model_states.pt", "zero3-model", (10, 123)),
        ("zero_pp_rank_3_mp_rank_00optim_states.pt", "optim", (3, 0)),
        ("bf16_zero_pp_rank_3_mp_rank_02_optim_states.pt", "optim", (3, 2)),
        ("layer_03-model_01-model_states.pt", "layer", (0, 1)),
        ("layer_0_expert_12_mp_rank_00_model_states.pt", "expert", (0, 0)),
        ("expert_12_mp_rank_00_model_states.pt", "expert", (0, 0)),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "expert-optim", (1, 0)),
    ],
)
def test_names_of_files_are_understood(name: str, kind: str, numbers: tuple[int, int]) -> None:
    found = parsed(name)
    assert found is not None and (found.kind, (found.dp, found.mp)) == (kind, numbers)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "zero_pp_rank_0.pt", "xmp_rank_00_model_states.pt"]
)
def test_other_names_are_not(name: str) -> None:
    assert parsed(name) is None


def test_the_folder_of_a_tag_may_be_given_itself() -> None:
    assert locate(DATA / "zero2_fp32" / "global_step3").tag == "global_step3"
    assert locate(DATA / "zero2_fp32", "global_step3") == locate(DATA / "zero2_fp32")


def test_a_tag_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(CheckpointError, match=r"'other'.*there are 'global_step3'"):
        locate(DATA / "zero2_fp32", "other")
    with pytest.raises(CheckpointError, match="no folder with files of DeepSpeed"):
        locate(DATA / "zero2_fp32", "../zero3_fp32/global_step3")
    with pytest.raises(CheckpointError, match="holds no checkpoint of DeepSpeed"):
        locate(DATA)


# ---- arithmetic

SHAPES = st.lists(
    st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8
)


def flat(name: str, values: list[int], begin: int) -> StoredTensor:
    return StoredTensor(name, name, "F32", (len(values),), begin, begin + 4 * len(values))


def read(pieces: tuple[StoredTensor, ...], parts: Mapping[str, list[int]], base: int) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        assert piece.begin is not None and piece.end is not None
        found += parts[piece.shard][(piece.begin - base) // 4 : (piece.end - base) // 4]
    return found


@given(SHAPES, st.integers(1, 9), st.booleans(), st.data())
def test_partitions_give_back_what_was_flattened(
    shapes: list[tuple[int, ...]], count: int, stripped: bool, data: st.DataObject
) -> None:
    group = {f"p{i}": shape for i, shape in enumerate(shapes)}
    paddings = data.draw(
        st.lists(st.integers(0, 3), min_size=len(group), max_size=len(group)), label="paddings"
    )
    values: dict[str, list[int]] = {}
    row: list[int] = []
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        values[name] = [*range(len(row) + 1, len(row) + 1 + numel(shape))]
        row += values[name] + [0] * padding
    length = partition_length(len(row), count)
    padded = row + [0] * (length * count - len(row))
    cuts = [padded[i * length : (i + 1) * length] for i in range(count)]
    if stripped:
        keep = max(0, length - (length * count - len(row)))
        cuts[-1] = cuts[-1][:keep]
    parts = {f"r{i}": part for i, part in enumerate(cuts)}
    stored = [flat(name, part, 64) for name, part in parts.items()]
    found = from_partitions(group, stored, paddings=paddings)
    assert not found.lost
    assert {n: read(f.pieces, parts, 64) for n, f in found.fragments.items()} == values
    # Without one part, exactly the parameters that reach into it are lost.
    gone = data.draw(st.integers(0, count - 1), label="gone")
    absent = [None if i == gone else part for i, part in enumerate(stored)]
    held = addresses(group, count=count, part=gone, paddings=paddings)
    if any(part is not None and numel(part.shape or ()) for part in absent):
        assert {*from_partitions(group, absent, paddings=paddings).lost} == {*held}


@given(SHAPES, st.integers(1, 9))
def test_shares_give_back_what_was_cut(shapes: list[tuple[int, ...]], count: int) -> None:
    group = {f"p{i}": shape for i, shape in enumerate(shapes)}
    values: dict[str, list[int]] = {}
    parts: dict[str, list[int]] = {f"r{i}": [] for i in range(count)}
    start = 1
    for name, shape in group.items():
        values[name] = [*range(start, start + numel(shape))]
        start += numel(shape)
        length = share_length(shape, count)
        padded = values[name] + [0] * (length * count - numel(shape))
        for i, part in enumerate(parts.values()):
            part += padded[i * length : (i + 1) * length]
    stored = [flat(name, part, 64) for name, part in parts.items()]
    found = from_shares(group, stored)
    assert {n: read(f.pieces, parts, 64) for n, f in found.fragments.items()} == values


@given(SHAPES, st.integers(1, 9))
def test_the_accounts_of_all_ranks_cover_each_parameter_once(
    shapes: list[tuple[int, ...]], count: int
) -> None:
    group = {f"p{i}": shape for i, shape in enumerate(shapes)}
    held = [addresses(group, count=count, part=part) for part in range(count)]
    for name, shape in group.items():
        assert sum(part[name].numel for part in held if name in part) == numel(shape)


# ---- slices of tensor parallelism


def affine(logical: list[int], pieces: list[list[tuple[int, int, int]]], dim: int) -> object:
    """Write an affine map: of each rank (place in the whole, place in the slice, length)."""
    ranks: dict[int, object] = {}
    for number, slabs in enumerate(pieces):
        shard = [*logical]
        shard[dim] = sum(length for _, _, length in slabs)
        step = [logical[1], 1], [shard[1], 1]
        listed = []
        for at, start, length in slabs:
            shape = [*logical]
            shape[dim] = length
            source = [at * step[0][dim], step[0]]
            dest = [start * step[1][dim], step[1]]
            listed.append({"shape": shape, "source": source, "dest": dest})
        ranks[number] = {"shard_shape": shard, "pieces": listed}
    return {"affine_map": {"params": {"^w$": {"logical_shape": logical, "ranks": ranks}}}}


@pytest.mark.parametrize("dim", [0, 1])
def test_fused_slices_go_back_between_each_other(dim: int) -> None:
    # Two fused parts of 4, of which each rank has half: 0 1 | 4 5 and 2 3 | 6 7.
    info = affine([8, 8], [[(0, 0, 2), (4, 2, 2)], [(2, 0, 2), (6, 2, 2)]], dim)
    assert isinstance(info, dict)
    shard = (4, 8) if dim == 0 else (8, 4)
    found = joining("w", [shard, shard], info)
    assert found is not None and (found.shape, found.dim) == ((8, 8), dim)
    assert [tuple(take) for take in found.takes] == [(0, 0, 2), (1, 0, 2), (0, 2, 4), (1, 2, 4)]


def test_slices_with_a_gap_are_not_joined() -> None:
    info = affine([8, 8], [[(0, 0, 3)], [(4, 0, 4)]], 0)
    assert isinstance(info, dict)
    assert joining("w", [(3, 8), (4, 8)], info) is None


def test_patterns_say_the_dimension_and_what_is_replicated() -> None:
    info = {
        "parameter_with_row_parallelism_patterns": [r"^o\d+$"],
        "tp_replicated_parameter_patterns": ["^norm$"],
        "vocabulary_parameter_patterns": ["^emb$"],
        "original_vocab_size": 7,
    }
    found = [joining(name, [(4, 6), (4, 6)], info) for name in ("o1", "norm", "emb", "q")]
    assert [join and (join.shape, join.dim) for join in found] == [
        ((4, 12), 1),
        ((4, 6), 0),
        ((7, 6), 0),
        ((8, 6), 0),
    ]


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"parameter_with_sub_params": [{"patterns": ["^w$"]}]},
        {"parameter_to_average_patterns": ["^w$"]},
        {"tp_replicated_parameter_patterns": ["(a+)+$"]},
        {"tp_replicated_parameter_patterns": ["("]},
    ],
)
def test_what_is_not_told_is_not_guessed(info: Mapping[str, object]) -> None:
    assert joining("w", [(4, 6), (4, 6)], info) is None


@pytest.mark.parametrize("case", CASES)
def test_pieces_have_names_of_their_own_and_masters_do_not_overlap(case: str) -> None:
    structure = read_structure(DATA / case)
    for found in (structure.masters, structure.training):
        inside = {piece for parameter in found.values() for piece in parameter.pieces}
        assert len({piece.name for piece in inside}) == len(inside)
    masters = sorted(
        (piece.shard, piece.begin or 0, piece.end or 0)
        for parameter in structure.masters.values()
        for piece in parameter.pieces
    )
    assert all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(masters))


def test_a_recipe_is_the_pieces_joined_and_reshaped() -> None:
    made = recipe(read_structure(DATA / "zero3_fp32").masters["lin1.weight"])
    assert isinstance(made, Reshape) and made.shape == (7, 6)
    names = [leaf.name for leaf in sources(made)]
    assert names == ["lin1.weight@mp0g0.0", "lin1.weight@mp0g0.1"]


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_bf16", "autotp2_zero1"])
def test_a_region_of_a_parameter_can_be_had(case: str) -> None:
    structure = read_structure(DATA / case)
    truth = load_file(DATA / case / "truth.safetensors")
    wide = [p for p in structure.masters.values() if len(p.shape) == 2 and p.origin == "master"]
    assert wide
    for parameter in wide:
        got = evaluated(structure.folder.path, parameter, ((1, 4), (0, parameter.shape[1])))
        assert torch.equal(got, truth[parameter.name][1:4])


@pytest.mark.parametrize("case", CASES)
def test_logical_tensors_over_the_stored_pieces_make_every_weight(case: str) -> None:
    structure = read_structure(DATA / case)
    best = structure.best()
    pieces = stored_pieces(best.values())
    truth = load_file(DATA / case / "truth.safetensors")

    def read(name: str, part: Region | None) -> torch.Tensor:
        found = raw(structure.folder.path, pieces[name]).reshape(pieces[name].shape or ())
        return found if part is None else found[tuple(slice(*bounds) for bounds in part)]

    def types(name: str) -> TensorType:
        return TensorType(pieces[name].dtype, pieces[name].shape)

    made: dict[str, torch.Tensor] = {}
    for logical in logical_tensors(best):
        for name, member in logical.items():
            env = dict(zip(logical.bound.variables, member, strict=True))
            made[name] = evaluate(logical.bound.node, env, read=read, types=types, schemes={})
    assert {*made} == {*truth}
    assert all(torch.equal(made[name], truth[name].to(made[name].dtype)) for name in truth)


def test_layers_that_are_cut_alike_are_one_logical_tensor() -> None:
    structure = read_structure(DATA / "autotp2_zero1")
    found = {logical.name: logical for logical in logical_tensors(structure.masters)}
    assert len(found) == 12
    assert found["model.layers.{0}.self_attn.o_proj.weight"].members == ((0,), (1,))
