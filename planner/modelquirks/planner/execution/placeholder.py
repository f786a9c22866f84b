"""Placeholders: offloaded tensors that bring their values when an operation needs them.

Hooks of accelerate fetch the weights of a module for its ``forward``. Code that reads a weight
without that, such as a parent that multiplies by ``self.child.weight`` or calls another method of
the child, meets a tensor of the meta device. torch 2.13 then computes with whatever is in memory
(``torch.mm``, ``linear`` and ``conv1d`` of a CPU tensor and a meta one return without an error).

A placeholder is such a meta tensor, and says so to whoever asks where it is. But an operation
that takes it as an operand is called with the fetched tensor instead, by the protocol for tensor
subclasses (https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api).
Operations without a placeholder are not touched, so this costs nothing where it is not needed.
Indexing the placeholder of stacked experts fetches only the experts that are asked for.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map  # containers as torch itself sees them

from modelquirks.planner.execution.expert_index import pick
from modelquirks.planner.execution.passstate import PassState

__all__ = [
    "OffloadedWriteError",
    "Origin",
    "UnfilledTensor",
    "UnfilledTensorError",
    "has_rows",
    "is_placeholder",
    "placeholder_of",
]


class OffloadedWriteError(RuntimeError):
    """An attempt to change an offloaded tensor, which would be lost; the message names it."""


class UnfilledTensorError(RuntimeError):
    """An attempt to compute with a tensor that has no data; the message names it."""


class _Hook(Protocol):
    """What is used of accelerate's ``AlignDevicesHook``."""

    weights_map: Any
    execution_device: Any


class _Rows(Protocol):
    """Brings elements of the first dimension: see ``experts.Rows``."""

    def one(self, number: int, device: torch.device) -> torch.Tensor: ...

    def count_whole(self, n_bytes: int) -> None: ...


