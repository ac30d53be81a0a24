"""The DFlash network as OpenVINO graphs.

Two graphs share one set of weights. `draft_graph` takes new context rows and a block, and returns
the draft tokens and the keys and values of the new rows; `context_graph` returns keys and values
alone, for the many rows of a prompt. Keys and values of earlier tokens are inputs: the graphs have
no state. One matrix computes keys and values, of context and block together.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.drafters.dflash.checkpoint import Config
from paceline.drafters.networks.nodes import GraphNodes
from paceline.drafters.networks.target import TargetWeights, read_matrix
from paceline.drafters.networks.tensors import Array

MASKED = -1e9
"""Added to the attention score of a masked position."""


class Kernel(NamedTuple):
    """A convolution's weights as graph nodes; see `Convolution`."""

    base: tuple[Any, Any]
    """[taps, groups, channels of a group], of the sublayer's input and of its output."""
    projection: Any


class Layer(NamedTuple):
    """A layer's weights as graph nodes; keys and values, and gate and up, share a matrix."""

    input_norm: Any
    query: Any
    keys_values: Any
    query_norm: Any
    key_norm: Any
    output: Any
    post_norm: Any
    gate_up: Any
    down: Any
    attention_kernel: Kernel | None
    feed_forward_kernel: Kernel | None


