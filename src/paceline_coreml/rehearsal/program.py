"""Reads a saved Core ML program: functions, operations, constants, and declared features.

Reads `.mlpackage` folders with an ML program, for the emulator and the linter; it does not run or
check anything else. Names, types and shapes are the package's own; dimensions known only at run
time are None. Constants stay in the weight file until used. Invariant: after reading, the file is
known to have all of them, in their declared types.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline_coreml.rehearsal.proto import messages
from paceline_coreml.rehearsal.weights import DTYPES, Constant, WeightFile, bytes_of

Shape = tuple[int | None, ...]
"""Sizes per axis; None: known only at run time."""

Operand = str | Constant
"""Name of an earlier value, or an inline constant."""

_HELD_IN_ATTRIBUTES: Final = ("const", "constexpr_")
"""Operation types whose constants may be attributes (always before iOS 18)."""


@dataclass(frozen=True, slots=True)
class Value:
    """The output of an operation, or the input of a function."""

    name: str
    dtype: str
    shape: Shape
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    type: str
    name: str
    inputs: Mapping[str, tuple[Operand, ...]]
    """Parameter -> operands; most have one, `concat` and similar have several."""
    outputs: tuple[Value, ...]
    blocks: tuple["MilBlock", ...] = ()
    """Nested blocks of `cond` and `while_loop`."""


@dataclass(frozen=True, slots=True)
class MilBlock:
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def walk(self) -> Iterator[Op]:
        """Yield every operation, with nested blocks after their operation."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


@dataclass(frozen=True, slots=True)
class Feature:
    """An input, output or state as declared to callers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The default shape; empty if none is declared, as usual for outputs."""
    lower: tuple[int, ...]
    upper: tuple[int | None, ...]
    """Inclusive bounds per dimension, which are equal if it is fixed; None: unbounded."""
    choices: tuple[tuple[int, ...], ...] = ()
    """The allowed shapes, if they are enumerated (EnumeratedShapes)."""

    @property
    def is_static(self) -> bool:
        return self.lower == self.upper and not self.choices


@dataclass(frozen=True, slots=True)
class MilFunction:
    """A program in a package, with its features."""

    name: str
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    states: tuple[Feature, ...]
    block: MilBlock
    """The block's inputs are the function's inputs, with states last."""


@dataclass(frozen=True, slots=True)
class MilPackage:
    path: Path
    functions: Mapping[str, MilFunction]
    default_function: str

    def function(self, name: str | None = None) -> MilFunction:
        """Return the function `name`, or the default one. Raises ModelError for an unknown name."""
        name = self.default_function if name is None else name
        if name not in self.functions:
            raise ModelError(
                f"{self.path} has no function {name!r}; expected one of "
                f"{', '.join(sorted(self.functions))}"
            )
        return self.functions[name]


