"""Runs a head with OpenVINO on the CPU, for a target that OpenVINO or Core ML runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.types import tap_name
from paceline.drafters.mtp.cache import HeadCache
from paceline.drafters.mtp.checkpoint import Head, HeadConfig, cut_vocabulary
from paceline.drafters.mtp.graph import KEYS, LAST, LONGEST, VALUES, HeadGraph
from paceline.drafters.mtp.head import Rows, measure_cost
from paceline.drafters.networks.context import PREFILL_CHUNK
from paceline.drafters.networks.padding import padded_rows, padded_size
from paceline.drafters.networks.target import check_pair, read_target
from paceline.drafters.networks.tensors import Array
from paceline.storage.openvino import core

_SLOTS = 32
"""Slots of a KV block; PagedAttention's own number."""


class PagedKV:
    """Keys and values of one sequence in blocks, [blocks, kv_heads, 32, head_dim]; they grow."""

    def __init__(self, kv_heads: int, head_dim: int, kind: Any) -> None:
        self._blocks: list[npt.NDArray[Any]] = [
            np.zeros((0, kv_heads, _SLOTS, head_dim), kind) for _ in (KEYS, VALUES)
        ]

    def copy(self) -> "PagedKV":
        """An independent copy."""
        duplicate = PagedKV(0, 0, np.float32)
        duplicate._blocks = [blocks.copy() for blocks in self._blocks]
        return duplicate

    def first(self, tapped: Array, count: int) -> Array:
        """The first `count` rows of pending hidden states."""
        return tapped[:count]

    def reserved(self, slots: int) -> list[npt.NDArray[Any]]:
        """Keys and values with room for this many slots; PagedAttention writes into them."""
        count, capacity = -(-slots // _SLOTS), len(self._blocks[0])
        if count > capacity:
            growth = max(count, 2 * capacity) - capacity
            self._blocks = [
                np.concatenate([blocks, np.zeros((growth, *blocks.shape[1:]), blocks.dtype)])
                for blocks in self._blocks
            ]
        return self._blocks


class OpenVinoHead:
    """A head opened for a target; see `DraftHead`."""

    def __init__(
        self, head: Head, graph: Path, *, int8: bool = True, vocab: int | None = None
    ) -> None:
        """Check that the head fits the target, and compile its graph.

        Args:
            head: as `read_head` returns it.
            graph: the target, as `read_target` takes it.
            int8: quantize matrices to 8 bits per output channel, and keys and values to float16;
                else float32.
            vocab: draft only this number of tokens, the first ones; None: all.

        Raises:
            ModelError: the head is one of another target.
        """
        target = read_target(graph)
        check_pair(head.path, head.config, target)
        draft_vocab = head.draft_vocab
        if vocab is not None:
            draft_vocab = cut_vocabulary(head, vocab)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if int8 else "0",
            "KV_CACHE_PRECISION": "f16" if int8 else "f32",
        }
        model = HeadGraph(head, int8=int8).build(target, draft_vocab)
        self._target = target  # its weights are in the graph
        compiled = core().compile_model(model, "CPU", options)
        # Rows of the target and drafted ones have requests of their own, so that shapes stay.
        self._draft_vocab = draft_vocab
        self._rows = _Request(compiled, head.config, "tapped")
        self._step = _Request(compiled, head.config, "carried")
        self._kind = np.float16 if int8 else np.float32
        self.config = head.config
        self.taps = head.config.taps
        self.cost = measure_cost(
            self, lambda rows: np.zeros((rows, self.config.tapped_size), np.float32)
        )

    def new_cache(self) -> HeadCache[PagedKV]:
        """An empty cache for a sequence."""
        config = self.config
        return HeadCache(PagedKV(config.num_key_value_heads, config.head_dim, self._kind))

    def tapped(self, taps: Mapping[str, Array], rows: int) -> Array:
        """Hidden states of a call's first `rows` rows, [rows, taps * d] float32."""
        return np.concatenate([taps[tap_name(tap)][:rows] for tap in self.taps], axis=1)

    def concat(self, parts: Sequence[Array]) -> Array:
        """Concatenate along tokens; see `DraftHead`."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def prefill(self, cache: HeadCache[PagedKV], rows: Rows) -> None:
        """Append rows to the cache; see `DraftHead`."""
        tapped, tokens, start = rows
        for at in range(0, len(tokens), PREFILL_CHUNK):
            end = at + PREFILL_CHUNK
            self._append(cache, Rows(tapped[at:end], tokens[at:end], start + at))

    def draft(
        self,
        cache: HeadCache[PagedKV],
        rows: Rows,
        limit: int,
        least: float,
        *,
        sampler: DraftSampler | None = None,
    ) -> tuple[list[int], list[float]]:
        """Append rows and draft after the last one; see `DraftHead`."""
        tapped, tokens, start = rows
        surplus = max(len(tokens) - PREFILL_CHUNK, 0)
        self.prefill(cache, Rows(tapped[:surplus], tokens[:surplus], start))
        last = self._append(cache, Rows(tapped[surplus:], tokens[surplus:], start + surplus))
        position = start + len(tokens)
        drafts: list[int] = []
        chances: list[float] = []
        likely = 1.0
        while True:
            token, chance = last.token, last.chance
            if sampler is not None:
                token, chance = sampler.pick(last.logits, position + 1, self._draft_vocab)
            drafts.append(token)
            chances.append(chance)
            likely *= chance
            if len(drafts) == limit or likely < least:
                return drafts, chances
            slot = len(cache) + len(drafts) - 1
            last = self._step.run(cache.kv, slot, [token], [position], last.carried)
            position += 1

    def _append(self, cache: HeadCache[PagedKV], rows: Rows) -> "_LastRow":
        positions = range(rows.start, rows.start + len(rows.tokens))
        last = self._rows.run(cache.kv, len(cache), rows.tokens, positions, rows.tapped)
        cache.positions += positions
        return last


class _LastRow(NamedTuple):
    """Outputs of a call's last row."""

    token: int
    """The most probable one."""
    chance: float
    logits: Array
    """[vocabulary or draft vocabulary], valid until the next call of the same request."""
    carried: Array
    """[1, d], valid until the next call of the same request."""


