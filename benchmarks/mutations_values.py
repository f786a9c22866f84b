"""Damage to tensors: other shapes and dtypes, honestly stored, and other values."""

from __future__ import annotations

import torch
from mutations_copy import Copy
from mutations_kinds import damage, is_companion

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLES = (torch.int32, torch.int64, torch.uint8, torch.int8)


def _put(copy: Copy, place: object, tensor: torch.Tensor, done: str, *, unseen: bool) -> bool:
    from mutations_copy import Place

    assert isinstance(place, Place)
    copy.change(place, tensor)
    if unseen:
        copy.may_be_unseen = True
    return copy.tell(f"{place.name!r} {done}", place.name)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().clone().reshape(-1).view(torch.uint8)


# ---- shapes


@damage("shapes")
def transposed(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() == 2 and t.shape[0] != t.shape[1])
    if found is None:
        return False
    place, tensor = found
    return _put(copy, place, tensor.t().contiguous(), "transposed", unseen=False)


@damage("shapes", unseen=True)
def square_transposed(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() == 2 and t.shape[0] == t.shape[1] > 1)
    if found is None:
        return False
    place, tensor = found
    return _put(copy, place, tensor.t().contiguous(), "(square) transposed", unseen=True)


@damage("shapes")
def rows_cut(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() > 0 and t.shape[0] > 1)
    if found is None:
        return False
    place, tensor = found
    n = copy.chance.randint(1, tensor.shape[0] - 1)
    return _put(copy, place, tensor[:n].clone(), f"cut to {n} rows", unseen=False)


@damage("shapes")
def rows_added(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() > 0 and t.numel() > 0)
    if found is None:
        return False
    place, tensor = found
    n = copy.chance.randint(1, tensor.shape[0])
    grown = torch.cat((_octets(tensor), _octets(tensor[:n]))).view(tensor.dtype)
    shape = (tensor.shape[0] + n, *tensor.shape[1:])
    return _put(copy, place, grown.reshape(shape), f"with {n} rows more", unseen=False)


@damage("shapes")
def columns_cut(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() > 1 and t.shape[-1] > 1)
    if found is None:
        return False
    place, tensor = found
    n = copy.chance.randint(1, tensor.shape[-1] - 1)
    return _put(copy, place, tensor[..., :n].clone(), f"cut to {n} columns", unseen=False)


@damage("shapes")
def flattened(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() > 1)
    if found is None:
        return False
    return _put(copy, found[0], found[1].reshape(-1).clone(), "flattened", unseen=False)


