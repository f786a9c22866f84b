"""Words of names: what the parts of a model are commonly called, brought to one spelling.

The spelling is for comparing only. Order is kept: ``image_to_token`` is not ``token_to_image``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from modelquirks.planner.infer.kin import Path

__all__ = ["contradict", "digits_of", "likeness", "numberless", "plain", "spelt", "words_of"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|\*")

_EXACT = """
self attention self = attn; self attention = attn; self attn = attn; attention self = attn
attn self = attn; attention = attn; att = attn; mha = attn; self mha = attn
block sparse moe = mlp; feed forward = mlp; feedforward = mlp; ffn = mlp; ff = mlp; moe = mlp
query key value = qkv; q k v = qkv; wqkv = qkv; query = q; queries = q; key = k; keys = k
value = v; values = v; wq = q; wk = k; wv = v; wo = o; wkv = kv; wgate = gate
attn output = attn o; attn out = attn o; attn dense = attn o; attn proj = attn o
attn out proj = attn o
layernorm = norm; layer norm = norm; batchnorm = norm; batch norm = norm; group norm = norm
rms norm = norm; rmsnorm = norm; normalization = norm; norms = norm; ln = norm; bn = norm
layer norms = norm; layernorms = norm
embeddings = embed; embedding = embed; embedder = embed; emb = embed; embeds = embed
token embed = embed token; word embed = embed token; embed word embed = embed token
wte = embed token; embed tokens = embed token; tok embed = embed token; tokens embed = embed token
positional = position; positions = position; pos = position; wpe = embed position
position embed = embed position; patches = patch; convolution = conv
tokens = token; layers = layer; blocks = layer; block = layer; h = layer; resblocks = layer
experts = expert; visual = vision; txt = text; img = image; router = gate
intermediate dense = mlp first; layer * output dense = layer * mlp second
mlp fc 1 = mlp first; mlp fc 2 = mlp second; mlp c fc = mlp first; mlp c proj = mlp second
mlp linear 1 = mlp first; mlp linear 2 = mlp second; mlp lin 1 = mlp first
mlp lin 2 = mlp second; mlp dense h to 4 h = mlp first; mlp dense 4 h to h = mlp second
mlp fc in = mlp first; mlp fc out = mlp second; gamma = weight; beta = bias; lm head = head; language head = head
e score correction bias = correction bias; downsampling = downsample; upsampling = upsample
"""
"""Words that mean the same, whoever writes them."""

_LOOSE = """
w 1 = gate; w 3 = up; w 2 = down; fc in = first; fc out = second; c fc = first; fc 1 = first; fc 2 = second; linear 1 = first; linear 2 = second
attn c proj = attn o; dense h to 4 h = first; dense 4 h to h = second; w 13 = gate up
w 12 = gate up; input linear = first; output linear = second
vit = vision; image = vision; llm = language; lm = language; text = language; sa = attn
ca = cross attn; encoder attn = cross attn; qcontent = q content; kcontent = k content
qpos = q position; kpos = k position; q net = q; k net = k; v net = v; scaling s = scaling weight; scaling b = scaling bias; fc 3 = up; ssmax = softmax
projector = project; projection = project; connector = project; final norm = norm
norm f = norm; norm final = norm; classifier = head; score = head; unembed = head
embed out = head; scale = weight; kernel = weight; ls = scale; layer scale = scale
conv d = conv; downsample = down; upsample = up; shared expert = shared; norm out = norm
out = o; output = o; adapter = project; merger = project; backbone = body; trunk = body
lambda 1 = weight
"""
"""Words that often mean the same. They are good for an order among guesses and nothing else."""

_FILLERS = frozenset(("proj", "dense", "linear", "lin", "fc", "weight", "to"))
"""Words that say of what kind something is, not which one it is."""

_EXCLUSIVE = (
    ({"encoder"}, {"decoder"}),
    ({"text", "language"}, {"vision", "image", "video"}, {"audio", "speech"}),
    ({"q"}, {"k"}, {"v"}, {"o"}),
    ({"gate"}, {"up"}, {"down"}),
    ({"first"}, {"second"}, {"third"}),
    ({"in", "input"}, {"out", "output"}),
    ({"pre", "before"}, {"post", "after"}),
    ({"left"}, {"right"}),
    ({"cross"}, {"self"}),
    ({"high"}, {"low"}),
)
"""Words of which one does not become another."""

Table = Mapping[str, Sequence[tuple[tuple[str, ...], tuple[str, ...]]]]


def _table(text: str) -> Table:
    table: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    for rule in text.replace("\n", ";").split(";"):
        said, _, meant = rule.partition("=")
        if words := tuple(said.split()):
            table.setdefault(words[0], []).append((words, tuple(meant.split())))
    for rules in table.values():
        rules.sort(key=lambda rule: -len(rule[0]))
    return table


_TABLES = {False: _table(_EXACT), True: _table(_LOOSE)}


@lru_cache(maxsize=65536)
def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a segment in lower case.

    >>> words_of("preLayerNorm_w1")
    ('pre', 'layer', 'norm', 'w', '1')
    """
    return tuple(word.lower() for word in _WORD.findall(text))


