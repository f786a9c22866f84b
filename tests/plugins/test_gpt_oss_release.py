"""gpt-oss-20b at its true size: real names and shards, headers with the true shapes, no bytes.

The files are sparse: as long as the released ones, with nothing behind the header.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections import defaultdict
from pathlib import Path

import pytest

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.dtypes import nbytes

RELEASE = Path(__file__).parents[1] / "data" / "manifests" / "gpt-oss-20b"
E, H, HEADS, KV, VOCAB = 32, 2880, 64 * 64, 8 * 64, 201088
SHAPES = {
    r".*layernorm\.weight|model\.norm\.weight": ("BF16", (H,)),
    r".*q_proj\.weight": ("BF16", (HEADS, H)),
    r".*[kv]_proj\.weight": ("BF16", (KV, H)),
    r".*o_proj\.weight": ("BF16", (H, HEADS)),
    r".*q_proj\.bias": ("BF16", (HEADS,)),
    r".*[kv]_proj\.bias": ("BF16", (KV,)),
    r".*o_proj\.bias": ("BF16", (H,)),
    r".*sinks": ("BF16", (64,)),
    r".*router\.weight": ("BF16", (E, H)),
    r".*router\.bias": ("BF16", (E,)),
    r".*gate_up_proj_blocks": ("U8", (E, 2 * H, 90, 16)),
    r".*gate_up_proj_scales": ("U8", (E, 2 * H, 90)),
    r".*gate_up_proj_bias": ("BF16", (E, 2 * H)),
    r".*down_proj_blocks": ("U8", (E, H, 90, 16)),
    r".*down_proj_scales": ("U8", (E, H, 90)),
    r".*down_proj_bias": ("BF16", (E, H)),
    r"model\.embed_tokens\.weight|lm_head\.weight": ("BF16", (VOCAB, H)),
}


def shape_of(name: str) -> tuple[str, tuple[int, ...]]:
    (found,) = [v for pattern, v in SHAPES.items() if re.fullmatch(pattern, name)]
    return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss-20b")
    weight_map = json.loads((RELEASE / "index.json").read_text())["weight_map"]
    shards: defaultdict[str, list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        shards[shard].append(name)
    for shard, names in shards.items():
        header, at = {}, 0
        for name in names:
            dtype, shape = shape_of(name)
            end = at + nbytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / shard, 8 + len(text) + at)
    shutil.copy(RELEASE / "index.json", folder / "model.safetensors.index.json")
    shutil.copy(RELEASE / "config.json", folder)
    return folder


def test_bytes_are_exactly_those_that_the_index_declares(release: Path) -> None:
    manifest = open_manifest(release)
    assert manifest.total_bytes == manifest.declared_bytes == 13_761_264_768
    assert not [f for f in manifest.findings if f.severity != "info"]


def test_without_a_model_every_companion_counts_in_full(release: Path) -> None:
    plan = Dispatcher().plan(release, max_memory={0: "8GB", "cpu": "64GB", "disk": 0})
    assert plan.ok
    used = sum(memory.used_bytes for memory in plan.placement.memory.values())
    assert used == 13_761_264_768
    assert [q.name for q in plan.quirks] == ["gpt_oss", "gpt_oss.mxfp4"]


def test_with_the_plain_model_memory_is_that_of_plain_weights_untied(release: Path) -> None:
    """The config names no dtype: as in transformers, the first stored one counts (BF16)."""
    dispatcher = Dispatcher()
    model = dispatcher.model(release)
    memory = {0: "24GiB", "cpu": "64GiB"}
    refused = dispatcher.plan(release, model=model, max_memory=memory)
    (reason,) = refused.problems
    assert "10,152,345,600 bytes stored, 38,220,595,200 bytes once loaded" in reason
    plan = dispatcher.plan(release, model=model, max_memory=memory, dequantize=True)
    assert plan.ok and plan.audit.coverage == 1.0
    assert plan.audit.by_class() == {"matched": 363, "made": 48, "used": 459}
    assert not plan.audit.ties and not plan.audit.unequal_ties
    planned = {
        name: nbytes(recipe.type.dtype or "", recipe.type.shape or ())
        for recipe in plan.recipes
        for name, _ in recipe.items()
    }
    assert sum(planned.values()) == 41_829_514_368
    used = plan.placement.memory
    assert used[0].used_bytes <= 24 * 2**30
    assert set(plan.device_map.values()) == {0, "cpu"}
