"""OpenVINO nodes that the graphs of every drafter's network are built of."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.drafters.networks.tensors import Array
from paceline.storage.int8 import as_int8


class GraphNodes:
    """Makes nodes; a graph builder is a subclass of it."""

    def __init__(self, *, int8: bool) -> None:
        """`int8` quantizes matrices to 8 bits per output channel."""
        from openvino import opset13

        self._ops = opset13
        self._int8 = int8

    def _rope_tables(self, positions: Any, frequencies: Array) -> tuple[Any, Any]:
        """Cos and sin of RoPE (half rotation) for frequencies [dims / 2], both [R, 1, dims]."""
        ops = self._ops
        turned = self._floats(frequencies)
        angles = ops.multiply(ops.unsqueeze(positions, self._ints([1, 2])), turned)
        angles = ops.concat([angles, angles], -1)
        return ops.cos(angles), ops.sin(angles)

    def _apply_rope(self, heads: Any, cos: Any, sin: Any) -> Any:
        ops = self._ops
        left, right = ops.split(heads, self._ints(2), 2).outputs()
        rotated = ops.concat([ops.multiply(right, self._floats(-1)), left], -1)
        return ops.add(ops.multiply(heads, cos), ops.multiply(rotated, sin))

    def _rms_norm(self, hidden: Any, weight: Any, epsilon: float) -> Any:
        ops = self._ops
        mean = ops.reduce_mean(ops.multiply(hidden, hidden), self._ints([-1]), True)
        root = ops.sqrt(ops.add(mean, self._floats(epsilon)))
        return ops.multiply(ops.divide(hidden, root), weight)

    def _swiglu(self, hidden: Any, gate_up: Any, down: Any) -> Any:
        """[R, d] -> [R, d]; `gate_up` has the rows of both matrices."""
        ops = self._ops
        gate, up = ops.split(self._linear(hidden, gate_up), self._ints(1), 2).outputs()
        return self._linear(ops.multiply(ops.swish(gate), up), down)

    def _greedy(self, logits: Any, draft_vocab: npt.NDArray[np.int64] | None) -> list[Any]:
        """Outputs of the rows' logits [R, n], over the whole or the draft vocabulary.

        `drafts` [R] int64 and `chances` [R], the rows' best tokens and their probabilities, and
        `logits`, from which another may be picked.
        """
        ops = self._ops
        best = ops.topk(logits, self._ints(1), -1, "max", "none", index_element_type="i64")
        top, tokens = best.outputs()
        relative = ops.subtract(logits, top)
        chances = ops.divide(
            self._floats(1), ops.reduce_sum(ops.exp(relative), self._ints([-1]), False)
        )
        tokens = ops.squeeze(tokens, self._ints([-1]))
        if draft_vocab is not None:
            tokens = ops.gather(self._ints(draft_vocab), tokens, self._ints(0))
        return [
            self._output("drafts", tokens),
            self._output("chances", chances),
            self._output("logits", logits),
        ]

    def _best(
        self, logits: Any, count: int, draft_vocab: npt.NDArray[np.int64] | None
    ) -> list[Any]:
        """Outputs `candidates` [R, count] int64, the best tokens, and `scores`, their logits."""
        ops = self._ops
        if draft_vocab is not None:
            count = min(count, len(draft_vocab))
        best = ops.topk(logits, self._ints(count), -1, "max", "none", index_element_type="i64")
        scores, tokens = best.outputs()
        if draft_vocab is not None:
            tokens = ops.gather(self._ints(draft_vocab), tokens, self._ints(0))
        return [self._output("candidates", tokens), self._output("scores", scores)]

    def _input(self, name: str, shape: Sequence[int], kind: Any = np.float32) -> Any:
        parameter = self._ops.parameter(list(shape), kind, name=name)
        parameter.output(0).set_names({name})
        return parameter

    def _output(self, name: str, value: Any) -> Any:
        result = self._ops.result(value, name=name)
        result.output(0).set_names({name})
        return result

    def _linear(self, rows: Any, matrix: Any) -> Any:
        return self._ops.matmul(rows, matrix, False, True)

    def _matrix(self, weight: Array) -> Any:
        """[out, in], quantized if this builder does."""
        return as_int8(weight) if self._int8 else self._vector(weight)

    def _vector(self, weight: Array) -> Any:
        return self._ops.constant(np.ascontiguousarray(weight))

    def _ints(self, value: Any) -> Any:
        return self._ops.constant(np.array(value, np.int64))

    def _floats(self, value: Any) -> Any:
        return self._ops.constant(np.array(value, np.float32))
