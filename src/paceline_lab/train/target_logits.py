"""The target's logits of the tokens to draft, from its hidden states after the last layer.

They are labels: the target's distribution has more information than the token that it picked. All
that comes after the last layer (norm, head, and what follows the head) is the target's own graph.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, tap_name
from paceline.drafters.networks.target import TargetWeights
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.openvino import core

Array = npt.NDArray[np.float32]

_TOLERANCE = 0.05
"""Of the largest logit: engines round, other layers give wholly other logits."""


class TargetLogits:
    """The end of a target's graph, with the head's rows of some tokens. Not thread-safe."""

    def __init__(self, target: TargetWeights, drafted: Sequence[int]) -> None:
        """Compile what `target` computes after its last layer, for the tokens `drafted`.

        Changes the graph of `target`: it has that end alone afterwards. Raises ModelError if the
        graph has no such end.
        """
        import openvino as ov
        from openvino import opset13

        stream = _last_sum(target)
        hidden = opset13.parameter(stream.get_partial_shape(), np.float32)
        cast = opset13.convert(hidden, stream.get_element_type())
        for port in stream.get_target_inputs():
            port.replace_source_output(cast.output(0))
        rows, axis = opset13.constant(np.array(drafted, np.int64)), opset13.constant(np.int64(0))
        readers = [port for port in target.head.get_target_inputs() if _is_matmul(port.get_node())]
        cut = opset13.gather(target.head, rows, axis)
        for port in readers:
            port.replace_source_output(cut.output(0))
        result = opset13.result(target.logits.node.input_value(0))
        try:
            model = ov.Model([result], [hidden], "end")
            self._compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except RuntimeError as error:
            raise ModelError(
                f"{target.path}: its logits depend on more than the last hidden states"
            ) from error
        self._before = (1,) * (stream.get_partial_shape().rank.get_length() - 2)
        self._count = len(drafted)

    def __call__(self, hidden: Array) -> Array:
        """Hidden states after the last layer [n, d] -> logits [n, drafted], both float32."""
        logits = self._compiled([hidden.reshape(*self._before, *hidden.shape)])[0]
        return np.asarray(logits, np.float32).reshape(len(hidden), self._count)


def check_end(
    engine: Engine, logits: TargetLogits, drafted: Sequence[int], tokens: Sequence[int]
) -> None:
    """Check, on the text `tokens`, that `logits` of the engine's last tap are the engine's own.

    Raises InvalidRequest if they differ: there is more in the target than its layers and its end.
    """
    with closing(engine.open()) as sequence:
        outputs = engine.step([(sequence, Block(tokens, 1, prefill=True))])
        hidden = outputs.taps[0][tap_name(engine.taps[-1])][-1:]
        expected = outputs.logits[0][:, list(drafted)]
        difference = np.abs(logits(hidden) - expected).max()
    if not difference <= _TOLERANCE * max(np.abs(expected).max(), 1):
        raise InvalidRequest(
            f"the target's logits do not follow from its hidden states after layer "
            f"{engine.taps[-1]} alone, so a head has no labels; expected a dense target whose last "
            "layer that is"
        )


def _is_matmul(node: Any) -> bool:
    return bool(node.get_type_name() == "MatMul")


def _last_sum(target: TargetWeights) -> Any:
    """The last sum of two computed tensors before the head: the residual stream's end."""
    [head] = [
        port.get_node() for port in target.head.get_target_inputs() if _is_matmul(port.get_node())
    ]
    outputs, seen = [head.input_value(0)], set()
    while outputs:
        output = outputs.pop(0)
        node = output.get_node()
        if node.get_friendly_name() in seen or not node.get_input_size():
            continue
        seen.add(node.get_friendly_name())
        is_wide = output.get_partial_shape()[-1] == target.hidden_size
        if node.get_type_name() == "Add" and is_wide:
            return output
        outputs.extend(node.input_value(index) for index in range(node.get_input_size()))
    raise ModelError(f"{target.path} has no sum before its head, where its last layer ends")
