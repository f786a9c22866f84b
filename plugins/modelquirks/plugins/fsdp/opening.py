"""From the files of ranks to places and recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.fingerprint import copies_among
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.checkpoint.pickle_names import about_names
from modelquirks.planner.checkpoint.place_tensors import dense_stride, place_tensors
from modelquirks.planner.checkpoint.rank_share import Share, ShareProblem, is_share, share_of
from modelquirks.planner.checkpoint.state_dict import find_weights
from modelquirks.planner.checkpoint.torch_content import TorchContent, record_findings
from modelquirks.planner.checkpoint.torch_pickle import StorageRecord, TensorRecord
from modelquirks.planner.checkpoint.torch_zip import read_content
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.grid import Chunk, assembled, shown_region
from modelquirks.plugins.dcp.opening import unassembled
from modelquirks.plugins.fsdp.series import RankFile, Series
from modelquirks.quirks.recipe import Node, RecipeError, Region, Source

__all__ = ["open_ranks"]

_OURS = "torch.distributed."
_FLAT = ("_flat_param", "flat_param")
_MAX_DEPTH = 4


class _Rank(NamedTuple):
    """One file: its weights by name, those that are shares apart."""

    file: RankFile
    content: TorchContent
    plain: Mapping[str, TensorRecord]
    shares: Mapping[str, Share]
    container: str
    findings: tuple[Finding, ...]


class _Piece(NamedTuple):
    """What lies in one place."""

    place: str
    region: Region
    record: TensorRecord
    rank: _Rank


def open_ranks(root: Path, series: Series) -> Opened | None:
    """Return what the files of *series* hold; None if no tensor of them is a rank's share."""
    ranks = [_read(root, file) for file in series.weights]
    flat = sorted({name for rank in ranks for name in (*rank.plain, *rank.shares) if _flat(name)})
    if not flat and not any(rank.shares for rank in ranks):
        return None
    findings = [f for rank in ranks for f in (*rank.content.findings, *rank.findings)]
    findings += _about_missing(ranks, series)
    findings += _about_rest(series)
    shards = tuple(rank.content.shard for rank in ranks)
    container = next((rank.container for rank in ranks if rank.container), "")
    if flat:
        findings.append(_about_flat(ranks, flat))
        return Opened("fsdp", {}, {}, shards, tuple(findings), container)
    pieces = _pieces(ranks)
    recipes, faults = _recipes(pieces)
    whole = {
        n: r for rank in reversed(ranks) for n in rank.plain if (r := rank) and n not in pieces
    }
    placed, about = _placed(pieces, whole)
    return Opened(
        format="fsdp",
        places=placed,
        tensors={**recipes, **{name: Source(name) for name in whole}},
        shards=shards,
        findings=(*findings, *unassembled(faults), *about),
        container=container,
    )


def _flat(name: str) -> bool:
    return name.rpartition(".")[2].startswith(_FLAT)


def _read(root: Path, file: RankFile) -> _Rank:
    content = read_content(root / file.name)
    if content.saved is None:
        return _Rank(file, content, {}, {}, "", ())
    shares: dict[str, Share] = {}
    problems: list[str] = []
    value = _with_records(content.saved.value, shares, problems, "")
    found = find_weights(file.name, value)
    plain = {n: r for n, r in found.tensors.items() if r.storage.key not in shares}
    cut = {n: shares[r.storage.key] for n, r in found.tensors.items() if r.storage.key in shares}
    strange = [g for g in content.saved.globals if not _is_ours(str(g))]
    findings = [*about_names(file.name, strange), *found.findings]
    if problems:
        text = f"{file.name!r}: {'; '.join(problems[:10])}."
        findings.append(Finding("share-unreadable", "error", text))
    return _Rank(file, content, plain, cut, found.container, tuple(findings))


def _is_ours(name: str) -> bool:
    # ShardedTensor's pickle names its own nested class by getattr; nothing is called here.
    return name.startswith(_OURS) or name == "builtins.getattr"


def _with_records(
    value: Any, shares: dict[str, Share], problems: list[str], name: str, depth: int = 0
) -> Any:
    """Return *value* with a record of the whole tensor in the place of each share."""
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        below = f"{name}." if name else ""
        return {
            key: _with_records(item, shares, problems, f"{below}{key}", depth + 1)
            for key, item in value.items()
        }
    if not is_share(value):
        return value
    try:
        share = share_of(value)
    except ShareProblem as problem:
        problems.append(f"{name!r} {problem}")
        return None
    storage = StorageRecord(f"share {len(shares)}", share.dtype, 0)
    shares[storage.key] = share
    return TensorRecord(storage, share.dtype, share.shape, dense_stride(share.shape), 0)


