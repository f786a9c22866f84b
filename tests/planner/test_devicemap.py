"""Device maps: emitted compact, and read with every fault named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.placement.devicemap import compact, expand
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.placement import Placement, place

LAYERS = [f"model.layers.{i}.{part}.weight" for i in range(12) for part in ("attn", "mlp")]
NAMES = ["model.embed.weight", *LAYERS, "model.norm.weight"]
TREE = ModuleTree(
    dict.fromkeys(NAMES, 100),
    ("", "model", "model.act", "head"),
    units=frozenset(f"model.layers.{i}" for i in range(12)),
    aliases={"head.weight": "model.embed.weight"},
)


def placed(
    device_map: Mapping[str, object],
    tree: ModuleTree = TREE,
    max_memory: Mapping[Device, int | None] | None = None,
) -> Placement:
    return place(tree, device_map=device_map, max_memory=max_memory or {})


def told(placement: Placement, code: str) -> str:
    """Return the only message of that code."""
    (message,) = [f.message for f in placement.findings if f.code == code]
    return message


def test_the_longest_key_decides_in_whole_segments() -> None:
    device_map = {"": 0, "layers.1": 1, "layers.1.a.w": 2}
    names = ["layers.1.a.w", "layers.1.b.w", "layers.10.a.w", "layers.1a.w", "head"]
    keys = expand(device_map, names)
    assert [device_map[keys[name]] for name in names] == [2, 1, 0, 0, 0]


def test_names_that_no_key_covers_are_left_out() -> None:
    assert expand({"layers.1": 0}, ["layers.10.w", "layers.1.w"]) == {"layers.1.w": "layers.1"}


def test_layers_1_does_not_claim_layers_10() -> None:
    """transformers 5.24 sends layers.10 to the device of layers.1."""
    placement = placed({"": "cpu", "model.layers.1": "disk"})
    assert placement.ok
    assert placement.devices["model.layers.1.mlp.weight"] == "disk"
    assert placement.devices["model.layers.10.mlp.weight"] == "cpu"
    assert placement.device_map["model.layers.10"] == "cpu"


def test_a_parent_with_an_exception_becomes_disjoint_prefixes() -> None:
    """accelerate fails on it with a meta error; so does transformers."""
    placement = placed({"model": "cpu", "head": "cpu", "model.layers.3": "disk"})
    layers = {f"model.layers.{i}": "disk" if i == 3 else "cpu" for i in range(12)}
    assert dict(placement.device_map) == {
        "model.embed": "cpu", **layers, "model.norm": "cpu", "head": "cpu",
    }  # fmt: skip
    assert placement.ok


def test_an_exception_down_to_one_tensor_is_kept() -> None:
    tree = ModuleTree({"a.w": 1, "a.b": 1, "c.w": 1}, ("",))
    placement = placed({"": 0, "a.b": 1}, tree)
    assert dict(placement.device_map) == {"a.w": 0, "a.b": 1, "c": 0}


def test_one_device_for_all_is_one_key() -> None:
    placement = placed({"model": 1, "head": 1})
    assert dict(placement.device_map) == {"": 1}
    assert placement.reasons[""] == "given as 'model', 'head'"


def test_every_spelling_of_a_device_is_read() -> None:
    import torch

    given = {"model": torch.device("cuda:1"), "head": "cuda:1"}
    assert dict(placed(given).device_map) == {"": 1}
    mixed = placed({"model": torch.device("cpu"), "head": "cpu"})
    assert dict(mixed.device_map) == {"": "cpu"}


def test_a_key_for_a_module_without_tensors_is_harmless_and_left_out() -> None:
    placement = placed({"model": 0, "head": 0, "model.act": 1})
    assert placement.findings == ()
    assert dict(placement.device_map) == {"": 0}


def test_a_key_that_matches_nothing_is_an_error_with_the_nearest_names() -> None:
    placement = placed({"": 0, "model.layer.3": 1})
    assert not placement.ok
    message = told(placement, "device-map-unknown-key")
    assert "key 'model.layer.3' of the device map is no module and no tensor" in message
    assert "'model.layers.3'" in message


def test_tensors_without_a_device_are_listed_by_module() -> None:
    """accelerate names the first one only."""
    placement = placed({"model.embed": 0, "model.layers": 0, "head": 0})
    assert told(placement, "device-map-incomplete") == (
        "the device map has no device for 1 tensors, those of 'model.norm'; "
        "add these modules, or '' for all that is not named"
    )
    many = told(placed({"head": 0}), "device-map-incomplete")
    assert "for 26 tensors" in many
    assert "… and 16 more" in many


def test_a_computed_buffer_may_be_left_out_and_goes_to_the_main_device() -> None:
    """accelerate leaves it where it is, and the forward pass fails (transformers#34456)."""
    tree = ModuleTree(
        {"layers.w": 1, "rotary.inv_freq": 1},
        ("",),
        buffers=frozenset({"rotary.inv_freq"}),
        computed=frozenset({"rotary.inv_freq"}),
    )
    placement = placed({"layers": 1}, tree)
    assert placement.ok
    assert dict(placement.device_map) == {"": 1}
    assert "'rotary.inv_freq'" in told(placement, "device-map-buffer")


def test_a_tie_torn_apart_is_an_error_with_both_names_and_devices() -> None:
    placement = placed({"model": 0, "head": 1})
    assert not placement.ok
    assert told(placement, "ties-torn") == (
        "'model.embed.weight' on 0, 'head.weight' on 1: "
        "these are one tensor and must be on one device"
    )


def test_companions_torn_apart_are_an_error() -> None:
    tree = ModuleTree({"a.blocks": 1, "a.scales": 1}, ("",), together=(("a.blocks", "a.scales"),))
    placement = placed({"a.blocks": 0, "a.scales": "cpu"}, tree)
    assert not placement.ok
    assert "'a.blocks' on 0, 'a.scales' on 'cpu'" in told(placement, "companions-torn")


def test_a_split_unit_is_a_warning_with_its_name() -> None:
    placement = placed({"": 0, "model.layers.2.mlp": 1})
    assert placement.ok
    assert "module 'model.layers.2' must not be split" in told(placement, "unit-split")


def test_two_devices_for_one_key_are_an_error() -> None:
    placement = placed({"": 0, "model": 0, "model.": 1})
    assert not placement.ok
    assert "'model' is twice in the device map, on 0 and on 1" in told(
        placement, "device-map-conflict"
    )


def test_a_key_that_longer_keys_cover_wholly_is_a_warning() -> None:
    tree = ModuleTree({"a.w": 1, "b.w": 1}, ("",))
    placement = placed({"": 0, "a": 1, "b": 1}, tree)
    assert placement.ok
    assert "key '' of the device map decides nothing" in told(placement, "device-map-idle-key")


def test_an_idle_key_does_not_make_the_main_device() -> None:
    tree = ModuleTree({"a.w": 1, "b.w": 1}, ("",))
    assert placed({"": 0, "a": 1, "b": "cpu"}, tree).main_device == 1


@pytest.mark.parametrize("device", ["gpu", None, "cuda:x", 1.5])
def test_an_unknown_device_is_an_error_that_says_what_is_allowed(device: object) -> None:
    placement = placed({"": 0, "head": device})
    assert not placement.ok
    message = told(placement, "device-map-device")
    assert message.startswith(f"'head' of the device map: device {device!r} is not known: give ")


def test_all_faults_of_a_map_are_told_at_once() -> None:
    placement = placed({"model": 0, "head": "gpu", "tail": 1, "model.embed": "disk"})
    assert {f.code for f in placement.findings if f.severity == "error"} == {
        "device-map-device", "device-map-unknown-key", "device-map-incomplete",
    }  # fmt: skip


def test_more_than_a_device_has_is_an_error_with_the_bytes() -> None:
    placement = placed({"": 0, "model.layers": "cpu"}, max_memory={0: 150, "cpu": 10_000})
    assert placement.memory[0] == (150, 200)
    assert told(placement, "over-capacity") == (
        "the device map puts 200 B on 0, which has 150 B; move 50 B elsewhere"
    )


def test_no_room_to_move_in_what_is_offloaded_is_a_warning() -> None:
    placement = placed({"": 0, "model.layers": "cpu"}, max_memory={0: 250, "cpu": 10_000})
    assert placement.ok
    message = told(placement, "no-room-for-streaming")
    assert "50 B are left on 0, less than 'model.layers.0' needs" in message


def test_the_main_device_is_the_first_in_the_map_that_computes() -> None:
    """accelerate takes any, in the order of a set of strings."""
    assert placed({"": "xpu:1", "model.layers": "xpu:0"}).main_device == "xpu:1"
    assert placed({"": "disk", "model.layers": "cpu"}).main_device == "cpu"


def test_cpu_beside_mps_counts_as_mps_with_a_warning() -> None:
    """accelerate moves those modules to mps: they are not offloaded, and it is where they run."""
    placement = placed({"": "mps", "model.layers": "cpu"})
    assert {d: m.used_bytes for d, m in placement.memory.items()} == {"mps": 2600}
    assert "to 'mps'" in told(placement, "device-map-mps")


def test_own_tensors_of_a_split_module_on_disk_are_told() -> None:
    tree = ModuleTree({"m.pos": 1, "m.a.w": 1, "m.b.w": 1}, ("",))
    placement = placed({"": "disk", "m.a": "cpu"}, tree)
    assert "'m.pos' is on 'disk'" in told(placement, "own-tensor-on-disk")
    assert placed({"": "disk"}, tree).findings == ()


def test_own_tensors_of_a_module_that_runs_on_two_accelerators_are_told() -> None:
    tree = ModuleTree({"m.pos": 1, "m.a.w": 1, "m.b.w": 1}, ("",))
    message = told(placed({"": 0, "m.b": 1}, tree), "own-tensor-apart")
    assert "'m.pos' belong to 'm' itself, whose parts run on 0, 1" in message
    assert placed({"": 0, "m.b": "cpu"}, tree).findings == ()


MODULES = st.lists(st.sampled_from("abc"), max_size=3).map(".".join)
TENSORS = st.tuples(MODULES, st.sampled_from("wv")).map(lambda p: ".".join(filter(None, p)))


@settings(deadline=None)
@given(
    st.dictionaries(TENSORS, st.sampled_from([0, 1, "cpu", "disk"]), min_size=1),
)
def test_the_emitted_map_says_the_same_and_is_disjoint_and_smallest(
    devices: dict[str, Device],
) -> None:
    tree = ModuleTree(dict.fromkeys(devices, 1), ("",))
    emitted = compact(tree, devices)
    keys = expand(emitted, tree.tensors)
    assert {name: emitted[key] for name, key in keys.items()} == devices
    for key in emitted:
        others = [other for other in emitted if other != key]
        assert not any(key == "" or other.startswith(f"{key}.") for other in others)
        owner = key.rpartition(".")[0]
        inside = [name for name in devices if not owner or name.startswith(f"{owner}.")]
        assert key == "" or len({devices[name] for name in inside}) > 1
    order = {name: n for n, name in enumerate(tree.tensors)}
    firsts = [min(order[n] for n, k in keys.items() if k == key) for key in emitted]
    assert firsts == sorted(firsts)


@settings(deadline=None)
@given(st.dictionaries(TENSORS | MODULES, st.sampled_from([0, 1, "cpu", "disk"])))
def test_any_map_is_read_without_an_exception_and_complete_or_refused(
    device_map: dict[str, Device],
) -> None:
    tree = ModuleTree({"w": 1, "a.w": 1, "a.b.w": 2, "a.b.v": 2, "b.w": 3, "c.a.b.w": 4}, ("",))
    placement = placed(device_map, tree)
    if placement.ok:
        assert list(placement.devices) == list(tree.tensors)
        assert sum(m.used_bytes for m in placement.memory.values()) == 13
