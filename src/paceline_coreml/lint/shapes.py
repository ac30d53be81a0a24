"""Rules about shapes: rank, axis lengths, and flexible lengths."""

from collections.abc import Iterator
from typing import Final

from paceline_coreml.lint.program import Program, first, shape_text
from paceline_coreml.lint.rules import Fault, program_rule

_MAX_AXES: Final = 4
_MAX_LENGTH: Final = 16384
_MAX_CHANNELS: Final = 65536


@program_rule("medium", "Anemll, its rules")
def rank(program: Program) -> Iterator[Fault]:
    """Use at most four axes: merge some, or compute heads one after another."""
    for op in program.ops:
        for out in op.outputs:
            if len(out.shape) > _MAX_AXES and not program.constant(out.name):
                yield Fault(op.name, f"a {op.type} with output {shape_text(out.shape)}")


@program_rule("medium", "Anemll, its rules")
def axis_length(program: Program) -> Iterator[Fault]:
    """Keep the last two of four axes at 16,384 or less: split them, or use channels."""
    values = [*program.function.block.inputs, *(out for op in program.ops for out in op.outputs)]
    for value in values:
        long = any(size is not None and size > _MAX_LENGTH for size in value.shape[2:])
        if len(value.shape) == _MAX_AXES and long:
            yield Fault(value.name, f"has shape {shape_text(value.shape)}")


@program_rule(
    "medium",
    "ane-book, privacy filter: 81,920 channels ran on the CPU, 20,480 did not; 65,536 by Anemll",
)
def channels(program: Program) -> Iterator[Fault]:
    """Use at most 65,536 channels in a convolution: sum several smaller ones."""
    for op in program.ops:
        shape = program.shape_of(first(op, "x")) if op.type == "conv" else None
        count = shape[1] if shape and len(shape) > 1 else None
        if count is not None and count > _MAX_CHANNELS:
            yield Fault(op.name, f"a conv with {count} channels")


@program_rule("high", "apple/coremltools#2370, #2548")
def unbounded(program: Program) -> Iterator[Fault]:
    """Set an upper bound for the range of every input."""
    for feature in program.function.inputs:
        if None in feature.upper:
            yield Fault(feature.name, "has an axis without an upper bound")


@program_rule("medium", "apple/coremltools#2548: EnumeratedWithRangeInputsException")
def mixed_inputs(program: Program) -> Iterator[Fault]:
    """Avoid ranges together with fixed inputs and states, or listed shapes: they may not load."""
    inputs = program.function.inputs
    ranged = [feature.name for feature in inputs if not (feature.is_static or feature.choices)]
    listed = [feature.name for feature in inputs if feature.choices]
    fixed = [feature.name for feature in inputs if feature.is_static] if program.stateful else []
    if ranged and listed:
        yield Fault("", f"{', '.join(ranged)} with a range, {', '.join(listed)} with listed shapes")
    if ranged and fixed:
        yield Fault(
            "", f"{', '.join(ranged)} with a range, {', '.join(fixed)} with one shape, and states"
        )


@program_rule("medium", "the seed experiments: std::bad_cast when loaded; ane-book, experiment 26")
def listed_shapes(program: Program) -> Iterator[Fault]:
    """Avoid EnumeratedShapes with states: use a range, or one function per shape."""
    if program.stateful:
        for feature in program.function.inputs:
            if feature.choices:
                count = len(feature.choices)
                yield Fault(feature.name, f"has {count} listed shapes, with states")


@program_rule("medium", "apple/coremltools#2500: std::bad_cast, error -14")
def whole_input(program: Program) -> Iterator[Fault]:
    """Avoid integer inputs of flexible length with states: embed on the host."""
    if program.stateful:
        for feature in program.function.inputs:
            if feature.dtype.startswith("int") and not feature.is_static:
                yield Fault(feature.name, f"is {feature.dtype} of any length, with states")