def _pieces(ranks: Iterable[_Rank]) -> dict[str, list[_Piece]]:
    """Return the pieces of each tensor; of copies (hybrid sharding) that of the first rank."""
    found: dict[str, dict[Region, _Piece]] = {}
    for rank in ranks:
        for name, share in rank.shares.items():
            regions = found.setdefault(name, {})
            whole = tuple((0, size) for size in share.shape)
            for region, record in share.pieces:
                place = name if region == whole else f"{name}{shown_region(region)}"
                regions.setdefault(region, _Piece(place, region, record, rank))
    return {name: list(regions.values()) for name, regions in found.items()}


def _recipes(pieces: Mapping[str, list[_Piece]]) -> tuple[dict[str, Node], dict[str, str]]:
    recipes: dict[str, Node] = {}
    faults: dict[str, str] = {}
    for name, several in pieces.items():
        chunks = [Chunk(piece.place, piece.region) for piece in several]
        try:
            if not several:
                raise RecipeError("no rank has elements of it")
            recipes[name] = assembled(chunks, several[0].rank.shares[name].shape)
        except RecipeError as error:
            faults[name] = str(error)
    return recipes, faults


def _placed(
    pieces: Mapping[str, list[_Piece]], whole: Mapping[str, _Rank]
) -> tuple[dict[str, StoredTensor], list[Finding]]:
    by_file: dict[str, dict[str, TensorRecord]] = {}
    contents: dict[str, TorchContent] = {}
    for several in pieces.values():
        for piece in several:
            file = piece.rank.file.name
            contents[file] = piece.rank.content
            by_file.setdefault(file, {})[piece.place] = piece.record
    for name, rank in whole.items():
        contents[rank.file.name] = rank.content
        by_file.setdefault(rank.file.name, {})[name] = rank.plain[name]
    places: dict[str, StoredTensor] = {}
    findings: list[Finding] = []
    for file, records in by_file.items():
        placed, beyond = place_tensors(file, records, begins=contents[file].begins)
        places |= placed
        findings += (*beyond, *record_findings(file, contents[file].faults, records))
    return places, findings


def _about_missing(ranks: list[_Rank], series: Series) -> Iterator[Finding]:
    """Name the files of ranks that are not there, and those of another save."""
    counts = {share.ranks for rank in ranks for share in rank.shares.values()}
    expected = max((*counts, series.ranks), default=0)
    present = {rank.file.rank for rank in ranks}
    example = ranks[0].file
    tail = example.name.rpartition(str(example.rank))
    absent = [f"{tail[0]}{n}{tail[2]}" for n in range(expected) if n not in present]
    if absent:
        text = (
            f"{len(absent)} of {expected} ranks are missing: {shown(absent)}. What only they have "
            "cannot be loaded; copy their files here, from other machines too."
        )
        yield Finding("shard-missing", "error", text)
    extra = [rank.file.name for rank in ranks if expected and rank.file.rank >= expected]
    if extra:
        text = (
            f"the tensors were saved by {expected} ranks, and these are of others: {shown(extra)}."
        )
        yield Finding("extra-shards", "warning", text)
    for same in copies_among(rank.content.shard for rank in ranks):
        text = f"{shown(same)} are one and the same file; only replicas may be equal."
        yield Finding("rank-copied", "warning", text)
    names = {name for rank in ranks for name in rank.shares}
    torn = [n for n in sorted(names) if len({r.shares[n][:2] for r in ranks if n in r.shares}) > 1]
    if torn:
        text = f"the ranks differ in shape or dtype of {shown(torn)}: they are not of one save."
        yield Finding("mixed-saves", "error", text)


def _about_rest(series: Series) -> Iterator[Finding]:
    if series.other:
        first = series.weights[0].name
        text = f"{first!r} and its series were read; not taken: {shown(series.other)}."
        yield Finding("several-models", "warning", text)
    if series.rest:
        text = f"the state of the optimizer and of the run is not loaded: {shown(series.rest)}."
        yield Finding("not-loaded", "info", text)


def _about_flat(ranks: list[_Rank], flat: list[str]) -> Finding:
    names = sorted({name for rank in ranks for name in rank.plain if not _flat(name)})
    pieces = f", and beside them pieces without a shape: {shown(names)}" if names else ""
    text = (
        f"{shown(flat)} hold the weights of several modules end to end, as FSDP1 writes them with "
        f"LOCAL_STATE_DICT{pieces}. Which are where, and what shape they have, only the wrapped "
        "model knows: load this in the same job with FSDP.state_dict_type(model, "
        "LOCAL_STATE_DICT), and save with SHARDED_STATE_DICT or FULL_STATE_DICT."
    )
    return Finding("flat-parameters", "error", text)
