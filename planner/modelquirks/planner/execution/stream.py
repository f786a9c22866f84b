"""``WeightStream``: the tensors of a plan one after another, under the names of its model.

For programs that put weights into their modules themselves: inference servers whose models have a
``load_weights`` of their own take an iterable of ``(name, tensor)`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch

from modelquirks.planner.batches import batches
from modelquirks.planner.execution.evaluate import node_type
from modelquirks.planner.execution.loading import in_order, load
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.openfile import known_of
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.perform import enough_memory, unchanged
from modelquirks.planner.execution.preflight import needs
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.planner.execution.weights import is_view
from modelquirks.planner.finding import shown
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.plan import Plan, PlanError
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import RecipeError, Scheme
from modelquirks.quirks.registry import Registry

__all__ = ["Ties", "WeightStream", "planned_items"]

Ties = Literal["once", "each"]
"""Whether a tied tensor comes under its first name only, or under each of its names."""

_BATCH = 1 << 26
"""Bytes of small tensors that are made together; a larger one is made by itself."""


class WeightStream:
    """The ``(name, tensor)`` pairs of a plan, made as they are asked for, in the order of files.

    An iterable that can be gone through again; each time the files are read anew. Beside what the
    caller keeps there are at most one tensor, or a batch of small ones of 64 MiB, and the memory
    for making them.
    """

    def __init__(
        self,
        plan: Plan,
        names: Iterable[str] | None = None,
        *,
        device: torch.device | str = "cpu",
        ties: Ties = "once",
        copy: bool = False,
        load_memory: int | str | None = None,
    ) -> None:
        """See :meth:`modelquirks.planner.plan.Plan.weights`, errors too."""
        if ties not in get_args(Ties):
            raise ValueError(f"ties {ties!r} is not known: it is 'once' or 'each'")
        self._device = _device(device)
        self._options = LoadOptions.of(copy=copy, load_memory=load_memory)
        if not plan.ok:
            raise PlanError(plan.refusal())
        self._plan = plan
        manifest = unchanged(plan)
        self._root, self._tensors = manifest.root, manifest.readable
        self._schemes = (plan.registry or Registry.load()).schemes
        self._known = known_of(manifest.shards)
        self._keeper = self._reader()
        items = list(planned_items(plan, self._keeper, self._schemes))
        called = _called(items, None if names is None else list(names), ties)
        self._items = in_order((item for item in items if item.name in called), self._tensors)
        self._called = called
        self._check()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that come, in their order."""
        return tuple(name for item in self._items for name in self._called[item.name])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that come, tied ones once."""
        return sum(item.nbytes for item in self._items)

    def __len__(self) -> int:
        """Return how many pairs come."""
        return sum(len(self._called[item.name]) for item in self._items)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor.

        Raises :class:`~modelquirks.planner.execution.loaditem.ExecutionError` or a ``ReadError``
        that names the tensor if it cannot be made, or its file was written to meanwhile.
        """
        for batch in batches(self._items, _BATCH):
            reader = self._reader()  # its mappings last as long as views of it
            with enough_memory(self._plan):
                made = self._made([item for item in batch if not self._is_view(item)])
            for item in batch:
                tensor = made.pop(item.name, None)
                if tensor is None:
                    with enough_memory(self._plan):
                        tensor = self._viewed(item, reader)
                yield from ((name, tensor) for name in self._called[item.name])
                del tensor  # nothing is kept here while the next one is made

    def _reader(self) -> Reader:
        copies = self._options.copy
        return Reader(self._root, self._tensors, known=self._known, copies=copies)

    def _check(self) -> None:
        """Raise for every file that lacks something, before the first tensor is given."""
        stored = {name: item for item in self._items for name in needs(item)}
        faults = [
            f"{i}: {fault}" for name, i in stored.items() for fault in self._keeper.faults([name])
        ]
        if faults:
            more = f"\n… and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ExecutionError("\n".join(faults[:10]) + more)

    def _is_view(self, item: LoadItem) -> bool:
        """Tell whether the mapped file has the tensor as it must be, where it must be."""
        if self._options.copy or self._device.type != "cpu":
            return False
        if not is_view(item, self._keeper.type_of):
            return False
        return all(map(self._keeper.is_mapped, needs(item)))

    def _viewed(self, item: LoadItem, reader: Reader) -> torch.Tensor:
        for name in needs(item):
            self._keeper.look(name)  # it has known the file since before the first tensor
        return item.made(reader, self._schemes)

    def _made(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        if not items:
            return {}
        for item in items:
            for name in needs(item):
                self._keeper.look(name)
        copies = self._options.copy
        reader = PassingReader(self._root, self._tensors, known=self._known, copies=copies)

        def write(item: LoadItem, region: Region, out: torch.Tensor) -> None:
            try:
                item.made(reader, self._schemes, region=region, out=out)
            finally:
                reader.release()

        wanted = [(item, self._device) for item in items]
        loaded = load(wanted, write=write, tensors=self._tensors, options=self._options)
        return dict(loaded.tensors)


def planned_items(plan: Plan, reader: Reader, schemes: Mapping[str, Scheme]) -> Iterator[LoadItem]:
    """Yield what *plan* makes, tensor by tensor, without the model that it was made for.

    Raises PlanError if there was none, or a shape that only the files tell does not fit.
    """
    if plan.model is None:
        raise PlanError(
            "the plan was made without a model, so no tensor has a name in one: give one to "
            "Dispatcher.plan (Dispatcher.model builds the one that config.json names)"
        )
    names: dict[str, list[str]] = {}
    for alias, owner in plan.aliases.items():
        names.setdefault(owner, []).append(alias)
    for recipe in plan.recipes:
        for name, env in recipe.items():
            try:
                made = node_type(
                    recipe.node, env, types=reader.type_of, schemes=schemes, read=reader.read
                )
            except RecipeError as error:
                raise PlanError(f"{name!r} cannot be made: {error}") from error
            yield LoadItem(
                name=name,
                node=recipe.node,
                env=env,
                dtype=recipe.type.dtype or made.dtype,
                shape=made.shape,
                device="cpu",
                aliases=tuple(names.get(name, ())),
                rule=recipe.rule,
            )


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device {device!r} is unknown to torch (try 'cpu' or 'cuda:0'): the weights come to "
            "one device, whatever the device map of the plan says"
        ) from error
    if found.type == "meta":
        raise ValueError(
            "device 'meta' holds no values: the names alone are in plan.weights().names"
        )
    return found


