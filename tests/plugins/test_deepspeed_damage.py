"""Damaged DeepSpeed checkpoints: each fault is named before anything is loaded."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.files import locate
from modelquirks.plugins.deepspeed.structure import Structure, read_structure

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OWN = "moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a checkpoint and gives the folder of its tag."""

    def copy(case: str) -> Path:
        shutil.copytree(DATA / case, tmp_path / case)
        return locate(tmp_path / case).path

    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a model file anew, under its own name, with something changed."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def said(structure: Structure, code: str) -> str:
    """Return the text of the one finding of that code."""
    (found,) = [finding for finding in structure.findings if finding.code == code]
    return found.message


def errors(structure: Structure) -> list[str]:
    return [finding.code for finding in structure.findings if finding.severity == "error"]


def last(structure: Structure) -> Finding:
    assert structure.findings[-1].code == "can-load"
    return structure.findings[-1]


# ---- files that are not there


def test_a_missing_rank_costs_only_the_masters_that_it_holds(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder / OPTIM.format(1)).unlink()
    structure = read_structure(folder)
    assert OPTIM.format(1) in said(structure, "rank-missing")
    # Rank 0 has 76 of 150 elements of the one group, 14 of 27 of the other.
    assert {*structure.masters} == {"lin1.bias", "norm.weight"}
    assert structure.lost_masters["norm.bias"] == OPTIM.format(1)
    assert len(structure.training) == 12
    text = last(structure).message
    assert "training weights: yes, all 12" in text and "fp32 masters: 2 of 7" in text


