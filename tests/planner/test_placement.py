"""Placement by policy: what fits is found, and what must stay together does."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.placement.devicemap import expand
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.placement import ModuleTree, Placement, place

KB = 1000
Memory = dict[Device, int | None]


def flat(*sizes: int) -> ModuleTree:
    """Return blocks b0, b1, … of *sizes*, none of which can be split."""
    return ModuleTree({f"b{n}.w": size for n, size in enumerate(sizes)}, ("",))


def placed(
    tree: ModuleTree, max_memory: Mapping[Device, int | None], policy: str = "auto"
) -> Placement:
    return place(tree, device_map=policy, max_memory=max_memory)


def used(placement: Placement) -> dict[Device, int]:
    return {device: memory.used_bytes for device, memory in placement.memory.items()}


def told(placement: Placement, code: str) -> str:
    """Return the only message of that code."""
    (message,) = [f.message for f in placement.findings if f.code == code]
    return message


# --- failures of accelerate 1.15's planner -----------------------------------------------------


def test_ten_blocks_fill_two_devices_to_the_brim() -> None:
    """accelerate sends one to the disk."""
    placement = placed(flat(*[10 * KB] * 10), {0: 50 * KB, 1: 50 * KB, "disk": None})
    assert used(placement) == {0: 50 * KB, 1: 50 * KB, "disk": 0}


def test_no_device_is_left_empty_while_blocks_that_would_fit_go_to_the_cpu() -> None:
    """accelerate leaves GPU 0 empty: it keeps room there for a block that is never offloaded."""
    for sizes in ([40, 60], [60, 40], [20, 60, 20], [20, 60, 20, 0], [50, 10, 40]):
        placement = placed(flat(*sizes), {0: 60, 1: 60, "cpu": 1000})
        assert set(placement.devices.values()) == {0, 1}
        assert used(placement)["cpu"] == 0


def test_going_back_to_an_earlier_device_finds_the_plan_that_fits() -> None:
    placement = placed(flat(30, 50, 10, 50, 20), {0: 60, 1: 60, 2: 50})
    assert placement.ok
    assert sum(used(placement).values()) == 160


def test_a_perfect_packing_is_found_where_first_fit_finds_none() -> None:
    placement = placed(flat(3, 3, 6, 4, 4, 5, 5), {0: 15, 1: 15})
    assert used(placement) == {0: 15, 1: 15}


@pytest.mark.parametrize("other", ["decoder", "head"])
def test_names_that_contain_one_another_are_no_kin(other: str) -> None:
    """accelerate: IndexError for head/lm_head and decoder/model.decoder, by substring tests."""
    tree = ModuleTree(
        {"model.decoder.embed.weight": 50, f"{other}.weight": 30, "mid.weight": 20},
        ("",),
        aliases={"lm_head.weight": "model.decoder.embed.weight"},
    )
    placement = placed(tree, {0: 50, 1: 50})
    assert placement.ok
    assert placement.devices["lm_head.weight"] == placement.devices["model.decoder.embed.weight"]
    assert used(placement) == {0: 50, 1: 50}


def test_a_persistent_buffer_of_a_split_module_has_a_device() -> None:
    """accelerate leaves it out of the map and then refuses the map."""
    tree = ModuleTree(
        {"blk.pos": 10, "blk.a.w": 50, "blk.b.w": 50}, ("",), buffers=frozenset({"blk.pos"})
    )
    placement = placed(tree, {0: 120 - 50, "cpu": 100, "disk": None}, "sequential")
    assert dict(placement.device_map) == {"blk.pos": 0, "blk.a": "cpu", "blk.b": "cpu"}
    fuller = placed(tree, {"cpu": 115, "disk": None})
    assert dict(fuller.device_map) == {"": "cpu"}
    partly = placed(tree, {"cpu": 110 - 1, "disk": None})
    assert partly.device_map["blk.pos"] == "cpu"
    assert "disk" in partly.device_map.values()


@pytest.mark.parametrize("ids", [(0, 1), (1, 2), (0, 2), (3, 7)])
def test_balanced_low_0_spares_the_first_device_whatever_its_number(ids: tuple[int, int]) -> None:
    """accelerate: KeyError for ids with gaps, or all on GPU 0 (#4297)."""
    first, second = ids
    roomy = placed(flat(*[10] * 10), {first: 200, second: 200}, "balanced_low_0")
    assert used(roomy) == {first: 0, second: 100}
    assert roomy.main_device == second
    tight = placed(flat(*[10] * 10), {first: 200, second: 75}, "balanced_low_0")
    assert used(tight) == {first: 30, second: 70}


def test_balanced_low_0_spares_the_first_device_even_out_of_order() -> None:
    placement = placed(flat(20, 50, 30, 40), {0: 60, 1: 60, 2: 60}, "balanced_low_0")
    assert used(placement) == {0: 40, 1: 50, 2: 50}


def test_a_device_without_memory_is_not_used() -> None:
    """accelerate's idiom to keep a GPU out; ZeroDivisionError and worse in places."""
    placement = placed(flat(10, 10), {0: 0, 2: 15, 5: 15}, "balanced_low_0")
    assert used(placement) == {0: 0, 2: 10, 5: 10}


def test_the_memory_of_the_caller_is_not_changed() -> None:
    memory: Memory = {"cpu": 50, 0: 60, "disk": None}
    placed(flat(60, 50, 40), memory)
    assert list(memory.items()) == [("cpu", 50), (0, 60), ("disk", None)]


# --- policies ----------------------------------------------------------------------------------


def test_sequential_fills_in_order_and_leaves_the_last_device_empty() -> None:
    placement = placed(flat(*[10] * 10), {0: 70, 1: 50, 2: 50}, "sequential")
    assert used(placement) == {0: 70, 1: 30, 2: 0}


@pytest.mark.parametrize("policy", ["auto", "balanced"])
@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([10] * 10, [20, 30, 20, 30]),
        ([10] * 5, [10, 10, 10, 20]),
        ([100, 1, 1, 1], [100, 1, 1, 1]),
        ([10] * 3, [10, 10, 10, 0]),
    ],
)
def test_what_fits_on_accelerators_is_spread_evenly(
    policy: str, sizes: list[int], shares: list[int]
) -> None:
    placement = placed(flat(*sizes), dict.fromkeys(range(4), 1000) | {"cpu": 9}, policy)
    found = [used(placement)[n] for n in range(4)]
    assert max(found) == max(shares)
    assert sorted(found) == sorted(shares)


