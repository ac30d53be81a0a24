"""Prepares a package's function to run: binds every operation to the function that computes it.

When a package is opened, this finds all unsupported operations, parameters and options, and reports
them in one error. Operations with only constant operands are folded. Matrices are contiguous
float32.

Rounding: everything is computed in float32. With "f16", a value declared as fp16 is rounded to fp16
after every operation that computes, but stored as float32; with "f32" nothing is rounded; "engine"
is "f16" with the Neural Engine's numerics from `ops/engine_numerics.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from paceline.errors import InvalidRequest, ModelError
from paceline_coreml.rehearsal.ops import OPS, Entry
from paceline_coreml.rehearsal.ops.engine_numerics import RUNS
from paceline_coreml.rehearsal.ops.table import Array
from paceline_coreml.rehearsal.program import MilBlock, MilFunction, MilPackage, Op, Shape
from paceline_coreml.rehearsal.rounding import to_half, to_half_flushed
from paceline_coreml.rehearsal.weights import DTYPES, Constant

ENGINE: Final = "engine"
ROUNDINGS: Final = ("f16", "f32", ENGINE)

Finish = Callable[[Any], Any]
"""Converts a computed value to its declared type."""

_Moving = tuple[str, tuple[str, ...] | str, Callable[[Any], Any] | None]


class ReadyOperation(NamedTuple):
    op: Op
    entry: Entry
    fixed: Mapping[str, Any]
    """Constant arguments."""
    moving: tuple[_Moving, ...]
    """Arguments to look up: parameter, value name(s), conversion."""
    finish: tuple[tuple[str, Shape, Finish], ...]
    """Each output's name, declared shape, and conversion to its type."""
    done: tuple[str, ...] = ()
    """Values whose last use is this step."""

    def run(self, values: dict[str, Any]) -> None:
        """Read operands from `values` and add outputs to it.

        Raises:
            ModelError: operands are incompatible, or an output's shape is not the declared one.
        """
        arguments = dict(self.fixed)
        for parameter, source, form in self.moving:
            if isinstance(source, str):
                operand = values[source]
                arguments[parameter] = operand if form is None else form(operand)
            else:
                arguments[parameter] = tuple([values[name] for name in source])
        try:
            output = self.entry.run(**arguments)
        except (ValueError, IndexError, TypeError) as error:
            raise ModelError(f"{self.op.type} {self.op.name!r}: {error}") from error
        results = output if isinstance(output, tuple) else (output,)
        if len(results) != len(self.finish):
            raise ModelError(
                f"{self.op.type} {self.op.name!r} makes {len(results)} values; "
                f"{len(self.finish)} are declared"
            )
        for (name, shape, finish), result in zip(self.finish, results, strict=True):
            value = finish(result)
            if value.shape != shape and not _fits(value.shape, shape):
                raise ModelError(
                    f"{self.op.type} {self.op.name!r} makes {list(value.shape)}; "
                    f"{_written(shape)} is declared"
                )
            values[name] = value
        for name in self.done:
            del values[name]


class ReadyFunction(NamedTuple):
    steps: tuple[ReadyOperation, ...]
    constants: Mapping[str, Array]
    """Values that steps look up, the same in every run."""


def finisher(dtype: str, rounding: str, *, moves: bool = False) -> Finish:
    """Return the conversion to a declared type; `moves`: the operation only moves values."""
    if dtype == "fp16" and rounding != "f32" and not moves:
        return to_half_flushed if rounding == ENGINE else to_half
    if dtype in ("fp16", "fp32"):
        return _floats
    held = DTYPES[dtype].held
    return lambda numbers: np.asarray(numbers).astype(held, copy=False)


def make_plan(package: MilPackage, function: MilFunction, rounding: str) -> ReadyFunction:
    """Prepare a function to run.

    Raises:
        ModelError: something is unsupported; the message lists every fault.
        InvalidRequest: the rounding is unknown.
    """
    if rounding not in ROUNDINGS:
        raise InvalidRequest(f"rounding is {rounding!r}; expected {', '.join(ROUNDINGS)}")
    if faults := list(_faults(function)):
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ModelError(f"the emulator cannot run {package.path}: {'; '.join(faults[:8])}{more}")
    return _Folding(rounding).plan(function.block)


def constants_of(function: MilFunction) -> dict[str, Array]:
    """Return all constants of a function by name, decoded to float32."""
    folding = _Folding("f32")
    folding.plan(function.block)
    return folding.constants


def _faults(function: MilFunction) -> Iterator[str]:
    defined = {value.name for value in function.block.inputs}
    constants: dict[str, Constant] = {}
    for op in function.block.ops:
        entry = OPS.get(op.type)
        if entry is None or op.blocks:
            yield f"{op.type} {op.name!r} is not a supported operation"
        else:
            for fault in _operation_faults(op, entry, defined, constants):
                yield f"{op.type} {op.name!r} {fault}"
        if op.type == "const":
            held = {output.name: op.inputs.get("val", ("",))[0] for output in op.outputs}
            constants |= {name: one for name, one in held.items() if isinstance(one, Constant)}
        defined |= {output.name for output in op.outputs}
    for name in function.block.outputs:
        if name not in defined:
            yield f"the output {name} is not defined"


