"""Damage to what ranks wrote: files of training jobs, exchanged, doubled, of another save."""

from __future__ import annotations

import re

from mutations_copy import Copy
from mutations_files import is_zip, members_of, with_members
from mutations_kinds import damage
from mutations_layout import called

_RANK = re.compile(r"(rank_?|__|mp_rank_)(\d+)")


def _ranks(copy: Copy) -> list[list[str]]:
    """Return the files of ranks, those that differ in one number together."""
    series: dict[str, list[str]] = {}
    for name in copy.weights:
        if copy.subject.config or not _RANK.search(name):
            continue
        for found in _RANK.finditer(name):
            series.setdefault(f"{name[: found.start(2)]}*{name[found.end(2) :]}", []).append(name)
    return [names for names in series.values() if len(names) > 1]


def _two(copy: Copy) -> tuple[str, str] | None:
    ranks = _ranks(copy)
    if not ranks:
        return None
    one, other = copy.chance.sample(copy.chance.choice(ranks), 2)
    return one, other


def _short(*names: str) -> list[str]:
    return [part for name in names for part in called(name)]


@damage("ranks")
def ranks_exchanged(copy: Copy) -> bool:
    if (found := _two(copy)) is None:
        return False
    one, other = found
    copy.files[one], copy.files[other] = copy.files[other], copy.files[one]
    return copy.tell(f"{one!r} and {other!r} exchanged", *_short(one, other))


@damage("ranks")
def rank_doubled(copy: Copy) -> bool:
    if (found := _two(copy)) is None:
        return False
    one, other = found
    copy.files[one] = copy.files[other]
    return copy.tell(f"{one!r} is a copy of {other!r}", *_short(one, other))


@damage("ranks")
def rank_missing(copy: Copy) -> bool:
    if (found := _two(copy)) is None:
        return False
    del copy.files[found[0]]
    return copy.tell(f"{found[0]!r} is not there", *_short(found[0]))


@damage("ranks")
def rank_more(copy: Copy) -> bool:
    if (found := _two(copy)) is None:
        return False
    matched = list(_RANK.finditer(found[0]))[-1]
    width = len(matched[2])
    new = f"{found[0][: matched.start(2)]}{7:0{width}}{found[0][matched.end(2) :]}"
    copy.files[new] = copy.files[found[0]]
    return copy.tell(f"{new!r} beside", *_short(new))


@damage("ranks", unseen=True)
def rank_of_another_step(copy: Copy) -> bool:
    """Put in a file of the same job with other values, as a save at another step has them."""
    ranks = [name for names in _ranks(copy) for name in names if is_zip(copy.files[name])]
    if not ranks:
        return False
    file = copy.chance.choice(ranks)
    copy.files[file] = with_members(
        {
            name: _turned(raw) if "/data/" in name else raw
            for name, raw in members_of(copy.files[file]).items()
        }
    )
    copy.may_be_unseen = True
    return copy.tell(f"{file!r} with other values", *_short(file))


def _turned(raw: bytes) -> bytes:
    return raw[4:] + raw[:4] if len(raw) > 8 else raw


@damage("ranks")
def state_marker_lost(copy: Copy) -> bool:
    names = [name for name in copy.files if name.rpartition("/")[2].startswith("latest")]
    if not names:
        return False
    name = copy.chance.choice(names)
    del copy.files[name]
    return copy.tell(f"{name!r} is not there", name)


@damage("ranks")
def state_marker_wrong(copy: Copy) -> bool:
    names = [name for name in copy.files if name.rpartition("/")[2].startswith("latest")]
    if not names:
        return False
    name = copy.chance.choice(names)
    text = copy.chance.choice(("global_step99", "", "..", "/etc", "global_step3\n\n x", "\0"))
    copy.files[name] = text.encode()
    return copy.tell(f"{name!r} says {text!r}", name, repr(text), "latest")


@damage("ranks")
def name_in_a_pickle_changed(copy: Copy) -> bool:
    """Rename a parameter in one file of a training checkpoint, by another of equal length."""
    names = [n for n in copy.subject.truth.tensors if len(n) > 3]
    files = [n for n in copy.weights if not copy.subject.config and is_zip(copy.files[n])]
    copy.chance.shuffle(files)
    for file in files:
        members = members_of(copy.files[file])
        (pickle,) = [n for n in members if n.endswith("data.pkl")] or [""]
        inside = [n for n in names if pickle and n.encode() in members[pickle]]
        if inside:
            name = copy.chance.choice(inside)
            new = f"{name[:-1]}Q"
            members[pickle] = members[pickle].replace(name.encode(), new.encode())
            copy.files[file] = with_members(members)
            leaf = new.rpartition(".")[2]  # numbers in the name may be of a stage
            return copy.tell(f"{name!r} called {new!r} in {file!r}", name, leaf, *_short(file))
    return False


@damage("ranks")
def storage_cut(copy: Copy) -> bool:
    """Cut one storage inside an archive of torch.save, whose pickle says more."""
    files = [n for n in copy.weights if is_zip(copy.files[n])]
    if not files:
        return False
    file = copy.chance.choice(files)
    members = members_of(copy.files[file])
    inside = [n for n in members if "/data/" in n and len(members[n]) > 4]
    if not inside:
        return False
    name = copy.chance.choice(inside)
    members[name] = members[name][: len(members[name]) // 2]
    copy.files[file] = with_members(members)
    return copy.tell(f"{name!r} in {file!r} cut to half", *_short(file))


@damage("ranks")
def storage_missing(copy: Copy) -> bool:
    files = [n for n in copy.weights if is_zip(copy.files[n])]
    if not files:
        return False
    file = copy.chance.choice(files)
    members = members_of(copy.files[file])
    inside = [n for n in members if "/data/" in n]
    if not inside:
        return False
    name = copy.chance.choice(inside)
    del members[name]
    copy.files[file] = with_members(members)
    return copy.tell(f"{name!r} gone from {file!r}", *_short(file))
