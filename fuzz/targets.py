"""Every place where bytes from outside are read, each as a function of bytes.

A target gives a word for how the input was treated, raises the package's own errors, and
:class:`~guard.Nonsense` where something was accepted that cannot be.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from answers import hub
from checking import behaviour, check_findings, check_manifest, check_places, sampled
from guard import Nonsense, scratch
from texts import options, texts

from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.checkpoint.torch_zip import read_torch
from modelquirks.planner.cli.command import CallError
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.execution.offloadstore import OffloadStore
from modelquirks.planner.hub.spans import Spans
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.registry import Registry

__all__ = ["DATA", "TARGETS", "Target"]

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"

Errors = tuple[type[BaseException], ...]


class Target(NamedTuple):
    """A parser, as a function of bytes."""

    run: Callable[[bytes], str]
    form: str
    """What its inputs are like, for the mutator."""
    allowed: Errors = ()
    """Errors that the package raises for such input: the clear ones, with a name in them."""


@cache
def _registry() -> Registry:
    """Return the plugins; what one of them raises is not put down as a finding."""
    before = os.environ.get("MODELQUIRKS_STRICT")
    os.environ["MODELQUIRKS_STRICT"] = "1"
    try:
        return Registry.load()
    finally:
        del os.environ["MODELQUIRKS_STRICT"]
        if before is not None:
            os.environ["MODELQUIRKS_STRICT"] = before


def _opened(path: Path) -> Manifest:
    return open_manifest(path, _registry)


@cache
def _folder(name: str) -> Path:
    """Return an empty folder of that name."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _written(folder: str, name: str, data: bytes) -> Path:
    path = _folder(folder) / name
    path.write_bytes(data)
    return path


@cache
def _copied(source: str, target: str) -> Path:
    """Return a copy of a folder of the tests' data."""
    folder = scratch() / target
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DATA / source, folder)
    return folder


# ------------------------------------------------------------------------------------- single files


def safetensors(data: bytes) -> str:
    """A safetensors file; what the library refuses must not pass without an error."""
    found = _header(read_header(_written("safetensors", "model.safetensors", data)), data)
    if all(finding.severity != "error" for finding in found.findings):
        library: Any = import_module("safetensors")
        try:
            library.deserialize(data)
        except library.SafetensorError as error:
            raise Nonsense(f"passes, and safetensors says {str(error)[:60]}") from error
    return behaviour(found.findings, len(found.entries))


def _header(header: Header, data: bytes) -> Header:
    check_findings(header.findings, data)
    if all(finding.severity != "error" for finding in header.findings):
        check_places(header.entries.values(), {header.shard.name: header.shard.size_bytes})
    return header


def torch_file(data: bytes) -> str:
    """A file of ``torch.save`` of any age: zip, the one before, tar."""
    found = _header(read_torch(_written("torch", "pytorch_model.bin", data)), data)
    return behaviour(found.findings, len(found.entries))