@lru_cache(maxsize=65536)
def spelt(path: Path, loose: bool = False) -> tuple[str, ...]:
    """Return the words of a path in their common spelling, in order, repetitions once.

    >>> spelt(("encoder", "layer", "*", "attention", "attention", "query"))
    ('encoder', 'layer', '*', 'attn', 'q')
    """
    words: Sequence[str] = [word for segment in path for word in words_of(segment)]
    for _ in range(3):
        words = _once(words, _TABLES[False])
    for _ in range(2 if loose else 0):
        words = _once(words, _TABLES[True])
    return tuple(words)


@lru_cache(maxsize=65536)
def plain(path: Path) -> tuple[str, ...]:
    """Return the spelling of a path without the words that only say of what kind it is."""
    words = _once([w for w in spelt(path) if w not in _FILLERS], _TABLES[False])
    return tuple(words)


def _once(words: Sequence[str], table: Table) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(words):
        for said, meant in table.get(words[at], ()):
            if tuple(words[at : at + len(said)]) == said:
                found += meant
                at += len(said)
                break
        else:
            found.append(words[at])
            at += 1
    return _unrepeated(found)


def _unrepeated(words: Sequence[str]) -> list[str]:
    """Return *words* with what is said twice in a row, one to three words, said once."""
    found: list[str] = []
    for word in words:
        found.append(word)
        for n in (1, 2, 3):
            if len(found) >= 2 * n and found[-n:] == found[-2 * n : -n] and "*" not in found[-n:]:
                del found[-n:]
    return found


def numberless(path: Path) -> Path:
    """Return a path with every number as ``#``: what differs only in numbers is equal then."""
    return tuple(re.sub(r"[0-9]+", "#", segment) for segment in path)


def contradict(was: Path, now: Path) -> bool:
    """Tell whether a word gives way to one that means something else.

    >>> contradict(("encoder", "layers"), ("decoder", "layers"))
    True
    """
    first, second = set(plain(was)), set(plain(now))
    gone, come = first - second, second - first
    for senses in _EXCLUSIVE:
        for sense in senses:
            others = set().union(*(o for o in senses if o is not sense))
            if gone & sense and come & others and not second & sense:
                return True
    return False


def digits_of(path: Path) -> tuple[int, ...]:
    """Return the numbers in a path."""
    return tuple(int(d) for segment in path for d in re.findall(r"[0-9]+", segment))


def likeness(one: Iterable[str], other: Iterable[str], weight: Mapping[str, float]) -> float:
    """Return how alike two names are, 0 to 1: shared words by all words, rare ones count more."""
    first, second = set(one), set(other)
    shared = sum(weight.get(w, 1.0) for w in first & second)
    total = sum(weight.get(w, 1.0) for w in first | second)
    return shared / total if total else 0.0
