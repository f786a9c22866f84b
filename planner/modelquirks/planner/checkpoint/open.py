"""``open_manifest``: what a checkpoint holds, from the headers of its files.

A checkpoint that can be recognised gives a :class:`Manifest`, whatever is wrong with it: the faults
are findings in it, so that all of them can be shown at once and the rest can be looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.checkpoint.confined import confined
from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.filepath import FilePath
from modelquirks.planner.checkpoint.folder import (
    Candidate,
    Folder,
    list_folder,
    rank_files,
    series_of,
)
from modelquirks.planner.checkpoint.index import Index, format_of, read_index
from modelquirks.planner.checkpoint.json_text import JsonProblem, parse_json, read_json
from modelquirks.planner.checkpoint.lookalikes import about_names
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.opened import Opened, content_of
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.params_json import config_of_params
from modelquirks.planner.checkpoint.ranks import read_ranks
from modelquirks.planner.checkpoint.shards import Content, beside, read_files, read_indexed
from modelquirks.planner.checkpoint.weight_file import is_whole
from modelquirks.planner.collector import collector_paused
from modelquirks.planner.finding import Finding, Severity, shown

if TYPE_CHECKING:
    from modelquirks.quirks.registry import Registry

__all__ = ["CheckpointError", "manifest_at", "open_manifest"]

_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}
_LOOKED_FOR = (
    "*.safetensors.index.json, *.safetensors, pytorch_model.bin.index.json, *.bin, *.pt, *.pth, "
    "*.ckpt, index.json"
)


_USUAL = frozenset(
    (
        *("model.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json"),
        *("diffusion_pytorch_model.safetensors", "consolidated.safetensors"),
        *("diffusion_pytorch_model.safetensors.index.json", "consolidated.00.pth"),
    )
)
"""A folder with one of these holds plain weights, whatever else there is."""
_FOR_PLUGINS = ("unknown", "gguf")
"""Formats, by the name of a file, that a plugin may know."""
_COUNT = re.compile(r"-of-0*([0-9]{1,6})\.")


class CheckpointError(ValueError):
    """The path is not there, or is no kind of checkpoint."""


def open_manifest(
    path: str | Path,
    registry: Callable[[], Registry] | None = None,
    options: OpenOptions = AS_USUAL,
) -> Manifest:
    """Return what the checkpoint *path* holds: a folder, a weight file or an index.

    Folders without weights under the usual names are shown to the plugins of *registry* (called
    when it is needed; None: all installed ones), which may know their format. *options* choose
    among several states or kinds of weights; a choice that the format does not have is an error
    among the findings.

    Reads headers only and executes nothing. In a folder, one checkpoint is chosen by a fixed order
    and what else is there is named in the findings; give the path of a file to choose it. Raises
    :class:`CheckpointError` if the path is not there or is no kind of checkpoint; unreadable
    content is an error among the findings.
    """
    if not str(path):
        raise CheckpointError("'' names no checkpoint; give a folder, a weight file or an index")
    path = Path(path)
    with collector_paused(), confined(path):
        try:
            return _opened(path, registry, options)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{str(path)!r} cannot be read: {reason}") from error


def manifest_at(
    path: FilePath, problems: Sequence[str] = (), options: OpenOptions = AS_USUAL
) -> Manifest:
    """Return what is at *path*, of a format that is known without plugins.

    Raises :class:`CheckpointError` as :func:`open_manifest`, and OSError. *problems* of plugins
    become findings.
    """
    manifest = _open_folder(path, problems) if path.is_dir() else _open_file(path)
    if not options:
        return manifest
    said = (*_unheeded(options, AS_USUAL, manifest.format), *manifest.findings)
    return replace(manifest, findings=said)


def _opened(path: Path, registry: Callable[[], Registry] | None, options: OpenOptions) -> Manifest:
    found, problems = _by_plugin(path, registry, options)
    if found is not None:
        root = path if path.is_dir() else path.parent
        said = [*_about_plugins(problems), *_unheeded(options, found.chosen, found.format)]
        said += (*_about_nothing(path, found), *_beside_opened(path, found))
        manifest = _manifest(root, path, content_of(found), *said)
        return replace(manifest, options=replace(found.chosen, expect=None))
    return manifest_at(path, problems, options)


def _about_nothing(path: Path, found: Opened) -> Iterator[Finding]:
    """Say so if a plugin knows the format, and found nothing in it and nothing wrong."""
    if not found.tensors and all(one.severity != "error" for one in found.findings):
        text = f"{str(path)!r} is a checkpoint of format {found.format!r} that holds no tensor."
        yield Finding("no-tensors", "error", text)


def _unheeded(options: OpenOptions, chosen: OpenOptions, format: str) -> Iterator[Finding]:
    """Yield an error for what was asked for and is no choice in a checkpoint of this format."""
    rest = OpenOptions(
        weights=None if chosen.weights else options.weights,
        tag=None if chosen.tag else options.tag,
        expect=None if chosen.expect else options.expect,
    )
    if rest:
        text = (
            f"{rest.told()} asked for: a checkpoint of format {format!r} has no such choice. Leave "
            "that out, or give the folder of a training checkpoint that has it."
        )
        yield Finding("no-choice", "error", text)


def _by_plugin(
    path: Path, registry: Callable[[], Registry] | None, options: OpenOptions
) -> tuple[Opened | None, tuple[str, ...]]:
    """Return what a plugin found that knows the format, or None, and what went wrong on the way.

    Somebody who wants one of several states does not mean the plain weights beside them.
    """
    if path.is_dir():
        names = sorted(os.listdir(path))
        if not options and not {*names}.isdisjoint(_USUAL):
            return None, ()
    elif path.is_file() and path.suffix != ".json" and format_of(path.name) in _FOR_PLUGINS:
        names = [path.name]
    else:
        return None, ()
    if registry is None:
        from modelquirks.quirks.registry import Registry  # 0.4 s that most checkpoints do without

        registry = Registry.load
    return registry().opened(path, names, options)


def _about_plugins(problems: Iterable[str]) -> Iterator[Finding]:
    for problem in problems:
        text = f"a plugin that opens checkpoints is not used here: {problem}"
        yield Finding("plugin-problem", "warning", text)


def _open_file(path: FilePath) -> Manifest:
    kind = look(path).kind
    if kind in ("absent", "special"):
        link = " (a link to something that is not there)" if path.is_symlink() else ""
        raise CheckpointError(f"{str(path)!r} is not a file or folder that exists{link}")
    if path.name.endswith(".json"):
        index = read_index(path)
        if not index.is_index and not path.name.endswith("index.json"):
            raise CheckpointError(
                f"{str(path)!r} is no checkpoint: its JSON has no 'weight_map'; give a folder, a "
                "weight file or an index"
            )
        content = read_indexed(list_folder(path.parent), index)
        return _manifest(path.parent, path, content)
    if kind == "unknown" and format_of(path.name) == "unknown":
        raise CheckpointError(
            f"{str(path)!r} is no kind of checkpoint that is known, by its name or its first bytes "
            f"({look(path).head[:8]!r}); give a folder, a weight file or an index"
        )
    content = read_files(path.parent, (path.name,), follow_links=True)
    return _manifest(path.parent, path, content, *_part_of_several(path))


def _open_folder(root: FilePath, problems: Sequence[str]) -> Manifest:
    folder = list_folder(root)
    if not folder.candidates:
        raise CheckpointError("; ".join((_nothing_in(folder), *problems)))
    chosen, index, findings = _choose(folder)
    if index is None:
        read = read_ranks if chosen.kind == "ranks" else read_files
        content = read(root, chosen.files)
        findings += _about_count(chosen.files)
    else:
        content = read_indexed(folder, index)
    findings += [*_rivals(folder, chosen, index), *_about_plugins(problems)]
    return _manifest(root, root, content, *findings)


def _choose(folder: Folder) -> tuple[Candidate, Index | None, list[Finding]]:
    """Return the best candidate, and its index if it is one.

    An index that cannot be read or of which no file is there gives way to what is whole.
    """
    chosen = folder.candidates[0]
    if chosen.kind != "index":
        return chosen, None, []
    index = read_index(folder.root / chosen.files[0])
    if any(map(folder.has, index.inside)):
        return chosen, index, []
    if found := _stand_in(folder):
        other, instead = found
        text = (
            f"none of the files that the index {chosen.files[0]!r} names can be read; "
            f"{other.files[0]!r} was taken instead, whose files are here."
        )
        doubts = [one._replace(severity="warning") for one in index.findings]
        return other, instead, [*doubts, Finding("rival-weights", "warning", text)]
    if chosen.files == ("index.json",) and not index.is_index:
        raise CheckpointError(_nothing_in(folder))
    return chosen, index, []


def _stand_in(folder: Folder) -> tuple[Candidate, Index | None] | None:
    """Return the next candidate that is whole: a file, or an index with all its files."""
    for other in folder.candidates[1:]:
        path = folder.root / other.files[0]
        if other.kind == "file" and not _is_adapter(other.files[0]) and is_whole(path):
            return other, None
        if other.kind == "index":
            index = read_index(path)
            if index.inside and all(map(folder.has, index.inside)):
                return other, index
    return None


def _manifest(root: FilePath, path: FilePath, content: Content, *findings: Finding) -> Manifest:
    config, about_config = _read_config(root)
    config = config or content.config
    found = [*content.findings, *findings, *about_config, *about_names(content.tensors)]
    if any(_is_adapter(shard.name) for shard in content.shards):
        found.append(Finding("adapter", "info", _about_alone(root, path)))
    return Manifest(
        root=Path(root),
        path=Path(path),
        format=content.format,
        tensors=content.tensors,
        shards=content.shards,
        config=config,
        findings=tuple(sorted(found, key=lambda one: (_ORDER[one.severity], one.code))),
        declared_bytes=content.declared_bytes,
        container=content.container,
        metadata=content.metadata,
        assembled=content.assembled,
        places=content.places,
    )


def _read_config(root: FilePath) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """Return config.json, ``{}`` if it is absent or cannot be read (which is a finding)."""
    path = root / "config.json"
    if not path.is_file():
        return _read_params(root)
    config, raw = read_json(path)
    if isinstance(config, dict):
        return config, tuple(_about_twice("config.json", raw))
    found = config.text if isinstance(config, JsonProblem) else f"is a JSON {type(config).__name__}"
    text = f"'config.json' {found}; it is not used, and rules that depend on it do not apply."
    return {}, (Finding("config-unreadable", "warning", text),)


def _about_twice(name: str, raw: bytes) -> Iterator[Finding]:
    twice: dict[str, bool] = {}
    parse_json(raw.decode("utf-8-sig"), duplicates=twice)
    if twice:
        text = (
            f"{name!r} has keys twice in one object, and the last counts here; other readers may "
            f"take the first: {shown(twice)}."
        )
        yield Finding("config-duplicate", "warning", text)


def _read_params(root: FilePath) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """Return what params.json says, where it is there in place of config.json."""
    path = root / "params.json"
    config = config_of_params(read_json(path)[0]) if path.is_file() else {}
    if not config:
        return {}, ()
    text = "there is no 'config.json'; 'params.json' was read in its place."
    return config, (Finding("params-read", "info", text),)


def _rivals(folder: Folder, chosen: Candidate, index: Index | None) -> Iterator[Finding]:
    """Name what else in the folder could have been meant."""
    used = {*chosen.files, *(index.shards if index else ())}
    if index is not None:
        same = {series_of(shard) for shard in index.shards}
        stale = [name for name in beside(folder, index) if series_of(name) in same]
        used.update(stale)
        if stale:
            text = (
                f"the index {chosen.files[0]!r} does not name these files of its series, which are "
                f"not read: {shown(stale)}. They may be of another version of the checkpoint."
            )
            yield Finding("extra-shards", "warning", text)
    rivals = [one for one in folder.candidates if not used.issuperset(one.files)]
    indexes = [one.files[0] for one in rivals if one.kind == "index"]
    of_index = {format_of(name.removesuffix(".index.json")) for name in indexes}
    foreign = [one.files[0] for one in rivals if one.kind == "foreign"]
    files = [name for one in rivals if one.kind in ("file", "files", "ranks") for name in one.files]
    files += [name for name in folder.weights if name not in foreign]  # of no candidate by its name
    others = [
        name
        for name in dict.fromkeys(files)
        if name not in used and not ("-of-" in name and format_of(name) in of_index)
    ]
    taken = f"{shown(chosen.files, 3)} was taken: {chosen.why}"
    if indexes and index is not None:
        text = f"{taken}. Not taken: {shown(indexes)}; give the path of the one that you mean."
        yield Finding("several-indexes", "warning", text)
    if others:
        text = f"{taken}. Not taken: {shown(others)}; give the path of the file that you mean."
        yield Finding("rival-weights", "warning", text)
    foreign += [name for name in folder.names if name.endswith(".distcp")]
    if copies := [*foreign, *(f"{name}/" for name in folder.subfolders)]:
        text = f"weights of other formats or in folders below were not read: {shown(copies)}."
        yield Finding("other-copies", "info", text)
    if "adapter_config.json" in folder.names and not _is_adapter(chosen.files[0]):
        text = "an adapter lies beside the base model ('adapter_config.json'); it is not applied."
        yield Finding("adapter-beside", "info", text)


def _beside_opened(root: Path, opened: Opened) -> Iterator[Finding]:
    """Name the weight files in a folder that are none of the checkpoint that a plugin opened."""
    if not root.is_dir():
        return
    held = {*opened.without_weights, *(shard.name for shard in opened.shards)}
    if others := [name for name in list_folder(root).weights if name not in held]:
        text = (
            f"the {opened.format} checkpoint in this folder was taken. Not taken: {shown(others)}; "
            "give the path of the file that you mean."
        )
        yield Finding("rival-weights", "warning", text)


def _about_count(names: Sequence[str]) -> Iterator[Finding]:
    """Say so if there should be more files by their names (which may lie)."""
    counts = {int(count) for name in names for count in _COUNT.findall(name)}
    if counts and max(counts) > len(names):
        text = f"by their names there should be {max(counts)} files; here are {len(names)}."
        yield Finding("series-incomplete", "warning", text)


def _part_of_several(path: FilePath) -> Iterator[Finding]:
    """Say so if a file that was named is one of a series."""
    folder = list_folder(path.parent)
    same = [name for name in folder.weights if series_of(name) == series_of(path.name)]
    is_part = "-of-" in path.name and (len(same) > 1 or "-of-00001." not in path.name)
    if is_part or path.name in rank_files(folder.weights):
        text = (
            f"{path.name!r} is one part of several by its name; only this part is read. Give the "
            "folder or the index to read all."
        )
        yield Finding("one-of-several", "warning", text)


def _is_adapter(name: str) -> bool:
    return name.startswith("adapter_model.")


def _about_alone(root: FilePath, path: FilePath) -> str:
    """Return what an adapter without its base is, which base it is for, and how to plan it."""
    data, _ = read_json(root / "adapter_config.json")
    config: Mapping[str, Any] = data if isinstance(data, dict) else {}
    method = str(config.get("peft_type") or "")
    base = str(config.get("base_model_name_or_path") or "")
    kind = f" ({method})" if method else ""
    whose = f"its base, {base!r}" if base else "a base model, which it does not name"
    return (
        f"these are the weights of an adapter{kind}, to be put on top of {whose}: "
        f"modelquirks plan {base or 'BASE'} --adapter {Path(path)} --merge"
    )


def _nothing_in(folder: Folder) -> str:
    """Return the sentence for a folder without a checkpoint, with what could be meant instead."""
    found = {0: "no files", 1: "1 file"}.get(len(folder.names), f"{len(folder.names)} files")
    hint = ""
    if ".metadata" in folder.names or any(name.endswith(".distcp") for name in folder.names):
        hint = "; it looks like a torch distributed checkpoint, and no plugin in use reads those"
    elif "latest" in folder.names:
        hint = "; it looks like a DeepSpeed checkpoint, and no plugin in use reads those"
    elif folder.subfolders:
        hint = f"; there are weights in the folders below: {shown(folder.subfolders)}"
    return f"{str(folder.root)!r} holds no checkpoint: {found}, none of {_LOOKED_FOR}{hint}"
