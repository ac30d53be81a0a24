"""Running DFlash with MLX, where its target runs: nothing but drafts goes to the host.

Nothing is computed here before somebody looks. Where nobody looks at a draft before it is verified,
its tokens go into the target's graph as they are, and the engine waits for draft, verification and
new keys and values together.

Matrices stay in the checkpoint's precision, or take 8 or 4 bits as MLX has them. Keys and values
are in caches of mlx-lm. Block and context go through one matrix for keys and values together; the
block's rows are put behind the context's, and forgotten.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.decoding.types import Pending, tap_name
from paceline.drafters.dflash.checkpoint import Array, read_config, read_draft_vocab
from paceline.drafters.dflash.mlx_weights import Layer, Matrix, MlxArray, layer_of, read_weights
from paceline.drafters.dflash.network import Context, measured
from paceline.drafters.dflash.target import check_pair


class MlxTarget(Protocol):
    """What is needed of a target that MLX runs."""

    @property
    def layers(self) -> int:
        """How many it has."""
        ...

    def embed(self, tokens: MlxArray) -> MlxArray:
        """Embeddings [..., d] of token ids [...]."""
        ...

    def head(self, hidden: MlxArray) -> MlxArray:
        """Logits [..., vocab] of hidden states [..., d]."""
        ...

    def head_of(self, tokens: MlxArray) -> Callable[[MlxArray], MlxArray]:
        """The head for these tokens [n] alone: its logits are [..., n]."""
        ...


class DeviceRows:
    """Keys and values in caches of mlx-lm, one a layer: each [1, kv_heads, n, head_dim]."""

    def __init__(self, layers: int) -> None:
        from mlx_lm.models.cache import KVCache

        self.caches = [KVCache() for _ in range(layers)]

    def copy(self) -> "DeviceRows":
        """The same, for a sequence that goes its own way from here."""
        other = DeviceRows(len(self.caches))
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            if mine.keys is not None:
                keys, values, count = mine.state
                # An array that is written to changes under all that hold it: these are views.
                theirs.state = (keys[..., :count, :], values[..., :count, :], count)
        _begin(other.arrays())
        return other

    def first(self, features: MlxArray, count: int) -> MlxArray:
        """The first rows of features."""
        return _begin(features[:count])

    def settle(self, count: int) -> None:
        """Forget all but the first `count` rows."""
        for each in self.caches:
            each.trim(each.offset - count)

    def arrays(self) -> list[MlxArray]:
        """All that is held."""
        return [each.state[:2] for each in self.caches if each.keys is not None]


class _Sizes(NamedTuple):
    """A target's, as `check_pair` asks for them."""

    layers: int
    hidden_size: int
    vocab_size: int