@damage("shapes")
def dimension_added(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, tensor = found
    grown = tensor.unsqueeze(copy.chance.randint(0, tensor.dim())).clone()
    return _put(copy, place, grown, f"of shape {list(grown.shape)}", unseen=False)


@damage("shapes")
def emptied(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, tensor = found
    return _put(copy, place, torch.empty(0, dtype=tensor.dtype), "of shape [0]", unseen=False)


# ---- dtypes


@damage("dtypes")
def cast_to_another_float(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS)
    if found is None:
        return False
    place, tensor = found
    dtype = copy.chance.choice([d for d in _FLOATS if d != tensor.dtype])
    return _put(copy, place, tensor.to(dtype), f"cast to {dtype}", unseen=False)


@damage("dtypes")
def all_cast_to_another_float(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS)
    if found is None:
        return False
    dtype = copy.chance.choice([d for d in _FLOATS if d != found[1].dtype])
    named: list[str] = []
    for file in copy.flat:
        tensors = copy.tensors(file)
        chosen = [n for n, t in tensors.items() if t.dtype in _FLOATS and not is_companion(n)]
        named += chosen
        copy.set_tensors(file, {n: t.to(dtype) if n in chosen else t for n, t in tensors.items()})
    return bool(named) and copy.tell(f"all cast to {dtype}", *named)


@damage("dtypes", unseen=True)
def all_scales_cast(copy: Copy) -> bool:
    """Store every scale of packed weights in another float: formats allow several."""
    found = copy.pick(lambda n, t: t.dtype in _FLOATS and is_companion(n))
    if found is None:
        return False
    dtype = copy.chance.choice([d for d in _FLOATS if d != found[1].dtype])
    for file in copy.flat:
        held = copy.tensors(file).items()
        copy.set_tensors(
            file,
            {n: t.to(dtype) if t.dtype in _FLOATS and is_companion(n) else t for n, t in held},
        )
    copy.may_be_unseen = True
    return copy.tell(f"all scales cast to {dtype}", *copy.subject.truth.tensors)


@damage("dtypes")
def cast_to_eight_bits(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS)
    if found is None:
        return False
    dtype = copy.chance.choice((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8))
    return _put(copy, found[0], found[1].to(dtype), f"cast to {dtype}", unseen=False)


@damage("dtypes")
def cast_to_integers(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS)
    if found is None:
        return False
    dtype = copy.chance.choice((torch.int64, torch.int32, torch.bool))
    return _put(copy, found[0], found[1].to(dtype), f"cast to {dtype}", unseen=False)


@damage("dtypes")
def integers_cast_to_floats(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _WHOLES)
    if found is None:
        return False
    dtype = copy.chance.choice(_FLOATS)
    return _put(copy, found[0], found[1].to(dtype), f"cast to {dtype}", unseen=False)


@damage("dtypes")
def double_precision(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS)
    if found is None:
        return False
    noise = found[1].double() * (1 + 1e-12)
    return _put(copy, found[0], noise, "stored in double precision", unseen=False)


# ---- values


@damage("values", unseen=True)
def one_value_changed(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.numel() > 0)
    if found is None:
        return False
    place, tensor = found
    octets = _octets(tensor)
    octets[copy.chance.randrange(len(octets))] ^= 1 << copy.chance.randrange(8)
    changed = octets.view(tensor.dtype).reshape(tensor.shape)
    return _put(copy, place, changed, "has one bit changed", unseen=True)


@damage("values", unseen=True)
def zeroed(copy: Copy) -> bool:
    if (found := copy.pick()) is None:
        return False
    place, tensor = found
    zeros = torch.zeros_like(_octets(tensor)).view(tensor.dtype).reshape(tensor.shape)
    return _put(copy, place, zeros, "all zero", unseen=True)


@damage("values", unseen=True)
def not_a_number(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dtype in _FLOATS and t.numel() > 0)
    if found is None:
        return False
    place, tensor = found
    changed = tensor.clone()
    changed.view(-1)[copy.chance.randrange(tensor.numel())] = float("nan")
    return _put(copy, place, changed, "has a NaN", unseen=True)


@damage("values", unseen=True)
def rows_permuted(copy: Copy) -> bool:
    found = copy.pick(lambda _, t: t.dim() > 0 and t.shape[0] > 1)
    if found is None:
        return False
    place, tensor = found
    octets = _octets(tensor).reshape(tensor.shape[0], -1).roll(1, 0)
    changed = octets.reshape(-1).view(tensor.dtype).reshape(tensor.shape)
    return _put(copy, place, changed, "has its rows in another order", unseen=True)


@damage("values", unseen=True)
def two_exchanged(copy: Copy) -> bool:
    """Exchange two tensors of one shape, or the names of both: in the file the same."""
    if (found := copy.twins()) is None:
        return False
    one, other = found
    first, second = copy.tensors(one.file)[one.name], copy.tensors(other.file)[other.name]
    copy.change(one, second)
    copy.change(other, first)
    copy.may_be_unseen = True
    return copy.tell(f"{one.name!r} and {other.name!r} exchanged", one.name, other.name)


@damage("values", unseen=True)
def one_twice(copy: Copy) -> bool:
    if (found := copy.twins()) is None:
        return False
    one, other = found
    copy.change(one, copy.tensors(other.file)[other.name].clone())
    copy.may_be_unseen = True
    return copy.tell(f"{one.name!r} has the values of {other.name!r}", one.name)
