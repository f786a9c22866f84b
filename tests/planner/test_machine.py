"""Descriptions of machines: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelquirks.planner.placement.machine import (
    Machine,
    MachineError,
    described,
    read_machine,
    shipped_machines,
)


@pytest.mark.parametrize("name", shipped_machines())
def test_every_machine_that_ships_can_be_planned_for(name: str) -> None:
    machine = read_machine(name)
    assert "disk" in machine.devices
    assert all(machine.memory[device] for device in machine.devices if device != "disk")
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_a_file_describes_a_machine_in_gb_per_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"devices": {"disk": {}, "0": {"capacity": "2GiB", "read_gb_per_s": 500}}, '
        '"crossing_us": 10}'
    )
    machine = read_machine(str(path))
    assert list(machine.devices) == [0, "disk"]
    assert machine[0].read_rate == 500e9 and machine[0].link_rate == 24e9
    assert machine.crossing_seconds == pytest.approx(10e-6)
    assert machine[0].source == str(path)


def test_max_memory_wins_over_the_sizes_of_a_machine() -> None:
    limited = read_machine("24gb+64gb").limited({0: 5, "cpu": 7})
    assert limited.memory == {0: 5, "cpu": 7}
    assert limited[0].read_rate == 800e9


def test_all_faults_of_a_description_are_told_at_once() -> None:
    devices = {
        "0": {"read_gb_per_s": -1, "capacity": "2Gb"},
        "cuda:0": {"capacity": 5},
        "tpu": {},
        "cpu": {"capacity": "1GiB", "link_gb_per_s": 3, "speed": 1},
    }
    with pytest.raises(MachineError) as error:
        described({"devices": devices, "crossing_us": 0, "gpus": 1}, "m")
    for part in (
        "key 'gpus' is not known", "read_gb_per_s -1 is not a positive number",
        "bits or bytes", "device 'tpu'", "link_gb_per_s is of accelerators",
        "key 'speed' is not known", "crossing_us 0 is not a positive number",
    ):  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"devices": {}}', '{"devices": 3}'])
def test_what_is_no_description_is_told_what_one_looks_like(text: str) -> None:
    with pytest.raises(MachineError, match=r'must be an object with "devices"'):
        described(json.loads(text), "m")


def test_an_unknown_machine_is_told_which_there_are() -> None:
    with pytest.raises(MachineError, match=r"none of .*24gb\+64gb.*nor a file"):
        read_machine("h200")