def _called(
    items: Iterable[LoadItem], wanted: Sequence[str] | None, ties: Ties
) -> Mapping[str, Sequence[str]]:
    """Return under which names each item is to come, by its first name; ValueError for strangers.

    *wanted* are names or patterns; a name that was asked for comes also where ties come once.
    """
    owners = {name: item for item in items for name in item.names}
    firsts = dict.fromkeys(item.name for item in owners.values())
    if wanted is None:
        return {name: owners[name].names if ties == "each" else (name,) for name in firsts}
    patterns = [text for text in dict.fromkeys(wanted) if set(text) & set("*{")]
    hits = {text: [n for n in owners if Pattern(text).match(n) is not None] for text in patterns}
    unknown = [t for t in wanted if t not in owners and not hits.get(t)]
    if unknown:
        near = [name for text in unknown[:10] for name in closest(text, owners)]
        hint = f"; the nearest names are {shown(near)}" if near else ""
        raise ValueError(f"the plan makes no tensor {shown(unknown)}{hint}")
    chosen = {name for name in wanted if name in owners}
    for name in (name for names in hits.values() for name in names):
        if ties == "each" or name in firsts:
            chosen.add(name)
    return {
        first: names
        for first in firsts
        if (names := [name for name in owners[first].names if name in chosen])
    }
