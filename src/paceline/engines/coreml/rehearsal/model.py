"""A Core ML package rehearsed: what it computes, on any machine, behind coremltools' interface.

`RehearsalModel` answers to `make_state` and `predict` as `coremltools.models.MLModel` does, so that
a runtime cannot tell them apart, and refuses what Core ML would refuse. It shows that a graph is
right ("graph-correct"). It shows nothing about a device: not where an operation would run, nor in
which order an accelerator adds, nor how long it takes.

**Rows do not depend on each other.** The numbers of a token's row are bitwise the same however many
rows a block has and wherever the row stands, as far as the program itself keeps rows apart. That
holds by construction: every sum of products is a dot product of two contiguous vectors, made by
itself (`ops/products.py`); every other sum runs over contiguous numbers whose count alone decides
the order (`ops/reductions.py`); functions beyond IEEE's see whole vectors only
(`ops/elementwise.py`); everything else is correctly rounded, or rounds nothing. What a program sums
over the rows themselves (a write of T rows into the slots of a cache) is exact where all but one
term are zeros. A softmax over an axis as long as the block is not kept apart by the program, and so
not here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engines.coreml.rehearsal.ops.table import Array, Cell
from paceline.engines.coreml.rehearsal.plan import OpWork, finisher, make_plan
from paceline.engines.coreml.rehearsal.program import Feature, Function, Package, read_package
from paceline.errors import InvalidRequest, ModelError

_STATE_DTYPES = ("float32", "float64", "int32")
"""What coremltools takes for a state; float16 it does not."""


class Work(NamedTuple):
    """What one call did, by operation: those that multiply or read weights."""

    ops: tuple[OpWork, ...]

    @property
    def macs(self) -> int:
        """Multiply-accumulates in all."""
        return sum(one.macs for one in self.ops)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in all, as the package stores them."""
        return sum(one.weight_bytes for one in self.ops)


class RehearsalState:
    """What a model keeps between calls; from `RehearsalModel.make_state`."""

    def __init__(self, owner: object, states: tuple[Feature, ...], rounding: str) -> None:
        """All zeros. `owner` equals that of every model that may use it."""
        self.owner = owner
        self._finish = {one.name: finisher(one.dtype, rounding) for one in states}
        self.cells = {one.name: Cell(np.zeros(one.shape, np.float32)) for one in states}

    def read_state(self, name: str) -> npt.NDArray[np.float32]:
        """A copy of a state's numbers. Raises InvalidRequest for an unknown name."""
        return self._cell(name).array.copy()

    def write_state(self, name: str, value: Array) -> None:
        """Put numbers into a state.

        Raises:
            InvalidRequest: there is no such state, or the array has another shape, or is of a type
                that coremltools does not take: it takes float32, float64 and int32.
        """
        cell = self._cell(name)
        found = np.asarray(value)
        if found.dtype.name not in _STATE_DTYPES:
            raise InvalidRequest(
                f"state {name!r} cannot be written from {found.dtype.name}; expected "
                f"{', '.join(_STATE_DTYPES)}"
            )
        if found.shape != cell.array.shape:
            raise InvalidRequest(
                f"state {name!r} has shape {list(cell.array.shape)}, got {list(found.shape)}"
            )
        cell.array = np.array(self._finish[name](found))

    def _cell(self, name: str) -> Cell:
        if name not in self.cells:
            raise InvalidRequest(
                f"there is no state {name!r}; expected one of {', '.join(self.cells) or 'none'}"
            )
        return self.cells[name]


