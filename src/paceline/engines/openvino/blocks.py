"""Parts of a decoder, for graphs that are built here instead of by OpenVINO's GGUF frontend.

Rows are [1, 1, rows, width] float32 throughout, as in the frontend's graphs. Nodes have the
frontend's names where others look for them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.engines.openvino.experts import ExpertProducts
from paceline.engines.openvino.gguf_matrix import floats, matrix
from paceline.engines.openvino.gguf_rope import rotate_halves, rotation
from paceline.engines.openvino.graph import OUTPUT_ROWS
from paceline.engines.openvino.paged import Heads, Inputs, attention, short_convolution
from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, Tensor

_LEAST_TOTAL = np.float32(1e-6)
"""Added to the sum of the chosen experts' weights, as in transformers."""


class Built(NamedTuple):
    """A decoder's outputs."""

    logits: Any
    layers: dict[int, Any]
    """Layer -> rows after it."""


class Blocks:
    """Makes the parts of one model, of its tensors."""

    def __init__(
        self, file: GgufFile, path: Path, inputs: Inputs, *, epsilon: float, rope_base: float
    ) -> None:
        """Of the `file` at `path`; `epsilon` is that of norms."""
        self._tensors = {tensor.name: tensor for tensor in file.tensors}
        self._path = path
        self._inputs = inputs
        self._epsilon = np.float32(epsilon)
        self._rope_base = rope_base
        self._tables: dict[int, tuple[Any, Any]] = {}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`. Raises ModelError if the file has none."""
        if name not in self._tensors:
            raise ModelError(f"{self._path} has no tensor {name}; fetch or convert it again")
        return self._tensors[name]

    def has(self, name: str) -> bool:
        """Whether there is a matrix `name`."""
        return f"{name}.weight" in self._tensors

    def embed(self, name: str) -> tuple[Any, Any]:
        """The tokens' rows of the matrix `name`, and the matrix."""
        from openvino import opset13

        weights = self._matrix(name)
        tokens = self._inputs.take("input_ids")
        rows = opset13.gather(weights, tokens, np.int64(0))
        return opset13.unsqueeze(rows, np.array([0, 1])).output(0), weights

    def linear(self, rows: Any, name: str) -> Any:
        """Rows times the matrix `name`."""
        return product(rows, self._matrix(name))

    def norm(self, rows: Any, name: str, node: str = "") -> Any:
        """Rows over their root mean square, times the vector `name`; `node` names the result."""
        from openvino import opset13

        squares = opset13.reduce_mean(opset13.power(rows, np.float32(2)), np.array([-1]), True)
        root = opset13.sqrt(opset13.add(squares, self._epsilon))
        scaled = opset13.multiply(rows, opset13.power(root, np.float32(-1)))
        weight = floats(self.tensor(f"{name}.weight"))
        return opset13.multiply(scaled, weight, name=node or None).output(0)

    def attend(
        self,
        rows: Any,
        layer: int,
        heads: int,
        kv_heads: int,
        *,
        rotary: int | None = None,
        gated: bool = False,
    ) -> Any:
        """Attention whose queries and keys are normalized head by head, then rotated by halves.

        `rotary` is the number of a head's values that are rotated; None: all. `gated`: beside a
        head's query is a gate, whose sigmoid multiplies the head's output.
        """
        from openvino import opset13

        prefix = f"blk.{layer}.attn_"
        size = self.tensor(f"{prefix}q_norm.weight").shape[0]
        qkv = {}
        gate = None
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            wide = part == "q" and gated
            shape = np.array([1, -1, count, size * (1 + wide)])
            projected = opset13.reshape(self.linear(rows, prefix + part), shape, False).output(0)
            if wide:
                projected, gate = opset13.split(projected, np.int64(3), 2).outputs()
            if part != "v":
                projected = self._rotated(
                    self.norm(projected, f"{prefix}{part}_norm"), rotary or size
                )
            qkv[part] = Heads(projected, count, size, layer)
        attended = attention(self._inputs, qkv["q"], qkv["k"], qkv["v"], size**-0.5)
        if gate is not None:
            attended = opset13.multiply(attended, opset13.sigmoid(gate))
        joined = opset13.reshape(attended, np.array([1, 1, -1, heads * size]), False)
        return self.linear(joined.output(0), f"{prefix}output")

    def gated_convolution(self, rows: Any, layer: int) -> Any:
        """LFM2's: c times the convolution of b times x, where b, c, x are parts of a projection."""
        from openvino import opset13

        prefix = f"blk.{layer}.shortconv."
        b, c, x = opset13.split(self.linear(rows, f"{prefix}in_proj"), np.int64(3), 3).outputs()
        weight = floats(self.tensor(f"{prefix}conv.weight"))
        summed = short_convolution(self._inputs, opset13.multiply(b, x).output(0), weight, layer)
        four = opset13.reshape(summed, np.array([1, 1, -1, len(weight)]), False)
        return self.linear(opset13.multiply(c, four).output(0), f"{prefix}out_proj")

    def feed_forward(self, rows: Any, layer: int, end: str = "") -> Any:
        """SwiGLU, of matrices whose names have this `end`."""
        from openvino import opset13

        gate, up = (self.linear(rows, f"blk.{layer}.ffn_{part}{end}") for part in ("gate", "up"))
        product = opset13.multiply(opset13.swish(gate), up)
        return self.linear(product.output(0), f"blk.{layer}.ffn_down{end}")

    def shared_expert(self, rows: Any, layer: int) -> Any:
        """The expert that every row takes, times the sigmoid of a product of the row."""
        from openvino import opset13

        name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
        gate = product(rows, floats(self.tensor(name)).reshape(1, -1))
        return opset13.multiply(self.feed_forward(rows, layer, "_shexp"), opset13.sigmoid(gate))

    def mixture(
        self, rows: Any, layer: int, used: int, products: ExpertProducts, *, softmax: bool = False
    ) -> Any:
        """Experts of SwiGLU: the `used` with the greatest sigmoid, plus a bias, of their logits.

        They are weighted by their sigmoids, over the sum of those. `softmax`: by that instead.
        """
        from openvino import opset13

        prefix = f"blk.{layer}."
        logits = self.linear(rows, f"{prefix}ffn_gate_inp")
        scores = opset13.softmax(logits, 3) if softmax else opset13.sigmoid(logits)
        chosen_by = scores
        if (bias := self._tensors.get(f"{prefix}exp_probs_b.bias")) is not None:
            chosen_by = opset13.add(scores, floats(bias))
        chosen = opset13.topk(chosen_by, np.int64(used), 3, "max", "value", "i32").output(1)
        weights = opset13.gather_elements(scores, chosen, 3)
        total = opset13.reduce_sum(weights, np.array([3]), True)
        if not softmax:
            total = opset13.add(total, _LEAST_TOTAL)
        weights = opset13.divide(weights, total)
        last = opset13.reshape(weights, np.array([-1, used]), False)
        by_choice = opset13.unsqueeze(opset13.transpose(last, np.array([1, 0])), np.int64(2))

        experts = opset13.reshape(chosen, np.array([-1, used]), False).output(0)
        three = opset13.squeeze(rows, np.array([0])).output(0)
        gate, up = self._first_products(
            prefix, lambda weights: products.product(three, weights, experts)
        )
        both = opset13.multiply(opset13.swish(gate), up).output(0)
        down = products.product(both, self._matrix(f"{prefix}ffn_down_exps"), experts)
        summed = opset13.reduce_sum(opset13.multiply(down, by_choice), np.array([0]), False)
        return opset13.unsqueeze(summed, np.array([0, 1])).output(0)

    def _first_products(self, prefix: str, product_of: Callable[[Any], Any]) -> tuple[Any, Any]:
        """With the experts' gate and up, which some files have as one matrix."""
        from openvino import opset13

        both = f"{prefix}ffn_gate_up_exps"
        if self.has(both):
            gate, up = opset13.split(product_of(self._matrix(both)), np.int64(2), 2).outputs()
        else:
            gate, up = (product_of(self._matrix(f"{prefix}ffn_{p}_exps")) for p in ("gate", "up"))
        return gate, up

    def _matrix(self, name: str) -> Any:
        return matrix(self.tensor(f"{name}.weight"))

    def output_rows(self, rows: Any) -> Any:
        """The rows that get logits."""
        from openvino import opset13

        return opset13.gather(rows, self._inputs.take(OUTPUT_ROWS), np.int64(2)).output(0)

    def _rotated(self, rows: Any, rotary: int) -> Any:
        """Rotate [1, rows, heads, size] by value i and i + rotary / 2 as a pair."""
        from openvino import opset13

        if rotary not in self._tables:
            places = np.arange(0, rotary, 2, dtype=np.float64) / rotary
            frequencies = (self._rope_base**-places).astype(np.float32)
            positions = opset13.convert(self._inputs.take("position_ids"), np.float32)
            four = opset13.reshape(positions, np.array([1, -1, 1, 1]), False)
            self._tables[rotary] = rotation(four, frequencies)
        if rows.get_partial_shape()[3] == rotary:
            return rotate_halves(rows, *self._tables[rotary])
        parts = opset13.variadic_split(rows, np.int64(3), np.array([rotary, -1])).outputs()
        turned = rotate_halves(parts[0], *self._tables[rotary])
        return opset13.concat([turned, parts[1]], 3).output(0)


def product(rows: Any, weights: Any) -> Any:
    """Rows times a matrix [out, in]."""
    from openvino import opset13

    return opset13.matmul(rows, weights, False, True).output(0)


def added(rows: Any, more: Any, name: str = "") -> Any:
    """The sum; `name` is its node's, if not empty."""
    from openvino import opset13

    return opset13.add(rows, more, name=name or None).output(0)
