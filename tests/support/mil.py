"""Core ML packages of a few operations, made by coremltools' MIL builder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

MODEL = Path("Data/com.apple.CoreML/model.mlmodel")


def save_program(
    path: Path,
    build: Callable[..., Any],
    inputs: Mapping[str, np.ndarray],
    *,
    target: str = "iOS18",
    states: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    flexible: Mapping[str, int] = MappingProxyType({}),
    rows: int = 4,
) -> Path:
    """Save a program as built, without the converter's passes.

    Args:
        path: the `.mlpackage` to write.
        build: gets the builder and a variable for each input and each state.
        inputs: an example of each.
        target: the minimum deployment target.
        states: their shapes.
        flexible: the axis of each input of length 1 to `rows`, with one symbol for all.
        rows: maximum of the flexible axes.
    """
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import types

    lengths = ct.RangeDim(1, rows, default=1)
    shapes: dict[str, list[Any]] = {name: list(one.shape) for name, one in inputs.items()}
    for name, axis in flexible.items():
        shapes[name][axis] = lengths
    dtypes = {name: types.numpy_type_to_builtin_type(one.dtype) for name, one in inputs.items()}
    specs = [
        mb.TensorSpec([lengths.symbol if size is lengths else size for size in shape], dtypes[name])
        for name, shape in shapes.items()
    ]
    specs += [mb.StateTensorSpec(shape, types.fp16) for shape in states.values()]
    # The builder takes the names of inputs from the function's arguments.
    arguments = ", ".join([*inputs, *states])
    scope: dict[str, Any] = {"build": build, "mb": mb}
    exec(f"def program({arguments}): return build(mb, {arguments})", scope)
    opset = ct.target[target]
    program = mb.program(input_specs=specs, opset_version=opset)(scope["program"])
    more: dict[str, Any] = {}
    if flexible:
        more["inputs"] = [
            ct.TensorType(name, tuple(shape), dtype=dtypes[name]) for name, shape in shapes.items()
        ]
    model = ct.convert(
        program,
        convert_to="mlprogram",
        pass_pipeline=ct.PassPipeline.EMPTY,
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=opset,
        skip_model_load=True,
        **more,
    )
    model.save(str(path))
    return path


def edit(package: Path, change: Callable[[Any], object]) -> Path:
    """Edit a package's specification in place."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model.FromString((package / MODEL).read_bytes())
    change(spec)
    (package / MODEL).write_bytes(spec.SerializeToString())
    return package


def operations(spec: Any) -> Any:
    """Return the operations of a specification's main function."""
    function = spec.mlProgram.functions["main"]
    return function.block_specializations[function.opset].operations


def operation(spec: Any, kind: str) -> Any:
    """The first operation of a kind."""
    return next(op for op in operations(spec) if op.type == kind)
