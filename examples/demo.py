"""The main job, for real: a GPT-OSS checkpoint planned from headers, loaded, verified, compared.

Run by ``make demo``. Needs no network, no GPU and a minute.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny_gpt_oss
import torch
import transformers
from transformers import GptOssForCausalLM

from modelquirks.planner import Dispatcher
from modelquirks.planner.cli import main as modelquirks
from modelquirks.planner.cli.report_plan import show_loaded
from modelquirks.planner.cli.terminal import Terminal

MEMORY = {"cpu": "900KB", "disk": None}
TAKEN_OUT = "model.layers.2.mlp.experts.down_proj_scales"


def said(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}\n", flush=True)


def demo(folder: Path) -> int:
    """Show the job; return 0 if everything was as it must be."""
    checkpoint = tiny_gpt_oss.make(folder / "gpt-oss-tiny")
    memory = ",".join(f"{name}={size}" if size else name for name, size in MEMORY.items())
    arguments = ["--model", "transformers", "--dequantize", "--max-memory", memory]

    said(f"modelquirks plan gpt-oss-tiny --dry-run {' '.join(arguments)}")
    if modelquirks(["plan", str(checkpoint), "--dry-run", *arguments]) != 0:
        return 1

    said("the same plan, executed by accelerate over cpu and disk, and verified")
    dispatcher = Dispatcher()
    model = dispatcher.model(checkpoint)
    if model is None:
        print("no plugin builds this model")
        return 1
    plan = dispatcher.plan(checkpoint, model=model, max_memory=MEMORY, dequantize=True)
    files = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    report = plan.load_into(model)
    show_loaded(Terminal(sys.stdout), report)

    said("logits against the same checkpoint loaded by transformers")
    theirs = GptOssForCausalLM.from_pretrained(checkpoint, device_map={"": "cpu"}).eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        ours = model.eval()(tokens).logits
        reference = theirs(tokens).logits
    equal = torch.equal(ours, reference)
    unchanged = files == {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    print(f"{tuple(ours.shape)} logits, equal bit for bit: {equal}")
    print(f"files of the checkpoint unchanged, nothing written: {unchanged}")

    said(f"failing well: the checkpoint without {TAKEN_OUT!r}")
    damaged = tiny_gpt_oss.make(folder / "gpt-oss-damaged", without=TAKEN_OUT)
    code = modelquirks(["plan", str(damaged), *arguments])
    print(f"exit code {code}")
    return 0 if equal and unchanged and code == 1 else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        raise SystemExit(demo(Path(name)))
