"""What llama.cpp and modelquirks make of damaged GGUF files.

    python benchmarks/comparison_gguf.py --source LLAMA_CPP --build LLAMA_CPP/build [--json FILE]

Needs a source tree of llama.cpp with its library built (``cmake --build build --target llama``), a
C++ compiler, and the packages gguf and transformers. Writes a tiny Llama as GGUF, damages it, has
each file loaded by ``llama_model_load_from_file`` of that library, in a process of its own, and by
modelquirks into the class of transformers; prints the table of docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from modelquirks.planner import Dispatcher

PROGRAM = """
#include "llama.h"
#include <cstdio>
static void say(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}
int main(int, char ** words) {
    llama_log_set(say, nullptr);
    llama_backend_init();
    llama_model_params options = llama_model_default_params();
    llama_model * model = llama_model_load_from_file(words[1], options);
    return model == nullptr;
}
"""
LAYERS, DIM, HEADS, KV_HEADS, FFN, WORDS = 4, 64, 4, 2, 128, 320
Arrays = dict[str, Any]


def tensors() -> Arrays:
    """Return the tensors of a Llama, as llama.cpp calls them."""
    chance = np.random.default_rng(0)
    kv = DIM // HEADS * KV_HEADS
    layer = {
        "attn_norm": (DIM,), "attn_q": (DIM, DIM), "attn_k": (kv, DIM), "attn_v": (kv, DIM),
        "attn_output": (DIM, DIM), "ffn_norm": (DIM,), "ffn_gate": (FFN, DIM),
        "ffn_up": (FFN, DIM), "ffn_down": (DIM, FFN),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WORDS, DIM),
        **{f"blk.{n}.{k}.weight": shape for n in range(LAYERS) for k, shape in layer.items()},
        "output_norm.weight": (DIM,),
        "output.weight": (WORDS, DIM),
    }
    return {n: chance.standard_normal(s, dtype=np.float32) * 0.05 for n, s in shapes.items()}


def write(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write them as a Llama without words."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("no_vocab")
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


UP = "blk.2.ffn_up.weight"


def without(arrays: Arrays) -> Arrays:
    """Leave one tensor out."""
    return {n: a for n, a in arrays.items() if n != UP}


def other_name(arrays: Arrays) -> Arrays:
    """Give one tensor a name that nobody knows."""
    return {n.replace("blk.2.ffn_up", "blk.2.ffn_rise"): a for n, a in arrays.items()}


def more(arrays: Arrays) -> Arrays:
    """Add one that nobody wants."""
    return arrays | {"blk.2.ffn_more.weight": arrays[UP]}


def shape(arrays: Arrays) -> Arrays:
    """Make one shorter."""
    return arrays | {UP: arrays[UP][:-32]}


def nan(arrays: Arrays) -> Arrays:
    """Put no number into one."""
    return arrays | {UP: np.full_like(arrays[UP], np.nan)}


EDITS: Mapping[str, Callable[[Arrays], Arrays]] = {
    "nothing is wrong": dict,
    "one tensor is not stored": without,
    "one tensor has another name": other_name,
    "one tensor more": more,
    "one tensor of another shape": shape,
    "the file is cut off": dict,
    "one tensor of NaN": nan,
}


def made(title: str, path: Path) -> Path:
    """Write the file that *title* speaks of, and return its path."""
    write(path, EDITS[title](tensors()))
    if "cut off" in title:
        path.write_bytes(path.read_bytes()[:-1000])
    return path


def by_llama(program: Path, path: Path) -> str:
    """Return what llama.cpp says; empty if it loads the file."""
    done = subprocess.run([program, path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit {done.returncode}"


def by_us(path: Path) -> str:
    """Return what a plan says; empty if it can be used, and was."""
    dispatcher = Dispatcher()
    try:
        model = dispatcher.model(path)
        if model is None:
            return "no class"
        plan = dispatcher.plan(path, model=model, device_map={"": "cpu"})
        if not plan.ok:
            return plan.refusal()
        plan.execute(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def told(said: str) -> str:
    """Return the cell for what was said."""
    if not said:
        return "loads"
    names = ("ffn_up", "ffn_rise", "ffn_more", "up_proj", "output.weight")
    return "refused, named" if any(name in said for name in names) else "refused"


def main() -> int:
    """Build the program, write, load, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="source of llama.cpp")
    parser.add_argument("--build", type=Path, required=True, help="where it is built")
    parser.add_argument("--json", type=Path, help="write what was said to this file")
    args = parser.parse_args()
    library = next(iter(args.build.glob("**/libllama.so")), None)
    compiler = shutil.which("c++")
    if library is None or compiler is None:
        sys.exit(f"no libllama.so below {str(args.build)!r}, or no C++ compiler")
    said: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        program = root / "load"
        (root / "load.cpp").write_text(PROGRAM)
        where = [f"-I{args.source / 'include'}", f"-I{args.source / 'ggml' / 'include'}"]
        link = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent.resolve()}"]
        libraries = ["-lllama", "-lggml", "-lggml-base"]
        words = [compiler, str(root / "load.cpp"), "-o", str(program), *where, *link, *libraries]
        subprocess.run(words, check=True)
        for title in EDITS:
            path = made(title, root / "model.gguf")
            said[title] = {
                "llama.cpp": by_llama(program, path),
                "modelquirks": by_us(path),
            }
    print("| GGUF | llama.cpp | modelquirks |\n|---|---|---|")
    for title, by in said.items():
        print(f"| {title} | {told(by['llama.cpp'])} | {told(by['modelquirks'])} |")
    if args.json is not None:
        args.json.write_text(json.dumps(said, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
