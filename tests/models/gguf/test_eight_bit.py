from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from openvino import opset13

from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.gguf.eight_bit import store_as_int8
from paceline.storage.openvino import core
from support.errors import raises
from support.tiny_checkpoints import write_gguf_of

ROWS, COLUMNS = 6, 32


def write_graph(path: Path, weight: np.ndarray, kind: type = np.float16) -> None:
    """y = x @ weight.T, with the weight as a graph of OpenVINO GenAI has it."""
    x = opset13.parameter([-1, weight.shape[-1]], np.float32, name="x")
    converted = opset13.convert(opset13.constant(weight.astype(kind)), np.float32)
    y = opset13.matmul(x, converted, transpose_a=False, transpose_b=True)
    ov.save_model(ov.Model([opset13.result(y)], [x], "m"), path, compress_to_fp16=False)


def stored_values(path: Path) -> np.ndarray:
    """The weight that a graph computes with, in float32."""
    compiled = core().compile_model(
        path,
        "CPU",
        # The identity goes through exactly only when it is not rounded, too.
        {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
    )
    return compiled(np.eye(compiled.input(0).partial_shape[1].get_length(), dtype=np.float32))[0].T


numbers = st.floats(-60000, 60000, width=16) | st.floats(-1, 1, width=16)


@settings(max_examples=40)
@given(weight=arrays(np.float16, (ROWS, COLUMNS), elements=numbers))
def test_every_weight_is_within_half_a_step_of_what_it_was(
    weight: np.ndarray, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("graph")
    write_graph(folder / "a.xml", weight)
    store_as_int8(folder / "a.xml", folder / "b.xml")
    exact = weight.astype(np.float64)
    step = np.abs(exact).max(axis=1, keepdims=True) / 127
    # A step is kept as f16, with 11 bits; under its least normal number a row becomes zeros.
    least = np.finfo(np.float16).tiny * 127
    allowed = np.where(step * 127 < least, least, step * (0.5 + 127 * 2**-11))
    assert (np.abs(stored_values(folder / "b.xml") - exact) <= allowed * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("form", "ignored"),
    [
        ("llama3", "rope_freqs.weight"),
        ("llama-linear", "rope.scaling.type"),
        ("mistral", "attention.sliding_window"),
    ],
)
def test_a_file_whose_positions_the_reader_ignores_is_refused(
    form: str, ignored: str, tmp_path: Path
):
    path = write_gguf_of(form, tmp_path / "m.gguf")
    with raises(ModelError, ignored):
        resolve(f"{path}@int8", tmp_path / "cache")
    assert not [*(tmp_path / "cache" / "models").glob("int8-*")]


def test_rows_of_zeros_stay_zeros_and_the_largest_weight_stays_itself(tmp_path: Path):
    weight = np.zeros((3, COLUMNS))
    weight[1, 5], weight[2, 7] = 127 * 2.0**-10, -127 * 2.0**-10
    write_graph(tmp_path / "a.xml", weight)
    store_as_int8(tmp_path / "a.xml", tmp_path / "b.xml")
    assert np.array_equal(stored_values(tmp_path / "b.xml"), weight)


def test_the_file_gets_half_as_large(tmp_path: Path):
    write_graph(tmp_path / "a.xml", np.ones((512, 512)))
    store_as_int8(tmp_path / "a.xml", tmp_path / "b.xml")
    before, after = ((tmp_path / f"{name}.bin").stat().st_size for name in "ab")
    assert after < 0.51 * before


@pytest.mark.parametrize(
    ("shape", "kind"), [((2, ROWS, COLUMNS), np.float16), ((ROWS, COLUMNS), np.float64)]
)
def test_what_is_no_f16_matrix_stays_as_it_is(shape: tuple[int, ...], kind: type, tmp_path: Path):
    weight = np.random.default_rng(0).normal(size=shape)
    write_graph(tmp_path / "a.xml", weight, kind)
    store_as_int8(tmp_path / "a.xml", tmp_path / "b.xml")
    types = {str(op.get_element_type()) for op in core().read_model(tmp_path / "b.xml").get_ops()
             if op.get_type_name() == "Constant"}  # fmt: skip
    assert not any("int8" in result for result in types)


def test_a_place_that_cannot_be_written_is_an_oserror(tmp_path: Path):
    write_graph(tmp_path / "a.xml", np.ones((ROWS, COLUMNS)))
    with raises(OSError, tmp_path / "a.xml" / "b.xml", lines=5):  # OpenVINO says its own
        store_as_int8(tmp_path / "a.xml", tmp_path / "a.xml" / "b.xml")
