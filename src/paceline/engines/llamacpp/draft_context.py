"""The network of a published drafter, run by llama.cpp next to a target.

    DFlash    features of the target's layers become keys and values of the text; then a block of
              [last token, mask, mask, ...] is filled in one pass, whose rows see one another
    EAGLE-3   features become one state per token; then a row has a token and the state before it
    MTP       a layer inside the target's own file: a row has a token and the target's last state

A context holds one sequence and grows with it. Nothing here has to be exact: drafts are verified.
The library ends the process if sizes do not fit, so check a file (`drafters/native/`) before
`open_drafter`. The order of library calls is that of llama.cpp's
common/speculative.cpp.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.llamacpp.binding import MIN_CONTEXT, State, interrupts_after
from paceline.engines.llamacpp.llama_h import (
    DECODE,
    ENCODE,
    FLASH_ATTENTION,
    MTP_CONTEXT,
    Embedding,
)
from paceline.engines.llamacpp.native import NativeModel
from paceline.engines.llamacpp.upstream import Llama
from paceline.errors import ModelError

PIECE = 64
"""Rows per pass: each may get logits, for which a context has memory."""

_NUMBER, _FLOATS = ctypes.c_int32, ctypes.POINTER(ctypes.c_float)


class OpenDrafter:
    """A drafter's mapped file, and the target's embeddings and head if the file has none."""

    def __init__(self, binding: Llama, path: Path, target: Path, threads: int) -> None:
        """Map the files. A drafter in its target's own file consists of its MTP layers.

        Raises ModelError, with the library's own words, if it refuses a file.
        """
        self.binding, self.threads = binding, threads
        self.is_inside = path == target
        self.file = NativeModel(binding, path, mtp=self.is_inside)
        self.vocab_size, self.width = self.file.vocab_size, binding.width(self.file.pointer)
        self._target = self.file if self.is_inside else NativeModel(binding, target)
        # The drafter's own contexts use it for embeddings and head.
        self._other = self._context(self._target, MIN_CONTEXT, inside=False)
        finalize(self, self._target.open.drop_context, self._other)

    def open(self, *, causal: bool, hidden: str) -> "DraftContext":
        return DraftContext(self, causal=causal, hidden=hidden)

    def context(self, slots: int) -> int:
        return self._context(self.file, slots, inside=self.is_inside, other=self._other)

    def _context(
        self, model: NativeModel, slots: int, *, inside: bool, other: int | None = None
    ) -> int:
        binding = self.binding
        params = binding.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = slots, PIECE, PIECE
        params.n_outputs_max = PIECE
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = FLASH_ATTENTION
        params.offload_kqv = params.op_offload = False
        params.ctx_type = MTP_CONTEXT if inside else 0
        params.ctx_other = other
        binding.errors.clear()
        with interrupts_after():
            context = binding.api.llama_init_from_model(model.pointer, params)
        if not context:
            name, reason = self.file.path.name, binding.errors.reason()
            raise ModelError(f"{binding.name} has no context for {name}: {reason}")
        model.open.add()
        return int(context)


class DraftContext:
    """A drafter's KV for one sequence. Its positions are consecutive, and may start anywhere.

    `length` is the position after the last one, 0 if there is none.
    """

    def __init__(self, model: OpenDrafter, *, causal: bool, hidden: str) -> None:
        """Create an empty context.

        Args:
            model: the drafter.
            causal: True if rows of a pass see only the rows before them.
            hidden: rows whose hidden states `run` returns: `outputs`, `all`, or `no`.
        """
        self._model, self._binding = model, model.binding
        self._causal, self._hidden = causal, hidden
        self.length = 0
        self._slots = MIN_CONTEXT
        self._free: finalize[Any, Any] | None = None
        self._begin(MIN_CONTEXT)

    def inject(self, features: Logits, start: int) -> None:
        """Turn features [n, width] into keys and values, from position `start`."""
        for at in range(0, len(features), PIECE):
            rows = features[at : at + PIECE]
            self._reach(start + at, len(rows))
            self._call(DECODE, start + at, states=rows)

    def encode(self, features: Logits) -> Logits:
        """Turn the target's features, [n, layers * width], into states [n, width]."""
        states = []
        for at in range(0, len(features), PIECE):
            rows = features[at : at + PIECE]
            self._call(ENCODE, self.length, states=rows, outputs=len(rows))
            states.append(self._read_hidden(len(rows)))
        return np.concatenate(states)

    def run(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        states: Logits | None = None,
        outputs: int,
    ) -> tuple[Logits, Logits]:
        """Run tokens from position `start`, each with a state of [n, width] if there are any.

        Returns logits [outputs, vocab] of the last rows, and their hidden states [outputs, width]
        (or of all rows, or none: see `__init__`); copies. At most `PIECE` rows.
        """
        self._reach(start, len(tokens))
        self._call(DECODE, start, tokens=tokens, states=states, outputs=outputs)
        count = {"outputs": outputs, "all": len(tokens), "no": 0}[self._hidden]
        hidden = self._read_hidden(count)
        if not outputs:
            return np.empty((0, self._model.vocab_size), np.float32), hidden
        address = self._binding.api.llama_get_logits(self._pointer)
        return _copied(address, (outputs, self._model.vocab_size)), hidden

    def truncate(self, length: int) -> None:
        if length < self.length:
            self._binding.truncate(self._pointer, 0, length)
            self.length = length

    def copy(self, length: int) -> "DraftContext":
        other = type(self)(self._model, causal=self._causal, hidden=self._hidden)
        if self.length:
            other._begin(self._slots, self._binding.read_state(self._pointer, 0))
            other.length = self.length
            other.truncate(length)
        return other

    def close(self) -> None:
        if self._free is not None:
            self._free()

    def _reach(self, start: int, rows: int) -> None:
        """Drop the positions from `start`, or all if there were a gap; make room."""
        if start > self.length:
            self.truncate(0)
        self.truncate(start)
        while start + rows > self._slots:
            state = self._binding.read_state(self._pointer, 0) if self.length else None
            self._begin(2 * self._slots, state)
        self.length = start + rows

    def _begin(self, slots: int, state: State | None = None) -> None:
        self.close()
        binding = self._binding
        self._slots, self._pointer = slots, self._model.context(slots)
        self._free = finalize(self, self._model.file.open.drop_context, self._pointer)
        is_read, is_masked = self._hidden != "no", self._hidden != "all"
        binding.extension("set_embeddings_nextn")(self._pointer, is_read, is_masked)
        binding.api.llama_set_causal_attn(self._pointer, self._causal)
        if state is not None:
            binding.write_state(self._pointer, 0, state)

    def _call(
        self,
        kind: int,
        start: int,
        *,
        tokens: Sequence[int] = (),
        states: Logits | None = None,
        outputs: int = 0,
    ) -> None:
        api = self._binding.api
        set_state = api.llama_batch_ext_set_embd_token
        if self._model.is_inside:
            set_state = api.llama_batch_ext_set_embd_state
        rows = None if states is None else np.ascontiguousarray(states, np.float32)
        count = len(tokens) if rows is None else len(rows)
        batch = api.llama_batch_ext_init(self._pointer)
        try:
            for row in range(count):
                state = None if rows is None else Embedding(rows[row].ctypes.data, 1, rows.shape[1])
                if tokens:
                    at = api.llama_batch_ext_add_token(batch, 0, tokens[row])
                    if state is not None:
                        set_state(batch, at, state)
                else:
                    at = api.llama_batch_ext_add_embd(batch, 0, state)
                place = start + row
                api.llama_batch_ext_set_pos(batch, at, (_NUMBER * 4)(place, place, place, 0))
                api.llama_batch_ext_set_output_logits(batch, at, row >= count - outputs)
            code = api.llama_process(self._pointer, kind, batch)
        finally:
            api.llama_batch_ext_free(batch)
        if code:
            self.truncate(0)
            reason = self._binding.errors.reason()
            raise ModelError(f"{self._binding.name} failed to run a drafter: {reason}")

    def _read_hidden(self, rows: int) -> Logits:
        if not rows:
            return np.empty((0, self._model.width), np.float32)
        address = self._binding.extension("get_embeddings_nextn")(self._pointer)
        return _copied(address, (rows, self._model.width))


def _copied(address: int, shape: tuple[int, int]) -> Logits:
    return np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape).copy()