def test_all_ranks_missing_is_not_taken_for_zero_0(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    for rank in (0, 1):
        (folder / OPTIM.format(rank)).unlink()
    structure = read_structure(folder)
    assert structure.grid.stage == "unknown"
    assert all(OPTIM.format(rank) in said(structure, "rank-missing") for rank in (0, 1))
    assert "fp32 masters: no" in last(structure).message


def test_a_missing_model_file_takes_the_names_with_it(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder / MODEL).unlink()
    structure = read_structure(folder)
    assert MODEL in said(structure, "rank-missing")
    assert not structure.masters and not structure.training
    assert "lacking the model files" in last(structure).message


def test_a_missing_model_file_of_zero_3_costs_what_was_frozen(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("zero3_fp32")
    (folder / MODEL_3.format(1)).unlink()
    structure = read_structure(folder)
    assert MODEL_3.format(1) in said(structure, "rank-missing")
    assert structure.lost_masters == dict.fromkeys(
        ("frozen.weight", "frozen.bias"), MODEL_3.format(1)
    )
    assert structure.ties == {"head.weight": "emb.weight"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_model_file_of_zero_3_is_missed_where_nothing_was_frozen(
    rank: int, copied: Callable[[str], Path]
) -> None:
    folder = copied("zero3_fp32")
    for path in folder.glob("*model_states.pt"):
        edit(path, lambda s: s.update(frozen_param_shapes={}, frozen_param_fragments={}))
    (folder / MODEL_3.format(rank)).unlink()
    assert MODEL_3.format(rank) in said(read_structure(folder), "rank-missing")


def test_without_the_model_file_of_rank_0_the_tied_names_are_missed(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("zero3_fp32")
    (folder / MODEL_3.format(0)).unlink()
    structure = read_structure(folder)
    assert "'head.weight'" in said(structure, "parameter-missing")
    assert "emb.weight" in structure.masters


def test_a_missing_optimizer_file_of_zero_3_is_missed_by_all_that_reach_into_it(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("zero3_fp32")
    (folder / OPTIM.format(0)).unlink()
    structure = read_structure(folder)
    assert len(structure.lost_masters) == 7
    assert {*structure.masters} == {"frozen.weight", "frozen.bias", "scale", "count"}


def test_a_missing_layer_of_a_pipeline_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("pipeline_pp2_zero1")
    (folder / "layer_04-model_states.pt").unlink()
    structure = read_structure(folder)
    text = said(structure, "layer-missing")
    assert "'layer_04-model_states.pt'" in text and "'4.weight', '4.bias'" in text
    assert "4.weight" in structure.masters


def test_a_missing_expert_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("moe_ep2_zero2")
    name = "layer_0_expert_2_mp_rank_00_model_states.pt"
    (folder / name).unlink()
    structure = read_structure(folder)
    assert name in said(structure, "rank-missing")
    assert f"training weights: 16, lacking '{name}'" in last(structure).message
    assert f"{OWN}.2.0.weight" in structure.masters


# ---- files of another save


def test_both_spellings_of_masters_are_two_saves(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    other = locate(DATA / "zero2_bf16").path
    for rank in (0, 1):
        shutil.copy(other / f"bf16_{OPTIM.format(rank)}", folder)
    structure = read_structure(folder)
    assert f"'bf16_{OPTIM.format(1)}'" in said(structure, "stale-files")
    assert len(structure.masters) == 7 and errors(structure) == []
    files = {piece.shard for p in structure.masters.values() for piece in p.pieces}
    assert not any(file.startswith("bf16_") for file in files)


def test_ranks_beyond_the_grid_are_stale(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    shutil.copy(folder / OPTIM.format(1), folder / OPTIM.format(10))
    structure = read_structure(folder)
    assert OPTIM.format(10) in said(structure, "stale-files")
    assert len(structure.masters) == 7 and errors(structure) == []


def test_a_model_file_of_another_stage_is_stale(copied: Callable[[str], Path]) -> None:
    folder = copied("zero3_fp32")
    shutil.copy(locate(DATA / "zero2_fp32").path / MODEL, folder)
    structure = read_structure(folder)
    assert MODEL in said(structure, "stale-files")
    assert len(structure.masters) == 11


def test_a_rank_of_another_run_is_told_by_its_config(copied: Callable[[str], Path]) -> None:
    folder = copied("zero3_fp32")
    shutil.copy(locate(DATA / "zero3_hpz").path / OPTIM.format(1), folder)
    structure = read_structure(folder)
    text = said(structure, "mixed-saves")
    assert "'ds_config' differs" in text and OPTIM.format(1) in text
    assert "not to be trusted" in last(structure).message


def test_a_rank_of_another_step_is_told(copied: Callable[[str], Path]) -> None:
    folder = copied("zero3_fp32")
    edit(folder / MODEL_3.format(1), lambda state: state.update(global_steps=7))
    text = said(read_structure(folder), "mixed-saves")
    assert "'global_steps' differs" in text and f"'{MODEL_3.format(1)}': 7" in text


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32", "zero1_bf16"])
def test_masters_of_another_step_are_told(case: str, copied: Callable[[str], Path]) -> None:
    # As a save leaves them that was broken off in a folder of an older one: all else is the same.
    folder = copied(case)
    (path,) = folder.glob(f"*{OPTIM.format(1)}")
    stepped = read_structure(folder).grid.optims[1, 0]
    assert stepped.step == 3
    content = bytearray(path.read_bytes())
    inner = stepped.saved.value["optimizer_state_dict"]
    inner = inner["optimizer_state_dict" if case == "zero3_fp32" else "base_optimizer_state"]
    for group in inner["state"].values():
        begin = stepped.saved.place({"step": group["step"]}).tensors["step"].begin
        assert begin is not None
        content[begin : begin + 4] = struct.pack("<f", 2)
    path.write_bytes(content)
    text = said(read_structure(folder), "mixed-saves")
    assert "'step of the optimizer' differs" in text and f"{path.name!r}: 2.0" in text


def test_a_folder_that_was_renamed_is_told(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    moved = folder.rename(folder.parent / "global_step500")
    assert "'global_step500' holds files of step 3" in said(read_structure(moved), "tag-step")


# ---- files that are there under the wrong name


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32", "zero2_legacy_pickle"])
def test_swapped_ranks_are_told(case: str, copied: Callable[[str], Path]) -> None:
    folder = copied(case)
    swap(folder / OPTIM.format(0), folder / OPTIM.format(1))
    structure = read_structure(folder)
    texts = [f.message for f in structure.findings if f.code == "rank-swapped"]
    assert all(any(OPTIM.format(rank) in text for text in texts) for rank in (0, 1))
    assert "not to be trusted" in last(structure).message


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32", "zero2_legacy_pickle"])
def test_a_copy_of_another_rank_is_told(case: str, copied: Callable[[str], Path]) -> None:
    folder = copied(case)
    shutil.copy(folder / OPTIM.format(0), folder / OPTIM.format(1))
    structure = read_structure(folder)
    text = said(structure, "rank-copied")
    assert OPTIM.format(0) in text and OPTIM.format(1) in text
    assert "not to be trusted" in last(structure).message


# ---- files that disagree


def test_another_order_of_parameters_is_told_by_name(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")

    def reorder(state: dict[str, Any]) -> None:
        group = state["param_shapes"][1]
        group["lin1.bias"] = group.pop("lin1.bias")  # now last, the sum as it was

    edit(folder / MODEL, reorder)
    structure = read_structure(folder)
    texts = [f.message for f in structure.findings if f.code == "order"]
    assert len(texts) == 2 and "'lin1.bias'" in texts[0]
    assert "group-size" not in errors(structure)


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32"])
@pytest.mark.parametrize("rows", [2, 13])
def test_another_size_of_a_parameter_is_told(
    case: str, rows: int, copied: Callable[[str], Path]
) -> None:
    folder = copied(case)

    def resize(state: dict[str, Any]) -> None:
        state["param_shapes"][0]["lin2.weight"] = torch.Size((rows, 5))

    for path in folder.glob("*model_states.pt"):
        edit(path, resize)
    texts = [f.message for f in read_structure(folder).findings if f.code == "group-size"]
    assert texts and "in group 0, where its 3 parameters (from 'emb.weight') take" in texts[0]


def test_frozen_parameters_that_were_left_out_are_told(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")

    def exclude(state: dict[str, Any]) -> None:
        state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
        del state["module"]["frozen.weight"], state["module"]["frozen.bias"]

    edit(folder / MODEL, exclude)
    structure = read_structure(folder)
    assert MODEL in said(structure, "frozen-excluded")
    assert "frozen.weight" not in structure.best() and len(structure.best()) == 10


def test_slices_without_the_facts_how_to_join_are_not_joined(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("autotp2_zero1")
    for path in folder.glob("mp_rank*"):
        edit(path, lambda state: state.pop("universal_checkpoint_info"))
    structure = read_structure(folder)
    assert not structure.masters
    assert "tensor-parallel slices" in structure.lost_masters["lm_head.weight"]


def test_slices_are_joined_by_patterns_where_there_is_no_affine_map(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("autotp2_zero1")
    expected = {name: p[3:] for name, p in read_structure(folder).training.items()}
    for path in folder.glob("mp_rank*"):
        edit(path, lambda state: state["universal_checkpoint_info"].pop("affine_map"))
    found = {name: p[3:] for name, p in read_structure(folder).training.items()}
    assert {name: p[0] for name, p in found.items()} == {n: p[0] for n, p in expected.items()}
    assert {name: p[2:] for name, p in found.items() if p[3]} == {
        name: p[2:] for name, p in expected.items() if p[3]
    }


@pytest.mark.parametrize("case", ["zero1_bf16", "zero2_fp32", "pipeline_pp2_zero1"])
def test_masters_are_found_without_param_shapes(case: str, copied: Callable[[str], Path]) -> None:
    # As BF16_Optimizer has it with ZeRO 0: order and sizes are in the files of masters only.
    folder = copied(case)
    expected = read_structure(folder)
    for path in folder.glob("mp_rank*"):
        edit(path, lambda state: state.update(param_shapes=None))
    found = read_structure(folder)
    assert found.masters == expected.masters
    assert {*found.training} == {*expected.training}
    assert errors(found) == []


def test_ranks_of_experts_in_another_order_are_not_guessed(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("moe_ep2_zero2")
    edit(
        folder / MODEL,
        lambda state: state["ds_config"].update(use_data_before_expert_parallelism=True),
    )
    structure = read_structure(folder)
    assert "order of ranks" in structure.lost_masters[f"{OWN}.0.0.weight"]
    assert "emb.weight" in structure.masters and len(structure.training) == 20


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_with_another_order_of_parameters_is_told(
    rank: int, copied: Callable[[str], Path]
) -> None:
    folder = copied("zero3_fp32")

    def reorder(state: dict[str, Any]) -> None:
        group = state["param_shapes"][1]
        group["lin1.bias"] = group.pop("lin1.bias")

    edit(folder / MODEL_3.format(rank), reorder)
    assert "'param_shapes' differs" in said(read_structure(folder), "mixed-saves")


@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32"])
def test_another_number_of_groups_is_told(case: str, copied: Callable[[str], Path]) -> None:
    folder = copied(case)
    for path in folder.glob("*model_states.pt"):
        edit(path, lambda state: state["param_shapes"].pop())
    texts = [f.message for f in read_structure(folder).findings if f.code == "group-size"]
    assert len(texts) == 2 and "has 2 groups of masters" in texts[0] and "lists 1" in texts[0]


# ---- files that are broken


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_shapes", [7, {1: 2}, {"a": (1, -1)}]),
        ("param_shapes", {"a": 1}),
        ("module", [1, 2]),
        ("module", {"emb.weight": 3}),
        ("shared_params", {"head.weight": ["emb.weight"]}),
        ("frozen_param_shapes", [1]),
        ("frozen_param_fragments", {"frozen.weight": None}),
        ("dp_world_size", 10**12),
        ("mp_world_size", "two"),
        ("mp_world_size", 1 << 16),
        ("buffer_names", 5),
        ("ds_config", []),
        ("checkpoint_parallel_dimensions", {"pp_degree": 0, "tp_degree": 0}),
        ("num_experts", [10**12]),
        ("universal_checkpoint_info", {"affine_map": {"params": [1]}}),
    ],
)
@pytest.mark.parametrize("case", ["zero2_fp32", "zero3_fp32"])
def test_nonsense_in_a_model_file_is_no_crash(
    case: str, key: str, value: Any, copied: Callable[[str], Path]
) -> None:
    folder = copied(case)
    for path in folder.glob("*model_states.pt"):
        edit(path, lambda state: state.update({key: value}))
    assert last(read_structure(folder)).message


@pytest.mark.parametrize(
    ("case", "code"), [("zero2_fp32", "zip-truncated"), ("zero2_legacy_pickle", "data-truncated")]
)
def test_a_truncated_file_is_told_and_the_rest_is_had(
    case: str, code: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(case)
    path = folder / OPTIM.format(1)
    path.write_bytes(path.read_bytes()[:-300])
    structure = read_structure(folder)
    assert OPTIM.format(1) in said(structure, code)
    assert "lin1.bias" in structure.masters and len(structure.training) == 12


def test_a_page_in_place_of_a_file_is_told(copied: Callable[[str], Path]) -> None:
    folder = copied("zero3_fp32")
    (folder / OPTIM.format(0)).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    structure = read_structure(folder)
    assert OPTIM.format(0) in said(structure, "lfs-pointer")
    assert structure.lost_masters["emb.weight"] == OPTIM.format(0)


def test_a_pickle_that_would_run_a_program_is_told_and_not_run(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero2_fp32")
    mark = tmp_path / "ran"

    class Program:
        def __reduce__(self) -> tuple[Any, ...]:
            return eval, (f"open({str(mark)!r}, 'w')",)

    def add(state: dict[str, Any]) -> None:
        state["client"] = Program()

    edit(folder / MODEL, add)
    structure = read_structure(folder)
    assert "builtins.eval" in said(structure, "pickle-code")
    assert not mark.exists()
    assert len(structure.masters) == 7


# ---- folders


def test_without_latest_the_only_state_is_taken_and_said(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder.parent / "latest").unlink()
    structure = read_structure(folder.parent)
    assert "'global_step3'" in said(structure, "tag-guessed")


def test_without_latest_two_states_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder.parent / "latest").unlink()
    shutil.copytree(folder, folder.parent / "best")
    with pytest.raises(CheckpointError, match=r"2 saved states; .* 'best', 'global_step3'"):
        read_structure(folder.parent)
    assert read_structure(folder.parent, tag="best").folder.tag == "best"


def test_a_tag_may_have_any_characters(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder.parent / "latest").write_text("best [0.5]*?")
    folder.rename(folder.parent / "best [0.5]*?")
    structure = read_structure(folder.parent)
    assert len(structure.best()) == 12 and errors(structure) == []


def test_latest_that_names_nothing_is_told(copied: Callable[[str], Path]) -> None:
    folder = copied("zero2_fp32")
    (folder.parent / "latest").write_text("global_step9\n")
    with pytest.raises(CheckpointError, match=r"'latest' names 'global_step9'.*'global_step3'"):
        read_structure(folder.parent)


def test_a_universal_checkpoint_without_a_parameter_names_it(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("universal_from_zero3")
    shutil.rmtree(folder / "zero" / "lin2.bias")
    assert "'lin2.bias'" in said(read_structure(folder), "parameter-missing")


def test_a_universal_checkpoint_without_the_file_of_its_optimizer_is_still_one(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("universal_from_zero3")
    (folder / "zero" / "optimizer_state.pt").unlink()
    structure = read_structure(folder)
    assert not errors(structure)
    assert "'zero/optimizer_state.pt' is missing" in said(structure, "not-loaded")


def test_universal_files_that_are_one_and_the_same_are_named(
    copied: Callable[[str], Path],
) -> None:
    zero = copied("universal_from_zero3") / "zero"
    shutil.copyfile(zero / "lin1.bias" / "fp32.pt", zero / "lin2.bias" / "fp32.pt")
    text = said(read_structure(zero.parent), "equal-files")
    assert "'zero/lin1.bias/fp32.pt'" in text
    assert "'zero/lin2.bias/fp32.pt'" in text


@pytest.mark.parametrize("case", ["universal_from_zero3", "zero1_fp32", "zero3_fp32"])
def test_another_file_under_the_name_of_model_states_is_named(
    case: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(case)
    model = next(folder.glob("*model_states.pt"))
    torch.save({"param": torch.ones(3)}, model)
    text = said(read_structure(folder), "state-invalid")
    assert f"{model.name!r} has no 'module'" in text
    assert "it holds 'param'" in text


def test_a_universal_checkpoint_of_round_robin_gradients_is_refused() -> None:
    structure = read_structure(DATA / "universal_from_round_robin")
    assert "wrong names" in said(structure, "round-robin-universal")
    truth = load_file(DATA / "universal_from_round_robin" / "truth.safetensors")
    stored = {
        path.parent.name: torch.load(path)["param"]
        for path in structure.folder.path.glob("zero/*/fp32.pt")
    }
    wrong = [name for name, value in stored.items() if not torch.equal(value, truth[name])]
    assert "lin2.weight" in wrong  # as DeepSpeed 0.19.8 wrote it


def test_the_checkpoint_it_was_made_from_is_right_and_says_why_it_was_doubted() -> None:
    structure = read_structure(DATA / "zero2_round_robin")
    texts = [f.message for f in structure.findings if f.code == "round-robin"]
    assert len(texts) == 2 and "order of 'param_shapes' is taken" in texts[0]
    assert errors(structure) == []


def test_the_checkpoint_without_its_frozen_parameters_says_so() -> None:
    assert MODEL in said(read_structure(DATA / "zero2_exclude_frozen"), "frozen-excluded")
