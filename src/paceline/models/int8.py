"""Stores the weights of an OpenVINO graph as symmetric int8, one scale per output channel.

A weight is an f16 matrix that is converted to f32; nothing else in the graph changes.
"""

from pathlib import Path

from paceline.storage.int8 import as_int8


def store_as_int8(source: Path, target: Path) -> None:
    """Read the graph `source`, replace its f16 weight matrices, write it to `target`.

    Raises OSError when `target` cannot be written.
    """
    import numpy as np
    import openvino as ov

    model = ov.Core().read_model(source)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convert":
            continue
        constant = node.input_value(0).get_node()
        if (
            constant.get_type_name() != "Constant"
            or constant.get_element_type() != ov.Type.f16
            or len(constant.get_output_shape(0)) != 2
        ):
            continue
        weight = constant.get_data().astype(np.float32)  # [out, in]
        node.output(0).replace(as_int8(weight).output(0))
    model.validate_nodes_and_infer_types()
    try:
        ov.save_model(model, target, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(f"cannot write {target}: {error}") from error