def zipped(pickle: bytes, template: bytes | None = None) -> bytes:
    """Return the zip file *template* with *pickle* as its ``data.pkl``, checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        records = _records(template)
        usual = {"archive/data.pkl": b"", "archive/version": b"3"}
        for name, content in (records or usual).items():
            new = pickle if name.endswith("/data.pkl") else content
            archive.writestr(zipfile.ZipInfo(name), new)
        if not records:
            for number in range(4):
                archive.writestr(zipfile.ZipInfo(f"archive/data/{number}"), bytes(64))
    return out.getvalue()


def _records(template: bytes | None) -> dict[str, bytes]:
    if template is None:
        return {}
    with zipfile.ZipFile(io.BytesIO(template)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def pickle(data: bytes) -> str:
    """The pickle in a file of ``torch.save`` that is whole but for that."""
    return torch_file(zipped(data))


def gguf(data: bytes) -> str:
    """A GGUF file, opened by its plugin."""
    return check_manifest(_opened(_written("gguf", "model.gguf", data)), data)


# ------------------------------------------------------------------------------------------ folders

_BASES: Mapping[str, Sequence[str]] = {
    "deepspeed": (
        "deepspeed/zero1_fp32",
        "deepspeed/zero3_fp32",
        "deepspeed/universal_from_zero1",
        "deepspeed/pipeline_pp2_zero1",
        "deepspeed/moe_ep2_zero2",
        "deepspeed/autotp2_zero1",
        "deepspeed/zero2_bf16",
    ),
    "dcp": ("dcp/grid", "dcp/fsdp2", "dcp/hugging_face", "dcp/accelerate"),
    "megatron": (
        "megatron/plain",
        "megatron/tp2_pp2",
        "megatron/moe_ep2",
        "megatron/torch_dist",
    ),
    "fsdp": ("fsdp/fsdp2", "fsdp/sharded", "fsdp/local", "fsdp/local_flat", "fsdp/hsdp"),
}


class _Place(NamedTuple):
    """A file in a folder of several, which an input takes the place of."""

    root: Path
    file: Path
    content: bytes


@cache
def places(kind: str) -> tuple[_Place, ...]:
    """Return the files of the folders of a kind that are parsed."""
    found: list[_Place] = []
    for number, base in enumerate(_BASES[kind]):
        root = _copied(base, f"{kind}-{number}")
        files = (path for path in root.rglob("*") if path.is_file())
        for file in sorted(files):
            if not file.name.startswith(("truth", "ABOUT")):
                found.append(_Place(root, file, file.read_bytes()))
    return tuple(found)


def content_of(place: _Place) -> bytes:
    """Return what an input for *place* is like: of a zip file its pickle."""
    return _records(place.content)["archive/data.pkl"] if _is_plain_zip(place) else place.content


def _is_plain_zip(place: _Place) -> bool:
    return place.content[:2] == b"PK" and "archive/data.pkl" in _records(place.content)


def _in_folder(kind: str) -> Callable[[bytes], str]:
    """Return the target of folders of a kind: the first byte says which file the rest is."""

    def run(data: bytes) -> str:
        every = places(kind)
        place = every[data[0] % len(every)] if data else every[0]
        rest = data[1:]
        zips = place.content[:2] == b"PK" and rest[:2] != b"PK"
        place.file.write_bytes(_repacked(rest, place.content) if zips else rest)
        try:
            return check_manifest(_opened(place.root), data, show_one_in=32)
        finally:
            place.file.write_bytes(place.content)

    return run


def _repacked(pickle: bytes, template: bytes) -> bytes:
    return zipped(pickle, template)


def index(data: bytes) -> str:
    """An index beside the two files that it may name."""
    root = _copied("files/dcp-hf/hf_2", "index")
    (root / "model.safetensors.index.json").write_bytes(data)
    return check_manifest(_opened(root), data)


def names(data: bytes) -> str:
    """Names of files, a line each: numbers of ranks, of shards and of iterations in them."""
    root = scratch() / "names"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    contents = [place.content for kind in ("deepspeed", "dcp", "fsdp") for place in places(kind)]
    for number, line in enumerate(data.split(b"\n")[:12]):
        name = line.decode("utf-8", "replace").replace("\0", "").strip("/")
        if not name or any(part in ("", ".", "..") or len(part) > 200 for part in name.split("/")):
            continue
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[(len(name) + number) % len(contents)])
        except OSError:  # a file where a folder should be, a path too long for this machine
            continue
    return check_manifest(_opened(root), data, show_one_in=32)


# ------------------------------------------------------------------------ configs, and what follows

_CONFIGURED = (
    "gptq/v1.safetensors",
    "awq/gemm.safetensors",
    "compressed_tensors/stored.safetensors",
    "bitsandbytes/formats.safetensors",
    "files/dcp-hf/hf_2",
    "mlx",
    "modelopt",
)


@cache
def _configured(number: int) -> Path:
    source = DATA / _CONFIGURED[number]
    folder = _folder(f"config-{number}")
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))[:1]
    for file in files:
        shutil.copy(file, folder / "model.safetensors")
    return folder


@cache
def _dispatcher() -> Dispatcher:
    return Dispatcher(_registry())


def config(data: bytes) -> str:
    """A config.json (or params.json) beside weights, packed in several ways, and the plan of it."""
    choice = data[0] if data else 0
    root = _configured(choice % len(_CONFIGURED))
    name, other = ("config.json", "params.json")[:: 1 if choice < 128 else -1]
    (root / other).unlink(missing_ok=True)
    (root / name).write_bytes(data[1:])
    manifest = _opened(root)
    told = check_manifest(manifest, data, show_one_in=64)
    plan = _dispatcher().plan(manifest, max_memory={"cpu": 1 << 30})
    return f"{told} {_checked_plan(plan, data)}"


def _checked_plan(plan: Plan, data: bytes) -> str:
    from modelquirks.planner.cli.report_plan import show_plan
    from modelquirks.planner.cli.terminal import Terminal

    plan.refusal()
    json.dumps(plan.to_json())
    if sampled(data, 4):
        show_plan(Terminal(io.StringIO(), {}), plan, everything=False)
    return behaviour(plan.all_findings, 0)


def plan(data: bytes) -> str:
    """A plan file, and what is told of the plan."""
    return _checked_plan(Plan.load(_written("plan", "plan.json", data)), data)


_ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj"


def adapter(data: bytes) -> str:
    """An adapter_config.json, and how strong the adapter is where."""
    root = _copied("peft/plain", "adapter") if (DATA / "peft/plain").is_dir() else _peft()
    (root / "adapter_config.json").write_bytes(data)
    found = open_adapter(root, _registry)
    for key in (_ADAPTER.removeprefix("base_model.model."), "a" * 40, "lm_head"):
        found.config.strength(key)
        found.config.targeted(key)
        found.config.is_retrained(key)
    _dispatcher().plan(root, max_memory={"cpu": 1 << 30})
    return f"{found.name} {behaviour(found.findings, len(found.manifest.tensors))}"


@cache
def _peft() -> Path:
    first = next(
        p for p in sorted((DATA / "peft").iterdir()) if (p / "adapter_config.json").is_file()
    )
    return _copied(f"peft/{first.name}", "adapter")


# -------------------------------------------------------------------------- what we write ourselves

_FINGERPRINT = "0123456789abcdef" * 4


def offload(data: bytes) -> str:
    """The manifest of an offload folder, or a file of weights in it, by the first byte."""
    store = OffloadStore(_folder("offload"), fingerprint=_FINGERPRINT, checkpoint={"path": "/c"})
    store.path.mkdir(exist_ok=True)
    if data[:1] < b"\x80":
        (store.path / "manifest.json").write_bytes(data[1:])
    else:
        path = store.path / "weights-0123456789abcdef.safetensors"
        path.write_bytes(data[1:])
        (store.path / "manifest.json").write_text(json.dumps(_manifest(path)))
    found = store.contents()
    store.stale()
    sizes = {path.name: path.stat().st_size for path in store.path.iterdir()}
    check_places(found.tensors.values(), {**sizes})
    return f"{len(found.tensors)} {sorted(found.faults)[:1]}"


def _manifest(path: Path) -> dict[str, Any]:
    status = path.stat()
    record = {
        "name": path.name,
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "digest": read_header(path).shard.digest or "",
    }
    checkpoint = {"path": "/c"}
    return {
        "format": 1,
        "fingerprint": _FINGERPRINT,
        "checkpoint": checkpoint,
        "files": [record],
    }


def _sealed(data: bytes) -> bytes:
    line, _, content = data.partition(b"\n")
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        return data
    if not isinstance(head, dict):
        return data
    head["sha256"] = hashlib.sha256(content).hexdigest()
    return json.dumps(head).encode() + b"\n" + content


def spans(data: bytes) -> str:
    """The parts of a file on the hub that were kept, with the checksum that they should have."""
    try:
        found = Spans.parse(_sealed(data))
    except (ValueError, TypeError) as error:
        return f"damaged {type(error).__name__}"
    for begin in (0, 1, 100, 1 << 40):
        if len(found.at(begin)) > len(data):
            raise Nonsense("more is known than was kept")
        found.next_after(begin)
    if found.size is None or found.size < 0:
        raise Nonsense(f"a file of {found.size} bytes")
    if Spans.parse(b"".join(found.dump())).size != found.size:
        raise Nonsense("does not come back as it was written")
    return "kept"


_CHECKPOINT: Errors = (CheckpointError,)

TARGETS: Mapping[str, Target] = {
    "safetensors": Target(safetensors, "safetensors"),
    "torch_file": Target(torch_file, "zip"),
    "pickle": Target(pickle, "pickle"),
    "gguf": Target(gguf, "numbers", _CHECKPOINT),
    "deepspeed": Target(_in_folder("deepspeed"), "marked-pickle", _CHECKPOINT),
    "dcp": Target(_in_folder("dcp"), "marked-pickle", _CHECKPOINT),
    "megatron": Target(_in_folder("megatron"), "marked-pickle", _CHECKPOINT),
    "fsdp": Target(_in_folder("fsdp"), "marked-pickle", _CHECKPOINT),
    "index": Target(index, "json", _CHECKPOINT),
    "names": Target(names, "lines", _CHECKPOINT),
    "config": Target(config, "marked-json", _CHECKPOINT),
    "plan": Target(plan, "json", (PlanError,)),
    "adapter": Target(adapter, "json", _CHECKPOINT),
    "offload": Target(offload, "marked-json"),
    "spans": Target(spans, "json"),
    "hub": Target(hub, "lines", _CHECKPOINT),
    "texts": Target(texts, "marked-lines", (ValueError, CallError)),
    "options": Target(options, "marked-json", (ValueError, CallError)),
}
"""By name."""