@pytest.mark.parametrize("policy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_what_does_not_fit_on_accelerators_fills_them_before_cpu_and_disk(policy: str) -> None:
    placement = placed(flat(*[10] * 10), {0: 35, "cpu": 40, "disk": None}, policy)
    assert used(placement) == {0: 20, "cpu": 40, "disk": 40}
    assert placement.main_device == 0
    assert "10 B on 0 are left free for 'b2'" in told(placement, "room-for-streaming")


def test_no_room_for_streaming_is_kept_when_nothing_is_offloaded() -> None:
    assert used(placed(flat(10, 10), {0: 20, "cpu": 100})) == {0: 20, "cpu": 0}


def test_without_an_accelerator_the_cpu_is_filled_before_the_disk() -> None:
    placement = placed(flat(*[10] * 10), {"cpu": 35, "disk": None})
    assert used(placement) == {"cpu": 20, "disk": 80}
    assert placement.main_device == "cpu"


def test_a_disk_alone_is_read_while_running_on_the_cpu() -> None:
    placement = placed(flat(10, 10), {"disk": None})
    assert dict(placement.device_map) == {"": "disk"}
    assert placement.main_device == "cpu"


def test_a_large_first_block_does_not_stop_the_others_from_using_the_accelerator() -> None:
    """Room for the largest block would leave nothing: it stays, and room for the next is kept."""
    placement = placed(flat(60, *[10] * 10), {0: 100, "cpu": 90})
    assert used(placement) == {0: 90, "cpu": 70}


def test_an_accelerator_too_small_for_streaming_is_not_used_and_that_is_told() -> None:
    placement = placed(flat(10, 10), {0: 5, "cpu": 100})
    assert dict(placement.device_map) == {"": "cpu"}
    assert "the model runs on 'cpu': on 0 is no room" in told(placement, "accelerator-unused")


def test_a_device_with_nothing_on_it_is_not_the_main_device() -> None:
    """dispatch_model by itself would run such a model on the cpu, which has no room to stream."""
    assert not placed(flat(3, 3, 6, 4, 4, 5, 5), {0: 6, "cpu": 15, "disk": 15}).ok
    assert placed(flat(3, 3, 6, 4, 4, 5, 5), {0: 9, "cpu": 15, "disk": 15}).main_device == 0


def test_of_a_module_that_may_be_split_only_the_largest_part_needs_room_to_run() -> None:
    """accelerate moves in the tensors of one module at a time, beside those of its owners."""
    parts = {f"layers.{n}.{part}": 40 for n in range(20) for part in ("a.w", "b.w")}
    tree = ModuleTree({**parts, **{f"layers.{n}.scale": 5 for n in range(20)}}, ("",))
    placement = placed(tree, {0: 900, "cpu": None}, "sequential")
    assert placement.device_map["layers.19"] == "cpu"
    assert told(placement, "room-for-streaming").startswith("45 B on 0 are left free")
    assert used(placement)[0] == 85 * 10
    cheapest = placed(tree, {0: 900, "cpu": None})
    assert told(cheapest, "room-for-streaming").startswith("40 B on 0 are left free")
    assert used(cheapest)["cpu"] < used(placement)["cpu"]


def test_cpu_beside_mps_is_not_used() -> None:
    """accelerate moves it to mps and keeps it there: the memory is one."""
    placement = placed(flat(*[10] * 10), {"mps": 50, "cpu": 90, "disk": None})
    assert used(placement) == {"mps": 40, "cpu": 0, "disk": 60}
    assert "'cpu' is not used" in told(placement, "device-map-mps")


def test_buffers_of_offloaded_modules_count_on_the_main_device() -> None:
    tree = ModuleTree(
        {f"b{n}.{leaf}": 10 for n in range(4) for leaf in ("w", "mask")},
        ("",),
        buffers=frozenset(f"b{n}.mask" for n in range(4)),
    )
    memory: Memory = {0: 65, "cpu": 100}
    kept = place(tree, device_map="auto", max_memory=memory)
    assert used(kept) == {0: 50, "cpu": 30}
    offloaded = place(tree, device_map="auto", max_memory=memory, offload_buffers=True)
    assert used(offloaded) == {0: 40, "cpu": 40}


def test_an_unknown_policy_is_refused_with_the_map_for_one_device() -> None:
    with pytest.raises(ValueError, match=r"'cpu' is not known: give one of auto, .*\{'': 'cpu'\}"):
        placed(flat(1), {"cpu": 10}, "cpu")


def test_a_model_without_tensors_is_on_the_main_device() -> None:
    placement = placed(ModuleTree({}, ("", "act")), {1: 5, "cpu": 5})
    assert dict(placement.device_map) == {"": 1}


# --- what stays together -----------------------------------------------------------------------


def test_a_tie_counts_once_and_is_on_one_device() -> None:
    tree = ModuleTree(
        {"embed.w": 60, **{f"h.{n}.w": 20 for n in range(4)}},
        ("",),
        aliases={"head.w": "embed.w", "other.w": "embed.w"},
    )
    placement = placed(tree, {0: 80, 1: 60}, "sequential")
    assert used(placement) == {0: 80, 1: 60}
    assert {placement.devices[n] for n in ("embed.w", "head.w", "other.w")} == {0}
    assert dict(placement.device_map) == {
        "embed": 0, "h.0": 0, "h.1": 1, "h.2": 1, "h.3": 1, "head": 0, "other": 0,
    }  # fmt: skip
    assert "'embed', 'head', 'other' must be on one device" in placement.reasons["head"]


def test_companions_in_different_modules_are_on_one_device() -> None:
    tree = ModuleTree({"a.w": 30, "b.w": 30, "c.w": 30}, ("",), together=(("a.w", "c.w"),))
    placement = placed(tree, {0: 60, 1: 60})
    assert placement.devices["a.w"] == placement.devices["c.w"] != placement.devices["b.w"]


def test_a_unit_is_not_split_even_if_only_a_split_would_fit() -> None:
    tree = ModuleTree({"blk.a.w": 50, "blk.b.w": 50}, ("", "blk"), units=frozenset({"blk"}))
    assert not placed(tree, {0: 60, 1: 60}).ok
    assert placed(ModuleTree(tree.sizes, ("",)), {0: 60, 1: 60}).ok


def test_small_modules_with_tensors_of_their_own_are_kept_whole() -> None:
    """As the embeddings of a vision model: split over two devices they could not run."""
    layers = {f"layers.{n}.w": 100 for n in range(20)}
    tree = ModuleTree({"embed.cls": 1, "embed.patch.w": 9, "embed.pos.w": 9, **layers}, ("",))
    placement = placed(tree, {0: 1100, 1: 1100})
    assert placement.ok
    assert placement.device_map["embed"] == 0
    assert placement.findings == ()


def test_tensors_of_a_module_whose_parts_are_apart_are_on_the_main_device() -> None:
    tree = ModuleTree({"pos": 5, "a.w": 50, "b.scale": 1, "b.c.w": 50, "b.d.w": 50}, ("",))
    placement = placed(tree, {1: 120, "cpu": 40, "disk": None})
    assert placement.ok
    assert placement.devices["pos"] == placement.devices["b.scale"] == 1
    assert placement.reasons["b.scale"] == (
        "a tensor of 'b' itself, whose parts are apart: on the main device"
    )


def test_they_follow_the_parts_if_these_are_all_on_one_accelerator() -> None:
    tree = ModuleTree({"a.w": 60, "b.scale": 1, "b.c.w": 30, "b.d.w": 30}, ("",))
    placement = placed(tree, {0: 70, 1: 70}, "sequential")
    assert dict(placement.device_map) == {"a": 0, "b": 1}
    assert placement.findings == ()


def test_they_stay_where_they_are_if_there_is_no_room() -> None:
    tree = ModuleTree({"a.w": 60, "b.scale": 1, "b.c.w": 30, "b.d.w": 30}, ("",))
    placement = placed(tree, {0: 70, 1: 60}, "sequential")
    assert dict(placement.device_map) == {"a": 0, "b.scale": 0, "b.c": 1, "b.d": 1}
    assert "'b.scale' belong to 'b' itself" in told(placement, "own-tensor-apart")


def test_buffers_that_stay_on_the_main_device_anyway_make_the_map_no_longer() -> None:
    sizes = {f"h.{i}.{leaf}": n for i in range(3) for leaf, n in (("mask", 4), ("a.w", 40))}
    sizes |= {f"h.{i}.b.w": 40 for i in range(3)}
    masks = frozenset(f"h.{i}.mask" for i in range(3))
    tree = ModuleTree(sizes, ("",), computed=masks, buffers=masks)
    placement = placed(tree, {"cpu": 100, "disk": None})
    assert dict(placement.device_map) == {
        "h.0.mask": "cpu", "h.0.a": "cpu", "h.0.b": "disk", "h.1": "disk", "h.2": "disk"
    }  # fmt: skip
    assert used(placement) == {"cpu": 52, "disk": 200}
    beside = placed(tree, {0: 60, "cpu": None})
    assert beside.main_device == 0 and 0 in beside.device_map.values()


def test_a_module_that_has_to_run_on_two_accelerators_is_told() -> None:
    tree = ModuleTree({"b.scale": 1, "b.c.w": 30, "b.d.w": 30}, ("",))
    placement = placed(tree, {0: 40, 1: 40})
    assert placement.ok
    assert "'b.scale' belong to 'b' itself" in told(placement, "own-tensor-apart")


# --- nothing fits ------------------------------------------------------------------------------


def test_what_does_not_fit_is_named_with_its_bytes_and_the_smallest_help() -> None:
    placement = placed(flat(10, 10, 10), {0: 12, 1: 19})
    assert not placement.ok
    assert (dict(placement.device_map), placement.main_device) == ({}, None)
    assert told(placement, "does-not-fit") == (
        "'b2' (10 B, in one piece) finds no room: left are 2 B on 0, 9 B on 1; "
        "add 'disk' without a limit to max_memory or give device 1 1 bytes more (1 B)"
    )


def test_what_fits_on_the_disk_but_not_where_it_runs_is_told_so() -> None:
    placement = placed(flat(10, 10), {"cpu": 4, "disk": None})
    assert told(placement, "does-not-fit") == (
        "'b0' (10 B, in one piece) finds room on the disk, but not where it runs: "
        "left are 4 B on 'cpu'; give device 'cpu' 6 bytes more (6 B)"
    )


def test_the_help_is_enough_and_one_byte_less_is_not() -> None:
    tree = flat(33, 21, 17, 40)
    assert "give device 'cpu' 46 bytes more" in told(
        placed(tree, {0: 30, "cpu": 65}), "does-not-fit"
    )
    assert placed(tree, {0: 30, "cpu": 111}).ok
    assert not placed(tree, {0: 30, "cpu": 110}).ok


def test_without_any_memory_the_message_says_what_to_give() -> None:
    assert "no device has any memory; give max_memory" in told(placed(flat(10), {}), "does-not-fit")


def test_an_unlimited_disk_is_not_proposed_where_it_is_there() -> None:
    placement = placed(flat(10), {"cpu": 5, "disk": None})
    message = told(placement, "does-not-fit")
    assert "add 'disk'" not in message
    assert "give device 'cpu' 5 bytes more" in message


# --- the record --------------------------------------------------------------------------------


def test_the_report_has_the_map_the_memory_and_the_reasons() -> None:
    placement = placed(flat(10, 10, 10), {0: 20, "disk": None})
    assert placement.to_json() == {
        "device_map": {"b0": 0, "b1": "disk", "b2": "disk"},
        "memory": {
            "0": {"capacity_bytes": 20, "used_bytes": 10},
            "disk": {"capacity_bytes": None, "used_bytes": 20},
        },
        "solver": "auto",
        "main_device": 0,
        "reserves": [
            {
                "what": "streaming",
                "device": "0",
                "n_bytes": 10,
                "formula": "the largest module that is moved there to run: 'b1'",
            }
        ],
        "prediction": {
            "seconds": pytest.approx(20 / 5e9 + 30 / 800e9),
            "bound_seconds": pytest.approx(20 / 5e9 + 30 / 800e9),
            "gap": pytest.approx(0, abs=1e-4),
            "objective": "latency",
            "batch": 1,
            "machine": "assumed",
        },
        "reasons": {
            "b0": "fits on the main device",
            "b1": "no room but on the disk; read from there when it runs on 0",
            "b2": "no room but on the disk; read from there when it runs on 0",
        },
    }


def test_a_tree_with_unknown_names_is_refused_with_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"owner 'b' of 'a'.*tensor 'c' of a group"):
        ModuleTree({"w": 1}, ("",), aliases={"a": "b"}, together=(("w", "c"),))


