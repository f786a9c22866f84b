"""Intake: a plugin's hooks are checked and called one by one, and what they give is checked.

Whatever a plugin does wrong, also lazily in a generator, comes out as one
:class:`~modelquirks.quirks.discovery.PluginError` with all faults found in it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pluggy

from modelquirks.quirks import hookspecs
from modelquirks.quirks.discovery import Origin, PluginError, said
from modelquirks.quirks.hookspecs import GROUP
from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.record import ModelQuirks

__all__ = ["Given", "examine", "model_of"]

_HOOKS = sorted(name for name in vars(hookspecs) if name.startswith(f"{GROUP}_"))
_LIBRARY = ("record", "problems", "named", "conversions", "extra", "absent", "computed")
_OPENED = ("format", "places", "tensors", "shards", "findings", "container", "metadata", "chosen")
_SCHEME = ("name", "roles", "peeks", "settings", "infer", "peek", "regions", "evaluate")


class Given(NamedTuple):
    """What a plugin that works gives."""

    origin: Origin
    module: str
    hooks: tuple[str, ...]
    records: tuple[ModelQuirks, ...]
    schemes: tuple[Scheme, ...]


def examine(
    plugin: object, impls: Mapping[str, pluggy.HookImpl], *, origin: Origin, module: str
) -> Given:
    """Return what *plugin* gives; ``impls`` are its hook implementations by name of the hook.

    Raises :class:`PluginError` with every fault of the plugin.
    """
    errors = [PluginError(origin, fault) for fault in _hook_faults(plugin, impls)]
    given: dict[str, tuple[Any, ...]] = {"modelquirks_records": (), "modelquirks_schemes": ()}
    for hook, check in (("modelquirks_records", _no_record), ("modelquirks_schemes", _no_scheme)):
        if hook not in impls:
            continue
        try:
            given[hook] = _call(impls[hook], origin, partial(_items, fault=check))
        except PluginError as error:
            errors.append(error)
    if errors:
        cause = next((e.__cause__ for e in errors if e.__cause__), None)
        raise PluginError(origin, "; ".join(error.error for error in errors)) from cause
    records, schemes = given.values()
    return Given(origin, module, tuple(sorted(impls)), records, schemes)


def model_of(impl: pluggy.HookImpl, origin: Origin, values: Mapping[str, Any]) -> Any:
    """Return the model that one ``modelquirks_model`` builds from *values*, or None."""
    return _call(impl, origin, _module, values)


def library_of(impl: pluggy.HookImpl, origin: Origin, values: Mapping[str, Any]) -> Any:
    """Return the rules that one ``modelquirks_library`` has for a model, or None."""
    return _call(impl, origin, _library, values)


def opened_of(impl: pluggy.HookImpl, origin: Origin, values: Mapping[str, Any]) -> Any:
    """Return what one ``modelquirks_open`` finds in a checkpoint, or None."""
    return _call(impl, origin, _opened, values)


def _call(
    impl: pluggy.HookImpl,
    origin: Origin,
    read: Callable[[Any], Any],
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return ``read(result)`` of one implementation. ``read`` is inside: results may be lazy."""
    name = getattr(impl.function, "__name__", "hook")
    positional = [values[arg] for arg in impl.argnames]
    optional = {arg: values[arg] for arg in impl.kwargnames if arg in values}
    try:
        return read(impl.function(*positional, **optional))
    except _WrongResult as error:
        raise PluginError(origin, f"{name!r} returned {error}") from None
    except (Exception, SystemExit) as error:
        raise PluginError(origin, f"{name!r} raised {said(error)}") from error


class _WrongResult(Exception):
    """A hook returned what it must not; the text says what, and what was expected."""


def _items(result: Any, *, fault: Callable[[Any], str]) -> tuple[Any, ...]:
    if not isinstance(result, Iterable):
        raise _WrongResult(f"{_kind(result)}, expected an iterable")
    items = tuple(result)
    if faults := [text for item in items if (text := fault(item))]:
        more = f" … and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise _WrongResult(", ".join(faults[:10]) + more)
    return items


def _module(result: Any) -> Any:
    if result is not None and not callable(getattr(result, "named_parameters", None)):
        raise _WrongResult(f"{_kind(result)}, expected an nn.Module or None")
    return result


def _library(result: Any) -> Any:
    return _having(result, _LIBRARY, "LibraryRules")


def _opened(result: Any) -> Any:
    return _having(result, _OPENED, "Opened")


def _having(result: Any, attributes: Iterable[str], expected: str) -> Any:
    lacking = [] if result is None else [n for n in attributes if not hasattr(result, n)]
    if lacking:
        raise _WrongResult(f"{_kind(result)} without {', '.join(lacking)}, expected {expected}")
    return result


def _no_record(item: Any) -> str:
    return "" if isinstance(item, ModelQuirks) else f"{_kind(item)} where a ModelQuirks belongs"


def _no_scheme(item: Any) -> str:
    lacking = [name for name in _SCHEME if not hasattr(item, name)]
    text = f"{_kind(item)} without {', '.join(lacking)} where a Scheme belongs"
    return f"{text}: name Scheme as its base class to inherit the defaults" if lacking else ""


def _kind(value: Any) -> str:
    """Return None and short strings as they are, and of everything else the type."""
    if value is None or (isinstance(value, str) and len(value) <= 40):
        return repr(value)
    if isinstance(value, type):
        return f"class {value.__name__!r}"
    return f"an object of type {type(value).__name__!r}"


def _hook_faults(plugin: object, impls: Mapping[str, pluggy.HookImpl]) -> Iterator[str]:
    for name, impl in impls.items():
        if impl.wrapper or impl.hookwrapper:
            yield f"{name!r} is a wrapper, and no plugin may wrap what others give"
        elif name not in _HOOKS and not impl.optionalhook:
            yield f"there is no hook {name!r}{_nearest(name)}"
    marked = {getattr(impl.function, "__name__", "") for impl in impls.values()}
    for name in dir(plugin):
        if name.startswith(f"{GROUP}_") and name not in marked and _is_function(plugin, name):
            advice = "add it" if name in _HOOKS else f"and there is no such hook{_nearest(name)}"
            yield f"{name!r} is not marked with @hookimpl: {advice}"
    if not impls and not any(name.startswith(f"{GROUP}_") for name in dir(plugin)):
        yield f"it implements none of the hooks {', '.join(_HOOKS)}"


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _HOOKS, n=1, cutoff=0.5)
    return f"; is {near[0]!r} meant?" if near else f"; there are {', '.join(_HOOKS)}"


def _is_function(plugin: object, name: str) -> bool:
    # Statically, as pluggy does: looking for hooks must not run properties.
    found = inspect.getattr_static(plugin, name)
    return callable(found) or isinstance(found, (staticmethod, classmethod))
