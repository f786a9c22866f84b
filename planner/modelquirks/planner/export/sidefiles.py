"""Files beside the weights: which an export copies, and how config.json follows the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.confined import confined
from modelquirks.planner.checkpoint.file_kind import OUTSIDE, Look, look
from modelquirks.planner.checkpoint.json_text import MAX_JSON_BYTES, JsonProblem, parse_json
from modelquirks.planner.dtypes import BITS, is_float, torch_name
from modelquirks.planner.export.exportreport import ExportError
from modelquirks.planner.finding import Finding

__all__ = ["CONFIG", "SideFile", "about_left_out", "is_ours", "side_files"]

CONFIG = "config.json"
_NAMES = frozenset(
    (
        *(CONFIG, "generation_config.json", "adapter_config.json", "params.json"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("spiece.model", "sentencepiece.bpe.model", "tekken.json", "source.spm", "target.spm"),
        *("chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    )
)
"""What transformers' configurations, tokenizers and processors save beside the weights."""
_WEIGHTS = re.compile(r"\w+(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_PACKING = ("quantization_config", "quantization", "quantization_bit")
"""Keys of config.json that say how weights are packed."""


class SideFile(NamedTuple):
    """A file to be written beside the weights, and what was changed in it, if anything."""

    name: str
    content: bytes
    changes: str = ""


def is_ours(name: str) -> bool:
    """Tell whether an export may have written a file of that name."""
    return name in _NAMES or _WEIGHTS.fullmatch(name) is not None


def side_files(
    root: Path, *, dtypes: Mapping[str, int], plain: bool, changed: bool
) -> tuple[list[SideFile], dict[str, str]]:
    """Return what the checkpoint in *root* has of them, and why some are not copied, by name.

    config.json follows the weights if those are *changed* (cast, made for a model, put together
    from a training run): its dtype is the one of most bytes in *dtypes*, bytes by dtype of what is
    written, among floats that are not packed; transformers loads in the dtype that is named there.
    *plain*: packed weights were made plain, so it must not say that they are packed. ExportError if
    one cannot be read: an export without its configuration is none.
    """
    found: list[SideFile] = []
    left_out: dict[str, str] = {}
    for name in sorted(_NAMES):
        with confined(root):
            seen = look(root / name)
        if why := _why_not(seen):
            left_out[name] = why
        elif seen.kind not in ("absent", "special"):
            found.append(SideFile(name, _read(root / name)))
    if changed:
        found = [_adapted(f, dtypes, plain=plain) if f.name == CONFIG else f for f in found]
    return found, left_out


def about_left_out(left_out: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning for the files that would be copied, and are not."""
    if told := [f"{name!r}: {why}" for name, why in left_out.items()]:
        yield Finding("side-file", "warning", f"not copied: {'; '.join(told)}")


def _why_not(seen: Look) -> str:
    """Return why a file is not copied, or ``""``.

    What a link leads to elsewhere may be private, and an export is made to be given away.
    """
    if seen.size_bytes > MAX_JSON_BYTES:
        return f"it has {seen.size_bytes:,} bytes"
    return seen.trouble if seen.trouble == OUTSIDE else ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExportError(
            f"{str(path)!r} belongs beside the weights and cannot be read: "
            f"{error.strerror or error}. Nothing was written"
        ) from error


def _adapted(file: SideFile, dtypes: Mapping[str, int], *, plain: bool) -> SideFile:
    config = parse_json(file.content.decode("utf-8-sig", "replace"))
    if isinstance(config, JsonProblem) or not isinstance(config, dict):
        return file  # a finding of the checkpoint says so
    changes = [*_with_dtype(config, _main(dtypes))]
    if plain and (packed := [key for key in _PACKING if config.pop(key, None) is not None]):
        changes.append(f"no {', '.join(map(repr, packed))}")
    if not changes:
        return file
    text = f"{json.dumps(config, indent=2)}\n"
    return SideFile(file.name, text.encode(), ", ".join(changes))


def _with_dtype(config: dict[str, Any], dtype: str | None) -> Iterable[str]:
    """Name *dtype* in *config* under the key that it has; yield what was changed."""
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    for key in keys if dtype is not None else ():
        name = torch_name(dtype or "")
        if config[key].removeprefix("torch.") != name:
            yield f"{key!r} is {name!r}, not {config[key]!r}"
            config[key] = name


def _main(dtypes: Mapping[str, int]) -> str | None:
    wide = {d: n for d, n in dtypes.items() if is_float(d) and BITS[d] >= 16}
    return max(wide, key=wide.__getitem__, default=None)
