"""Gives every row its own position, in exported graphs that count positions themselves.

Exporters leave out `position_ids` where a model can do without. The count then is of the tokens
of a call: OpenVINO's pass makes every token a batch of its own, so every row has the position of
the first (Qwen3.5 of optimum-intel 2.2).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

POSITIONS = "position_ids"


def read_positions(model: Any) -> None:
    """Let the rotary tables of a transformed `model` read `position_ids` if nothing does."""
    from openvino import opset13

    parameter = next((port.node for port in model.inputs if POSITIONS in port.names), None)
    if parameter is not None and parameter.output(0).get_target_inputs():
        return
    counted = {node.get_name(): node for node in _counted(model)}
    if counted and parameter is None:
        parameter = opset13.parameter([-1], np.int64, name=POSITIONS)
        parameter.output(0).set_names({POSITIONS})
        model.add_parameters([parameter])
    for convert in counted.values():
        shape = convert.get_input_partial_shape(0)
        rank = shape.rank.get_length()
        if rank == 4:  # [sections, rows, 1, 1]: of text, all sections are the same
            rows = opset13.reshape(parameter, np.array([1, -1, 1, 1]), False)
            rows = opset13.tile(rows, np.array([shape[0].get_length(), 1, 1, 1]))
        else:
            rows = opset13.reshape(parameter, np.array([-1, *[1] * (rank - 1)]), False)
        kind = convert.get_output_element_type(0)
        convert.output(0).replace(opset13.convert(rows, kind).output(0))


def _counted(model: Any) -> Iterator[Any]:
    """Nodes that make floats of positions, on the way to rotary tables."""
    for table in model.get_ordered_ops():
        if table.get_type_name() not in ("Cos", "Sin"):
            continue
        waiting, seen = [table], set()
        while waiting:
            node = waiting.pop()
            if node.get_name() in seen:
                continue
            seen.add(node.get_name())
            is_convert = node.get_type_name() == "Convert"
            if is_convert and node.get_input_element_type(0).is_integral():
                yield node
            elif node.get_output_element_type(0).is_real():
                waiting += [value.get_node() for value in node.input_values()]
