"""``align``: claims for the tensors of a model, from names and types of both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from modelquirks.planner.infer.certify import certify
from modelquirks.planner.infer.claim import Claim, Tier, source_of
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
    from modelquirks.planner.infer import guesses, structure

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
        same = [i for i in shared(left.kin, kin) if left.kin.types[i].shape == kin.types[i].shape]
        if same:
            tier = left.tier
            why = "same name" if left.path == left.kin.path else left.why
            claim = Claim(kin.only(same), source_of(left.kin), tier, why, sources=(left.kin,))
            pool.enter(claim, [left], kin)


def add_stacks(pool: Pool) -> None:
    """Add the forms of families of which one side stacks what the other has one by one."""
    sizes = {k.types[i].shape[0] for k in pool.model for i in k.types if k.types[i].shape}
    forms = [
        Left(form, (form.path,))
        for left in pool.stored
        if left.kin.over is None
        for form in stacks(left.kin, sizes)
    ]
    sizes = {
        k.types[i].shape[0]
        for left in pool.stored
        for k in [left.kin]
        for i in k.types
        if k.types[i].shape
    }
    model = [form for kin in pool.model if kin.over is None for form in stacks(kin, sizes)]
    pool.stored += forms
    pool.model += model


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
            if not any(kin is k for k in pool.model) or not any(left is k for k in pool.stored):
                continue
            if fits(left.kin, kin):
                enter(pool, left, kin, left.tier, left.why)


def enter(
    pool: Pool, left: Left, kin: Kin, tier: Tier, why: str, others: tuple[str, ...] = ()
) -> None:
    from modelquirks.quirks.recipe import Node, Select

    node: Node = source_of(left.kin)
    if kin.over is not None:
        node = Select(node, "{e}", 0)
    members = kin.only(shared(kin, left.kin))
    pool.enter(Claim(members, node, tier, why, others, (left.kin,), left, kin), [left], kin)


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
    stored: dict[int, tuple[Left, list[Left]]] = {}
    done: list[Left] = []
    for left in pool.stored:
        if left.kin.parent is None:
            done.append(left)
        else:
            stored.setdefault(id(left.kin.parent), (left, []))[1].append(left)
    for first, parts in stored.values():
        parent = first.kin.parent
        kin = _rejoined(parent, [p.kin for p in parts])
        done.append(Left(kin, (kin.path,)))
    pool.stored = done
    model: dict[int, list[Kin]] = {}
    kins: list[Kin] = []
    for kin in pool.model:
        if kin.parent is None:
            kins.append(kin)
        else:
            model.setdefault(id(kin.parent), []).append(kin)
    pool.model = kins + [_rejoined(parts[0].parent, parts) for parts in model.values()]


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