# --- rules, on random trees --------------------------------------------------------------------

PATHS = st.lists(st.sampled_from("abc"), max_size=3)
NAMES = st.tuples(PATHS, st.sampled_from("wvx")).map(lambda pair: ".".join([*pair[0], pair[1]]))


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    """Return trees of a few tensors with every kind of bond."""
    names = sorted(draw(st.sets(NAMES, min_size=1, max_size=7)))
    tied = draw(st.sets(st.sampled_from(names), max_size=2)) if len(names) > 3 else set[str]()
    owners = [name for name in names if name not in tied]
    aliases = {name: draw(st.sampled_from(owners)) for name in sorted(tied)}
    modules = sorted({name[:n] for name in names for n in range(len(name)) if name[n] == "."})
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    return ModuleTree(
        sizes={name: draw(st.integers(0, 20)) for name in owners},
        modules=("", *modules),
        units=frozenset(draw(st.sets(st.sampled_from(["", *modules]), max_size=2))),
        aliases=aliases,
        buffers=frozenset(draw(st.sets(st.sampled_from(owners), max_size=2))),
        together=tuple(draw(st.lists(pairs, max_size=1))),
    )


CAPACITIES = st.one_of(st.integers(0, 60), st.none())
MEMORIES = st.dictionaries(st.sampled_from([0, 2, "cpu", "disk"]), CAPACITIES).map(
    lambda memory: {"cpu": 0, **memory}
)
POLICIES = st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"])


