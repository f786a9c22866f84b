"""Suggestions: the rule that would mend what is left. Proposed, never applied unasked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from modelquirks.planner.mapping.audit import Suggestion
from modelquirks.planner.mapping.nearest import Nearest
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.planner.names import module_word
from modelquirks.quirks.family import Family

__all__ = ["suggest"]

_MAX_SUGGESTIONS = 5
_MAX_OPTIONS = 20
"""Aliases in one suggestion: more than that nobody types."""
_MAX_PARTNERS = 8
"""Model families that one stored family is compared with: those that share most of their end."""
_MIN_SHARE = 0.01
"""Of the missing tensors; what serves fewer is a coincidence of shapes rather than a rule."""


def suggest(
    skeleton: Skeleton, nearest: Nearest, model_names: Collection[str]
) -> Iterator[Suggestion]:
    """Yield aliases of prefixes, and ties, that would account for missing tensors.

    Each alias says how many missing tensors it would serve with a spare tensor of the right
    shape or the model's own ties with these, and touches no other name; aliases are sought one
    after the other, so that two of them never claim one name. For each name the first alias that
    matches counts, so they come with the longest prefixes first: all of them may be used
    together, in that order.
    """
    if not nearest.missing:
        return
    missing = dict(nearest.missing)
    spare = {nearest.spare_called.get(n, n): shape for n, shape in nearest.spare.items()}
    accounted = set(nearest.spare_called.values()) - spare.keys()
    aliases: list[tuple[str, Suggestion]] = []
    for _ in range(_MAX_SUGGESTIONS):
        best = _best_alias(nearest, missing, spare)
        if best is None:
            break
        source, target, served = best
        tied = _tied(skeleton, missing.keys() - served.values(), served.values())
        n_served, n_missing = len(served) + len(tied), len(nearest.missing)
        if n_served < _MIN_SHARE * n_missing:
            break
        pairs = list(_exact(source, target, served, accounted))
        if len(pairs) <= _MAX_OPTIONS:
            found = _alias(source, target, pairs, n_served, n_missing, len(model_names))
            aliases.append((source, found))
        for stored in served:
            del spare[stored]
        for name in (*served.values(), *tied):
            del missing[name]
    aliases.sort(key=lambda pair: len(pair[0]), reverse=True)
    yield from (suggestion for _, suggestion in aliases)
    yield from _ties(skeleton, missing)


def _alias(
    source: str,
    target: str,
    pairs: Sequence[tuple[str, str]],
    served: int,
    missing: int,
    model: int,
) -> Suggestion:
    whole = f"all {missing} missing tensors" if served == missing else f"{served} of {missing}"
    if served == missing == model:
        whole = f"all {model}"
    if source and not target:
        what = f"the prefix {source + '.'!r} is stripped"
    elif target and not source:
        what = f"the prefix {target + '.'!r} is added"
    else:
        what = f"{source + '.'!r} is read as {target + '.'!r}"
    option = " ".join(f"--alias {_quoted(f'{stored}={wanted}')}" for stored, wanted in pairs)
    return Suggestion(f"{whole} match if {what}: {option}", option, served)


def _quoted(text: str) -> str:
    """Return *text* as one word for a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _exact(
    source: str, target: str, served: Mapping[str, str], accounted: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the aliases that rename what is *served* and nothing that is *accounted* for.

    ``**=model.**`` would also rename what already fits; then each next segment gets an alias of
    its own: ``visual.**=model.visual.**``.
    """
    head = f"{source}." if source else ""
    goal = f"{target}." if target else ""
    taken = _by_segment(head, accounted)
    if not taken:
        yield f"{head}**", f"{goal}**"
        return
    for segment, names in _by_segment(head, served).items():
        if head + segment in served:
            yield head + segment, goal + segment
        below = {name: served[name] for name in names if name != head + segment}
        if below:
            yield from _exact(head + segment, goal + segment, below, taken.get(segment, ()))


def _by_segment(head: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the *names* that start with *head*, by the segment that comes next."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(head):
            found.setdefault(name[len(head) :].partition(".")[0], []).append(name)
    return found


def _best_alias(
    nearest: Nearest, missing: Mapping[str, object], spare: Mapping[str, object]
) -> tuple[str, str, dict[str, str]] | None:
    """Return the prefix alias that serves most, with stored → model names; None if none does."""
    votes = _votes(_left(nearest.missing_families, missing), _left(nearest.spare_families, spare))
    best: tuple[str, str, dict[str, str]] | None = None
    for (source, target), n_at_most in votes.most_common(40):
        if best is not None and n_at_most <= len(best[2]):
            break
        served = dict(_served(source, target, missing, spare))
        if _by_lot(served, missing, spare):
            continue
        if served and (best is None or len(served) > len(best[2])):
            best = (source, target, served)
    return best


def _by_lot(
    served: Mapping[str, str], missing: Mapping[str, object], spare: Mapping[str, object]
) -> bool:
    """Tell whether another pair is as good: only ``weight`` and the shape are the same.

    An embedding has the shape of the output head: ``tok.weight`` may be either.
    """
    if len(served) != 1:
        return False
    ((stored, name),) = served.items()
    leaf = _leaf(name)
    if stored.split(".")[-2:] == name.split(".")[-2:]:
        return False  # the module has the same name too
    shape = missing[name]
    rivals = [one for names in (missing, spare) for one in names.items() if _leaf(one[0]) == leaf]
    return sum(other in (None, shape) for _, other in rivals) > 2


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _left(families: Mapping[str, Family], names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the families of which a member is among *names*, and how many members they have."""
    for template, family in families.items():
        if any(name in names for name in family.names):
            yield template, len(family)


def _votes(
    model: Iterable[tuple[str, int]], stored: Iterable[tuple[str, int]]
) -> Counter[tuple[str, str]]:
    """Return how many stored tensors would have another prefix, by both prefixes.

    Each stored family votes for the model families with which it shares most last segments.
    """
    by_tail: dict[str, list[str]] = {}
    for template, _ in model:
        for head, tail in _cuts(template):
            by_tail.setdefault(tail, []).append(head)
    votes: Counter[tuple[str, str]] = Counter()
    for template, n_members in stored:
        for head, tail in _cuts(template):
            if partners := by_tail.get(tail):
                for other in partners[:_MAX_PARTNERS]:
                    if "{" not in head and "{" not in other:
                        votes[head, other] += n_members
                break
    return votes


def _cuts(template: str) -> Iterator[tuple[str, str]]:
    """Yield head and tail of a name for each dot in it, the longest tail first.

    >>> list(_cuts("a.b.c"))
    [('', 'a.b.c'), ('a', 'b.c'), ('a.b', 'c')]
    """
    yield "", template
    at = template.find(".")
    while at >= 0:
        yield template[:at], template[at + 1 :]
        at = template.find(".", at + 1)


def _served(
    source: str, target: str, missing: Mapping[str, object], spare: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    head = f"{source}." if source else ""
    for stored, shape in spare.items():
        if not stored.startswith(head):
            continue
        name = f"{target}.{stored[len(head) :]}" if target else stored[len(head) :]
        if name in missing and shape in (None, missing[name]):
            yield stored, name


def _tied(skeleton: Skeleton, lost: Set[str], served: Collection[str]) -> list[str]:
    """Return which of the *lost* names the model ties to one that is *served*."""
    arriving = set(served)
    groups = [names for names in skeleton.ties if not arriving.isdisjoint(names)]
    return list(dict.fromkeys(name for names in groups for name in names if name in lost))


def _ties(skeleton: Skeleton, missing: Mapping[str, object]) -> Iterator[Suggestion]:
    """Propose the tie that people forget: a missing output head of the embedding's shape."""
    heads = [skeleton.wanted[name] for name in list(missing)[:20]]
    heads = [head for head in heads if len(head.shape) == 2 and not _embeds(head.name)]
    arrived: list[ModelTensor] = []
    if heads:
        arrived = [t for n, t in skeleton.wanted.items() if n not in missing and _embeds(n)]
    for head in heads:
        twins = [t.name for t in arrived if t.shape == head.shape]
        known = any(head.name in names and t in names for names in skeleton.ties for t in twins)
        if len(twins) == 1 and not known:
            option = f"--tie {_quoted(f'{head.name}={twins[0]}')}"
            text = (
                f"{head.name!r} has the shape of {twins[0]!r}; if the two are one tensor "
                f"(tied embeddings): {option}"
            )
            yield Suggestion(text, option, 1)


def _embeds(name: str) -> bool:
    module = module_word(name)
    return "emb" in module or module in ("wte", "shared")
