"""Which part of a model an operation of a shard belongs to: attention, experts, the head, ...

Knows how a shard names its weights and states: `layers_N_` and the path of the module that has
them, or `final_` and `head_`, with underscores for dots. Runs nothing and counts nothing. The rule:
names decide, and the flow of data only where an operation has none: a product of two computed
values, or of one and a weight that the converter made of several, belongs to where its first
operand with a name behind it comes from.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from paceline.engines.coreml.rehearsal.ops import OPS
from paceline.engines.coreml.rehearsal.program import Block, Op

ATTENTION, CONVOLUTION, FEED_FORWARD = "attention", "convolution", "feed-forward"
ROUTER, EXPERTS, REST, HEAD = "router", "experts", "rest", "head"

PARTS = (ATTENTION, CONVOLUTION, FEED_FORWARD, ROUTER, EXPERTS, REST, HEAD)
"""In the order of a layer. The rest is norms, scales of residuals, and bounds of norms."""

_NAMED = re.compile(r"layers_(\d+)_(.*)|(?:final|head)_")

# The first that a path begins with. A layer's `mix` is attention or a short convolution.
_BEGINNINGS = (
    (ATTENTION, re.compile(r"attention_|mix_(?:q|k|v|o|q_norm|k_norm|attention)_")),
    (CONVOLUTION, re.compile(r"mix_")),
    (ROUTER, re.compile(r"router_|feed_forward_(?:router|bias)_")),
    (EXPERTS, re.compile(r"(?:feed_forward_)?experts_")),
    (FEED_FORWARD, re.compile(r"feed_forward_")),
)


class Traced(NamedTuple):
    """A program, looked through."""

    parts: Mapping[str, str]
    """For every operation, by name, one of `PARTS`."""
    shares: Mapping[int, tuple[str, ...]]
    """For every layer with experts the values [1, n, 1, T] that their outputs are multiplied by;
    together they have one number for each expert and row, 0 where the row does not have it."""


def part_of(name: str) -> str | None:
    """The part that a weight or a state is of; None: its name does not say."""
    found = _NAMED.match(name)
    if found is None:
        return None
    if found[2] is None:
        return HEAD
    return next((part for part, begins in _BEGINNINGS if begins.match(found[2])), REST)


def trace(block: Block) -> Traced:
    """Find every operation's part, and what experts are weighted by."""
    parts: dict[str, str] = {}
    shares: dict[int, tuple[str, ...]] = {}
    origins: dict[str, str] = {}  # value -> the weight or state that it was made of, by name
    for op in block.ops:
        operands = list(_operands(op))
        named = [name for name in operands if _NAMED.match(name)]
        behind = [origins[name] for name in operands if name in origins]
        if op.type == "mul" and {part_of(name) for name in behind} == {EXPERTS, ROUTER}:
            behind.sort(key=lambda name: part_of(name) != EXPERTS)
            (share,) = (name for name in operands if origins[name] == behind[1])
            layer = _layer_of(behind[1])
            shares[layer] = (*shares.get(layer, ()), share)
        origin = next(iter(named + behind), None)
        counts = named or OPS[op.type].macs is not None
        parts[op.name] = (part_of(origin) if origin and counts else None) or REST
        if origin is not None:
            origins |= dict.fromkeys((made.name for made in op.outputs), origin)
    return Traced(parts, shares)


def _operands(op: Op) -> Iterator[str]:
    """The names of an operation's operands, its weight before others."""
    for parameter in sorted(op.inputs, key=lambda each: (each != "weight", each)):
        yield from (one for one in op.inputs[parameter] if isinstance(one, str))


def _layer_of(name: str) -> int:
    found = _NAMED.match(name)
    assert found is not None
    return int(found[1])
