"""A pickle machine that executes nothing.

The opcodes come from ``pickletools``, which only reads them; what they would do to real objects is
done here to plain lists, tuples and dicts. A class or function that a pickle names is never
imported: it becomes a :class:`Global`, and calling it becomes an :class:`Opaque` record, unless
the caller gave a *rebuild* function of that exact name. So a pickle can spend time and memory,
which are limited, and nothing else.

A pickle of some kilobytes may name one list a million times, and is that large for whoever goes
through its value: so is also limited how often parts may be used again.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from modelquirks.planner.finding import brief

__all__ = ["MAX_BYTES", "MAX_OPCODES", "Global", "Loaded", "Opaque", "PickleProblem", "load"]

MAX_BYTES = 1 << 27
"""A larger pickle is refused: that of 200,000 tensors has 30 MB."""
MAX_OPCODES = 8_000_000
"""Each may make one object; a tensor takes about 25."""
_MAX_BITS = 256
"""Larger numbers mean nothing: states of random generators have 128, the magic of old files 77."""
_AGAIN = 8
"""So many times as much may be copied, or reached, as was written."""
_ALWAYS = 500_000
"""And so many parts in any case."""

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_SIMPLE = (str, int, float, bool, bytes, type(None))


class PickleProblem(Exception):
    """The bytes are no pickle that can be read; the text goes after the name of the file."""


class Global(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


class Opaque:
    """Stands for an object that was not made: what would have been called, and with what.

    ``items`` and ``state`` are what the pickle would have put in afterwards.
    """

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: str, args: Any = ()) -> None:
        """Record that *kind* would have been called with *args*."""
        self.kind = kind
        self.args = args
        self.items: dict[Any, Any] = {}
        self.state: Any = None

    def __repr__(self) -> str:
        """Return the kind only: arguments may be of any size."""
        return f"Opaque({self.kind!r})"


_KEYS = (*_SIMPLE, Opaque)


class Loaded(NamedTuple):
    """The value of a pickle, and every class and function that it names, in order."""

    value: Any
    globals: tuple[Global, ...]


Rebuild = Mapping[tuple[str, str], Callable[..., Any]]


def load(file: BinaryIO, *, rebuild: Rebuild, persistent: Callable[[Any], Any]) -> Loaded:
    """Return the value of the next pickle in *file*, and leave *file* behind it.

    *rebuild* makes values of the calls that are known, by module and name; *persistent* of the
    identifiers of objects outside the pickle. Both may raise TypeError or ValueError, which makes
    the value an :class:`Opaque`. Raises :class:`PickleProblem` for bytes that are no pickle.
    """
    limited = _Limited(file)
    machine = _Machine(rebuild, persistent, limited)
    steps: Any = pickletools.genops  # which needs no more of a file than read and readline
    try:
        for count, (opcode, arg, _) in enumerate(steps(limited)):
            if count >= MAX_OPCODES:
                raise PickleProblem(f"has a pickle of more than {MAX_OPCODES:,} steps")
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, arg)
        value = machine.stack.pop()
        _refuse_repeated(value)
        return Loaded(value, tuple(machine.globals))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        kind = type(error).__name__
        text = f"{kind}: {brief(error.args[0] if error.args else '', 80)}"
        raise PickleProblem(f"has a broken pickle ({text})") from error


def _refuse_repeated(value: Any) -> None:
    """Raise :class:`PickleProblem` if lists and the like hold each other without measure.

    An object that was not made is looked into by itself: those may hold each other in circles.
    """
    sizes: dict[int, int] = {}
    opaque: set[int] = set()
    roots = [value]
    reached = written = 0
    for root in roots:  # grows on the way
        if type(root) is Opaque:
            roots += (root.args, root.items, root.state)
            continue
        for item, is_done in _in_order(root, sizes):
            parts = item.values() if type(item) is dict else item
            if is_done:
                sizes[id(item)] += sum(sizes.get(id(part), 1) for part in parts)
                continue
            written += len(parts)
            for part in parts:
                if type(part) is Opaque and id(part) not in opaque:
                    opaque.add(id(part))
                    roots.append(part)
        reached += sizes.get(id(root), 1)
    if reached > _AGAIN * written + _ALWAYS:
        raise PickleProblem("has a pickle in which lists hold each other many times over")


def _in_order(root: Any, sizes: dict[int, int]) -> Iterator[tuple[Any, bool]]:
    """Yield each container that *sizes* does not have, before what is in it and (True) after."""
    todo = [(root, False)]
    while todo:
        item, is_done = todo.pop()
        if type(item) not in _CONTAINERS or (id(item) in sizes and not is_done):
            continue
        yield item, is_done
        if not is_done:
            sizes[id(item)] = 1
            parts = item.values() if type(item) is dict else item
            todo.append((item, True))
            todo += [(part, False) for part in parts if type(part) in _CONTAINERS]


_CONTAINERS = (list, tuple, dict)  # themselves: tensors are tuples of a class of their own
_SIZED = (*_CONTAINERS, str, bytes)


class _Limited:
    """A file of which only so much can be read, whatever lengths the pickle states."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_BYTES

    @property
    def n_bytes(self) -> int:
        """How much was read."""
        return MAX_BYTES - self._left

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise PickleProblem(f"has a pickle of more than {MAX_BYTES:,} bytes")
        self._left -= size
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(
        self, rebuild: Rebuild, persistent: Callable[[Any], Any], limited: _Limited
    ) -> None:
        self.stack: list[Any] = []
        self.globals: dict[Global, str] = {}
        self._limited = limited
        self._copied = 0
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._rebuild = rebuild
        self._persistent = persistent

    def step(self, name: str, arg: Any) -> None:
        """Do what one opcode says."""
        if name in _PUSH_ARGUMENT:
            is_huge = type(arg) is int and arg.bit_length() > _MAX_BITS
            self.stack.append(Opaque("a huge number") if is_huge else arg)
        elif name in _GET:
            self.stack.append(self._memo[arg])
        elif name in _PUT:
            self._memo[arg] = self.stack[-1]
        elif name in _PUSH:
            self.stack.append(_PUSH[name]())
        elif name not in _NOTHING:
            _STEPS[name](self, arg)

    # ---- the stack

    def _do_mark(self, _: Any) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def _pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def _do_pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._pop_mark()

    def _do_pop_mark(self, _: Any) -> None:
        self._pop_mark()

    def _do_dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _do_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    # ---- containers

    def _do_tuple(self, _: Any) -> None:
        items = self._pop_mark()
        self.stack.append(tuple(items))

    def _do_tuple1(self, _: Any) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def _do_tuple2(self, _: Any) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _do_tuple3(self, _: Any) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _do_list(self, _: Any) -> None:
        items = self._pop_mark()
        self.stack.append(items)

    def _do_dict(self, _: Any) -> None:
        items = self._pop_mark()
        self.stack.append({})
        self._set(items)

    def _do_frozenset(self, _: Any) -> None:
        self._pop_mark()
        self.stack.append(Opaque("builtins.frozenset"))

    def _do_append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def _do_appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _do_additems(self, _: Any) -> None:
        self._pop_mark()

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def _do_setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _do_setitems(self, _: Any) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.items if isinstance(target, Opaque) else target
        if isinstance(target, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                # Hashing a tuple of tuples of tuples may take for ever; an Opaque hashes as itself.
                target[key if isinstance(key, _KEYS) else Opaque("key")] = value

    # ---- what would be imported and called

    def _do_global(self, arg: str) -> None:
        self.stack.append(self._named(*arg.split(" ", 1)))

    def _do_stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            module, name = "?", "a name that is made while loading"
        self.stack.append(self._named(module, name))

    def _named(self, module: str, name: str = "") -> Global:
        found = Global(_PYTHON_2.get(module, module), name)
        if found not in self.globals:
            self.globals[found] = str(found)
        return found

    def _extension(self, code: int) -> None:
        self.stack.append(self._named("copyreg", f"extension {code}"))

    _do_ext1 = _do_ext2 = _do_ext4 = _extension

    def _do_reduce(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(function, args))

    def _do_newobj(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(function, args))

    def _do_newobj_ex(self, _: Any) -> None:
        _, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(function, args))

    def _do_obj(self, _: Any) -> None:
        function, *args = self._pop_mark()
        self.stack.append(self._call(function, tuple(args)))

    def _do_inst(self, arg: str) -> None:
        args = self._pop_mark()
        self.stack.append(self._call(self._named(*arg.split(" ", 1)), tuple(args)))

    def _call(self, function: Any, args: Any) -> Any:
        known = self._rebuild.get(function) if isinstance(function, Global) else None
        if known is not None and isinstance(args, tuple):
            self._copied += sum(len(arg) for arg in (args, *args) if type(arg) in _SIZED)
            if self._copied > _AGAIN * self._limited.n_bytes:
                raise PickleProblem("has a pickle that copies its lists many times over")
            try:
                return known(*args)
            except (TypeError, ValueError, RecursionError):
                pass
        return Opaque(self.globals[function] if isinstance(function, Global) else "?", args)

    def _do_build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Opaque):
            self.stack[-1].state = state

    def _do_binpersid(self, _: Any) -> None:
        self._do_persid(self.stack.pop())

    def _do_persid(self, identifier: Any) -> None:
        try:
            self.stack.append(self._persistent(identifier))
        except (TypeError, ValueError):
            self.stack.append(Opaque("persistent object", identifier))


_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    name.removeprefix("_do_").upper(): step
    for name, step in vars(_Machine).items()
    if name.startswith("_do_")
}
_PUSH: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: Opaque("builtins.set"),
    "NEXT_BUFFER": lambda: Opaque("buffer outside the file"),
}
_PUSH_ARGUMENT = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_GET = frozenset(("GET", "BINGET", "LONG_BINGET"))
_PUT = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_NOTHING = frozenset(("PROTO", "FRAME", "READONLY_BUFFER"))
