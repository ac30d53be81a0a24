"""The tiny model in the layout of models that also see images: two graphs instead of one."""

from pathlib import Path
from typing import Any

import numpy as np

from paceline.storage.openvino import EMBEDDINGS, LANGUAGE, core


def split_graph(path: Path, folder: Path, *, sections: bool = False, kinds: bool = False) -> Path:
    """Write a language model's graph as embeddings and decoder into `folder`; return `folder`.

    `sections`: the decoder takes positions in three sections (of Qwen2-VL). `kinds`: it takes a
    kind of each token (of Gemma 3).
    """
    import openvino as ov
    from openvino import opset13

    table = core().read_model(path)
    lookup = _table(table)
    ids = table.input("input_ids").get_node()
    result = opset13.result(lookup.output(0))
    ov.save_model(ov.Model([result], [ids]), folder / EMBEDDINGS, compress_to_fp16=False)

    model = core().read_model(path)
    lookup = _table(model)
    width = lookup.get_output_partial_shape(0)[2].get_length()
    embeds = _parameter([-1, -1, width], np.float32, "inputs_embeds")
    ids = model.input("input_ids").get_node()
    _feed(lookup, embeds.output(0))
    for reader in ids.output(0).get_target_inputs():
        reader.replace_source_output(embeds.output(0))  # its shape
    new = [embeds]
    gone = {"input_ids"}
    if sections:
        places = _parameter([3, -1, -1], np.int64, "position_ids")
        first = opset13.gather(places, opset13.constant(0), opset13.constant(0))
        _feed(model.input("position_ids").get_node(), first.output(0))
        new.append(places)
        gone.add("position_ids")
    if kinds:
        # What is not text gets other positions, so that the kinds have an effect.
        kind = _parameter([-1, -1], np.int64, "token_type_ids")
        places = model.input("position_ids").get_node() if not sections else new[1]
        del places
        shifted = opset13.multiply(
            opset13.convert(opset13.unsqueeze(kind, -1), np.float32),
            opset13.constant(np.float32(9)),
        )
        readers = list(embeds.output(0).get_target_inputs())
        total = opset13.add(embeds, shifted)
        for reader in readers:
            reader.replace_source_output(total.output(0))
        new.append(kind)
    kept = [port.get_node() for port in model.inputs if port.any_name not in gone]
    rest = ov.Model(model.get_results(), model.get_sinks(), [*kept, *new])
    ov.save_model(rest, folder / LANGUAGE, compress_to_fp16=False)
    return folder


def _table(model: Any) -> Any:
    """The Gather of embeddings, [batch, tokens, width]."""
    return next(
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Gather" and node.get_output_partial_shape(0).rank == 3
    )


def _parameter(shape: list[int], dtype: Any, name: str) -> Any:
    from openvino import opset13

    parameter = opset13.parameter(shape, dtype, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _feed(node: Any, value: Any) -> None:
    for reader in node.output(0).get_target_inputs():
        reader.replace_source_output(value)