def held(tree: ModuleTree, placement: Placement, *, offload_buffers: bool) -> dict[Device, int]:
    """Return the bytes on each device as accelerate leaves them, counted tensor by tensor."""
    main = placement.main_device
    assert main is not None
    bytes_on: dict[Device, int] = {}
    for name, size in tree.sizes.items():
        device = placement.devices[name]
        moved = device == "disk" or (device == "cpu" and main != "cpu")
        home = main if moved and name in tree.buffers and not offload_buffers else device
        bytes_on[home] = bytes_on.get(home, 0) + size
    return bytes_on


def streamed(tree: ModuleTree, placement: Placement, *, offload_buffers: bool) -> int:
    """Return the most bytes that one offloaded module brings to the main device."""
    main, most = placement.main_device, 0
    for module in tree.root.walk():
        whole = module.name in tree.units
        names = {tree.aliases.get(n, n) for n in (module.below() if whole else module.tensors)}
        moved = (
            tree.sizes[name]
            for name in names
            if placement.devices[name] == "disk"
            or (placement.devices[name] == "cpu" and main != "cpu")
            if offload_buffers or name not in tree.buffers
        )
        most = max(most, sum(moved))
    return most


@settings(max_examples=150, deadline=None)
@given(trees(), MEMORIES, POLICIES, st.booleans())
def test_every_rule_holds_for_every_tree(
    tree: ModuleTree, memory: Memory, policy: str, offload_buffers: bool
) -> None:
    placement = place(tree, device_map=policy, max_memory=memory, offload_buffers=offload_buffers)
    if not placement.ok:
        assert placement.device_map == {}
        return
    # every tensor one device, and the map says exactly that, disjoint and in module order
    assert list(placement.devices) == list(tree.tensors)
    keys = expand(placement.device_map, tree.tensors)
    assert {n: placement.device_map[k] for n, k in keys.items()} == placement.devices
    for key in placement.device_map:
        assert key == "" or parent_keys(key).isdisjoint(placement.device_map)
    order = list(tree.tensors)
    firsts = [min(order.index(n) for n in keys if keys[n] == k) for k in placement.device_map]
    assert firsts == sorted(firsts)
    assert set(placement.reasons) == set(placement.device_map)
    # no capacity is exceeded, with the room to run what is offloaded
    bytes_on = held(tree, placement, offload_buffers=offload_buffers)
    assert {d: n for d, n in used(placement).items() if n} == {
        d: n for d, n in bytes_on.items() if n
    }
    main = placement.main_device
    assert main is not None
    bytes_on[main] = bytes_on.get(main, 0) + streamed(
        tree, placement, offload_buffers=offload_buffers
    )
    for device, n_bytes in bytes_on.items():
        capacity = memory[device]
        assert capacity is None or n_bytes <= capacity
    # what belongs together is together
    for group in (*((o, a) for a, o in tree.aliases.items()), *tree.together):
        assert len({placement.devices[name] for name in group}) == 1
    for module in tree.root.walk():
        devices = {placement.devices[name] for name in module.below()}
        assert module.name not in tree.units or len(devices) == 1
        if module.parts and len(devices) > 1:
            own = {placement.devices[name] for name in module.tensors}
            assert own <= {main}


