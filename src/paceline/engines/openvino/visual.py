"""Joins the two graphs of a visual model that answer text: its embeddings and its decoder.

Exporters write the decoder of a model that also sees images as `openvino_language_model.xml`, whose
input is embeddings; those of text are in a graph of their own. Joined, they are a language model
like any other. Images are not read: every token is text.
"""

from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.openvino import EMBEDDINGS

_EMBEDS, _POSITIONS, _KINDS = "inputs_embeds", "position_ids", "token_type_ids"
_KNOWN = {_EMBEDS, _POSITIONS, _KINDS, "attention_mask", "beam_idx"}


def join_embeddings(decoder: Any, embeddings: Any, path: Path) -> Any:
    """The decoder with `input_ids` [batch, tokens] in place of `inputs_embeds`.

    Raises ModelError for a decoder that needs more of an image than its embeddings; `path` is its
    file.
    """
    import openvino as ov
    from openvino import opset13

    inputs = {port.any_name: port.get_node() for port in decoder.inputs}
    if _EMBEDS not in inputs or inputs.keys() - _KNOWN:
        others = ", ".join(sorted(inputs.keys() - _KNOWN)) or f"no {_EMBEDS}"
        raise ModelError(
            f"{path}: the decoder of this visual model cannot be used for text alone (inputs: "
            f"{others}); a checkpoint or GGUF file of the model may work"
        )
    if len(embeddings.inputs) != 1 or len(embeddings.outputs) != 1:
        raise ModelError(f"{path.with_name(EMBEDDINGS)} should have one input and one output")
    ids = embeddings.input(0).get_node()
    _rename(ids, "input_ids")
    new = [ids]
    _replace(inputs[_EMBEDS], embeddings.output(0).get_node().input_value(0))
    if _KINDS in inputs:  # 0: text
        zero = opset13.constant(0, inputs[_KINDS].get_element_type())
        _replace(inputs[_KINDS], opset13.broadcast(zero, opset13.shape_of(ids)).output(0))
    if _POSITIONS in inputs and inputs[_POSITIONS].get_partial_shape().rank.get_length() == 3:
        # Time, height and width of a place in an image; those of text are all the same.
        old = inputs[_POSITIONS]
        sections = old.get_partial_shape()[0]
        positions = opset13.parameter([-1, -1], old.get_element_type())
        count = sections.get_length() if sections.is_static else 3
        stacked = opset13.tile(opset13.unsqueeze(positions, 0), [count, 1, 1])
        _replace(old, stacked.output(0))
        _rename(positions, _POSITIONS)
        new.append(positions)
        del inputs[_POSITIONS]
    kept = [node for name, node in inputs.items() if name not in (_EMBEDS, _KINDS)]
    return ov.Model(
        decoder.get_results(), decoder.get_sinks(), [*kept, *new], decoder.friendly_name
    )


def _rename(parameter: Any, name: str) -> None:
    parameter.set_friendly_name(name)
    parameter.output(0).set_names({name})


def _replace(parameter: Any, value: Any) -> None:
    """Feed `value` to every reader of `parameter`."""
    for reader in parameter.output(0).get_target_inputs():
        reader.replace_source_output(value)
