"""Which files in a folder are the checkpoint, and which are something else.

Folders hold a checkpoint in several formats, adapters beside a base model, states of optimizers,
indexes of a run long gone. One candidate is chosen by a fixed order and the others are named:
nothing is ever added up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.confined import is_outside
from modelquirks.planner.checkpoint.filepath import FilePath

__all__ = ["Candidate", "Folder", "list_folder", "rank_files", "rank_of", "series_of"]

_SIDE_FILE = re.compile(
    r"(training_args|optimizer|scheduler|lr_scheduler|scaler|sampler|trainer_state|distrib_optim"
    r"|random_states|rng_state|custom_checkpoint|optim)([_-]?\d+)*\.(bin|pt|pth|pkl|safetensors)"
    r"|.*optim_states\.pt|random_states_\d+\.pkl",
    re.IGNORECASE,
)
_TORCH = (".bin", ".pt", ".pth", ".ckpt")
_FOREIGN = (".gguf", ".msgpack", ".h5", ".keras", ".onnx", ".npz", ".tflite", ".pdparams", ".pb")
_SINGLES = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "consolidated.safetensors",
)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_PART = re.compile(r"\d+")
_RANK = re.compile(r"consolidated\.([0-9]{2,4})\.pth")


class Candidate(NamedTuple):
    """Files that together may be the checkpoint."""

    kind: Literal["index", "file", "files", "ranks", "foreign"]
    files: tuple[str, ...]
    why: str
    """The place in the order, for people."""


class Folder(NamedTuple):
    """What is in a folder, as far as names tell."""

    root: FilePath
    candidates: tuple[Candidate, ...]
    """Best first."""
    names: tuple[str, ...]
    """All files."""
    present: frozenset[str]
    weights: tuple[str, ...]
    """Files that are weights by their name, whatever the format."""
    subfolders: tuple[str, ...]
    """Folders below that hold such files."""

    def has(self, shard: str) -> bool:
        """Tell whether the file of that name, relative to the folder, is there."""
        try:
            return shard in self.present or ("/" in shard and (self.root / shard).exists())
        except OSError:  # a name that is longer than names can be
            return False


def series_of(name: str) -> str:
    """Return what the names of all shards of one series have in common.

    >>> series_of("model-00001-of-00002.bin"), series_of("model-00002-of-00002.bin")
    ('model-#-of-#.bin', 'model-#-of-#.bin')
    """
    return _PART.sub("#", name)


def rank_of(name: str) -> int:
    """Return the number of a file that holds one rank of a model, as Meta names it; else -1."""
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else -1


def rank_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of ranks among *names*, by number; none if there is only one.

    >>> rank_files(["consolidated.01.pth", "tokenizer.model", "consolidated.00.pth"])
    ('consolidated.00.pth', 'consolidated.01.pth')
    """
    found = sorted((name for name in names if rank_of(name) >= 0), key=rank_of)
    return tuple(found) if len(found) > 1 else ()


def list_folder(root: FilePath) -> Folder:
    """Return what *root* holds. OSError if it cannot be listed."""
    listed = sorted((entry.name, entry.is_dir()) for entry in root.iterdir())
    names = tuple(name for name, is_folder in listed if not is_folder)
    below = [name for name, is_folder in listed if is_folder and not name.startswith(".")]
    weights = tuple(name for name in names if _is_weight(name))
    subfolders = tuple(name for name in below if any(map(_is_weight, _names_in(root / name))))
    candidates = tuple(_ranked(names, weights))
    return Folder(root, candidates, names, frozenset(names), weights, subfolders)


def _names_in(folder: FilePath) -> list[str]:
    try:
        return [] if is_outside(folder) else [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _is_weight(name: str) -> bool:
    ending = os.path.splitext(name)[1].lower()
    return (
        ending in (".safetensors", *_TORCH, *_FOREIGN)
        and not _SIDE_FILE.fullmatch(name)
        and not name.startswith(".")
    )


def _ranked(names: Sequence[str], weights: Sequence[str]) -> Iterator[Candidate]:
    safe = [name for name in weights if name.endswith(".safetensors") and name not in _ADAPTERS]
    torch = [name for name in weights if name.lower().endswith(_TORCH) and name not in _ADAPTERS]
    indexes = [name for name in names if name.endswith(".index.json")]
    safe_indexes = [name for name in indexes if "safetensors" in name]
    torch_indexes = [name for name in indexes if any(f"{end}.index" in name for end in _TORCH)]
    known = [name for name in _SINGLES if name in safe]
    for name in sorted(safe_indexes, key=_index_order):
        yield Candidate("index", (name,), "an index of safetensors files comes first")
    for name in known or safe[: len(safe) == 1]:
        yield Candidate("file", (name,), "a single safetensors file comes before other formats")
    for name in sorted(torch_indexes, key=_index_order):
        yield Candidate("index", (name,), "an index comes before single files of its format")
    if ranks := rank_files(torch):
        yield Candidate("ranks", ranks, "the ranks of one model come before single files")
        torch = [name for name in torch if name not in ranks]
    singles = [*_single_torch(torch)]
    yield from singles
    several = [name for name in safe if name not in known]
    if len(several) > 1:
        yield Candidate("files", tuple(several), "all safetensors files, as there is no index")
    if len(torch) > 1 and not singles:
        yield Candidate("files", tuple(torch), "all torch files, as there is no index")
    for name in _ADAPTERS:
        if name in names:
            yield Candidate("file", (name,), "an adapter is taken where there is no base model")
    others = [name for name in indexes if name not in safe_indexes and name not in torch_indexes]
    for name in [*others, *("index.json" for name in names if name == "index.json")]:
        yield Candidate("index", (name,), "an index of another name is taken last")
    for name in weights:
        if name.lower().endswith(_FOREIGN):
            yield Candidate("foreign", (name,), "there is nothing else")


def _index_order(name: str) -> tuple[bool, bool, bool, str]:
    return (
        not name.startswith(("model.safetensors.", "pytorch_model.bin.")),
        not name.startswith("diffusion_pytorch_model"),
        not name.startswith("consolidated"),
        name,
    )


def _single_torch(torch: list[str]) -> Iterator[Candidate]:
    models = [name for name in torch if name.endswith("model_states.pt")]  # DeepSpeed
    if "pytorch_model.bin" in torch:
        yield Candidate("file", ("pytorch_model.bin",), "the usual name of a single torch file")
    elif len(torch) == 1 or len(models) == 1:
        yield Candidate("file", tuple(models or torch), "the only weight file of its format")
