"""Weights of an OpenVINO graph as 8 bits per output channel, symmetric.

Knows one thing about graphs: an f16 matrix that is converted to f32 is a weight. Everything else in
the graph stays as it is.
"""

from pathlib import Path

_MOST = 127  # -128 is left out, so that the range is symmetric


def store_as_int8(source: Path, target: Path) -> None:
    """Read the graph `source`, replace its f16 weight matrices, write it to `target`.

    Each row w [in] of a weight [out, in] becomes round(w / s) with s = max |w| / 127, kept as f16.
    Raises OSError when `target` cannot be written.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13

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
        scale = np.abs(weight).max(axis=1, keepdims=True) / _MOST
        # As it will be stored; a row of zeros, or too small for f16, gets any scale.
        scale = np.where(scale < np.finfo(np.float16).tiny, 1, scale).astype(np.float16)
        whole = np.rint(weight / scale.astype(np.float32)).clip(-_MOST, _MOST).astype(np.int8)
        small = opset13.convert(opset13.constant(whole), np.float16)
        scaled = opset13.multiply(small, opset13.constant(scale))
        node.output(0).replace(opset13.convert(scaled, np.float32).output(0))
    model.validate_nodes_and_infer_types()
    try:
        ov.save_model(model, target, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(f"cannot write {target}: {error}") from error