class Origin(NamedTuple):
    """Where the values of a placeholder come from."""

    name: str
    """In the model."""
    hook: _Hook
    key: str
    """In the weights map of the hook."""
    state: PassState
    rows: _Rows | None = None
    """If these are stacked experts: what brings one of them."""

    @property
    def device(self) -> torch.device:
        """The device that computes with the tensor."""
        return torch.device(self.hook.execution_device)

    def fetch(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values on the device that computes with them."""

        def fetch() -> torch.Tensor:
            weight: torch.Tensor = self.hook.weights_map[self.key]
            if self.rows is not None:
                self.rows.count_whole(weight.nbytes)
            return weight.to(self.device, dtype)

        return self.state.fetched((self.name, dtype), fetch)


class OffloadedTensor(torch.Tensor):
    """An offloaded buffer, or an offloaded parameter detached or in another dtype."""

    origin: Origin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call *func* with fetched tensors, unless it asks for no values."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the placeholder of the copied hook."""
        return _copied(self, memo, OffloadedTensor)


class OffloadedParameter(nn.Parameter):
    """An offloaded parameter."""

    origin: Origin
    plain: ClassVar[type[nn.Parameter]] = nn.Parameter

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: accelerate so makes the one with values of the one without."""
        return cls.plain(data, requires_grad=requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call *func* with fetched tensors, unless it asks for no values."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the placeholder of the copied hook."""
        return _copied(self, memo, type(self))

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the parameter with its values."""
        whole: Any = self.plain(_values(self).detach(), self.requires_grad)
        return whole.__reduce_ex__(proto)


class UnfilledTensor(torch.Tensor):
    """A tensor without data that nothing will fill, under the name that the model has for it."""

    name_in_model: str

    @staticmethod
    def of(tensor: torch.Tensor, name: str) -> UnfilledTensor:
        """Return it for *tensor* of the meta device."""
        made = torch.Tensor._make_subclass(UnfilledTensor, tensor.detach(), tensor.requires_grad)
        made.name_in_model = name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse *func*, unless it asks for no values."""
        if func in _ABOUT or func in _DEVICE:
            return _as_meta(func, args, kwargs or {})
        lost = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, UnfilledTensor))
        name = getattr(func, "__name__", str(func))
        raise UnfilledTensorError(
            f"{name} would compute with {lost.name_in_model!r}, which is on the meta device "
            "without data: it is neither parameter nor buffer, so nothing filled it. Build the "
            "model outside of torch.device('meta'), or set it before the forward pass"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> UnfilledTensor:
        """Return another one for the same name."""
        memo[id(self)] = made = UnfilledTensor.of(
            _as_meta(torch.empty_like, (self,), {}), self.name_in_model
        )
        return made


def is_placeholder(tensor: object) -> bool:
    """Tell whether *tensor* is one."""
    return isinstance(tensor, (OffloadedTensor, OffloadedParameter))


def has_rows(tensor: object) -> bool:
    """Tell whether *tensor* is the placeholder of stacked experts, which come one by one."""
    return isinstance(tensor, (OffloadedTensor, OffloadedParameter)) and (
        tensor.origin.rows is not None
    )


def placeholder_of(tensor: torch.Tensor, origin: Origin) -> torch.Tensor | None:
    """Return the placeholder for *tensor* of the meta device; None if its class allows none."""
    if not isinstance(tensor, nn.Parameter):
        return _tensor_placeholder(tensor, origin) if type(tensor) is torch.Tensor else None
    kind = _kind(type(tensor))
    if kind is None:
        return None
    made = torch.Tensor._make_subclass(kind, tensor.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    made.origin = origin  # type: ignore[attr-defined]
    return made


def _tensor_placeholder(tensor: torch.Tensor, origin: Origin) -> torch.Tensor:
    made = torch.Tensor._make_subclass(OffloadedTensor, tensor.detach(), tensor.requires_grad)
    made.origin = origin
    return made


_OWN_WAY = frozenset({"Int8Params", "FP4Params", "Params4bit", "QTensor", "QBitsTensor"})
"""Classes that ``set_module_tensor_to_device`` of accelerate 1.15 treats by their name."""


@cache
def _kind(kind: type[nn.Parameter]) -> type[nn.Parameter] | None:
    """Return the class of placeholders for parameters of class *kind*.

    None for classes that have operations of their own.
    """
    if kind is nn.Parameter:
        return OffloadedParameter
    plain_function = getattr(nn.Parameter, "__torch_function__", None)
    if kind.__name__ in _OWN_WAY or getattr(kind, "__torch_function__", None) != plain_function:
        return None
    return type(kind.__name__, (OffloadedParameter, kind), {"plain": kind})


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _DEVICE and args[0].origin.state.is_running:
        return func(torch.empty(0, device=args[0].origin.device), *args[1:], **kwargs)
    if func in _ABOUT or func in _DEVICE:
        return _as_meta(func, args, kwargs)
    if func in _LAZY and is_placeholder(args[0]):
        return _lazily(func, args, kwargs)
    if func is torch.Tensor.to and is_placeholder(args[0]) and _stays(args, kwargs):
        dtype = _parsed(args, kwargs)[1]
        return _lazily(func, (args[0], args[0].dtype if dtype is None else dtype), {})
    if func is torch.Tensor.__getitem__ and is_placeholder(args[0]):
        picked = _picked(*args)
        if picked is not None:
            return picked
    _refuse_writing(func, args, kwargs)
    return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _as_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _parsed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return device, dtype, whether not to block, and memory format of a call of ``to``."""
    plain = {key: value for key, value in kwargs.items() if key != "copy"}
    native: Any = torch._C
    return native._nn._parse_to(*tree_map(_real, args[1:]), **tree_map(_real, plain))


def _stays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of ``to`` leaves the tensor where it says that it is."""
    device, _, _, layout = _parsed(args, kwargs)
    if layout is not None or kwargs.get("copy"):
        return False
    origin: Origin = args[0].origin
    here = {origin.device, torch.empty(0, device=origin.device).device}
    return device is None or device.type == "meta" or (origin.state.is_running and device in here)


def _lazily(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a placeholder for what *func* would return."""
    made = _as_meta(func, args, kwargs)
    return args[0] if made is args[0] else _tensor_placeholder(made, args[0].origin)


def _real(value: Any) -> Any:
    return _values(value) if is_placeholder(value) else value


def _values(placeholder: Any) -> torch.Tensor:
    """Return the fetched tensor that stands for *placeholder* in one operation."""
    origin: Origin = placeholder.origin
    fetched = origin.fetch(placeholder.dtype)
    return fetched.detach().requires_grad_(placeholder.requires_grad)


def _picked(placeholder: Any, index: Any) -> torch.Tensor | None:
    """Return what *index* gives by fetching only the experts it asks for; None if it needs all."""
    origin: Origin = placeholder.origin
    rows = origin.rows
    picked = None if rows is None or is_placeholder(index) else pick(index, len(placeholder))
    if rows is None or picked is None:
        return None

    def one(number: int) -> torch.Tensor:
        expert = rows.one(number, origin.device).to(placeholder.dtype).detach()
        return expert.requires_grad_(placeholder.requires_grad)

    shape = placeholder.shape[1:]
    return picked.of(
        one, lambda: torch.empty((0, *shape), dtype=placeholder.dtype, device=origin.device)
    )


_WRITING = frozenset(
    {"__setitem__"}
    | {f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
    | {f"__i{op}__" for op in ("and", "or", "xor", "lshift", "rshift", "div")}
)


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    written: list[Any] = [kwargs.get("out")]
    if getattr(func, "__module__", "") == "torch.nn.init":
        written += [args, kwargs]
    elif name in _WRITING or (name.endswith("_") and not name.endswith("__")):
        written += args[:1]
    for tensor in filter(is_placeholder, tree_leaves(written)):
        raise OffloadedWriteError(
            f"{name} would write to {tensor.origin.name!r}, which is offloaded: the change would "
            "be lost. Give its module a device that computes in the device map, or change the "
            "checkpoint"
        )


def _copied(tensor: Any, memo: dict[int, Any], kind: type[torch.Tensor]) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.Tensor._make_subclass(
            kind, torch.empty_like(tensor, requires_grad=False), tensor.requires_grad
        )
    memo[id(tensor)] = made
    vars(made).update(copy.deepcopy(vars(tensor), memo))
    return made


def _getters(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name).__get__ for name in names.split())


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name) for name in names.split())


_DEVICE = _getters("device is_cuda is_cpu is_meta is_xpu is_mps") | _methods("get_device")
"""In a forward pass they answer for the device that computes, so that inputs are sent there."""

_ABOUT = (
    _getters("shape dtype layout ndim requires_grad grad grad_fn is_leaf name itemsize")
    | _getters("nbytes _version is_sparse is_quantized is_nested retains_grad _backward_hooks")
    | _methods("size stride dim ndimension numel nelement element_size is_floating_point")
    | _methods("is_complex is_signed is_contiguous storage_offset data_ptr untyped_storage")
    | _methods("requires_grad_ detach_ retain_grad share_memory_ __repr__ __len__ register_hook")
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed}
    | {vars(torch)["_has_compatible_shallow_copy_type"]}
    | {getattr(torch.Tensor, name).__set__ for name in ("data", "grad", "requires_grad")}
)
"""What asks for no values, or changes none."""

_LAZY = _methods("detach half float double bfloat16") | _getters("data")
"""What returns the same tensor in another guise: fetched only once somebody computes with it."""
