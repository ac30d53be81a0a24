"""Exported graphs that count positions themselves get them from the engine."""

from typing import Any

import numpy as np
import pytest

from paceline.engines.openvino.positions import read_positions
from paceline.storage.openvino import core

FREQUENCIES = np.array([1.0, 0.1, 0.01], np.float32)


def model(*, sections: int = 0, rotary: bool = True, reads: bool = False) -> Any:
    """A graph as after OpenVINO's pass: every row has the position of the call's first."""
    import openvino as ov
    from openvino import opset13

    tokens = opset13.parameter([-1], np.int64, name="input_ids")
    tokens.output(0).set_names({"input_ids"})
    parameters = [tokens]
    rows = opset13.unsqueeze(opset13.unsqueeze(tokens, 1), 2)  # [n, 1, 1]
    counted = opset13.subtract(rows, rows)
    if reads:
        parameter = opset13.parameter([-1], np.int64, name="position_ids")
        parameter.output(0).set_names({"position_ids"})
        parameters.append(parameter)
        counted = opset13.unsqueeze(opset13.unsqueeze(parameter, 1), 2)
    if sections:
        counted = opset13.tile(opset13.unsqueeze(counted, 0), [sections, 1, 1, 1])
    angles = opset13.multiply(opset13.convert(counted, np.float32), FREQUENCIES)
    result = opset13.cos(angles) if rotary else opset13.exp(angles)
    if sections:
        result = opset13.reduce_mean(result, np.array([0]), False)
    return ov.Model([opset13.result(result)], parameters, "m")


def run(graph: Any, positions: list[int]) -> np.ndarray:

    compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    values = {"input_ids": np.arange(len(positions)), "position_ids": np.array(positions)}
    return np.array(compiled(values)[0])[:, 0]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("sections", [0, 3, 4])
def test_each_row_gets_its_own_position(sections: int, reads: bool):
    graph = model(sections=sections, reads=reads)
    read_positions(graph)
    positions = [7, 8, 2, 300]
    expected = np.cos(np.array(positions)[:, None] * FREQUENCIES)
    np.testing.assert_allclose(run(graph, positions), expected, atol=1e-4)


def test_a_graph_without_rotary_tables_stays_as_it_is():
    graph = model(rotary=False)
    read_positions(graph)
    assert [port.any_name for port in graph.inputs] == ["input_ids"]
