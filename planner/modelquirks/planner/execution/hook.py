"""``FetchingHook``: a hook of accelerate that fetches the weights of one module.

Imports accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from time import monotonic
from typing import Any, TypeVar, cast

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import find_device, send_to_device, set_module_tensor_to_device
from torch import nn

from modelquirks.planner.execution.ahead import Ahead
from modelquirks.planner.execution.order import Need
from modelquirks.planner.execution.passstate import PassState, ThreadPass
from modelquirks.planner.execution.place import Place
from modelquirks.planner.execution.weights import Viewed, WeightsMap

__all__ = ["FetchingHook"]

_MOMENT = 0.05
"""Seconds for which a look at a file counts within a pass."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _untraced(function: _F) -> _F:
    """Keep torch.compile out of a function, as accelerate does for those of its hooks.

    As there, the compiler is imported only once the function is called.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(untraced, "disabled"):
            untraced.disabled = compiler.disable(function)
        return untraced.disabled(*args, **kwargs)

    compiler: Any = torch.compiler
    untraced: Any = call
    return cast(_F, call)


class FetchingHook(AlignDevicesHook):  # type: ignore[misc]
    """Fetches weights for a forward pass as accelerate does, and leaves placeholders after it.

    On the CPU with less ado: a weight that is a view of its file is made a parameter once, and
    then only put in its place. Other devices and other classes of parameters go accelerate's way.
    """

    places: list[Place]
    """What it fetches."""
    state: PassState
    given_map: Any
    """The mapping that accelerate gave it; third parties may replace ``weights_map``."""
    weights: WeightsMap | None
    """What is behind that."""
    prefix: str
    """Of the names in the model."""
    # accelerate's own, which it does not annotate so.
    weights_map: Any
    execution_device: Any
    tied_pointers_to_remove: set[tuple[int, Any]]
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None
    _settled: object = None
    """The mapping that the places were settled for."""
    _in_pass: Sequence[Place] = ()
    """The places but those of stacked experts, which are fetched one by one when they are used."""
    _viewed: tuple[tuple[Hashable, Viewed], ...] = ()
    """One tensor of each file that is viewed, by its file."""
    _viewed_bytes = 0

    @_untraced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Fetch the weights of *module*, and send the inputs after them."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        self.bring(module)
        return self._sent(args, kwargs)

    @_untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights go."""
        self.put_back(module)
        return self._returned(output, self.input_device)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run *forward* of *module* itself, as the function of accelerate around it does."""
        back = find_device([args, kwargs]) if self.io_same_device else None
        if args or kwargs:
            args, kwargs = self._sent(args, kwargs)
        if not self.places:
            return self._returned(forward(*args, **kwargs), back)
        try:
            self.bring(module)
            output = forward(*args, **kwargs)
        finally:
            self.put_back(module)
        return output if back is None else self._returned(output, back)

    @property
    def is_changed(self) -> bool:
        """Whether third parties have made it do something else than :meth:`around`."""
        own = self.__dict__
        return self.no_grad or "pre_forward" in own or "post_forward" in own

    def _sent(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs on the device that computes."""
        device = self.execution_device
        is_cpu = _is_cpu(device)
        for value in args:
            if not (is_cpu and ((type(value) is torch.Tensor and value.is_cpu) or _is_here(value))):
                args = send_to_device(args, device)
                break
        skipped = self.skip_keys or ()
        skipped = (skipped,) if isinstance(skipped, str) else skipped
        for key, value in kwargs.items():
            if not (is_cpu and (_is_here(value) or key in skipped)):
                kwargs = send_to_device(kwargs, device, skip_keys=skipped)
                break
        return args, kwargs

    def _returned(self, output: Any, device: Any) -> Any:
        if not self.io_same_device or device is None or (_is_cpu(device) and _is_here(output)):
            return output
        return send_to_device(output, device, skip_keys=self.skip_keys)

    def bring(self, module: nn.Module) -> None:
        """Fetch the weights of *module*."""
        thread = self.state.thread
        if thread.loans:
            thread.loans.clear()
        if not self.places:
            return
        if self._settled is not self.weights_map:
            self._settle()
        # accelerate's align_module_device, which is in no pass, wants all there is.
        places = self._in_pass if thread.depth else self.places
        track = thread.track
        if track is not None:
            track.seen.append(self)
            if self in track.starts:
                track.cross(track.starts[self])
        is_on_cpu = _is_cpu(self.execution_device)
        if self._viewed:
            self._look(thread)
        learns = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():  # placeholders are meta tensors here
            for place in places:
                ready, old = place.ready, place.placeholder
                if old is None or ready is None or not is_on_cpu or ready.dtype != old.dtype:
                    self._fetch(module, place)
                    continue
                if old.requires_grad != ready.requires_grad or (learns and old.requires_grad):
                    # Each pass has its own parameter to compute gradients for.
                    ready = place.dressed(ready, requires_grad=old.requires_grad)
                    if not learns:
                        place.ready = ready
                owner = place.owner
                held: Any = owner._buffers if place.is_buffer else owner._parameters
                if place.leaf in held:
                    held[place.leaf] = ready

    def _settle(self) -> None:
        """Find out what is the same memory in every pass."""
        viewed: dict[Hashable, Viewed] = {}
        self._viewed_bytes = 0
        served = self.weights is not None and self.weights_map is self.given_map
        for place in self.places:
            place.ready = place.steady = None
            has_one = place.placeholder is not None and not place.by_row
            if served and self.weights is not None and has_one:
                place.settle(self.weights, self.prefix + place.name)
            if place.steady is not None and place.steady.viewed is not None:
                viewed.setdefault(place.steady.viewed.file, place.steady.viewed)
                self._viewed_bytes += place.steady.tensor.nbytes
        self._viewed = tuple(viewed.items())
        self._in_pass = [place for place in self.places if not place.by_row]
        self._settled = self.weights_map

    def _look(self, thread: ThreadPass) -> None:
        """Raise if a file was written to: once in a pass, but not longer ago than a moment.

        Touching a mapping behind the end of its file would kill the process.
        """
        track, looked = thread.track, thread.looked
        now = monotonic()
        if now > thread.looked_until or track is None:
            looked.clear()
            thread.looked_until = now + _MOMENT
        for file, viewed in self._viewed:
            if file not in looked:
                viewed.look()
                looked.add(file)
        if track is not None:
            track.viewed_bytes += self._viewed_bytes
        else:
            self.count(self._viewed_bytes)

    def count(self, nbytes: int) -> None:
        """Count bytes of views as having been read."""
        if self.weights is not None:
            self.weights.count(nbytes)

    def _fetch(self, module: nn.Module, place: Place) -> None:
        """Put a weight in its place that is another tensor at each use."""
        held, old = place.held, place.placeholder
        if place.leaf not in held:
            return
        value: Any = self.weights_map[place.name]
        is_on_cpu = _is_cpu(self.execution_device)
        if old is not None and value is not None and is_on_cpu and value.shape == old.shape:
            value = value.to("cpu", old.dtype)
            held[place.leaf] = place.dressed(value, requires_grad=old.requires_grad)
        else:
            self._fetch_elsewhere(module, place.name, value)

    def _fetch_elsewhere(self, module: nn.Module, name: str, value: Any) -> None:
        """Put a weight in its place as ``AlignDevicesHook.pre_forward`` of accelerate 1.15 does."""
        statistics: Any = None
        if value is not None and value.dtype == torch.int8 and "weight" in name:
            statistics = self.weights_map.get(name.replace("weight", "SCB"))
        tied, device = self.tied_params_map, self.execution_device
        if value is not None and tied is not None:
            pointer = value.data_ptr()
            if name in self.tied_params_names:
                tied.setdefault(pointer, {})
            if device not in tied.get(pointer, {device: None}):
                self.tied_pointers_to_remove.add((pointer, device))
        set_module_tensor_to_device(
            module, name, device, value=value, fp16_statistics=statistics, tied_params_map=tied
        )

    def put_back(self, module: nn.Module) -> None:
        """Let *module* hold its placeholders again.

        Not as accelerate does (1.15, ``AlignDevicesHook.post_forward``), which makes each a meta
        tensor first: another thread that runs the module could find that, or have put the
        placeholder back already.
        """
        for place in self.places:
            placeholder, owner = place.placeholder, place.owner
            held: Any = owner._buffers if place.is_buffer else owner._parameters
            if placeholder is None:  # a class of parameters that has none
                self._drop_elsewhere(module, place.name)
            elif place.leaf in held:
                held[place.leaf] = placeholder
        if self.tied_pointers_to_remove:
            for pointer, device in self.tied_pointers_to_remove:
                (self.tied_params_map or {}).get(pointer, {}).pop(device, None)
            self.tied_pointers_to_remove = set()

    def _drop_elsewhere(self, module: nn.Module, name: str) -> None:
        set_module_tensor_to_device(module, name, "meta")
        if type(module).__name__ == "Linear8bitLt":
            state: Any = module.state
            state.SCB = state.CxB = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has; it finds its views anew."""
        found = {"_settled", "_in_pass", "_viewed", "_viewed_bytes"}
        return {key: value for key, value in self.__dict__.items() if key not in found}

    @property
    def ahead(self) -> Ahead | None:
        """What makes its weights ahead of time."""
        return None if self.weights is None else self.weights.ahead

    def needs(self) -> Sequence[Need]:
        """Return what its weights take; nothing if third parties gave it others."""
        if self.weights is None or self.weights_map is not self.given_map:
            return ()
        places = (place for place in self.places if not place.by_row)
        found = (self.weights.need(self.prefix + place.name) for place in places)
        return [need for need in found if need is not None]


_PLAIN = frozenset({type(None), bool, int, float, str})
_CPU = torch.device("cpu")


def _is_cpu(device: Any) -> bool:
    return bool(device == "cpu" or device == _CPU)


def _is_here(value: Any) -> bool:
    """Tell whether accelerate's ``send_to_device`` to the CPU would give the same values."""
    kind = type(value)
    if kind is torch.Tensor:
        return bool(value.is_cpu)
    if kind is tuple or kind is list:
        return all(map(_is_here, value))
    if kind is dict:
        return all(map(_is_here, value.values()))
    return kind in _PLAIN
