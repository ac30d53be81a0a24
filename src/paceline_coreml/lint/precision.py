"""Rules about precision: the Neural Engine computes in float16 only."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from paceline_coreml.lint.program import Program, first
from paceline_coreml.lint.rules import Fault, program_rule
from paceline_coreml.rehearsal.program import Op, Operand

_LARGEST: Final = 65504.0
"""The largest float16."""
_WIDE: Final = ("fp32", "fp64")
_FLOATS: Final = ("fp16", *_WIDE)
_SUMS: Final = ("reduce_sum", "reduce_mean")
_SUMS_OF_SQUARES: Final = ("reduce_sum_square", "reduce_l2_norm", "l2_norm")


@program_rule("high", "hollance/neural-engine: the Neural Engine computes in float16")
def float16(program: Program) -> Iterator[Fault]:
    """Convert to float16: float32 runs on other devices."""
    for op in program.ops:
        for out in op.outputs:
            if out.dtype in _WIDE and not program.constant(out.name):
                yield Fault(op.name, f"a {op.type} with output {out.dtype}")


@program_rule("medium", "anemll-profile: 'Unsupported tensor data type: int32'")
def whole_numbers(program: Program) -> Iterator[Fault]:
    """Avoid integers, which run on other devices: do not read sizes from tensors."""
    for op in program.ops:
        for out in op.outputs:
            whole = out.dtype not in (*_FLOATS, "bool", "string")
            if whole and not program.constant(out.name):
                yield Fault(op.name, f"a {op.type} with output {out.dtype}")


@program_rule("medium", "ane-book, experiment 22: a cast, next to a topk, ran on the CPU")
def cast(program: Program) -> Iterator[Fault]:
    """Avoid casts, which may leave the Neural Engine: use float16, and signs and clamps."""
    for op in program.ops:
        if op.type == "cast" and not program.constant(op.outputs[0].name):
            value = program.value(first(op, "x"))
            dtype = value.dtype if value else "a constant"
            yield Fault(op.name, f"a cast from {dtype} to {op.outputs[0].dtype}")


@program_rule("high", "ane-book, experiment 27; Anemll, its norms")
def overflow(program: Program) -> Iterator[Fault]:
    """Divide the residual stream before squaring it: squares of 256 and more overflow float16.

    Checks only squares of inputs and sums, such as the residual stream; a projection's output is
    seldom that large.
    """
    for op in program.ops:
        squared = _squared(program, op)
        value = program.value(program.origin(squared))
        maker = program.maker(program.origin(squared))
        if value is None or value.dtype != "fp16" or value.is_state:
            continue
        if maker is None or maker.type == "add":
            of = f"the sum {maker.name}" if maker else f"the input {value.name}"
            yield Fault(op.name, f"a {op.type} over the squares of {of}, which is not scaled down")


@program_rule("high", "ane-book and john-rocky/CoreML-LLM: masks of -1e4, not -inf")
def infinity(program: Program) -> Iterator[Fault]:
    """Keep constants in float16's range, such as -1e4 for masks: infinity times 0 is NaN."""
    for op, constant in program.stored():
        if constant.dtype not in _FLOATS:
            continue
        numbers = np.ravel(np.asarray(constant.value()))
        beyond = numbers[~(np.abs(numbers) <= _LARGEST)]
        if beyond.size:
            yield Fault(op.name, f"has {beyond[0]}" + (" and others" if beyond.size > 1 else ""))


def _squared(program: Program, op: Op) -> Operand | None:
    """Return the operand whose squares an operation sums, or None if it does not sum squares."""
    if op.type in _SUMS_OF_SQUARES:
        return first(op, "x")
    if op.type not in _SUMS:
        return None
    maker = program.maker(program.origin(first(op, "x")))
    if maker is None:
        return None
    if maker.type == "square":
        return first(maker, "x")
    x, y = first(maker, "x"), first(maker, "y")
    if maker.type == "mul" and isinstance(x, str) and x == y:
        return x
    power = program.numbers(maker, "y") if maker.type == "pow" else None
    return x if power is not None and power.size == 1 and float(power.item()) == 2 else None
