"""Sizes, devices and max_memory, as people and accelerate write them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from accelerate.utils import get_max_memory
from accelerate.utils.modeling import convert_file_size_to_int
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.placement.memory import (
    canonical_order,
    normalize_max_memory,
    parse_device,
    parse_max_memory,
    parse_size,
    show_bytes,
    this_machine,
)

UNITS = [p + i + "B" for p in "KkMmGg" for i in ("", "i", "I")]


@settings(deadline=None)
@given(st.integers(0, 10**6) | st.floats(0, 10**6), st.sampled_from(UNITS))
def test_a_size_with_a_unit_means_what_accelerate_means(number: float, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == convert_file_size_to_int(f"{number}{unit}")


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_a_number_is_bytes_exactly(n_bytes: int) -> None:
    assert parse_size(n_bytes) == parse_size(str(n_bytes)) == parse_size(f"{n_bytes}B") == n_bytes


def test_terabytes_which_accelerate_refuses_are_read() -> None:
    with pytest.raises(ValueError, match="not in a valid format"):
        convert_file_size_to_int("1TB")
    assert (parse_size("1TB"), parse_size("1.5 TiB")) == (10**12, 3 * 2**39)


def test_plain_digits_which_accelerate_refuses_are_bytes() -> None:
    with pytest.raises(ValueError, match="not in a valid format"):
        convert_file_size_to_int("500")
    assert (parse_size("500"), parse_size(499.9)) == (500, 499)


@pytest.mark.parametrize(
    ("size", "clear"),
    [("24Gb", "24GB"), ("24gb", "24GB"), ("24Gib", "24GiB"), ("1.5tib", "1.5TiB"), ("8b", "8B")],
)
def test_a_lower_case_b_is_refused_and_the_message_says_what_to_write(
    size: str, clear: str
) -> None:
    """accelerate reads 24Gb as 3 GB and 24Gib as 24 GiB, without a word."""
    assert convert_file_size_to_int("24Gb") == 3 * 10**9
    with pytest.raises(ValueError, match="bits or bytes") as caught:
        parse_size(size)
    assert f"'{clear}'" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (-1, "negative"),
        ("-5GB", "negative"),
        (float("nan"), "not finite"),
        ("inf", "not finite"),
        ("1e400GB", "not finite"),
        ("24G", "a number with a unit"),
        ("5IB", "a number with a unit"),
        ("", "a number with a unit"),
        ("lots", "a number with a unit"),
        ("1..5GB", "'1..5' is not a number"),
        (None, "not a number of bytes"),
        (True, "not a number of bytes"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(size: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(size)


@pytest.mark.parametrize(
    ("written", "device"),
    [
        (3, 3),
        ("3", 3),
        ("cuda:1", 1),
        ("cuda", 0),
        ("CPU", "cpu"),
        ("cpu:0", "cpu"),
        ("mps:0", "mps"),
        ("xpu:2", "xpu:2"),
        ("disk", "disk"),
    ],
)
def test_a_device_has_one_spelling(written: object, device: object) -> None:
    assert parse_device(written) == device


def test_a_torch_device_is_a_device() -> None:
    import torch

    assert [parse_device(torch.device(d)) for d in ("cpu", "cuda:2", "mps")] == ["cpu", 2, "mps"]


@pytest.mark.parametrize("written", [None, True, 1.0, -1, "gpu", "meta", "cuda:", "cpu:1", ""])
def test_what_is_no_device_is_refused_with_what_is_allowed(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not known: give an accelerator's number \(0"):
        parse_device(written)


def test_devices_are_filled_accelerators_first_by_number_then_cpu_then_disk() -> None:
    assert canonical_order(["disk", "cpu", 10, "mps", 2]) == [2, 10, "mps", "cpu", "disk"]


def test_the_command_line_gives_sizes_and_an_unlimited_disk() -> None:
    memory = parse_max_memory("disk, cpu=64GiB ,0=24GiB")
    assert list(memory.items()) == [(0, 24 * 2**30), ("cpu", 64 * 2**30), ("disk", None)]
    assert parse_max_memory("disk=5GB") == {"disk": 5 * 10**9}


def test_all_faults_of_max_memory_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="max_memory: ") as caught:
        parse_max_memory("cuda:1=5GB,1=6GB,gpu=3,cpu=5Gb,mps")
    told = str(caught.value)
    for part in (
        "device 1 is given twice",
        "device 'gpu' is not known",
        "device 'cpu': size '5Gb' does not say",
        "device 'mps' has no size; only 'disk' may be without one",
    ):
        assert part in told


def test_an_empty_max_memory_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match="no device in --max-memory: write for example '0=24GiB"):
        parse_max_memory(" , ")


def test_the_dict_of_the_caller_is_not_changed() -> None:
    """accelerate's get_max_memory replaces the strings in it."""
    theirs: dict[int | str, int | str] = {"cpu": "1KiB"}
    ours = {"cpu": "1KiB", "cuda:0": 5}
    get_max_memory(theirs)
    assert theirs == {"cpu": 1024}
    assert normalize_max_memory(ours) == {0: 5, "cpu": 1024}
    assert ours == {"cpu": "1KiB", "cuda:0": 5}


def test_no_size_is_refused_for_all_but_the_disk() -> None:
    assert normalize_max_memory({"disk": None}) == {"disk": None}
    with pytest.raises(ValueError, match=r"device 0 has no size; .* device 'cpu' has no size;"):
        normalize_max_memory({0: None, "cpu": None})


def test_normalizing_twice_changes_nothing() -> None:
    once = parse_max_memory("1=3GB,disk,cpu=5")
    assert normalize_max_memory(once) == once


def test_this_machine_is_what_accelerate_finds() -> None:
    found, theirs = this_machine(), get_max_memory()
    assert list(found) == canonical_order(theirs)
    assert all(isinstance(n_bytes, int) and n_bytes > 0 for n_bytes in found.values())


def test_of_a_single_gpu_90_percent_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 1000, "cpu": 5000}
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: dict(free))
    assert this_machine() == {0: 900, "cpu": 5000}
    free[1] = 1000
    assert this_machine() == {0: 1000, 1: 1000, "cpu": 5000}


def test_the_memory_of_the_cpu_can_be_asked_without_torch() -> None:
    code = (
        "import sys; from modelquirks.planner.placement.memory import this_machine; "
        "import modelquirks.planner.placement.placement; "
        "print(list(this_machine(ask_torch=False)), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['cpu'] False"


def test_bytes_are_shown_as_people_read_them() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1024, 3 * 2**40, None)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 TiB", "unlimited",
    ]  # fmt: skip
