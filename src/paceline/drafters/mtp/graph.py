"""A head as one OpenVINO graph, for rows of the target's hidden states and for drafted ones.

Rows of a call: first those with `tapped`, then those with `carried`. Either may be none. Rows after
the row `last` are padding: attention is causal, so that they change nothing before them. Keys and
values are in blocks of PagedAttention, so that a step costs nearly the same at any context.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.drafters.mtp.checkpoint import Head
from paceline.drafters.networks.nodes import GraphNodes
from paceline.drafters.networks.rope import frequencies
from paceline.drafters.networks.target import TargetWeights, read_matrix
from paceline.storage.paged_attention import SEQUENCES, PagedSizes, paged_attention

KEYS, VALUES, LONGEST = "key_cache.0", "value_cache.0", "max_context_len"
LAST = "last"


class HeadGraph(GraphNodes):
    """Builds the graph of one head."""

    def __init__(self, head: Head, *, int8: bool) -> None:
        """`int8` quantizes matrices to 8 bits per output channel."""
        super().__init__(int8=int8)
        self._config, self._weights = head.config, head.weights

    def build(self, target: TargetWeights, draft_vocab: npt.NDArray[np.int64] | None) -> Any:
        """The graph; see `HeadWeights` for what it computes. `target`: None for a logits head.

        Inputs: `tokens` [n] int64, the token after a row's position; `tapped` [k, taps * d];
        `carried` [n - k, d]; `positions` [n] float32; `last` [1] int64, the
        last row that is no padding; keys, values and sequences as PagedAttention has them.

        Outputs, of the row `last`: those of `_greedy`, and `carried_out` [1, d] float32.
        """
        import openvino as ov

        ops, config, weights = self._ops, self._config, self._weights
        tokens = self._input("tokens", [-1], np.int64)
        tapped = self._input("tapped", [-1, config.tapped_size])
        carried = self._input("carried", [-1, config.hidden_size])
        positions = self._input("positions", [-1])
        last_row = self._input(LAST, [1], np.int64)
        if weights.fuse.ndim == 2:
            fused = self._linear(tapped, self._matrix(weights.fuse))
        else:
            fused = self._norm(tapped, weights.fuse)
        hidden = ops.concat([fused, carried], 0)
        embedded = ops.gather(target.embeddings, tokens, self._ints(0))
        both = ops.concat(
            [
                self._norm(embedded, weights.embedding_norm),
                self._norm(hidden, weights.hidden_norm),
            ],
            -1,
        )
        if weights.join is not None:
            stream = self._linear(both, self._matrix(weights.join))
            attended, inputs = self._attention(
                self._norm(stream, weights.attention_norm), positions
            )
        else:
            stream = hidden
            attended, inputs = self._attention(both, positions)
        stream = ops.add(stream, self._linear(attended, self._matrix(weights.output)))
        last = ops.gather(stream, last_row, self._ints(0))
        normed = self._norm(last, weights.post_norm)
        fed = self._swiglu(normed, self._matrix(weights.gate_up), self._matrix(weights.down))
        last = ops.add(last, fed)
        out = self._norm(last, weights.norm)
        results = [
            *self._greedy(self._logits(out, target, draft_vocab), draft_vocab),
            self._output("carried_out", last if weights.join is None else out),
        ]
        return ov.Model(results, [tokens, tapped, carried, positions, last_row, *inputs], "mtp")

    def _attention(self, rows: Any, positions: Any) -> tuple[Any, list[Any]]:
        """Attention of [n, width] -> [n, heads * head_dim], and its inputs of the graph."""
        import openvino as ov

        ops, config, weights = self._ops, self._config, self._weights
        heads, kv_heads, hd = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        tables = self._rope_tables(positions, frequencies(config.rotary_dims, config.rope_theta))
        queries = self._heads(self._linear(rows, self._matrix(weights.query)), heads)
        both = self._heads(self._linear(rows, self._matrix(weights.keys_values)), 2 * kv_heads)
        keys, values = ops.split(both, self._ints(1), 2).outputs()
        flat = [
            self._flat(self._rotated(queries, weights.query_norm, tables), heads * hd),
            self._flat(self._rotated(keys, weights.key_norm, tables), kv_heads * hd),
            self._flat(values, kv_heads * hd),
        ]
        caches = [self._input(name, [-1] * 4, ov.Type.dynamic) for name in (KEYS, VALUES)]
        sequences = [self._input(name, [-1], np.int32) for name in SEQUENCES]
        longest = self._input(LONGEST, [], np.int32)
        sizes = PagedSizes(heads, kv_heads, hd)
        attended = paged_attention(flat, caches, sequences, longest, sizes)
        if weights.attention_gate is not None:
            gate = self._linear(rows, self._matrix(weights.attention_gate))
            attended = ops.multiply(attended, ops.sigmoid(gate))
        return attended, [*caches, *sequences, longest]

    def _rotated(self, heads: Any, norm: Any, tables: tuple[Any, Any]) -> Any:
        """Queries or keys [n, heads, head_dim], normed if there is a `norm`, rotated in part."""
        ops, config = self._ops, self._config
        if norm is not None:
            heads = self._norm(heads, norm)
        rest = config.head_dim - config.rotary_dims
        if not rest:
            return self._apply_rope(heads, *tables)
        sizes = self._ints([config.rotary_dims, rest])
        turned, kept = ops.variadic_split(heads, self._ints(2), sizes).outputs()
        return ops.concat([self._apply_rope(turned, *tables), kept], -1)

    def _logits(
        self, row: Any, target: TargetWeights, draft_vocab: npt.NDArray[np.int64] | None
    ) -> Any:
        head = self._weights.head
        if head is not None:
            return self._linear(row, self._matrix(head))
        if draft_vocab is None:
            return self._linear(row, target.head)
        return self._linear(row, self._matrix(read_matrix(target.head, draft_vocab)))

    def _norm(self, rows: Any, weight: Any) -> Any:
        return self._rms_norm(rows, self._vector(weight), self._config.rms_norm_eps)

    def _heads(self, rows: Any, heads: int) -> Any:
        return self._ops.reshape(rows, self._ints([0, heads, self._config.head_dim]), True)

    def _flat(self, heads: Any, width: int) -> Any:
        return self._ops.reshape(heads, self._ints([-1, width]), False)
