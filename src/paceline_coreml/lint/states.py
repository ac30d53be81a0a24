"""Rules about states: their type, number and updates."""

from collections.abc import Iterator
from typing import Final

from paceline_coreml.engine.artifact import MAX_STATES
from paceline_coreml.lint.program import MOVE_OPS, Program, first, shape_text
from paceline_coreml.lint.rules import Fault, program_rule
from paceline_coreml.rehearsal.program import Op, Operand

_WIDTH: Final = 32
_PARTS: Final = MOVE_OPS | {"slice_by_index", "slice_by_size"}
"""Operations that return some or all elements of one operand."""


@program_rule("high", "coremltools 9, backend/mil/load.py; apple/coremltools#2537")
def state_type(program: Program) -> Iterator[Fault]:
    """Make states float16, with one shape."""
    kept = {value.name: value for value in program.function.block.inputs if value.is_state}
    for state in program.function.states:
        value = kept.get(state.name)
        if state.dtype != "fp16" or (value is not None and value.dtype != "fp16"):
            yield Fault(state.name, f"is {state.dtype}; expected fp16")
        if not state.is_static or (value is not None and None in value.shape):
            yield Fault(state.name, "has more than one shape")


@program_rule("medium", "apple/coremltools#2631: 256 ran, 270 failed")
def state_width(program: Program) -> Iterator[Fault]:
    """Make the last axis of a state a multiple of 32.

    Checks only the last axis: shards with an axis of eight heads before it were resident.
    """
    for state in program.function.states:
        if state.shape and state.shape[-1] % _WIDTH:
            yield Fault(state.name, f"has shape {list(state.shape)}")


@program_rule("medium", "the seed experiments: 40 states ran")
def over_40_states(program: Program) -> Iterator[Fault]:
    """Put fewer layers into a package: a state count this high is not known to run."""
    count = len(program.function.states)
    if count > MAX_STATES:
        yield Fault("", f"{count} states; expected at most {MAX_STATES}")


@program_rule("medium", "john-rocky/CoreML-LLM: error -14")
def state_shift(program: Program) -> Iterator[Fault]:
    """Write to a ring buffer through a mask, instead of shifting a state with concat."""
    for op in program.ops:
        if op.type != "write_state":
            continue
        joined = program.maker(program.origin(_written(program, op), _PARTS))
        if joined is None or joined.type != "concat":
            continue
        for part in joined.inputs.get("values", ()):
            read = program.maker(program.origin(part, _PARTS))
            if read is not None and read.type == "read_state":
                name = str(first(op, "input"))
                if first(read, "input") == name:
                    yield Fault(joined.name, f"{name} is written as its own part and new rows")
                    break


@program_rule("medium", "Anemll#27 (more than 32 rows failed); FluidInference/mobius#77")
def state_part(program: Program) -> Iterator[Fault]:
    """Write the whole state through a mask, instead of a part of it."""
    for op in program.ops:
        update, whole = first(op, "update"), first(op, "x")
        if op.type != "slice_update" or not _reads_state(program, whole):
            continue
        part, shape = program.shape_of(update), program.shape_of(whole)
        if part is not None and shape is not None and part != shape:
            yield Fault(op.name, f"writes {shape_text(part)} of {shape_text(shape)}")


@program_rule("medium", "Anemll#39: an error of BNNS on macOS 26")
def state_update_type(program: Program) -> Iterator[Fault]:
    """Write values of the state's own type."""
    for op in program.ops:
        if op.type == "slice_update" and _reads_state(program, first(op, "x")):
            new, kept = program.value(first(op, "update")), program.value(first(op, "x"))
        elif op.type == "write_state":
            new, kept = program.value(first(op, "data")), program.value(first(op, "input"))
        else:
            continue
        if new is not None and kept is not None and new.dtype != kept.dtype:
            yield Fault(op.name, f"writes {new.dtype} to a {kept.dtype} state")


def _reads_state(program: Program, operand: Operand | None) -> bool:
    maker = program.maker(program.origin(operand))
    return maker is not None and maker.type == "read_state"


def _written(program: Program, op: Op) -> Operand | None:
    """Return the value written to a state; `state[:] = x` converts to an update of all of it."""
    data = first(op, "data")
    maker = program.maker(data)
    if maker is not None and maker.type == "slice_update":
        update, whole = first(maker, "update"), first(maker, "x")
        if program.shape_of(update) == program.shape_of(whole):
            return update
    return data
