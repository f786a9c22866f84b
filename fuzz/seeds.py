"""The first inputs of every target: small real files, of the tests' data or written here.

``python fuzz/seeds.py`` writes those into ``fuzz/corpus`` that are not there. Inputs that once
showed a fault are in the same folders, named after what they showed; nothing is ever taken away.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from answers import HUB_SEEDS
from targets import _CONFIGURED, DATA, content_of, places

from modelquirks.planner.dispatcher import Dispatcher

__all__ = ["CORPUS", "inputs", "write_seeds"]

CORPUS = Path(__file__).resolve().parent / "corpus"
_MAX_BYTES = 40_000


def inputs(target: str) -> list[bytes]:
    """Return the corpus of a target, those first that showed faults."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def write_seeds() -> None:
    """Write the seeds that are not there yet."""
    for target, content in _seeds():
        if len(content) <= _MAX_BYTES:
            path = CORPUS / target / f"seed-{hashlib.sha256(content).hexdigest()[:12]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _seeds() -> Iterator[tuple[str, bytes]]:
    yield from _files()
    yield from _folders()
    yield from _texts()
    yield from _ours()
    for content in HUB_SEEDS:
        yield "hub", content
    for content in _ggufs():
        yield "gguf", content


def _files() -> Iterator[tuple[str, bytes]]:
    for path in sorted((DATA / "files").rglob("*")):
        if path.suffix == ".safetensors" and path.is_file() and path.stat().st_size < 2000:
            yield "safetensors", path.read_bytes()
        if path.suffix in (".pt", ".pth", ".bin", ".tar", ".ckpt") and path.is_file():
            content = path.read_bytes()
            if len(content) < 12_000:
                yield "torch_file", content
                yield from (("pickle", p) for p in _pickles(content))
        if path.name.endswith(".index.json"):
            yield "index", path.read_bytes()[:20_000]


def _pickles(content: bytes) -> Iterator[bytes]:
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    yield archive.read(name)


def _folders() -> Iterator[tuple[str, bytes]]:
    for kind in ("deepspeed", "dcp", "megatron", "fsdp"):
        seen: dict[tuple[str, int], None] = {}
        for number, place in enumerate(places(kind)):
            key = (str(place.root), len(place.content))
            if number < 256 and key not in seen:
                seen[key] = None
                yield kind, bytes([number]) + content_of(place)
    for base in ("deepspeed/zero1_fp32", "fsdp/fsdp2", "dcp/fsdp2", "megatron/tp2_pp2"):
        root = DATA / base
        found = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_file()]
        yield "names", "\n".join(found[:10]).encode()
    yield "names", b"model-00001-of-00002.gguf\nmodel-00002-of-00002.gguf"
    yield "names", b"consolidated.00.pth\nconsolidated.01.pth"
    yield "names", b"model-00001-of-00003.safetensors\nmodel-00003-of-00003.safetensors"


def _texts() -> Iterator[tuple[str, bytes]]:
    for number, text in enumerate(
        (
            *("0=24GiB,cpu=64GiB,disk", "model.layers.{0..9}.mlp=cpu", "1.5GB", "cuda:1"),
            *("model.layers.{i}.**=h.{i}.**", "a=b", "8k", "0=2GiB", "bfloat16", "bf16"),
            *("hf://org/name@v1.0/unet", "zero_stage=3,dp=8,dtype=bf16", "a.{x}.*.**.b"),
        )
    ):
        yield "texts", bytes([number]) + text.encode()
    machine = {
        "devices": {
            "0": {"capacity": "22GiB", "read_gb_per_s": 800, "link_gb_per_s": 24},
            "cpu": {"capacity": "64GiB"},
        }
    }
    listing = {"config": {"model_type": "llama"}, "tensors": {"a.weight": "BF16 [32, 128]"}}
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": 8}
    given: tuple[Any, ...] = (
        {"": "cpu"},
        {"3": [0.02, 0.4]},
        machine,
        zero,
        listing,
        {"schema": 1},
    )
    for number, value in enumerate(given):
        yield "options", bytes([number]) + json.dumps(value).encode()


