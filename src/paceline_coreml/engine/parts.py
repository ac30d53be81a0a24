"""Maps the operations of a shard to parts of the model: attention, experts, head, ...

Shards name weights and states `layers_N_` plus the path of their module, or `final_` and `head_`,
with underscores for dots. Invariant: names decide. An operation without a named operand, such as a
product of two computed values, belongs to the part of its first operand that comes from one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from paceline_coreml.rehearsal.ops import OPS
from paceline_coreml.rehearsal.program import Block, Op

ATTENTION, CONVOLUTION, FEED_FORWARD = "attention", "convolution", "feed-forward"
ROUTER, EXPERTS, REST, HEAD = "router", "experts", "rest", "head"

PARTS = (ATTENTION, CONVOLUTION, FEED_FORWARD, ROUTER, EXPERTS, REST, HEAD)
"""In the order of a layer. The rest is norms, scales of residuals, and bounds of norms."""

_NAMED = re.compile(r"layers_(\d+)_(.*)|(?:final|head)_")

# The first match decides. A layer's `mix` is attention or a short convolution.
_BEGINNINGS = (
    (ATTENTION, re.compile(r"attention_|mix_(?:q|k|v|o|q_norm|k_norm|attention)_")),
    (CONVOLUTION, re.compile(r"mix_")),
    (ROUTER, re.compile(r"router_|feed_forward_(?:router|bias)_")),
    (EXPERTS, re.compile(r"(?:feed_forward_)?experts_")),
    (FEED_FORWARD, re.compile(r"feed_forward_")),
)


class Traced(NamedTuple):
    """Parts of a program."""

    parts: Mapping[str, str]
    """Operation name -> one of `PARTS`."""
    shares: Mapping[int, tuple[str, ...]]
    """Layer with experts -> names of its routing weights, values [1, n, 1, T].

    Together they have one number per expert and row, 0 if the row does not use the expert."""


def part_of(name: str) -> str | None:
    """The part of a weight or a state, by its name; None: unknown."""
    match = _NAMED.match(name)
    if match is None:
        return None
    if match[2] is None:
        return HEAD
    return next((part for part, begins in _BEGINNINGS if begins.match(match[2])), REST)


def trace(block: Block) -> Traced:
    """Find the part of every operation, and the routing weights."""
    parts: dict[str, str] = {}
    shares: dict[int, tuple[str, ...]] = {}
    origins: dict[str, str] = {}  # value -> name of the weight or state that it comes from
    for op in block.ops:
        operands = list(_operands(op))
        named = [name for name in operands if _NAMED.match(name)]
        sources = [origins[name] for name in operands if name in origins]
        if op.type == "mul" and {part_of(name) for name in sources} == {EXPERTS, ROUTER}:
            sources.sort(key=lambda name: part_of(name) != EXPERTS)
            (share,) = (name for name in operands if origins[name] == sources[1])
            layer = _layer_of(sources[1])
            shares[layer] = (*shares.get(layer, ()), share)
        origin = next(iter(named + sources), None)
        counts = named or OPS[op.type].macs is not None
        parts[op.name] = (part_of(origin) if origin and counts else None) or REST
        if origin is not None:
            origins |= dict.fromkeys((output.name for output in op.outputs), origin)
    return Traced(parts, shares)


def _operands(op: Op) -> Iterator[str]:
    """Names of an operation's operands, its weight first."""
    for parameter in sorted(op.inputs, key=lambda name: (name != "weight", name)):
        yield from (operand for operand in op.inputs[parameter] if isinstance(operand, str))


def _layer_of(name: str) -> int:
    match = _NAMED.match(name)
    assert match is not None
    return int(match[1])