def read_package(path: Path) -> MilPackage:
    """Read a `.mlpackage` folder.

    Raises:
        ModelError: it is not a package, is corrupt, or has no ML program.
        MissingExtra: coremltools is not installed.
    """
    location = _model_file(path)
    from_bytes: Any = messages("Model_pb2").Model.FromString
    try:
        spec = from_bytes(location.read_bytes())
    except OSError as error:
        raise ModelError(f"{location} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # protobuf's own class, which is not imported
        raise ModelError(f"{location} is not a Core ML model: {error}") from error
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise ModelError(f"{path} holds a {kind or 'model without content'}; expected an mlProgram")
    return _Reader(path, location).package(spec)


def _model_file(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder; expected a Core ML package (.mlpackage)")
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        raise ModelError(f"{path} has no Manifest.json; expected a Core ML package (.mlpackage)")
    value = read_json(manifest)
    items, root = value.get("itemInfoEntries"), value.get("rootModelIdentifier")
    entry = items.get(root) if isinstance(items, dict) else None
    inside = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(inside, str):
        raise ModelError(f"{manifest} has no path to the model; expected a Core ML package")
    return path / "Data" / inside


class _Reader:
    """A reader that turns protobuf messages into the classes above."""

    def __init__(self, path: Path, location: Path) -> None:
        self._path = path
        self._folder = location.parent
        self._files: dict[str, WeightFile] = {}
        types = messages("MIL_pb2").DataType
        self._dtypes = {
            number: name.lower().replace("float", "fp") for name, number in types.items()
        }
        features = messages("FeatureTypes_pb2").ArrayFeatureType.ArrayDataType
        self._feature_dtypes = {
            features.Value(name): dtype
            for name, dtype in {
                "FLOAT16": "fp16",
                "FLOAT32": "fp32",
                "DOUBLE": "fp64",
                "INT32": "int32",
            }.items()
        }

    def package(self, spec: Any) -> MilPackage:
        described = {function.name: function for function in spec.description.functions}
        default = spec.description.defaultFunctionName or "main"
        functions = {
            name: self.function(name, function, described.get(name, spec.description))
            for name, function in spec.mlProgram.functions.items()
        }
        if default not in functions:
            raise ModelError(
                f"{self._path}: the default function {default!r} does not exist; it has "
                f"{', '.join(sorted(functions)) or 'none'}"
            )
        return MilPackage(self._path, functions, default)

    def function(self, name: str, function: Any, description: Any) -> MilFunction:
        if function.opset not in function.block_specializations:
            raise ModelError(f"{self._path}: {name} has no operations for {function.opset!r}")
        block = self.block(function.block_specializations[function.opset])
        # A block does not repeat its function's inputs.
        inputs = sorted(map(self.value, function.inputs), key=lambda value: value.is_state)
        return MilFunction(
            name,
            tuple(map(self.feature, description.input)),
            tuple(map(self.feature, description.output)),
            tuple(map(self.feature, description.state)),
            MilBlock(tuple(inputs), block.ops, block.outputs),
        )

    def feature(self, feature: Any) -> Feature:
        kind = feature.type.WhichOneof("Type")
        if kind not in ("multiArrayType", "stateType") or feature.type.isOptional:
            description = "optional" if feature.type.isOptional else f"a {kind}"
            raise ModelError(f"{self._path}: {feature.name} is {description}; expected an array")
        is_state = kind == "stateType"
        array = feature.type.stateType.arrayType if is_state else feature.type.multiArrayType
        dtype = self._feature_dtypes.get(array.dataType)
        if dtype is None:
            raise ModelError(
                f"{self._path}: {feature.name} has type {array.dataType}; expected one of "
                f"{', '.join(self._feature_dtypes.values())}"
            )
        shape: tuple[int, ...] = tuple(array.shape)
        lower, upper = shape, cast("Shape", shape)
        if ranges := array.shapeRange.sizeRanges:
            lower = tuple(bounds.lowerBound for bounds in ranges)
            upper = tuple(None if bounds.upperBound < 0 else bounds.upperBound for bounds in ranges)
        choices = tuple(tuple(choice.shape) for choice in array.enumeratedShapes.shapes)
        return Feature(feature.name, dtype, shape, lower, upper, choices)

    def block(self, block: Any) -> MilBlock:
        return MilBlock(
            tuple(map(self.value, block.inputs)),
            tuple(map(self.op, block.operations)),
            tuple(block.outputs),
        )

    def op(self, op: Any) -> Op:
        outputs = tuple(map(self.value, op.outputs))
        attributes = {
            name: self.constant(value, op.type)
            for name, value in op.attributes.items()
            if value.type.WhichOneof("type") == "tensorType"
        }
        named = attributes.pop("name", None)
        name = str(named.value()) if named else outputs[0].name if outputs else op.type
        inputs = {
            parameter: tuple(
                binding.name
                if binding.WhichOneof("binding") == "name"
                else self.constant(binding.value, name)
                for binding in argument.arguments
            )
            for parameter, argument in op.inputs.items()
        }
        if op.type.startswith(_HELD_IN_ATTRIBUTES):
            inputs |= {parameter: (value,) for parameter, value in attributes.items()}
        return Op(op.type, name, inputs, outputs, tuple(map(self.block, op.blocks)))

    def value(self, value: Any) -> Value:
        is_state = value.type.WhichOneof("type") == "stateType"
        kind = value.type.stateType.wrappedType if is_state else value.type
        if kind.WhichOneof("type") != "tensorType":
            raise ModelError(
                f"{self._path}: {value.name} is a {kind.WhichOneof('type')}; expected a tensor"
            )
        return Value(value.name, *self.tensor(kind.tensorType, value.name), is_state)

    def tensor(self, tensor: Any, name: str) -> tuple[str, Shape]:
        dtype = self._dtypes.get(tensor.dataType, str(tensor.dataType))
        if dtype not in DTYPES:
            raise ModelError(f"{self._path}: {name} has the unknown type {dtype}")
        return dtype, tuple(
            dimension.constant.size if dimension.WhichOneof("dimension") == "constant" else None
            for dimension in tensor.dimensions
        )

    def constant(self, value: Any, owner: str) -> Constant:
        """Read a constant of the operation `owner`."""
        dtype, dimensions = self.tensor(value.type.tensorType, owner)
        shape = tuple(size or 0 for size in dimensions)
        count = math.prod(shape)
        if value.WhichOneof("value") == "blobFileValue":
            data = self.file(value.blobFileValue.fileName).record(
                value.blobFileValue.offset, dtype, count
            )
            return Constant(dtype, shape, data)
        tensor = value.immediateValue.tensor
        kind = tensor.WhichOneof("value")
        if kind is None:
            raise ModelError(f"{self._path}: {owner} has a constant without numbers")
        values = getattr(tensor, kind).values
        if dtype == "string" and kind == "strings" and len(values) == 1 and not shape:
            return Constant(dtype, shape, str(values[0]))
        try:
            held = values if kind == "bytes" else np.array(values, DTYPES[dtype].held)
        except (ValueError, OverflowError) as error:
            raise ModelError(f"{self._path}: a constant of {owner}: {error}") from error
        data = np.frombuffer(held, np.uint8)
        if dtype == "string" or len(data) != bytes_of(dtype, count):
            raise ModelError(
                f"{self._path}: a constant of {owner} has {len(data)} bytes; expected {count} "
                f"numbers of type {dtype}"
            )
        return Constant(dtype, shape, data)

    def file(self, name: str) -> WeightFile:
        """Open a weight file, named relative to the model's folder."""
        if name not in self._files:
            inside = name.removeprefix("@model_path/")
            path = self._folder / inside
            if inside == name or not path.resolve().is_relative_to(self._folder.resolve()):
                raise ModelError(f"{self._path}: {name!r} is not a weight file of this package")
            self._files[name] = WeightFile(path)
        return self._files[name]