def _ours() -> Iterator[tuple[str, bytes]]:
    """Configs, plans, adapters, and what we write ourselves."""
    base = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4}
    configs: list[Any] = [base, {"dim": 64, "n_heads": 4, "n_layers": 2}]
    for path in (*sorted(DATA.glob("gptq/*.json")), *sorted(DATA.glob("*/config*.json"))):
        found = json.loads(path.read_text())
        configs += [*found.values()] if path.name == "configs.json" else [found]
    for number in range(len(_CONFIGURED)):
        for value in configs[:6]:
            packed = value if "quantization_config" in value else {"quantization_config": value}
            yield "config", bytes([number]) + json.dumps({**base, **packed}).encode()
    yield "config", bytes([128]) + json.dumps(configs[1]).encode()
    for path in sorted(DATA.glob("peft/*/adapter_config.json"))[:8]:
        yield "adapter", path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "plan.json"
        for source in ("gptq/v1.safetensors", "files/dcp-hf/hf_2", "deepspeed/zero1_fp32"):
            memory: dict[Any, Any] = {0: 1 << 10, "cpu": 1 << 30}
            Dispatcher().plan(DATA / source, max_memory=memory).save(saved)
            yield "plan", saved.read_bytes()
        source = "files/dcp-hf/hf_2"
        Dispatcher().plan(DATA / source, model=_model(), max_memory={"cpu": 1 << 30}).save(saved)
        yield "plan", saved.read_bytes()
    record = {"name": "weights-0123456789abcdef.safetensors", "size_bytes": 8, "mtime_ns": 1}
    store = {"format": 1, "fingerprint": "0123456789abcdef" * 4, "checkpoint": {"path": "/c"}}
    text = json.dumps({**store, "files": [{**record, "digest": "00"}]}).encode()
    yield "offload", b"\0" + text
    header = b'{"__metadata__":{"modelquirks.keys":"{\\"a\\":\\"k\\"}"},'
    header += b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} '
    yield "offload", b"\x80" + struct.pack("<Q", len(header)) + header + bytes(4)
    yield "spans", b'{"size": 20, "begins": [0, 10], "lengths": [4, 4]}\nabcdefgh'


def _model() -> Any:
    """Return the model that the files of ``hf_2`` are of, nearly: one weight is transposed."""
    import torch

    with torch.device("meta"):
        model = torch.nn.Module()
        model.lin1, model.lin2 = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)
        model.emb, model.head = torch.nn.Embedding(13, 6), torch.nn.Linear(6, 13, bias=False)
        model.scale = torch.nn.Parameter(torch.empty(3))
    return model


def _ggufs() -> Iterator[bytes]:
    """Write small files by hand: facts of every type, plain and packed tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def fact(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
        dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head = text(name) + struct.pack("<I", len(shape))
        return head + dims + struct.pack("<IQ", kind, offset)

    facts = [
        fact("general.architecture", 8, text("llama")),
        fact("llama.block_count", 4, struct.pack("<I", 1)),
        fact("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        fact("general.alignment", 4, struct.pack("<I", 32)),
        fact("split.count", 2, struct.pack("<H", 1)),
        fact("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        fact("tokenizer.ggml.scores", 9, struct.pack("<IQff", 6, 2, 0, 1)),
        fact("flag", 7, b"\1"),
    ]
    lines = [
        tensor("token_embd.weight", (2, 32), 0, 0),
        tensor("blk.0.attn_q.weight", (1, 256), 12, 256),
        tensor("output_norm.weight", (4,), 1, 416),
    ]
    for n_facts, n_lines in ((8, 3), (1, 1), (0, 0)):
        head = b"GGUF" + struct.pack("<IQQ", 3, n_lines, n_facts)
        head += b"".join(facts[:n_facts]) + b"".join(lines[:n_lines])
        yield head + bytes(-len(head) % 32) + bytes(448)


if __name__ == "__main__":
    write_seeds()