class RehearsalModel:
    """A function of a package, ready to be called; see the top of this file."""

    def __init__(
        self, path: Path | str, *, function_name: str | None = None, rounding: str = "f16"
    ) -> None:
        """Open a package.

        Args:
            path: the `.mlpackage` folder.
            function_name: which of its functions; None: the default one.
            rounding: "f16" rounds to fp16 after every operation whose output the program declares
                as fp16, and keeps states as fp16; "f32" never rounds.

        Raises:
            ModelError: it is no ML program, it is damaged, or it has what cannot be run here; the
                message names everything.
            InvalidRequest: there is no such rounding.
            MissingExtra: coremltools is not installed.
        """
        self.package: Package = read_package(Path(path))
        self.function = self.package.function(function_name)
        self.last_work = Work(())
        """What the last `predict` did."""
        self._plan = make_plan(self.package, self.function, rounding)
        self._rounding = rounding
        self._inputs = {one.name: one for one in self.function.inputs}
        self._finish = {
            one.name: finisher(one.dtype, rounding) for one in self.function.block.inputs
        }
        _check_names(self.package, self.function)
        # Functions of one package may share a state, as they may in Core ML.
        states = tuple((one.name, one.shape, one.dtype) for one in self.function.states)
        self._owner = (self.package.path.resolve(), states, rounding)

    def make_state(self) -> RehearsalState:
        """A new state, all zeros; an empty one where the model keeps nothing."""
        return RehearsalState(self._owner, self.function.states, self._rounding)

    def predict(
        self, data: Mapping[str, Array], state: RehearsalState | None = None
    ) -> dict[str, Array]:
        """Run the function once.

        Args:
            data: an array for each input, of a shape that the model declares. Numbers for an fp16
                input are rounded to it.
            state: from `make_state`; changed by the call. Needed where the model has states.

        Returns:
            An array for each output: float32, or int32 for integers.

        Raises:
            InvalidRequest: an input is missing, unknown, or of another shape or type than declared;
                the state is missing or another model's.
            ModelError: the operands of an operation do not go together.
        """
        if state is None and self.function.states:
            raise InvalidRequest(
                f"the model keeps {', '.join(one.name for one in self.function.states)}; pass a "
                "state from make_state()"
            )
        if state is not None and state.owner != self._owner:
            raise InvalidRequest(
                "the state is another model's; make one with this model's make_state()"
            )
        values: dict[str, Any] = dict(self._plan.constants)
        values |= state.cells if state is not None else {}
        values |= self._checked(data)
        work = []
        with np.errstate(all="ignore"):
            for step in self._plan.steps:
                macs = step.run(values)
                if macs or step.weight_bytes:
                    work.append(OpWork(step.op.name, step.op.type, macs, step.weight_bytes))
        self.last_work = Work(tuple(work))
        return {one.name: _returned(values[one.name]) for one in self.function.outputs}

    def _checked(self, data: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs, as the program takes them."""
        faults = [f"{name} is missing" for name in self._inputs if name not in data]
        faults += [f"{name} is no input of this model" for name in data if name not in self._inputs]
        found = {name: np.asarray(data[name]) for name in self._inputs if name in data}
        for name, array in found.items():
            faults += _input_faults(self._inputs[name], array)
        if faults:
            raise InvalidRequest(f"{self.package.path.name}: {'; '.join(faults)}")
        return {name: np.array(self._finish[name](array)) for name, array in found.items()}


def _check_names(package: Package, function: Function) -> None:
    """Raise ModelError where the model declares other inputs, states or outputs than it has."""
    inputs = {one.name for one in (*function.inputs, *function.states)}
    outputs = {one.name for one in function.outputs}
    for kind, declared, found in (
        ("inputs", inputs, {one.name for one in function.block.inputs}),
        ("outputs", outputs, set(function.block.outputs)),
    ):
        if declared != found:
            raise ModelError(
                f"{package.path}: {function.name} declares the {kind} {sorted(declared)}, and its "
                f"program has {sorted(found)}"
            )


def _input_faults(declared: Feature, found: Array) -> list[str]:
    """What Core ML would refuse of an input."""
    whole = found.dtype.kind in "iub"
    if declared.dtype.startswith("int") and not whole:
        return [f"{declared.name} is {found.dtype.name}, expected whole numbers"]
    if not (whole or found.dtype.kind == "f"):
        return [f"{declared.name} is {found.dtype.name}, expected numbers"]
    if declared.choices:
        if found.shape in declared.choices:
            return []
        expected = " or ".join(str(list(one)) for one in declared.choices)
    else:
        if len(found.shape) == len(declared.lower) and all(
            low <= size and (high is None or size <= high)
            for size, low, high in zip(found.shape, declared.lower, declared.upper, strict=True)
        ):
            return []
        expected = str(_ranges(declared))
    return [f"{declared.name} has shape {list(found.shape)}, expected {expected}"]


def _ranges(declared: Feature) -> str:
    sizes = [
        str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
        for low, high in zip(declared.lower, declared.upper, strict=True)
    ]
    return f"[{', '.join(sizes)}]"


def _returned(value: Array) -> Array:
    """As coremltools returns it; of its own, for a state or an input may share its memory."""
    kind = np.float32 if value.dtype.kind == "f" else np.int32
    return np.array(value, kind, order="C")
