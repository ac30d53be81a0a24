"""What Core ML means to run where: the plan of one package for one number of rows, as plain data.

Knows Core ML's compute plans, which there are on a Mac only, and how a package is made to have its
plan for other rows than its default. Judges nothing: that is `residency`'s. The rule: Core ML is
only ever asked in a child process, as a model that the Neural Engine's compiler fails on may take
the process with it (coremltools issue 2758).

A plan is of the default function at its default shape, and coremltools lets nobody choose another
(coremltools 9, `MLComputePlan.load_from_path`). So it is read from a copy of the package in which
the function, or the shape, that is asked about is the default.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.engines.coreml.packages import UNITS
from paceline.engines.coreml.rehearsal.proto import messages
from paceline.errors import ModelError
from paceline.models.processes import python, run_child
from paceline.storage.files import read_json, write_json

NEURAL_ENGINE = "neural-engine"

_DEVICES = {
    "MLNeuralEngineComputeDevice": NEURAL_ENGINE,
    "MLGPUComputeDevice": "gpu",
    "MLCPUComputeDevice": "cpu",
}
"""coremltools' classes, and our names."""

_OPSET = re.compile(r"^ios\d+\.")
"""Before an operation's type, in a compiled model."""


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One operation of a plan."""

    name: str
    """Of its first output; empty where it has none."""
    type: str
    """As `conv`, without the opset's name."""
    preferred: str | None
    """The device that it would run on; None: the plan does not say."""
    supported: tuple[str, ...] | None
    """Devices that could run it; None: the plan does not say."""
    cost: float | None
    """Its share of the whole, 0 to 1, as Core ML estimates it; None: the plan does not say."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What Core ML says of a package, or why it says nothing."""

    package: str
    """Its path in the artifact."""
    rows: int
    """T"""
    function: str | None
    """The static function for so many rows; None: the package takes any number, this one as its
    default."""
    ops: tuple[PlannedOp, ...] = ()
    """Those of nested blocks too; constants among them."""
    fault: str | None = None
    """Why there is no plan."""


def record(folder: Path, package: str, rows: int, *, function: str | None, units: str) -> Plan:
    """Ask Core ML for the plan of a package, in a child process.

    Args:
        folder: the artifact.
        package: the package's path in it.
        rows: T.
        function: the package's static function for so many rows; None: it takes any number.
        units: one of `packages.UNITS`.

    Returns:
        The plan; one with a `fault` where Core ML failed, or took the child with it.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-coreml-") as work:
        out = Path(work) / "plan.json"
        asked = [str(folder / package), str(rows), function or "", UNITS[units], str(out)]
        ended = run_child(python("-m", __name__, *asked))
        if ended.code or not out.is_file():
            return Plan(package, rows, function, fault=ended.reason)
        return Plan(package, rows, function, tuple(map(_op_from, read_json(out)["ops"])))


def with_default(package: Path, copy: Path, rows: int, function: str | None) -> Path:
    """Copy a package, with another default: the function, or else the shape for so many rows.

    Weights are linked where the disk can do so.

    Raises:
        ModelError: the package has no such function, or takes no such number of rows.
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
        for each in spec.description.input:
            array = each.type.multiArrayType
            for axis, size in enumerate(array.shapeRange.sizeRanges):
                if size.lowerBound == size.upperBound:
                    continue
                if not size.lowerBound <= rows <= size.upperBound:
                    raise ModelError(
                        f"{package} takes {size.lowerBound} to {size.upperBound} rows, not {rows}"
                    )
                array.shape[axis] = rows
    # The file may be the package's own, linked: another takes its place, nothing is written to it.
    model.unlink()
    model.write_bytes(spec.SerializeToString())
    return copy


def ops_of(plan: Any, function: str) -> Iterator[PlannedOp]:
    """What an `MLComputePlan` of coremltools says of the operations of a function.

    Raises:
        ModelError: it is no plan of an ML program, or has no such function.
    """
    program = plan.model_structure.program
    if program is None:
        raise ModelError("the plan is of no ML program")
    if function not in program.functions:
        raise ModelError(
            f"the plan has no function {function!r}, only {', '.join(sorted(program.functions))}"
        )
    yield from _ops_of(plan, program.functions[function].block)


def plan_from(value: Mapping[str, Any]) -> Plan:
    """A plan as `dataclasses.asdict` and JSON have it. Raises KeyError or TypeError where not."""
    ops = tuple(map(_op_from, value["ops"]))
    return Plan(value["package"], value["rows"], value["function"], ops, value["fault"])


def _op_from(value: Mapping[str, Any]) -> PlannedOp:
    supported = value["supported"]
    return PlannedOp(
        name=value["name"],
        type=value["type"],
        preferred=value["preferred"],
        supported=None if supported is None else tuple(supported),
        cost=value["cost"],
    )


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
    """The child: write the plan's operations to a file."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    package, rows, function, units, out = arguments
    work = Path(out).parent
    asked = with_default(Path(package), work / Path(package).name, int(rows), function or None)
    compiled = ct.models.utils.compile_model(str(asked), str(work / "plan.mlmodelc"))
    plan = MLComputePlan.load_from_path(compiled, compute_units=ct.ComputeUnit[units])
    write_json(Path(out), {"ops": [asdict(op) for op in ops_of(plan, function or "main")]})


if __name__ == "__main__":
    _main(sys.argv[1:])