class MlxDFlash:
    """A checkpoint opened for a target; see `Network`."""

    def __init__(
        self,
        folder: Path,
        target: MlxTarget,
        *,
        window: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Check the pair and read the weights.

        Args:
            folder: a checkpoint in z-lab's form.
            target: whose embeddings and head are shared.
            window: tokens of context that are looked at, at most; None: all.
            bits: 8 or 4 for each number of a matrix; None: as in the checkpoint.

        Raises:
            ModelError: the checkpoint cannot be used, or not with this target.
        """
        self.config = read_config(folder)
        import mlx.core as mx

        embedded = target.embed(mx.array([0]))  # its shape and type are known without its numbers
        sizes = _Sizes(target.layers, embedded.shape[-1], target.head(embedded).shape[-1])
        check_pair(folder, self.config, sizes)
        draft_vocab = read_draft_vocab(folder, self.config)
        weights = read_weights(folder, self.config)
        self._kind, self._target_kind = weights["fc.weight"].dtype, embedded.dtype
        self._fc = Matrix(weights["fc.weight"], bits)
        self._hidden_norm, self._norm = weights["hidden_norm.weight"], weights["norm.weight"]
        self._layers = [
            layer_of(weights, at, bits=bits) for at in range(self.config.num_hidden_layers)
        ]
        self._embed = target.embed
        self._head: Callable[[MlxArray], MlxArray] = target.head
        self._draft_vocab = None
        if draft_vocab is not None:
            self._draft_vocab = mx.array(draft_vocab.astype(np.int32))
            self._head = target.head_of(self._draft_vocab)
        self._window = window
        self.taps = self.config.target_layer_ids
        size = self.config.feature_size
        self.cost = measured(self, lambda rows: mx.zeros((rows, size), self._kind), window)

    def context(self) -> Context[DeviceRows]:
        """Room for a new sequence's keys and values."""
        return Context(DeviceRows(self.config.num_hidden_layers))

    def features(self, taps: Mapping[str, Array], rows: int) -> MlxArray:
        """The features of a block's first rows, [rows, taps * d], from what an engine tapped.

        Those that lie on the device, in `taps.arrays` by layer, are taken from there.
        """
        import mlx.core as mx

        arrays = getattr(taps, "arrays", None)
        if arrays is None:
            arrays = {tap: mx.array(taps[tap_name(tap)]) for tap in self.taps}
        found = mx.concatenate([arrays[tap][:rows] for tap in self.taps], axis=1)
        return _begin(found.astype(self._kind))

    def joined(self, parts: Sequence[MlxArray]) -> MlxArray:
        """Features one behind the other; of no parts, no rows."""
        import mlx.core as mx

        return mx.concatenate([mx.zeros((0, self.config.feature_size), self._kind), *parts])

    def read(self, context: Context[DeviceRows], features: MlxArray, start: int) -> None:
        """Add tokens to the context; see `Network`."""
        if not len(features):
            return
        seen = self._seen(features)
        context.rows.settle(len(context))
        for layer, kept in zip(self._layers, context.rows.caches, strict=True):
            kept.update_and_fetch(*self._keys_values(layer, seen, start))
        context.positions += range(start, start + len(features))
        _begin(context.rows.arrays())

    def draft(
        self,
        context: Context[DeviceRows],
        token: int,
        position: int,
        features: MlxArray,
        start: int,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Fill a block that begins with `token` at `position`; see `Network`.

        Both that is returned is pending.
        """
        import mlx.core as mx

        new, block = len(features), self.config.block_size
        if new and start + new != position:
            self.read(context, features, start)
            new = 0
        tokens = mx.array([token, *[self.config.mask_token_id] * (block - 1)])
        hidden = self._embed(tokens).astype(self._kind)
        seen = self._seen(features) if new else None
        context.rows.settle(len(context))
        context.positions += range(position - new, position)
        for layer, kept, window in zip(
            self._layers, context.rows.caches, self.config.windows, strict=True
        ):
            normed = self._rms(hidden, layer.input_norm)
            both = normed if seen is None else mx.concatenate([seen, normed])
            held = kept.update_and_fetch(*self._keys_values(layer, both, position - new))
            kept.trim(block)
            first = self._first(context, position, window)
            keys, values = (rows[..., first:, :] for rows in held)
            attended = mx.fast.scaled_dot_product_attention(
                self._queries(layer, normed, position),
                keys,
                values,
                scale=self.config.head_dim**-0.5,
                mask=_mask(context, first, position, block, window),
            )
            hidden = hidden + layer.output(attended[0].swapaxes(0, 1).reshape(block, -1))
            hidden = hidden + self._feed_forward(layer, hidden)
        return self._picked(self._rms(hidden[1:], self._norm))

    def _seen(self, features: MlxArray) -> MlxArray:
        """[n, taps * d] -> [n, d]: what all layers see of the target."""
        return self._rms(self._fc(features), self._hidden_norm)

    def _queries(self, layer: Layer, rows: MlxArray, position: int) -> MlxArray:
        """[R, d] -> [1, heads, R, head_dim], turned to positions from `position` on."""
        heads = layer.query(rows).reshape(len(rows), -1, self.config.head_dim).swapaxes(0, 1)
        return self._turned(self._rms(heads, layer.query_norm)[None], position)

    def _keys_values(
        self, layer: Layer, rows: MlxArray, position: int
    ) -> tuple[MlxArray, MlxArray]:
        """[R, d] -> keys, turned to positions from `position` on, and values, as caches have them.

        [1, kv_heads, R, head_dim] each.
        """
        import mlx.core as mx

        both = layer.keys_values(rows).reshape(len(rows), -1, self.config.head_dim)
        keys, values = mx.split(both.swapaxes(0, 1)[None], 2, axis=1)
        return self._turned(self._rms(keys, layer.key_norm), position), values

    def _turned(self, heads: MlxArray, position: int) -> MlxArray:
        """RoPE, half rotation."""
        import mlx.core as mx

        return mx.fast.rope(
            heads,
            self.config.head_dim,
            traditional=False,
            base=self.config.rope_theta,
            scale=1.0,
            offset=position,
        )

    def _feed_forward(self, layer: Layer, hidden: MlxArray) -> MlxArray:
        import mlx.core as mx

        gate, up = mx.split(layer.gate_up(self._rms(hidden, layer.post_norm)), 2, axis=-1)
        return layer.down(gate * mx.sigmoid(gate) * up)

    def _rms(self, rows: MlxArray, weight: MlxArray) -> MlxArray:
        import mlx.core as mx

        return mx.fast.rms_norm(rows, weight, self.config.rms_norm_eps)

    def _first(self, context: Context[DeviceRows], position: int, window: int | None) -> int:
        """The first row that any of the block's looks at."""
        first = 0
        if self._window is not None:
            first = max(len(context) - self._window, 0)
        if window is not None:
            first = max(first, bisect_left(context.positions, position - window + 1))
        return first

    def _picked(self, hidden: MlxArray) -> tuple[Sequence[int], Sequence[float]]:
        """The likeliest token of each row, and how likely it is."""
        import mlx.core as mx

        logits = self._head(hidden.astype(self._target_kind)).astype(mx.float32)
        chances = mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))
        tokens = mx.argmax(logits, axis=-1)
        if self._draft_vocab is not None:
            tokens = self._draft_vocab[tokens]
        tokens = tokens.astype(mx.int32)
        # Who looks at the chances does so before the tokens are verified, and needs those as well.
        return (
            Pending(lambda: _read(tokens), len(hidden), tokens),
            Pending(lambda: _read(chances, tokens), len(hidden)),
        )


def _read(array: MlxArray, *also: MlxArray) -> list[Any]:
    """Wait for arrays; the numbers of the first."""
    import mlx.core as mx

    mx.eval(array, *also)
    numbers: list[Any] = np.array(array).tolist()
    return numbers


def _mask(
    context: Context[DeviceRows], first: int, position: int, block: int, window: int | None
) -> MlxArray | None:
    """What each row of a block may look at of the context, from a row on, and of the block itself.

    [block, rows] bool; None: at all of it.
    """
    import mlx.core as mx

    if window is None:
        return None
    own = range(position, position + block)
    places = np.array([*context.positions[first:], *own])
    if own[-1] - places[0] < window:
        return None
    return mx.array(np.array(own)[:, None] - places < window)


def _begin(arrays: Any) -> Any:
    """Begin to compute what may be needed in another thread, for that cannot; nobody waits."""
    import mlx.core as mx

    mx.async_eval(arrays)
    return arrays
