"""Reads Core ML's compute plan for a package and a number of rows, as plain data; Mac only.

`residency` evaluates the plans. Invariant: Core ML runs only in a child process, because a model
that crashes the Neural Engine's compiler may kill the process (coremltools issue 2758).

Plans describe the default function at its default shape, and coremltools cannot choose another
(coremltools 9, `MLComputePlan.load_from_path`). So a plan is read from a copy of the package whose
default is the planned function or shape.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.files import read_json, write_json
from paceline.storage.validation import validated
from paceline.system.processes import python, run_child
from paceline_coreml.engine.failures import reason_of
from paceline_coreml.engine.packages import UNITS
from paceline_coreml.rehearsal.proto import messages

NEURAL_ENGINE = "neural-engine"

_DEVICES = {
    "MLNeuralEngineComputeDevice": NEURAL_ENGINE,
    "MLGPUComputeDevice": "gpu",
    "MLCPUComputeDevice": "cpu",
}
"""coremltools' device classes -> paceline's names."""

_OPSET = re.compile(r"^ios\d+\.")
"""Prefix of an operation's type in a compiled model."""


@dataclass(frozen=True, slots=True)
class PlannedOp:
    name: str
    """Name of its first output; empty if it has none."""
    type: str
    """Operation type without the opset's name, such as `conv`."""
    preferred: str | None
    """The planned device, or None if it is not in the plan."""
    supported: tuple[str, ...] | None
    """Devices that could run it, or None if it is not in the plan."""
    cost: float | None
    """Core ML's estimate of its share of the total cost, 0 to 1; None if it is not in the plan."""


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """Core ML's plan for a package, or the reason why there is none."""

    package: str
    """Its path in the artifact."""
    rows: int
    """T"""
    function: str | None
    """The static function for `rows`; None: the package is flexible, with `rows` as default."""
    ops: tuple[PlannedOp, ...] = ()
    """All operations, including nested blocks and constants."""
    fault: str | None = None
    """The reason why the plan is missing."""


def record(
    folder: Path, package: str, rows: int, *, function: str | None, units: str
) -> ComputePlan:
    """Get Core ML's plan for a package of the artifact in `folder`, in a child process.

    `units` is one of `packages.UNITS`. The plan has a `fault` if Core ML failed or crashed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-coreml-") as work:
        out = Path(work) / "plan.json"
        arguments = [str(folder / package), str(rows), function or "", UNITS[units], str(out)]
        ended = run_child(python("-m", __name__, *arguments))
        if ended.code or not out.is_file():
            return ComputePlan(package, rows, function, fault=ended.reason)
        ops = validated(tuple[PlannedOp, ...], read_json(out)["ops"], str(out), error=ModelError)
        return ComputePlan(package, rows, function, ops)


def copy_with_default(package: Path, copy: Path, rows: int, function: str | None) -> Path:
    """Copy a package, with `function` or else the shape for `rows` as its default.

    Weights are hard links if the disk supports them. Raises ModelError if the package does not have
    this function, or does not support `rows`.
    """
    shutil.copytree(package, copy, copy_function=_link)
    (model,) = copy.rglob("*.mlmodel")
    load: Any = messages("Model_pb2").Model.FromString
    spec = load(model.read_bytes())
    if function is not None:
        if function not in spec.mlProgram.functions:
            raise ModelError(f"{package} has no function {function!r}")
        spec.description.defaultFunctionName = function
    else:
        for feature in spec.description.input:
            array = feature.type.multiArrayType
            for axis, size in enumerate(array.shapeRange.sizeRanges):
                if size.lowerBound == size.upperBound:
                    continue
                if not size.lowerBound <= rows <= size.upperBound:
                    raise ModelError(
                        f"{package} takes {size.lowerBound} to {size.upperBound} rows, not {rows}"
                    )
                array.shape[axis] = rows
    # The file may be a hard link to the original, so replace it instead of writing to it.
    model.unlink()
    model.write_bytes(spec.SerializeToString())
    return copy


def ops_of(plan: Any, function: str) -> Iterator[PlannedOp]:
    """Yield a function's operations in coremltools' `MLComputePlan`.

    Raises ModelError if the plan is not for an ML program, or does not have this function.
    """
    program = plan.model_structure.program
    if program is None:
        raise ModelError("the plan is not for an ML program")
    if function not in program.functions:
        raise ModelError(
            f"the plan has no function {function!r}; it has {', '.join(sorted(program.functions))}"
        )
    yield from _ops_of(plan, program.functions[function].block)


def _ops_of(plan: Any, block: Any) -> Iterator[PlannedOp]:
    for op in block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
        cost = plan.get_estimated_cost_for_mlprogram_operation(op)
        yield PlannedOp(
            name=op.outputs[0].name if op.outputs else "",
            type=_OPSET.sub("", op.operator_name),
            preferred=None if usage is None else _device(usage.preferred_compute_device),
            supported=None
            if usage is None
            else tuple(map(_device, usage.supported_compute_devices)),
            cost=None if cost is None else float(cost.weight),
        )
        for nested in op.blocks:
            yield from _ops_of(plan, nested)


def _device(device: Any) -> str:
    name = type(device).__name__
    return _DEVICES.get(name, name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _main(arguments: Sequence[str]) -> None:
    """Write the plan's operations to a file, in the child process."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    package, rows, function, units, out = arguments
    work = Path(out).parent
    copy = copy_with_default(Path(package), work / Path(package).name, int(rows), function or None)
    try:
        compiled = ct.models.utils.compile_model(str(copy), str(work / "plan.mlmodelc"))
        plan = MLComputePlan.load_from_path(compiled, compute_units=ct.ComputeUnit[units])
    except Exception as error:  # coremltools raises plain Exception, Core ML RuntimeError
        sys.exit(reason_of(error))
    write_json(Path(out), {"ops": [asdict(op) for op in ops_of(plan, function or "main")]})


if __name__ == "__main__":
    _main(sys.argv[1:])
