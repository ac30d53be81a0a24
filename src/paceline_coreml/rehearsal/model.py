"""The emulator ("rehearsal"): runs Core ML packages in numpy, with coremltools' interface.

`RehearsalModel` has `make_state` and `predict` like `coremltools.models.MLModel`, and rejects the
same inputs as Core ML. It verifies that a graph is correct ("graph-correct"). It does not model a
device: where an operation runs, an accelerator's order of additions, or the time.

Invariant: a token's row is bit-identical for every number of rows in a block and every position in
it, if the program keeps rows separate. Reasons:

- every sum of products is a separate dot product of two contiguous vectors (`ops/products.py`);
- every other sum is over contiguous numbers, in an order that depends only on their count
  (`ops/reductions.py`);
- functions beyond IEEE's get only whole vectors (`ops/elementwise.py`);
- everything else is correctly rounded or does not round.

A sum over rows (a write of T rows into cache slots) is exact if all but one term are zero. Softmax
over an axis as long as the block mixes rows, as it does in the program.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidRequest, ModelError
from paceline_coreml.rehearsal.ops.products import half_sums
from paceline_coreml.rehearsal.ops.table import Array, Cell
from paceline_coreml.rehearsal.plan import ENGINE, finisher, make_plan
from paceline_coreml.rehearsal.program import Feature, MilFunction, MilPackage, read_package


class RehearsalState:
    def __init__(self, owner: object, states: tuple[Feature, ...]) -> None:
        """Create a state with all zeros. Models with an equal `owner` may use it."""
        self.owner = owner
        self.cells = {feature.name: Cell(np.zeros(feature.shape, np.float32)) for feature in states}


class RehearsalModel:
    """A package's function, ready to run; see the top of this file."""

    def __init__(
        self, path: Path | str, *, function_name: str | None = None, rounding: str = "f16"
    ) -> None:
        """Open a package's function, or its default one.

        The rounding "f16" rounds to fp16 after every operation whose output is declared as fp16,
        and keeps states as fp16; "f32" never rounds; "engine" emulates the Neural Engine's reported
        numerics (`ops/engine_numerics.py`).

        Raises:
            ModelError: it is not an ML program, is corrupt, or has unsupported operations; the
                message lists every fault.
            InvalidRequest: the rounding is unknown.
            MissingExtra: coremltools is not installed.
        """
        self.package: MilPackage = read_package(Path(path))
        self.function = self.package.function(function_name)
        self._plan = make_plan(self.package, self.function, rounding)
        self._rounding = rounding
        self._inputs = {feature.name: feature for feature in self.function.inputs}
        self._finish = {
            value.name: finisher(value.dtype, rounding) for value in self.function.block.inputs
        }
        _check_names(self.package, self.function)
        # Functions of one package may share a state, as in Core ML.
        states = tuple(
            (feature.name, feature.shape, feature.dtype) for feature in self.function.states
        )
        self._owner = (self.package.path.resolve(), states, rounding)

    def make_state(self) -> RehearsalState:
        """Create a state with all zeros; it is empty if the model has no states."""
        return RehearsalState(self._owner, self.function.states)

    def predict(
        self, data: Mapping[str, Array], state: RehearsalState | None = None
    ) -> dict[str, Array]:
        """Run the function once; return output name -> array in float32, or int32 for integers.

        `data` has an array with a declared shape for every input. A model with states needs a
        `state` from `make_state`, and changes it.

        Raises:
            InvalidRequest: an input is missing or unknown, or its shape or type is not the declared
                one; the state is missing or belongs to another model.
            ModelError: an operation got incompatible operands.
        """
        if state is None and self.function.states:
            names = ", ".join(feature.name for feature in self.function.states)
            raise InvalidRequest(f"the model has states {names}; pass a state from make_state()")
        if state is not None and state.owner != self._owner:
            raise InvalidRequest(
                "the state is from another model; create one with this model's make_state()"
            )
        values: dict[str, Any] = dict(self._plan.constants)
        values |= state.cells if state is not None else {}
        values |= self._checked(data)
        with np.errstate(all="ignore"), half_sums(on=self._rounding == ENGINE):
            for step in self._plan.steps:
                step.run(values)
        return {feature.name: _returned(values[feature.name]) for feature in self.function.outputs}

    def _checked(self, data: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs, validated and converted to their declared types."""
        faults = [f"{name} is missing" for name in self._inputs if name not in data]
        faults += [f"{name} is not an input" for name in data if name not in self._inputs]
        arrays = {name: np.asarray(data[name]) for name in self._inputs if name in data}
        for name, array in arrays.items():
            faults += _input_faults(self._inputs[name], array)
        if faults:
            raise InvalidRequest(f"{self.package.path.name}: {'; '.join(faults)}")
        return {name: np.array(self._finish[name](array)) for name, array in arrays.items()}


def _check_names(package: MilPackage, function: MilFunction) -> None:
    """Raise ModelError if the declared inputs, states or outputs differ from the program's."""
    inputs = {feature.name for feature in (*function.inputs, *function.states)}
    outputs = {feature.name for feature in function.outputs}
    for kind, declared, defined in (
        ("inputs", inputs, {value.name for value in function.block.inputs}),
        ("outputs", outputs, set(function.block.outputs)),
    ):
        if declared != defined:
            raise ModelError(
                f"{package.path}: {function.name} declares the {kind} {sorted(declared)}, but its "
                f"program has {sorted(defined)}"
            )


def _input_faults(declared: Feature, array: Array) -> list[str]:
    """Return the faults for which Core ML would reject an input."""
    whole = array.dtype.kind in "iub"
    if declared.dtype.startswith("int") and not whole:
        return [f"{declared.name} is {array.dtype.name}, expected whole numbers"]
    if not (whole or array.dtype.kind == "f"):
        return [f"{declared.name} is {array.dtype.name}, expected numbers"]
    if len(array.shape) == len(declared.lower) and all(
        low <= size and (high is None or size <= high)
        for size, low, high in zip(array.shape, declared.lower, declared.upper, strict=True)
    ):
        return []
    return [f"{declared.name} has shape {list(array.shape)}, expected {_ranges(declared)}"]


def _ranges(declared: Feature) -> str:
    sizes = [
        str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
        for low, high in zip(declared.lower, declared.upper, strict=True)
    ]
    return f"[{', '.join(sizes)}]"


def _returned(value: Array) -> Array:
    """Copy to the type that coremltools returns: a state or an input may share the memory."""
    kind = np.float32 if value.dtype.kind == "f" else np.int32
    return np.array(value, kind, order="C")