def parent_keys(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[:n]) for n in range(len(parts))}


@settings(max_examples=150, deadline=None)
@given(trees(), MEMORIES, POLICIES, st.sampled_from([0, 1, 2, "cpu", "disk"]), st.integers(0, 60))
def test_more_memory_never_makes_a_fitting_tree_unfit(
    tree: ModuleTree, memory: Memory, policy: str, device: Device, more: int
) -> None:
    if placed(tree, memory, policy).ok:
        size = memory.get(device, 0)
        larger = {**memory, device: None if size is None else size + more}
        assert placed(tree, larger, policy).ok


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.data(), POLICIES)
def test_nothing_is_offloaded_that_would_fit_on_the_accelerators(
    sizes: list[int], data: st.DataObject, policy: str
) -> None:
    rooms = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    memory: Memory = {**dict(enumerate(rooms)), "cpu": 1000, "disk": None}
    fits = any(
        all(
            sum(size for size, home in zip(sizes, homes, strict=True) if home == n) <= room
            for n, room in enumerate(rooms)
        )
        for homes in product(range(len(rooms)), repeat=len(sizes))
    )
    placement = placed(flat(*sizes), memory, policy)
    assert placement.ok
    assert fits == set(placement.devices.values()).isdisjoint({"cpu", "disk"})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from([1, 4, 5]), st.integers(1, 200), min_size=1),
)
def test_balanced_has_the_least_load_that_is_possible_in_module_order(
    sizes: list[int], memory: Memory
) -> None:
    homes = sorted(memory, key=str)
    contiguous = [
        [home for home, n in zip(homes, counts, strict=True) for _ in range(n)]
        for counts in product(range(len(sizes) + 1), repeat=len(homes))
        if sum(counts) == len(sizes)
    ]
    loads = [
        {h: sum(s for s, home in zip(sizes, way, strict=True) if home == h) for h in homes}
        for way in contiguous
    ]
    fitting = [max(x.values()) for x in loads if all(x[h] <= (memory[h] or 0) for h in homes)]
    placement = placed(flat(*sizes), memory, "balanced")
    if fitting:
        assert max(used(placement).values()) == min(fitting)
