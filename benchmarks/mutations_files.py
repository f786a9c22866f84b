"""Weight files as bytes: opened, changed and written anew, without modelquirks."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

__all__ = [
    "Files",
    "Header",
    "as_torch",
    "folder_files",
    "header_of",
    "is_weights",
    "is_zip",
    "members_of",
    "tensors_in",
    "with_header",
    "with_members",
    "with_tensors",
    "write_files",
]

Files = dict[str, bytes]
Header = dict[str, Any]
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf")


def folder_files(root: Path) -> Files:
    """Return every file below *root* by its path there, with ``/``."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Write *files* below *root*."""
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def is_weights(name: str) -> bool:
    """Tell whether a file holds weights, by its name."""
    return name.endswith(_WEIGHTS)


def tensors_in(name: str, raw: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors, or of a flat one of torch.save."""
    if name.endswith(".safetensors"):
        return load_safetensors(raw)
    loaded: dict[str, torch.Tensor] = torch.load(io.BytesIO(raw), weights_only=True)
    return loaded


def with_tensors(name: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a file with these tensors, in the format that its name says."""
    if name.endswith(".safetensors"):
        held = {key: tensor.contiguous() for key, tensor in tensors.items()}
        return save_safetensors(held, metadata={"format": "pt"})
    with tempfile.TemporaryDirectory() as folder:  # the name becomes part of the file
        path = Path(folder) / name.rpartition("/")[2]
        torch.save(dict(tensors), path)
        return path.read_bytes()


def as_torch(files: Mapping[str, bytes]) -> Files:
    """Return a checkpoint of safetensors as files of torch.save, its index too."""
    found: Files = {}
    for name, raw in files.items():
        new = name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        if name.endswith(".safetensors"):
            found[new] = with_tensors(new, tensors_in(name, raw))
        elif name.endswith(".index.json"):
            text = raw.decode().replace('"model-', '"pytorch_model-')
            found[new] = text.replace(".safetensors", ".bin").encode()
        else:
            found[name] = raw
    return found


def header_of(raw: bytes) -> tuple[Header, bytes]:
    """Return the header of a safetensors file and its data."""
    (length,) = struct.unpack("<Q", raw[:8])
    header: Any = json.loads(raw[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return header, raw[8 + length :]


def with_header(header: Header | str, data: bytes) -> bytes:
    """Return a safetensors file with that header, whatever it says."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    raw = text.encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def is_zip(raw: bytes) -> bool:
    """Tell whether a file is a zip archive, as torch.save writes them."""
    return raw.startswith(b"PK\x03\x04")


def members_of(raw: bytes) -> dict[str, bytes]:
    """Return the members of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def with_members(members: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of *members*, not compressed, with right checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()
