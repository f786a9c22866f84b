"""A pytest plugin (``-p ours_in_place``): our functions in place of accelerate's, in its tests.

Without a GPU most tests of loading are skipped. ``--awake NAME`` runs such a test *one tier down*:
what it puts on a GPU goes to the CPU, and then what it puts on the CPU goes to the disk. With
``--theirs`` accelerate's own functions stay in place, which shows whether a test is fair.

The JUnit report says of each test, in its property ``calls``, how often it called one of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

LOADERS = ("load_checkpoint_and_dispatch", "load_checkpoint_in_model")
"""Our drop-in takes the place of both: the latter is the first part of the former, and better
tested."""

MAPPERS = ("infer_auto_device_map", "get_balanced_memory")
"""They have drop-ins of the same names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--theirs", action="store_true", help="leave accelerate's own in place")
    parser.addoption("--awake", action="append", default=[], help="a test to run without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Put the functions in place before a test module takes them from accelerate."""
    awake = frozenset(config.option.awake)
    config.pluginmanager.register(InPlace(awake, theirs=config.option.theirs))


class InPlace:
    """The functions in place, with a look at who calls them."""

    def __init__(self, awake: frozenset[str], *, theirs: bool) -> None:
        import accelerate

        from modelquirks import planner

        self.awake = awake
        self.calls = 0
        self.folder = ""
        """Where accelerate's own puts what is on disk, if the test that runs is an awake one."""
        ours: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(LOADERS, planner.load_checkpoint_and_dispatch),
            **{name: getattr(planner, name) for name in MAPPERS},
        }
        for module in (accelerate, accelerate.big_modeling, accelerate.utils.modeling):
            for name, our in ours.items():
                if (their := getattr(module, name, None)) is not None:
                    watched = self._watched_loader if name in LOADERS else self._watched
                    setattr(module, name, watched(their if theirs else our))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return function(*arguments, **options)

        return call

    def _watched_loader(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        def load(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.folder:
                options = {"offload_folder": self.folder, **options}
                options |= {key: down(options[key]) for key, down in DOWN.items() if key in options}
            return loader(*arguments, **options)

        return load

    def pytest_pycollect_makeitem(self, obj: object) -> None:
        """Take from the tests that shall be awake what makes them sleep."""
        for name in self.awake & vars(obj).keys() if isinstance(obj, type) else ():
            test = getattr(obj, name)
            while getattr(test, "__unittest_skip__", False):
                test = test.__wrapped__
            setattr(obj, name, test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Count the calls of one test."""
        self.calls = 0
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.folder = folder if item.name in self.awake else ""
                yield
        finally:
            item.user_properties.append(("calls", str(self.calls)))


def _map_down(device_map: Any) -> Any:
    if not isinstance(device_map, Mapping) or not {0, 1} & {*device_map.values()}:
        return device_map
    down = {0: "cpu", 1: "cpu", "cpu": "disk"}
    return {key: down.get(device, device) for key, device in device_map.items()}


def _memory_down(max_memory: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the limit of the GPU for the CPU; the disk has none."""
    return {"cpu": max_memory[0]}


DOWN: Mapping[str, Callable[[Any], Any]] = {"device_map": _map_down, "max_memory": _memory_down}
