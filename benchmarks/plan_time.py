"""How long planning a checkpoint of 208,550 tensors takes, beside only parsing its headers.

    python benchmarks/plan_time.py [--pairs N] [--rows bare,packed,stacked] [--parted]
                                   [--steps] [--keep DIR]

The checkpoint is made here and takes no disk: 64 safetensors files with whole headers over empty
(sparse) data, and an index. Names, dtypes and shapes are those of Kimi-K2.6: 61 layers with
multi-head latent attention, 60 of them with 384 experts in compressed-tensors' pack-quantized int4
(``weight_packed``, ``weight_scale``, ``weight_shape``), and a vision tower of 27 blocks.
A file holds a layer, or with ``--parted`` parts of two.

The floor is a process that reads the header of each file and calls ``json.loads`` on it. Beside it,
a process that plans: folder to device map over one accelerator, cpu and disk. Whole processes and
the work inside them are timed, wall and CPU, in turn; printed are medians, and the median of the
ratios pair by pair. Rows: ``bare`` without a model, which must not import torch; ``packed`` for a
model whose modules keep the packed form (208,550 tensors wanted); ``stacked`` for one with plain
experts stacked by layer (1,310 tensors wanted), each made of 3 x 384 packed ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from compiled import with_compiled

N_TENSORS, N_FILES = 208_550, 64
N_LAYERS, N_EXPERTS, N_VISION = 61, 384, 27
HIDDEN, INTERMEDIATE, EXPERT, VOCABULARY, HEADS = 7168, 18432, 2048, 163_840, 64
VISION, VISION_FFN = 1152, 4304
TEXT = "language_model.model"
BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}
MEMORY = {0: "80GiB", "cpu": "400GiB", "disk": "4TiB"}
MAX_MB = 600
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": N_LAYERS,
        "n_routed_experts": N_EXPERTS,
        "first_k_dense_replace": 1,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": EXPERT,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"},
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\..*proj"],
        },
    },
    "vision_config": {"hidden_size": VISION, "num_hidden_layers": N_VISION},
}


class Tensor(NamedTuple):
    """One entry of a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its data."""
        count = BYTES[self.dtype]
        for length in self.shape:
            count *= length
        return count


def attention(at: str) -> Iterator[Tensor]:
    """Yield the tensors of one layer outside of its MLP."""
    for name, shape in (
        ("input_layernorm", (HIDDEN,)),
        ("post_attention_layernorm", (HIDDEN,)),
        ("self_attn.q_a_proj", (1536, HIDDEN)),
        ("self_attn.q_a_layernorm", (1536,)),
        ("self_attn.q_b_proj", (HEADS * 192, 1536)),
        ("self_attn.kv_a_proj_with_mqa", (576, HIDDEN)),
        ("self_attn.kv_a_layernorm", (512,)),
        ("self_attn.kv_b_proj", (HEADS * 256, 512)),
        ("self_attn.o_proj", (HIDDEN, HEADS * 128)),
    ):
        yield Tensor(f"{at}.{name}.weight", "BF16", shape)


def plain_mlp(at: str, width: int) -> Iterator[Tensor]:
    """Yield the three projections of a gated MLP."""
    for name, shape in (
        ("gate_proj", (width, HIDDEN)),
        ("up_proj", (width, HIDDEN)),
        ("down_proj", (HIDDEN, width)),
    ):
        yield Tensor(f"{at}.{name}.weight", "BF16", shape)


def packed_experts(at: str) -> Iterator[Tensor]:
    """Yield the experts of one layer as compressed-tensors packs them: 8 values an I32."""
    for expert in range(N_EXPERTS):
        for plain in plain_mlp(f"{at}.{expert}", EXPERT):
            rows, columns = plain.shape
            yield Tensor(f"{plain.name}_packed", "I32", (rows, columns // 8))
            yield Tensor(f"{plain.name}_scale", "BF16", (rows, columns // 32))
            yield Tensor(f"{plain.name}_shape", "I64", (2,))


def stacked_experts(at: str) -> Iterator[Tensor]:
    """Yield the experts of one layer as transformers' modules have them."""
    yield Tensor(f"{at}.gate_up_proj", "BF16", (N_EXPERTS, 2 * EXPERT, HIDDEN))
    yield Tensor(f"{at}.down_proj", "BF16", (N_EXPERTS, HIDDEN, EXPERT))


Experts = Callable[[str], Iterator[Tensor]]


