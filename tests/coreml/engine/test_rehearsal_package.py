import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.proto import Model_pb2
from rehearsal_layer import ROWS, D, call

from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline_coreml.rehearsal import RehearsalModel, proto
from paceline_coreml.rehearsal.program import read_package
from support import mil

pytestmark = [pytest.mark.coreml, pytest.mark.usefixtures("quiet_coremltools")]

WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")


@pytest.fixture
def copy(layer_package: Path, tmp_path: Path) -> Path:
    """A package that a test may damage."""
    return shutil.copytree(layer_package, tmp_path / "copy.mlpackage")


@pytest.fixture(scope="module")
def model(layer_package: Path) -> RehearsalModel:
    return RehearsalModel(layer_package)


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=message):
        RehearsalModel(path, **options)


def test_a_folder_that_is_not_a_package_is_rejected(tmp_path: Path):
    refused(tmp_path / "none", r"none is not a folder; expected a Core ML package")
    refused(tmp_path, r"has no Manifest\.json")
    (tmp_path / "Manifest.json").write_text(json.dumps({"itemInfoEntries": {}}))
    refused(tmp_path, r"Manifest\.json has no path to the model")


def test_a_corrupt_or_foreign_specification_is_rejected(copy: Path):
    spec = Model_pb2.Model(specificationVersion=4)
    spec.neuralNetwork.SetInParent()
    for content, message in (
        (b"\xff" * 100, r"model\.mlmodel is not a Core ML model"),
        (spec.SerializeToString(), "holds a neuralNetwork; expected an mlProgram"),
        (b"", "holds a model without content; expected an mlProgram"),
    ):
        (copy / mil.MODEL).write_bytes(content)
        refused(copy, message)
    (copy / mil.MODEL).unlink()
    refused(copy, r"model\.mlmodel cannot be read: No such file")


def test_corrupt_or_truncated_weights_are_rejected(copy: Path):
    whole = (copy / WEIGHTS).read_bytes()
    damage = bytes([99, 0, 0, 0])
    for content, message in (
        (whole[:4] + damage + whole[8:], "is a weight file of version 99; expected version 2"),
        (whole[:64] + damage + whole[68:], "the record at 64 is not a record; the file is corrupt"),
        (whole[:68] + damage + whole[72:], r"of type 99; expected \d+ bytes of type 1 \(fp16\)"),
        (whole[:-10_000], "is truncated|is outside the file"),
        (whole[:100], "is outside the file, which has 100 bytes"),
        (whole[:10], "has 10 bytes; expected a weight file"),
        (b"", "cannot be read"),
    ):
        (copy / WEIGHTS).write_bytes(content)
        refused(copy, message)
    (copy / WEIGHTS).unlink()
    refused(copy, r"weight\.bin cannot be read: .*No such file")


def elsewhere(spec: Any) -> None:
    """Weights of a file outside the package."""
    for op in mil.operations(spec):
        for value in op.attributes.values():
            if value.WhichOneof("value") == "blobFileValue":
                value.blobFileValue.fileName = "@model_path/../../../secret.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (elsewhere, "is not a weight file of this package"),
        (
            lambda spec: setattr(spec.description.input[0].type, "isOptional", True),
            "hidden is optional; expected an array",
        ),
        (
            lambda spec: setattr(spec.description.input[0], "name", "hiden"),
            r"main declares the inputs \[.*'hiden'.*but its program has.*'hidden'",
        ),
    ],
)
def test_an_inconsistent_specification_is_rejected(
    copy: Path, change: Callable[[Any], object], message: str
):
    refused(mil.edit(copy, change), message)


def test_opening_a_package_names_all_unsupported_features(copy: Path):
    def change(spec: Any) -> None:
        for op in mil.operations(spec):
            value = op.attributes["val"].immediateValue.tensor if op.type == "const" else None
            if value is not None and "valid" in value.strings.values:
                value.strings.values[0] = "mirrored"
        mil.operation(spec, "softmax").type = "softmax_of_tomorrow"
        mil.operation(spec, "rsqrt").inputs["accuracy"].CopyFrom(
            mil.operation(spec, "rsqrt").inputs["x"]
        )
        mil.operation(spec, "sub").inputs["y"].arguments[0].name = "nowhere"
        del mil.operation(spec, "tile").inputs["reps"]
        del mil.operation(spec, "silu").inputs["x"].arguments[:]

    with pytest.raises(ModelError) as refusal:
        RehearsalModel(mil.edit(copy, change))
    for message in (
        r"emulator cannot run .*copy\.mlpackage",
        r"softmax_of_tomorrow '\w+' is not a supported operation",
        r"rsqrt '\w+' has the unsupported parameter accuracy",
        r"tile '\w+' has no reps",
        r"conv '\w+' has pad_type mirrored, expected one of custom, valid",
        r"sub '\w+' reads nowhere, which is not defined before it",
    ):
        assert re.search(message, str(refusal.value)), message


def test_incompatible_operands_raise_an_error_naming_the_operation(
    copy: Path, save_program: Callable[..., Path]
):
    def change(spec: Any) -> None:
        for one in spec.description.input:
            if one.name == "rope_cos":
                one.type.multiArrayType.shapeRange.sizeRanges[1].upperBound = 9

    model = RehearsalModel(mil.edit(copy, change))
    given = {**call([0]), "rope_cos": np.ones((1, 9), np.float32)}
    message = r"transpose '\w+' makes \[9, 1\]; \[8, '\?'\] is declared"
    with pytest.raises(ModelError, match=message):
        model.predict(given, model.make_state())
    given, filters = {"x": np.zeros((1, 2, 7), np.float32)}, np.zeros((2, 2, 3), np.float32)
    path = save_program(lambda mb, x: mb.conv(x=x, weight=filters, pad_type="valid"), given)
    with pytest.raises(ModelError, match=r"conv '\w+': .*expected a 1x1 convolution"):
        RehearsalModel(path).predict(given)


def test_missing_files_and_a_missing_coremltools_are_named(
    monkeypatch: pytest.MonkeyPatch, layer_package: Path
):
    refused(layer_package, "no function 't4'; expected one of main", function_name="t4")
    with pytest.raises(InvalidRequest, match="'f8'"):
        RehearsalModel(layer_package, rounding="f8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "coremltools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "_paceline_coreml_proto", raising=False)
    monkeypatch.setattr(proto.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"install it with: pip install .*\[coreml\]"):
        read_package(layer_package)


def test_all_invalid_inputs_are_named(model: RehearsalModel):
    given = call([0, 1])
    given["hidden"] = given["hidden"][0]
    given["rope_cos"] = np.ones((5, 8), np.float32)
    given["attn_mask"] = np.full(given["attn_mask"].shape, "no")
    given["more"] = given.pop("rope_sin")
    with pytest.raises(InvalidRequest) as refusal:
        model.predict(given, model.make_state())
    assert str(refusal.value) == (
        "layer.mlpackage: rope_sin is missing; more is not an input; hidden has shape "
        f"[{D}, 2, 1], expected [1, {D}, 1 to {ROWS}, 1]; rope_cos has shape [5, 8], expected "
        f"[1 to {ROWS}, 8]; attn_mask is str64, expected numbers"
    )
