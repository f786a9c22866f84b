"""``align``: claims for the tensors of a model, from names and types of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelquirks.planner.infer import guesses, structure
from modelquirks.planner.infer.certify import certify
from modelquirks.planner.infer.claim import Claim, source_of
from modelquirks.planner.infer.doubts import doubt, turned
from modelquirks.planner.infer.kin import Kin, Path, kins_of, lists_of, literal, stacks
from modelquirks.planner.infer.pool import Left, Pool, fits, shared
from modelquirks.planner.infer.rewrites import best_rewrite, rule_of
from modelquirks.quirks.recipe import TensorType

__all__ = ["align"]


def align(
    stored: Mapping[str, TensorType],
    model: Mapping[str, TensorType],
    ties: Iterable[Sequence[str]] = (),
) -> list[Claim]:
    """Return what is claimed of the tensors of *model*; *ties* are names that share one.

    First equal names, then what is called otherwise, by what explains most; what is in parts
    where names say so; then what is most alike. What remains is sought again with places in lists
    as names. At the end what is proven is called certain, and what could be otherwise doubted.
    """
    lists = lists_of({**stored, **model})
    pool = Pool(
        [Left(kin, (kin.path,)) for kin in kins_of(stored, lists)],
        kins_of(model, lists),
        model_paths=tuple(tuple(name.split(".")) for name in model),
        ties={name: n for n, group in enumerate(ties) for name in group},
    )
    by_name(pool)
    right = [c.model.path for c in pool.claims]
    turned(pool)
    add_stacks(pool)
    rewrite(pool, right)
    guesses.same_words(pool)
    rewrite(pool, right)
    structure.apart(pool, named=True)
    rewrite(pool, right)
    guesses.assign(pool, at_least=0.5)
    for sides in ("model", "stored", "both"):
        split_lists(pool, sides)
        by_name(pool)
        rewrite(pool, right)
        guesses.same_words(pool)
        structure.apart(pool, named=True)
        guesses.assign(pool, at_least=0.5)
        join_lists(pool)
    guesses.assign(pool, at_least=0.3)
    structure.apart(pool, named=False)
    for sides in ("", "model", "stored", "both"):
        split_lists(pool, sides)
        guesses.assign(pool, at_least=0.0)
        join_lists(pool)
    certify(pool)
    doubt(pool)
    return pool.claims


def by_name(pool: Pool) -> None:
    """Claim what has one name and one shape on both sides."""
    models = {kin.path: kin for kin in pool.model}
    for left in list(pool.stored):
        kin = models.get(left.path)
        if kin is None or left.kin.over is not None or kin.over is not None:
            continue
        same = [i for i in shared(left.kin, kin) if _agree(left.kin.types[i], kin.types[i])]
        if same:
            tier = left.tier
            why = "same name" if left.path == left.kin.path else left.why
            if any(left.kin.types[i].shape is None for i in same):
                tier, why = "likely", f"{why}; no header tells the shape"
            claim = Claim(kin.only(same), source_of(left.kin), tier, why, sources=(left.kin,))
            pool.enter(claim, [left], kin)


def _agree(one: TensorType, other: TensorType) -> bool:
    return one.shape == other.shape or one.shape is None or other.shape is None


def add_stacks(pool: Pool) -> None:
    """Add the forms of families of which one side stacks what the other has one by one."""
    ours, theirs = [left.kin for left in pool.stored], [*pool.model]
    pool.model += [form for kin in theirs for form in stacks(kin, _firsts(ours))]
    pool.stored += [
        Left(form, (form.path,)) for kin in ours for form in stacks(kin, _firsts(theirs))
    ]


def _firsts(kins: Iterable[Kin]) -> set[int]:
    """Return the sizes of all first dimensions."""
    return {of.shape[0] for kin in kins for of in kin.types.values() if of.shape}


def rewrite(pool: Pool, right: Iterable[Path]) -> None:
    """Apply the best rewrite until there is none."""
    right = [*right]
    for _ in range(60):
        found = best_rewrite(pool, right)
        if found is None:
            return
        rule = rule_of(found, pool)
        pool.stored = [
            left.under(path, rule) if (path := found.rewrite(left.path)) is not None else left
            for left in pool.stored
        ]
        landed(pool)


def landed(pool: Pool) -> None:
    """Claim what has come to a name of the model."""
    models: dict[Path, list[Kin]] = {}
    for kin in pool.model:
        models.setdefault(kin.path, []).append(kin)
    for left in list(pool.stored):
        for kin in models.get(left.path, ()):
            if not (pool.has_model(kin) and pool.has_stored(left)):
                continue
            if fits(left.kin, kin):
                pool.rename(left, kin, left.tier, left.why)


def split_lists(pool: Pool, sides: str) -> None:
    """Make names of the last index of what is left, where it has few values."""
    pool.stored = [
        Left(one, tuple(_literal_path(name, left, one) for name in left.names), left.rules)
        for left in pool.stored
        for one in (literal(left.kin) if _splits(left.kin, sides, "stored") else [left.kin])
    ]
    pool.model = [
        one
        for kin in pool.model
        for one in (literal(kin) if _splits(kin, sides, "model") else [kin])
    ]


def _splits(kin: Kin, sides: str, side: str) -> bool:
    return sides in (side, "both") and kin.over is None and kin.n_slots > 0


def join_lists(pool: Pool) -> None:
    """Take back what :func:`split_lists` did, for what is still left."""
    kins = _joined(left.kin for left in pool.stored if left.kin.parent is not None)
    pool.stored = [left for left in pool.stored if left.kin.parent is None]
    pool.stored += [Left(kin, (kin.path,)) for kin in kins]
    split = [kin for kin in pool.model if kin.parent is not None]
    pool.model = [kin for kin in pool.model if kin.parent is None] + _joined(split)


def _joined(kins: Iterable[Kin]) -> list[Kin]:
    parts: dict[int, list[Kin]] = {}
    for kin in kins:
        parts.setdefault(id(kin.parent), []).append(kin)
    return [_rejoined(each[0].parent or each[0], each) for each in parts.values()]


def _rejoined(parent: Kin, parts: Sequence[Kin]) -> Kin:
    slot = parent.n_slots - 1
    return parent.only((*i[:slot], part.value, *i[slot:]) for part in parts for i in part.types)


def _literal_path(path: Path, left: Left, one: Kin) -> Path:
    """Return *path*, a name of *left*, with the last index as it is in *one*."""
    if one is left.kin:
        return path
    at = max(n for n, s in enumerate(path) if s == "*")
    old = max(n for n, s in enumerate(left.kin.path) if s == "*")
    return (*path[:at], one.path[old], *path[at + 1 :])