def layer(number: int, experts: Experts) -> Iterator[Tensor]:
    """Yield one layer; the first is dense."""
    at = f"{TEXT}.layers.{number}"
    yield from attention(at)
    if number == 0:
        yield from plain_mlp(f"{at}.mlp", INTERMEDIATE)
        return
    yield Tensor(f"{at}.mlp.gate.weight", "BF16", (N_EXPERTS, HIDDEN))
    yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", "F32", (N_EXPERTS,))
    yield from plain_mlp(f"{at}.mlp.shared_experts", EXPERT)
    yield from experts(f"{at}.mlp.experts")


def linear(name: str, *shape: int) -> Iterator[Tensor]:
    """Yield weight and bias."""
    yield Tensor(f"{name}.weight", "BF16", shape)
    yield Tensor(f"{name}.bias", "BF16", shape[:1])


def vision() -> Iterator[Tensor]:
    """Yield the vision tower and the projector."""
    yield from linear("vision_tower.patch_embed.proj", VISION, 3, 14, 14)
    yield Tensor("vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, VISION))
    for number in range(N_VISION):
        at = f"vision_tower.encoder.blocks.{number}"
        yield from linear(f"{at}.norm0", VISION)
        yield from linear(f"{at}.norm1", VISION)
        yield from linear(f"{at}.wqkv", 3 * VISION, VISION)
        yield from linear(f"{at}.wo", VISION, VISION)
        yield from linear(f"{at}.mlp.fc0", VISION_FFN, VISION)
        yield from linear(f"{at}.mlp.fc1", VISION, VISION_FFN)
    yield from linear("vision_tower.encoder.final_layernorm", VISION)
    yield from linear("mm_projector.pre_norm", VISION)
    yield from linear("mm_projector.proj.0", 4 * VISION, 4 * VISION)
    yield from linear("mm_projector.proj.2", HIDDEN, 4 * VISION)


def files() -> list[list[Tensor]]:
    """Return the tensors of each file: a layer each, then what is around them."""
    ends = [
        [
            Tensor(f"{TEXT}.norm.weight", "BF16", (HIDDEN,)),
            Tensor("language_model.lm_head.weight", "BF16", (VOCABULARY, HIDDEN)),
        ],
        [Tensor(f"{TEXT}.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))],
        list(vision()),
    ]
    return [*(list(layer(number, packed_experts)) for number in range(N_LAYERS)), *ends]


def cut_anywhere() -> list[list[Tensor]]:
    """Return the same tensors in as many files, cut by their number, so that layers are parted."""
    tensors = [tensor for file in files() for tensor in file]
    bounds = [len(tensors) * number // N_FILES for number in range(N_FILES + 1)]
    return [tensors[begin:end] for begin, end in pairwise(bounds)]


def write_checkpoint(folder: Path, *, by_layer: bool) -> None:
    """Write the files (their data as holes), the index and config.json."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files() if by_layer else cut_anywhere(), 1):
        shard = f"model-{number:05}-of-{N_FILES:06}.safetensors"
        # As the library has them: the widest dtypes first, then by name.
        ordered = sorted(tensors, key=lambda t: (-BYTES[t.dtype], t.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in ordered:
            begin, end = end, end + tensor.n_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + end)
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), shard)
        total += end
    assert len(weight_map) == N_TENSORS, len(weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))


def skeleton(experts: Experts) -> Any:
    """Return what a model of the checkpoint's names wants, by hand: torch is not needed."""
    from modelquirks.planner.model.skeleton import ModelTensor, Skeleton

    around = [tensor for file in files()[N_LAYERS:] for tensor in file]
    layers = [tensor for number in range(N_LAYERS) for tensor in layer(number, experts)]
    tensors = {t.name: ModelTensor(t.name, t.dtype, t.shape) for t in (*layers, *around)}
    modules = {"": "Model"}
    for name in tensors:
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            kind = "DecoderLayer" if depth == 4 and parts[2] == "layers" else "Module"
            modules.setdefault(".".join(parts[:depth]), kind)
    return Skeleton("benchmark", tensors, modules, no_split=frozenset({"DecoderLayer"}))


class Timed:
    """Functions of the dispatcher, replaced by themselves with a clock."""

    def __init__(self) -> None:
        """Start with no times."""
        self.seconds: dict[str, float] = {}

    def watch(self, module: Any, name: str, step: str) -> None:
        """Add up the CPU time of ``module.name``, inner steps that are watched included."""
        function = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - started
                self.seconds[step] = self.seconds.get(step, 0.0) + took

        setattr(module, name, timed)


def watched_steps() -> Timed:
    """Return the clock of the steps of ``Dispatcher.plan``."""
    from modelquirks.planner import dispatcher
    from modelquirks.planner.checkpoint import manifest

    timed = Timed()
    for name, step in (
        ("_manifest", "manifest"),
        ("resolve", "resolve"),
        ("find_offers", "offers"),
        ("derive", "derive and audit"),
        ("placement_of", "placement"),
        ("layout_digest", "layout digest"),
    ):
        if hasattr(dispatcher, name):
            timed.watch(dispatcher, name, step)
    for name in ("templates_of", "grouped"):
        timed.watch(manifest, name, "group names")
    return timed


def peak_mb() -> float:
    """Return the most memory that this process has had, in MB (1,000,000 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def run_floor(folder: Path) -> None:
    """Read and parse each header; nothing else."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            json.loads(file.read(length))


def child(row: str, folder: Path, *, steps: bool) -> None:
    """Do one piece of work; print what it took as JSON."""
    seconds: dict[str, float] = {}
    if row == "floor":
        started, cpu = time.perf_counter(), time.process_time()
        run_floor(folder)
        took, used = time.perf_counter() - started, time.process_time() - cpu
    else:
        from modelquirks.planner import Dispatcher

        kinds: dict[str, Experts] = {"packed": packed_experts, "stacked": stacked_experts}
        model = skeleton(kinds[row]) if row in kinds else None
        timed = watched_steps() if steps else Timed()
        started, cpu = time.perf_counter(), time.process_time()
        plan = Dispatcher().plan(
            folder,
            model=model,
            device_map="auto",
            max_memory=MEMORY,
            dequantize=row == "stacked",
        )
        took, used = time.perf_counter() - started, time.process_time() - cpu
        seconds = timed.seconds
        assert plan.checkpoint["tensors"] == N_TENSORS, plan.checkpoint
        assert plan.device_map, plan.problems
        assert model is not None or "torch" not in sys.modules, "torch was imported"
        assert model is None or plan.audit.n_model == len(model.wanted), plan.audit.by_class()
    print(json.dumps({"wall": took, "cpu": used, "peak": peak_mb(), "steps": seconds}))


class Measured(NamedTuple):
    """One process."""

    wall: float
    cpu: float
    peak: float
    whole: float
    """Wall time of the whole process, start and imports included."""
    steps: dict[str, float]


def measured(row: str, folder: Path, *, steps: bool = False) -> Measured:
    """Run one piece of work in a fresh process."""
    command = [sys.executable, __file__, "--child", row, "--keep", str(folder)]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, *["--steps"] * steps],
        check=True, stdout=subprocess.PIPE, text=True, env=with_compiled(),
    )  # fmt: skip
    whole = time.perf_counter() - started
    told = json.loads(done.stdout)
    return Measured(told["wall"], told["cpu"], told["peak"], whole, told["steps"])


def compare(row: str, folder: Path, pairs: int, *, steps: bool) -> None:
    """Print one row beside the floor."""
    measured(row, folder)
    found = [(measured("floor", folder), measured(row, folder)) for _ in range(pairs)]
    print(f"{row}")
    for what in ("wall", "cpu", "whole"):
        floor = statistics.median(getattr(f, what) for f, _ in found)
        ours = statistics.median(getattr(o, what) for _, o in found)
        ratio = statistics.median(getattr(o, what) / getattr(f, what) for f, o in found)
        label = {"wall": "wall", "cpu": "CPU", "whole": "whole process"}[what]
        print(f"  {label:14} json.loads {floor:6.2f} s   plan {ours:6.2f} s   ratio {ratio:5.2f}")
    floor, ours = (max(pair[side].peak for pair in found) for side in (0, 1))
    print(f"  {'peak memory':14} json.loads {floor:4.0f} MB    plan {ours:4.0f} MB")
    assert ours < MAX_MB, f"more than {MAX_MB} MB"
    if steps:
        once = measured(row, folder, steps=True)
        for step, took in once.steps.items():
            print(f"    {step:18} {took:6.3f} s")
        print(f"    {'all':18} {once.cpu:6.3f} s CPU")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="processes of each kind, in turn")
    parser.add_argument("--rows", default="bare,packed,stacked")
    parser.add_argument("--steps", action="store_true", help="print what each step takes")
    parser.add_argument("--keep", type=Path, help="folder for the checkpoint, made if it is empty")
    parser.add_argument("--parted", action="store_true", help="files that begin within a layer")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.keep, steps=args.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            write_checkpoint(folder, by_layer=not args.parted)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"{N_TENSORS:,} tensors, {len(sizes)} files of {sum(sizes) / 1e9:,.0f} GB, empty")
        for row in args.rows.split(","):
            compare(row, folder, args.pairs, steps=args.steps)


if __name__ == "__main__":
    main()
