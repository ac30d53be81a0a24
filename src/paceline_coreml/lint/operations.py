"""Rules about operation types: those that run on other devices, and unknown ones."""

from collections.abc import Iterator
from typing import Final

from paceline_coreml.lint.program import Program, first, shape_text
from paceline_coreml.lint.rules import Fault, program_rule
from paceline_coreml.rehearsal.ops import OPS
from paceline_coreml.rehearsal.program import Op

_FROM_DATA: Final = {"cond", "while_loop", "non_zero", "non_maximum_suppression"}
_LISTS: Final = "list_"
_ON_THE_HOST: Final = {
    "gather", "gather_along_axis", "gather_nd", "reduce_argmax", "reduce_argmin", "argsort",
    "scatter", "scatter_along_axis", "scatter_nd",
}  # fmt: skip
_NAMED: Final = _FROM_DATA | _ON_THE_HOST | {"linear", "einsum", "topk"}
"""Operations with a rule of their own."""
_SHAPING: Final = ("shape", "begin", "end", "reps", "size", "split_sizes", "pad")
"""Parameters that determine the output shape."""


@program_rule("high", "ane-book, converters; Apple, ml-ane-transformers; Anemll, its rules")
def linear(program: Program) -> Iterator[Fault]:
    """Make every projection a 1x1 convolution.

    Products of two computed tensors are allowed: shards with them were fully resident.
    """
    for op in program.ops:
        if op.type == "linear":
            yield Fault(op.name, "a linear; expected a 1x1 conv")
        elif op.type in ("matmul", "einsum"):
            operands = [value for several in op.inputs.values() for value in several]
            fixed = [
                shape
                for operand in operands
                if program.constant(operand)
                and (shape := program.shape_of(operand)) is not None
                and len(shape) > 1
            ]
            if fixed:
                yield Fault(
                    op.name,
                    f"a {op.type} with a weight {shape_text(fixed[0])}; expected a 1x1 conv",
                )


@program_rule("high", "ane-book, experiment 22: topk ran on the CPU")
def topk(program: Program) -> Iterator[Fault]:
    """Avoid top-k, which leaves the Neural Engine: use comparisons, or the host."""
    yield from _of_kinds(program, {"topk"})


@program_rule("medium", "hollance/neural-engine; john-rocky/CoreML-LLM")
def host_operation(program: Program) -> Iterator[Fault]:
    """Avoid gather, scatter, sort and argmax, which run on the CPU: use the host."""
    yield from _of_kinds(program, _ON_THE_HOST)


@program_rule("high", "every source: the Neural Engine runs fixed programs")
def control_flow(program: Program) -> Iterator[Fault]:
    """Avoid branches, loops and shapes that depend on data: compute everything, and mask."""
    for op in program.ops:
        if op.type in _FROM_DATA or op.blocks or _LISTS in op.type:
            yield Fault(op.name, f"a {op.type}")
            continue
        sizes = _computed_sizes(program, op)
        open_ended = any(None in out.shape for out in op.outputs)
        if open_ended and any(size not in program.sizes for size in sizes):
            yield Fault(op.name, f"a {op.type} whose shape depends on the data")


@program_rule(
    "medium",
    "john-rocky/CoreML-LLM: 1,024 groups of 3 taps ran on the CPU; ane-book says otherwise",
)
def depthwise(program: Program) -> Iterator[Fault]:
    """Avoid depthwise convolutions, which may run on the CPU: sum shifted products."""
    for op in program.ops:
        weight = program.shape_of(first(op, "weight"))
        groups = program.numbers(op, "groups")
        if op.type == "conv" and weight and weight[1] == 1 and groups is not None and groups > 1:
            yield Fault(op.name, f"a conv with {groups} groups of one channel")


@program_rule("low", "paceline's emulator, which rejects unknown operations")
def unknown_operation(program: Program) -> Iterator[Fault]:
    """Check this operation on a Mac: the emulator does not support it."""
    for op in program.ops:
        if op.type not in OPS and op.type not in _NAMED and not op.blocks:
            yield Fault(op.name, f"a {op.type}, which the emulator does not support")


def _of_kinds(program: Program, kinds: set[str]) -> Iterator[Fault]:
    for op in program.ops:
        if op.type in kinds and not program.constant(op.outputs[0].name):
            yield Fault(op.name, f"a {op.type}")


def _computed_sizes(program: Program, op: Op) -> list[str]:
    """Return the computed operands that determine an operation's output shape."""
    return [
        operand
        for parameter in _SHAPING
        for operand in op.inputs.get(parameter, ())
        if isinstance(operand, str) and not program.constant(operand)
    ]
