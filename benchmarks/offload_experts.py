"""Experts on disk: tokens a second and bytes a token, accelerate's way and one by one.

    python benchmarks/offload_experts.py [--tokens N] [--json FILE] [--plot FILE]

Two models of transformers with all decoder layers on disk, one token at a time: a Mixtral whose
experts are stored one by one (``save_pretrained``), and a GPT-OSS with mxfp4 blocks and scales. The
roads, on one device map, take the same tokens in three rounds, the fastest of which counts:

- *in memory*: the whole model;
- *accelerate*: its hooks over the checkpoint's own files (``expert_offload=False``), which make
  every expert of a layer for each token, as the model computes with all of them in one tensor;
- *by expert*: as by default but without a cache, then with one for a quarter of the experts;
- *from_pretrained*: for comparison, transformers' own loading with an ``offload_folder``, to which
  it first writes the stacked, plain experts. On a CPU accelerate maps those files anew for each
  token and the page cache does the rest; the bytes are those of the tensors that it asks for.

Logits are compared bit for bit with those of the model in memory, by the same implementation. Those
of *from_pretrained* need not be equal: on some machines they are off by float32's rounding.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from accelerate.utils import OffloadedWeightsLoader
from bars import Bar, bars
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from modelquirks.planner import Dispatcher
from modelquirks.planner.execution.experts import ExpertOffload, ExpertReport
from modelquirks.planner.model.build import empty_weights

LAYERS, HIDDEN, WORDS = 2, 512, 2000
DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
ROUNDS = 3


class Subject(NamedTuple):
    """A checkpoint on disk and how to build its model."""

    name: str
    folder: Path
    kind: Callable[[Any], Any]
    config: Any
    share: float
    """Of the experts, that one token takes."""
    options: dict[str, Any]
    """For ``from_pretrained``."""
    plain: int
    """Bytes of all experts as the model computes with them."""


class Outcome(NamedTuple):
    """One road."""

    road: str
    implementation: str
    tokens_per_second: float
    bytes_per_token: float
    equal: bool
    """Logits equal bit for bit to those of the model in memory, same implementation."""
    written: int
    report: ExpertReport | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        report = None if self.report is None else self.report.to_json()
        return {**self._asdict(), "report": report}


class Road(NamedTuple):
    """A loaded model, ready to run."""

    name: str
    model: Any
    bytes_read: Callable[[], int]
    written: int = 0
    experts: ExpertOffload | None = None


def mixtral(folder: Path, layers: int) -> Subject:
    """Save a Mixtral as transformers does, experts one by one."""
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_local_experts=32,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=WORDS,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    plain = layers * 32 * 3 * HIDDEN * 1024 * 4
    return Subject("Mixtral-like", folder, MixtralForCausalLM, config, 2 / 32, {}, plain)


def gpt_oss(folder: Path, layers: int) -> Subject:
    """Write a GPT-OSS with packed experts, 128 of which 4 are taken, as in gpt-oss-120b."""
    n, inner = 128, 512
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_local_experts=n,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=WORDS,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        _, into, out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (n, out, into // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, (n, out, into // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(described))
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    plain = layers * n * 3 * HIDDEN * inner * 2
    return Subject("GPT-OSS-like", folder, GptOssForCausalLM, config, 4 / n, options, plain)


def load(subject: Subject, name: str, device_map: Any = DEVICE_MAP, **options: Any) -> Road:
    """Load through a plan."""
    with empty_weights():
        model = subject.kind(deepcopy(subject.config)).eval()
    plan = Dispatcher().plan(
        subject.folder, model=model, device_map=device_map, dtype="auto", dequantize=True
    )
    loaded = plan.load_into(model, **options)
    return Road(name, model, _reads(model), loaded.bytes_written, loaded.experts)


def _reads(model: nn.Module) -> Callable[[], int]:
    """Return what tells the bytes asked of the files so far."""
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            return lambda: int(weights.dataset.state_dict.bytes_read)
    return lambda: 0


@contextmanager
def from_pretrained(subject: Subject) -> Generator[Road]:
    """Load as transformers and accelerate do, counting what accelerate asks of the folder."""
    asked = [0]
    get = OffloadedWeightsLoader.__getitem__

    def counting(self: Any, key: str) -> torch.Tensor:
        tensor: torch.Tensor = get(self, key)
        asked[0] += tensor.nbytes
        return tensor

    with tempfile.TemporaryDirectory(dir=subject.folder.parent) as offload:
        model: Any = AutoModelForCausalLM.from_pretrained(
            subject.folder, device_map=DEVICE_MAP, offload_folder=offload, **subject.options
        )
        written = sum(path.stat().st_size for path in Path(offload).iterdir())
        with mock.patch.object(OffloadedWeightsLoader, "__getitem__", counting):
            yield Road("from_pretrained", model.eval(), lambda: asked[0], written)


def run(
    road: Road, tokens: Sequence[torch.Tensor], expected: Sequence[torch.Tensor] | None = None
) -> tuple[Outcome, list[torch.Tensor]]:
    """Take the tokens through the model one by one; return how it went, and the logits."""
    made: list[torch.Tensor] = []
    seconds: list[float] = []
    n = -(-len(tokens) // ROUNDS)
    with torch.inference_mode():
        road.model(tokens[-1], use_cache=False)  # pages, kernels
        before = road.bytes_read()
        for start in range(0, len(tokens), n):
            began = time.perf_counter()
            for ids in tokens[start : start + n]:
                made.append(road.model(ids, use_cache=False).logits)
            seconds.append((time.perf_counter() - began) / len(tokens[start : start + n]))
    outcome = Outcome(
        road.name,
        road.model.config._experts_implementation,
        1 / min(seconds),
        (road.bytes_read() - before) / len(tokens),
        expected is None or all(map(torch.equal, made, expected)),
        road.written,
        None if road.experts is None else road.experts.report(),
    )
    return outcome, made


def outcomes(subject: Subject, tokens: Sequence[torch.Tensor]) -> Iterator[Outcome]:
    """Run every road over *subject*."""
    expected: dict[str, list[torch.Tensor]] = {}
    memory = load(subject, "in memory", {"": "cpu"})
    for kind in ("grouped_mm", "eager"):
        memory.model.set_experts_implementation(kind)
        outcome, expected[kind] = run(memory, tokens)
        yield outcome
    del memory
    few = len(tokens) // 4
    whole = load(subject, "accelerate", expert_offload=False)
    yield run(whole, tokens[:few], expected["grouped_mm"])[0]
    for name, cache in (("by expert", 0), ("by expert, cache", subject.plain // 4)):
        yield run(load(subject, name, expert_cache=cache), tokens, expected["eager"])[0]
    with from_pretrained(subject) as road:
        for kind in ("grouped_mm", "eager"):
            road.model.set_experts_implementation(kind)
            yield run(road, tokens, expected[kind])[0]


def needed(subject: Subject) -> float:
    """Return the stored bytes that one token needs of the layers on disk: all but experts, k/N."""
    total = 0.0
    for file in subject.folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.startswith("model.layers."):
                total += tensor.nbytes * (subject.share if ".experts." in name else 1)
    return total


def show(subject: Subject, rows: Sequence[Outcome], least: float) -> bool:
    """Print a table; return whether everything that must be shown was."""
    print(f"\n{subject.name}: {subject.plain / 1e6:.0f} MB of experts as computed with; a token "
          f"needs {least / 1e6:.1f} MB of the files")  # fmt: skip
    print(f"{'':18}{'experts':12}{'tokens/s':>9}{'MB/token':>10}{'equal':>7}{'written':>9}  cache")
    for row in rows:
        cache = ""
        if row.report is not None:
            peak = sum(row.report.peak_bytes.values())
            cache = f"{row.report.hit_rate:.0%} hits, {peak / 1e6:.0f} MB at most"
        print(
            f"{row.road:18}{row.implementation:12}{row.tokens_per_second:9.1f}"
            f"{row.bytes_per_token / 1e6:10.1f}{'yes' if row.equal else 'NO':>7}"
            f"{row.written / 1e6:7.0f}MB  {cache}"
        )
    by_road = {row.road: row for row in rows if row.report is not None or row.road == "accelerate"}
    plain, cached = by_road["by expert"], by_road["by expert, cache"]
    faster = plain.tokens_per_second / by_road["accelerate"].tokens_per_second
    bytes_used = plain.bytes_per_token / least
    bounded = cached.report is not None and all(
        peak <= subject.plain // 4 for peak in cached.report.peak_bytes.values()
    )
    print(f"by expert / accelerate: {faster:.1f} (at least 8); read / needed: {bytes_used:.2f} "
          f"(at most 1.2); cache within its bound: {'yes' if bounded else 'NO'}")  # fmt: skip
    equal = all(row.equal for row in rows if row.road != "from_pretrained")
    return faster >= 8 and bytes_used <= 1.2 and bounded and equal


def bar_of(row: Outcome) -> Bar:
    """Return the seconds of a token, with what was read for it."""
    by_us = row.road.startswith("by expert")
    who = f"{'ours ' if by_us else ''}{row.road}, {row.implementation}"
    return Bar(who, 1 / row.tokens_per_second, f"{row.bytes_per_token / 1e6:.1f} MB read")


def main() -> int:
    """Run, print, and say by the exit code whether it is as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="seconds a token as a picture (SVG)")
    args = parser.parse_args()
    for name in ("accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    silence: Any = transformers_logging
    silence.disable_progress_bar()
    torch.manual_seed(0)
    tokens = list(torch.randint(2, WORDS, (args.tokens, 1, 1)))
    told: dict[str, Any] = {}
    drawn: dict[str, list[Bar]] = {}
    good = True
    for make in (mixtral, gpt_oss):
        with tempfile.TemporaryDirectory() as scratch:
            subject = make(Path(scratch) / "model", args.layers)
            rows = list(outcomes(subject, tokens))
            least = needed(subject)
            good &= show(subject, rows, least)
        drawn[f"{subject.name}, a token"] = [bar_of(row) for row in rows]
        told[subject.name] = {"needed": least, "roads": [row.to_json() for row in rows]}
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    if args.plot is not None:
        args.plot.write_text(bars(drawn, logarithmic=True), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