def _operation_faults(
    op: Op, entry: Entry, defined: set[str], constants: Mapping[str, Constant]
) -> Iterator[str]:
    """Yield the faults of an operation after others with the values `defined`."""
    for parameter in sorted(entry.required - set(op.inputs)):
        yield f"has no {parameter}"
    for parameter, operands in op.inputs.items():
        if parameter not in entry.forms:
            yield f"has the unsupported parameter {parameter}"
        elif len(operands) != 1 and parameter not in entry.several:
            yield f"has {len(operands)} values for {parameter}, expected one"
        for operand in operands:
            if isinstance(operand, str) and operand not in defined:
                yield f"reads {operand}, which is not defined before it"
            elif parameter in entry.accepts:
                constant = constants.get(operand) if isinstance(operand, str) else operand
                option = str(constant.value()) if constant else "computed at run time"
                if option not in (accepted := sorted(entry.accepts[parameter])):
                    yield f"has {parameter} {option}, expected one of {', '.join(accepted)}"


class _Folding:
    """A binder of operations that runs those whose operands are all constants."""

    def __init__(self, rounding: str) -> None:
        self._rounding = rounding
        self.constants: dict[str, Any] = {}

    def plan(self, block: MilBlock) -> ReadyFunction:
        steps = []
        for op in block.ops:
            step = self._step(op)
            if step.moving:
                steps.append(step)
            else:
                self._fold(step)
        return _shortened(steps, self.constants, block.outputs)

    def _step(self, op: Op) -> ReadyOperation:
        entry = OPS[op.type]
        if self._rounding == ENGINE and op.type in RUNS:
            entry = entry._replace(run=RUNS[op.type])
        fixed: dict[str, Any] = {}
        moving: list[_Moving] = []
        for parameter, operands in op.inputs.items():
            form = entry.forms[parameter]
            several = parameter in entry.several
            if all(map(self._is_constant, operands)):
                constants = [self._constant(operand) for operand in operands]
                argument = tuple(constants) if several else constants[0]
                fixed[parameter] = argument if form is None else form(argument)
            elif several:
                moving.append((parameter, tuple(map(self._name, operands)), form))
            else:
                moving.append((parameter, self._name(operands[0]), form))
        finish = tuple(
            (output.name, output.shape, finisher(output.dtype, self._rounding, moves=entry.moves))
            for output in op.outputs
        )
        return ReadyOperation(op, entry, fixed, tuple(moving), finish)

    def _fold(self, step: ReadyOperation) -> None:
        outputs: dict[str, Any] = {}
        step.run(outputs)
        for name, value in outputs.items():
            self.constants[name] = np.ascontiguousarray(value) if np.ndim(value) > 1 else value

    def _is_constant(self, operand: str | Constant) -> bool:
        return isinstance(operand, Constant) or operand in self.constants

    def _constant(self, operand: str | Constant) -> Any:
        if isinstance(operand, str):
            return self.constants[operand]
        return finisher(operand.dtype, "f32")(operand.value())

    def _name(self, operand: str | Constant) -> str:
        """Return the name of an operand in `values`; an unnamed constant gets one."""
        if isinstance(operand, str):
            return operand
        name = f"constant {len(self.constants)}"
        self.constants[name] = self._constant(operand)
        return name


def _shortened(
    steps: Iterable[ReadyOperation], constants: Mapping[str, Any], outputs: tuple[str, ...]
) -> ReadyFunction:
    """Free every value after its last use, and drop constants that no step looks up."""
    later = set(outputs)
    looked_up = set(outputs)
    kept = []
    for step in reversed(list(steps)):
        used = {
            name
            for _, source, _ in step.moving
            for name in ([source] if isinstance(source, str) else source)
        }
        results = {name for name, _, _ in step.finish}
        kept.append(step._replace(done=tuple((used | results) - later)))
        later |= used
        looked_up |= used
    used_constants = {name: value for name, value in constants.items() if name in looked_up}
    return ReadyFunction(tuple(reversed(kept)), used_constants)


def _floats(numbers: Any) -> Array:
    return np.asarray(numbers).astype(np.float32, copy=False)


@lru_cache(4096)  # called for every operation of every call, with few shapes
def _fits(shape: tuple[int, ...], declared: Shape) -> bool:
    return len(shape) == len(declared) and all(
        expected in (None, size) for size, expected in zip(shape, declared, strict=True)
    )


def _written(shape: Shape) -> str:
    return str(["?" if size is None else size for size in shape])