class GraphBuilder(GraphNodes):
    """Builds graphs from one checkpoint."""

    def __init__(self, config: Config, weights: Mapping[str, Array], *, int8: bool) -> None:
        """Prepare the weights; `int8` quantizes matrices to 8 bits per output channel."""
        super().__init__(int8=int8)
        self._config = config
        self._fc = self._matrix(weights["fc.weight"])
        self._hidden_norm = self._vector(weights["hidden_norm.weight"])
        self._norm = self._vector(weights["norm.weight"])
        self._layers = [self._layer(weights, layer) for layer in range(config.num_hidden_layers)]

    def draft_graph(self, target: TargetWeights, draft_vocab: npt.NDArray[np.int64] | None) -> Any:
        """Graph that appends context rows and drafts a block.

        Inputs: `tokens` [B] int64; `tapped` [N, taps * d], hidden states of new context rows;
        `positions` [N + B] float32, of these rows, then of the block; for each layer `keys.i` and
        `values.i` [S, kv_heads, head_dim], the context so far; `mask.full` and, where a layer has
        a window, `mask.window`, [B, S + N + B] float32, added to attention scores.

        Outputs: those of `_greedy` for the n rows that draft, or, if drafts are a chain,
        `candidates` [n, k] int64, `scores` [n, k] and `hidden` [n, d]; and for each layer
        `new_keys.i`, `new_values.i` [N, kv_heads, head_dim].
        """
        import openvino as ov

        ops, config = self._ops, self._config
        inputs = {
            "tokens": self._input("tokens", [-1], np.int64),
            "tapped": self._input("tapped", [-1, config.tapped_size]),
            "positions": self._input("positions", [-1]),
            **self._masks(),
        }
        caches = self._caches()
        results = []
        cos, sin = self._rope(inputs["positions"])
        context = self._context(inputs["tapped"])
        rows = self._row_count(inputs["tapped"])
        hidden = ops.gather(target.embeddings, inputs["tokens"], self._ints(0))
        if config.embedding_scale != 1:
            hidden = ops.multiply(hidden, self._floats(config.embedding_scale))
        for at, layer in enumerate(self._layers):
            normed, kernel = self._convolved(
                self._norm_of(hidden, layer.input_norm), layer.attention_kernel
            )
            both = ops.concat([context, normed], 0)
            keys, values = self._keys_values(layer, both, cos, sin)
            results += self._kv_outputs(at, keys, values, rows)
            window = "mask.full" if config.windows[at] is None else "mask.window"
            attended = self._attention(
                self._queries(layer, normed, self._after(cos, rows), self._after(sin, rows)),
                ops.concat([caches[f"keys.{at}"], keys], 0),
                ops.concat([caches[f"values.{at}"], values], 0),
                inputs[window],
            )
            attended = self._linear(attended, layer.output)
            hidden = ops.add(hidden, self._finished(attended, kernel, layer.attention_kernel))
            hidden = ops.add(hidden, self._feed_forward(layer, hidden))
        drafted = self._norm_of(hidden, self._norm)
        if config.first_drafted:
            drafted = self._after(drafted, self._ints([config.first_drafted]))
        if draft_vocab is None:
            logits = ops.matmul(drafted, target.head, False, True)
        else:
            logits = self._linear(drafted, self._matrix(read_matrix(target.head, draft_vocab)))
        if config.logit_scale != 1:
            logits = ops.multiply(logits, self._floats(config.logit_scale))
        if config.logit_cap is not None:
            cap = self._floats(config.logit_cap)
            logits = ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)
        if config.chain is None:
            results += self._greedy(logits, draft_vocab)
        else:
            results += self._best(logits, config.chain.candidates, draft_vocab)
            results.append(self._output("hidden", drafted))
        return ov.Model(results, [*inputs.values(), *caches.values()], "dflash")

    def context_graph(self) -> Any:
        """Graph for keys and values alone: `tapped` and `positions` [N] in, `new_*` out."""
        import openvino as ov

        tapped = self._input("tapped", [-1, self._config.tapped_size])
        positions = self._input("positions", [-1])
        cos, sin = self._rope(positions)
        context = self._context(tapped)
        results = []
        for at, layer in enumerate(self._layers):
            results += self._kv_outputs(at, *self._keys_values(layer, context, cos, sin))
        return ov.Model(results, [tapped, positions], "dflash context")

    def _layer(self, weights: Mapping[str, Array], at: int) -> Layer:
        def of(*names: str) -> Array:
            return np.concatenate([weights[f"layers.{at}.{name}.weight"] for name in names])

        return Layer(
            input_norm=self._vector(of("input_layernorm")),
            query=self._matrix(of("self_attn.q_proj")),
            keys_values=self._matrix(of("self_attn.k_proj", "self_attn.v_proj")),
            query_norm=self._vector(of("self_attn.q_norm")),
            key_norm=self._vector(of("self_attn.k_norm")),
            output=self._matrix(of("self_attn.o_proj")),
            post_norm=self._vector(of("post_attention_layernorm")),
            gate_up=self._matrix(of("mlp.gate_proj", "mlp.up_proj")),
            down=self._matrix(of("mlp.down_proj")),
            attention_kernel=self._kernel(weights, f"layers.{at}.attention_conv"),
            feed_forward_kernel=self._kernel(weights, f"layers.{at}.mlp_conv"),
        )

    def _kernel(self, weights: Mapping[str, Array], name: str) -> Kernel | None:
        form = self._config.convolution
        if form is None:
            return None
        base = weights[f"{name}.base_kernel"].reshape(2, form.taps, -1, form.group)
        projection = self._matrix(weights[f"{name}.kernel_projection.weight"])
        return Kernel((self._vector(base[0]), self._vector(base[1])), projection)

    # --- the network

    def _context(self, tapped: Any) -> Any:
        """[N, taps * d] -> [N, d], the input of every layer's keys and values."""
        return self._norm_of(self._linear(tapped, self._fc), self._hidden_norm)

    def _queries(self, layer: Layer, hidden: Any, cos: Any, sin: Any) -> Any:
        heads = self._heads(self._linear(hidden, layer.query), self._config.num_attention_heads)
        return self._apply_rope(self._norm_of(heads, layer.query_norm), cos, sin)

    def _keys_values(self, layer: Layer, hidden: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        """[R, d] -> keys, rotated to their positions, and values: both [R, kv_heads, head_dim]."""
        kv_heads = self._config.num_key_value_heads
        both = self._heads(self._linear(hidden, layer.keys_values), 2 * kv_heads)
        keys, values = self._ops.split(both, self._ints(1), 2).outputs()
        return self._apply_rope(self._norm_of(keys, layer.key_norm), cos, sin), values

    def _attention(self, queries: Any, keys: Any, values: Any, mask: Any) -> Any:
        """[B, heads, hd], [R, kv_heads, hd] twice -> [B, heads * hd]; grouped-query attention."""
        ops, config = self._ops, self._config
        kv_heads, hd = config.num_key_value_heads, config.head_dim
        group = config.num_attention_heads // kv_heads
        grouped = ops.reshape(queries, self._ints([0, kv_heads, group, hd]), True)
        grouped = ops.transpose(grouped, self._ints([1, 2, 0, 3]))  # [kv_heads, group, B, hd]
        keys = ops.unsqueeze(ops.transpose(keys, self._ints([1, 2, 0])), self._ints(1))
        values = ops.unsqueeze(ops.transpose(values, self._ints([1, 0, 2])), self._ints(1))
        scores = ops.multiply(ops.matmul(grouped, keys, False, False), self._floats(hd**-0.5))
        weights = ops.softmax(ops.add(scores, mask), -1)
        attended = ops.transpose(
            ops.matmul(weights, values, False, False), self._ints([2, 0, 1, 3])
        )
        width = config.num_attention_heads * hd
        return ops.reshape(attended, self._ints([0, width]), True)

    def _feed_forward(self, layer: Layer, hidden: Any) -> Any:
        normed, kernel = self._convolved(
            self._norm_of(hidden, layer.post_norm), layer.feed_forward_kernel
        )
        fed = self._swiglu(normed, layer.gate_up, layer.down)
        return self._finished(fed, kernel, layer.feed_forward_kernel)

    def _convolved(self, rows: Any, kernel: Kernel | None) -> tuple[Any, Any]:
        """A sublayer's input [B, d] convolved, and the dynamic kernel for its output."""
        form = self._config.convolution
        if form is None or kernel is None:
            return rows, None
        groups = self._config.hidden_size // form.group
        sizes = self._ints([0, 2, form.taps, groups, 1])
        dynamic = self._ops.reshape(self._linear(rows, kernel.projection), sizes, True)
        input_kernel, output_kernel = (
            self._ops.squeeze(part, self._ints([1]))
            for part in self._ops.split(dynamic, self._ints(1), 2).outputs()
        )
        return self._convolve(rows, kernel.base[0], input_kernel), output_kernel

    def _finished(self, rows: Any, dynamic: Any, kernel: Kernel | None) -> Any:
        """A sublayer's output [B, d], convolved."""
        return rows if kernel is None else self._convolve(rows, kernel.base[1], dynamic)

    def _convolve(self, rows: Any, base: Any, dynamic: Any) -> Any:
        """See `Convolution`; `dynamic` is [B, taps, groups, 1]."""
        ops, form = self._ops, self._config.convolution
        assert form is not None
        groups = self._config.hidden_size // form.group
        blocks = ops.reshape(rows, self._ints([0, groups, form.group]), True)
        kernels = ops.split(ops.add(dynamic, base), self._ints(1), form.taps).outputs()
        total = None
        for tap, kernel in enumerate(kernels):
            shifted = blocks
            if tap:
                before = self._floats(np.zeros((tap, groups, form.group)))
                shifted = ops.concat([before, self._before(blocks, self._ints([-tap]))], 0)
            part = ops.multiply(ops.squeeze(kernel, self._ints([1])), shifted)
            total = part if total is None else ops.add(total, part)
        return ops.reshape(total, self._ints([0, self._config.hidden_size]), True)

    def _rope(self, positions: Any) -> tuple[Any, Any]:
        return self._rope_tables(positions, self._config.frequencies)

    def _norm_of(self, hidden: Any, weight: Any) -> Any:
        return self._rms_norm(hidden, weight, self._config.rms_norm_eps)

    # --- inputs, outputs and weights

    def _masks(self) -> dict[str, Any]:
        windows = self._config.windows
        names = [
            name
            for name, is_used in (("mask.full", None in windows), ("mask.window", any(windows)))
            if is_used
        ]
        return {name: self._input(name, [-1, -1]) for name in names}

    def _caches(self) -> dict[str, Any]:
        shape = [-1, self._config.num_key_value_heads, self._config.head_dim]
        return {
            f"{kind}.{layer}": self._input(f"{kind}.{layer}", shape)
            for layer in range(self._config.num_hidden_layers)
            for kind in ("keys", "values")
        }

    def _kv_outputs(self, at: int, keys: Any, values: Any, rows: Any = None) -> list[Any]:
        """Outputs for the keys and values of the first `rows`; None: of all."""
        outputs = []
        for name, rows_of in (("new_keys", keys), ("new_values", values)):
            leading = rows_of if rows is None else self._before(rows_of, rows)
            outputs.append(self._output(f"{name}.{at}", leading))
        return outputs

    def _row_count(self, rows: Any) -> Any:
        """Number of rows, [1] int64."""
        shape = self._ops.shape_of(rows, "i64")
        return self._ops.gather(shape, self._ints([0]), self._ints(0))

    def _before(self, rows: Any, end: Any) -> Any:
        return self._ops.slice(rows, self._ints([0]), end, self._ints([1]), self._ints([0]))

    def _after(self, rows: Any, start: Any) -> Any:
        end = self._ints([np.iinfo(np.int64).max])
        return self._ops.slice(rows, start, end, self._ints([1]), self._ints([0]))

    def _heads(self, rows: Any, heads: int) -> Any:
        return self._ops.reshape(rows, self._ints([0, heads, self._config.head_dim]), True)
