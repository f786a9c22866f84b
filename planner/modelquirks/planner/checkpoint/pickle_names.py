"""Classes and functions that pickles name: which are known, and which would run programs.

Known are the names that torch's own restricted unpickler accepts (torch 2.13,
``weights_only=True``), and numpy's. All others are reported: as an error if running them would be
the point of the pickle rather than its content.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.planner import dtypes
from modelquirks.planner.checkpoint.pickle_machine import Global
from modelquirks.planner.finding import Finding, shown

__all__ = ["STORAGES", "STORAGE_MODULES", "TENSOR_LIKE", "about_names"]

STORAGES: dict[str, str | None] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": None,
}
"""Dtypes of torch's storage classes."""
STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")

_MODULES: dict[str, tuple[str, ...]] = {
    "torch._utils": (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
        "_rebuild_sparse_csr_tensor",
        "_rebuild_nested_tensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_wrapper_subclass",
        "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor",
    ),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.storage": ("_load_from_bytes",),
    "numpy.core.multiarray": ("_reconstruct",),
    "numpy._core.multiarray": ("_reconstruct",),
}
TENSOR_LIKE = frozenset(f"{module}.{name}" for module, names in _MODULES.items() for name in names)
"""Calls that make a tensor or an array."""

_HARMLESS: dict[str, tuple[str, ...]] = {
    "torch": (
        *("Size", "Tensor", "device", "qint8", "quint8", "qint32"),
        *("QInt8Storage", "QUInt8Storage", "QInt32Storage"),
        *("per_tensor_affine", "per_tensor_symmetric"),
        *("per_channel_affine", "per_channel_symmetric"),
    ),
    "torch.storage": ("TypedStorage",),
    "torch._tensor": ("Tensor",),
    "torch.nn": ("Parameter",),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict", "defaultdict", "Counter"),
    "builtins": (
        *("set", "frozenset", "dict", "list", "tuple", "bytearray", "complex", "slice"),
        *("int", "float", "str", "bool"),
    ),
    "_codecs": ("encode",),
    "numpy": ("dtype", "ndarray", "float64", "float32", "int64", "bool_"),
    "numpy.core.multiarray": ("scalar",),
    "numpy._core.multiarray": ("scalar",),
}
_KNOWN = TENSOR_LIKE | {f"{module}.{name}" for module, names in _HARMLESS.items() for name in names}

_PROGRAMS = frozenset(
    (
        *(
            "os",
            "posix",
            "nt",
            "sys",
            "subprocess",
            "shutil",
            "socket",
            "pty",
            "ctypes",
            "commands",
        ),
        *("runpy", "code", "codeop", "importlib", "marshal", "pickle", "_pickle", "operator"),
        *("pip", "pdb", "bdb", "timeit", "profile", "cProfile", "popen2", "webbrowser"),
        *("urllib", "http", "requests", "ftplib", "telnetlib"),
        *("torch.hub", "torch.utils.cpp_extension"),
    )
)
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_GETATTR = "builtins.getattr"
"""How the pickle of a ShardedTensor names a class that is nested in it."""

_RUNNERS = frozenset(
    (
        *("eval", "exec", "execfile", "compile", "open", "input", "apply", "reload", "breakpoint"),
        *("__import__", "getattr", "setattr", "delattr", "globals", "locals", "vars"),
        *("system", "popen", "spawn", "runstring", "load", "loads"),
        *("FileIO", "FunctionType", "CodeType"),
    )
)


def about_names(shard: str, names: Iterable[Global]) -> tuple[Finding, ...]:
    """Return what to say of the classes and functions that the pickle of *shard* names."""
    strange = [found for found in names if not _is_known(found)]
    programs = [str(found) for found in strange if _is_program(found)]
    others = [str(found) for found in strange if not _is_program(found)]
    if programs == [_GETATTR] and _SHARDED in others:  # as torch itself writes it
        programs, others = [], [*others, _GETATTR]
    findings: list[Finding] = []
    if programs:
        text = (
            f"{shard!r} is a pickle that would run {shown(programs)} when it is loaded the usual "
            "way. Nothing of it was run here, and it is not to be trusted: delete it."
        )
        findings.append(Finding("pickle-code", "error", text))
    if others:
        text = (
            f"{shard!r} holds objects of {shown(others)}: not imported and left out; tensors "
            "beside them are read as usual."
        )
        findings.append(Finding("pickle-objects", "warning", text))
    return tuple(findings)


def _is_known(found: Global) -> bool:
    if str(found) in _KNOWN:
        return True
    if found.module in STORAGE_MODULES and found.name in STORAGES:
        return True
    try:
        return found.module == "torch" and bool(dtypes.from_torch(found.name))
    except ValueError:
        return False


def _is_program(found: Global) -> bool:
    """Tell whether *found* has no place in data; ``os.system`` inside ``torch`` counts too."""
    parts = {found.module, *found.module.split(".")[:1], *found.name.split(".")}
    return found.module == "?" or not parts.isdisjoint(_PROGRAMS | _RUNNERS)