class _Request:
    """A request of the graph for rows of one kind: `tapped`, or `carried`.

    Its inputs stay bound from call to call and are overwritten where shapes are the same: handing
    them over anew takes longer than the graph of a small head.
    """

    def __init__(self, compiled: Any, config: HeadConfig, kind: str) -> None:
        self._request = compiled.create_infer_request()
        self._bound: dict[str, npt.NDArray[Any]] = {}
        self._kv: tuple[npt.NDArray[Any], ...] = ()
        self._kind = kind
        widths = {"tapped": config.tapped_size, "carried": config.hidden_size}
        for name, width in widths.items():
            self._bind(name, np.zeros((0, width), np.float32))

    def run(
        self,
        kv: PagedKV,
        slot: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        hidden: Array,
    ) -> _LastRow:
        """Run rows, which write the slots of `kv` from `slot` on.

        Padding writes the slots after them, whose values the next rows replace before any is read.
        """
        rows = len(tokens)
        if len(hidden) != rows:  # OpenVINO notices it only with several threads
            raise ValueError(f"{len(hidden)} hidden states for {rows} tokens")
        size = padded_size(rows)
        padding, end = size - rows, slot + size
        self._bind_kv(kv.reserved(end))
        self._set(self._kind, padded_rows(hidden, padding))
        self._set("tokens", padded_rows(np.array(tokens, np.int64), padding))
        self._set("positions", padded_rows(np.array(positions, np.float32), padding))
        self._set(LAST, np.array([rows - 1], np.int64))
        self._set("past_lens", np.array([slot], np.int32))
        self._set("subsequence_begins", np.array([0, size], np.int32))
        self._set(LONGEST, np.array(end, np.int32))
        self._request.infer()
        drafts, chances, logits, carried = (
            self._request.get_tensor(name).data
            for name in ("drafts", "chances", "logits", "carried_out")
        )
        return _LastRow(int(drafts[0]), float(chances[0]), logits[0], carried)

    def _bind_kv(self, blocks: Sequence[npt.NDArray[Any]]) -> None:
        if len(self._kv) and all(a is b for a, b in zip(self._kv, blocks, strict=True)):
            return
        self._kv = tuple(blocks)
        count = len(blocks[0])
        self._set("block_indices", np.arange(count, dtype=np.int32))
        self._set("block_indices_begins", np.array([0, count], np.int32))
        for name, array in zip((KEYS, VALUES), blocks, strict=True):
            self._bind(name, array)

    def _set(self, name: str, values: npt.NDArray[Any]) -> None:
        bound = self._bound.get(name)
        if bound is not None and bound.shape == values.shape:
            bound[...] = values
        else:
            self._bind(name, values.copy())

    def _bind(self, name: str, values: npt.NDArray[Any]) -> None:
        from openvino import Tensor

        self._bound[name] = values  # an array that is collected is read as noise
        self._request.set_tensor(name, Tensor(values, shared_memory=values.size > 0))
