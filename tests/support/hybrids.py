"""Tiny hybrid models: states as they are in memory, and a Qwen3.5 with a head in its file."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.engines.base import KVSequence
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.engines.state_blocks import StateRows, StateTable
from paceline.storage.gguf_file import Tensor, read_gguf, write_gguf
from support.engine_rows import feed, run
from support.mtp import HeadForm, gguf_name
from support.tiny_checkpoints import write_gguf_of

HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Forms of tiny checkpoints, one of each family."""

LAYERS = 4
CONFIG: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 96, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1},
}
"""Of a tiny Qwen3.5 that can have a head."""
HEAD = HeadForm(own=True, taps=(3,), heads=4, kv_heads=2, rotary=0.25, layers=LAYERS)


def with_head(
    path: Path,
    weights: Mapping[str, np.ndarray],
    others: Mapping[str, Any] | None = None,
    context: int = 512,
) -> Path:
    """Write a tiny Qwen3.5 with the head `weights`; `others` replace tensors called so."""
    about = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": LAYERS + 1}
    plain = write_gguf_of(
        "qwen3_5_text",
        path.with_name("plain.gguf"),
        fields=about,
        **CONFIG,
        max_position_embeddings=context,
    )
    file = read_gguf(plain)
    tensors = {item.name: item for item in file.tensors}
    for end, rows in (others or {}).items():
        for name, old in tensors.items():
            if name.split(".")[-2] == end:
                tensors[name] = _tensor(name, np.broadcast_to(rows, old.shape))
    for name, rows in weights.items():
        if name.startswith("mtp."):
            stored = gguf_name(name, LAYERS)
            tensors[stored] = _tensor(stored, rows + 1 if rows.ndim == 1 else rows)
    forms = {name: (value.kind, value.data.nbytes) for name, value in tensors.items()}
    changed = replace(file, tensors=list(tensors.values()))
    write_gguf(path, changed, forms, lambda tensor: tensor.data, lambda _done: None)
    return path


def _tensor(name: str, rows: np.ndarray) -> Tensor:
    stored = np.ascontiguousarray(rows, np.float32)
    return Tensor(name, stored.shape, 0, stored.view(np.uint8))


def state_of(engine: OpenVinoEngine, sequence: KVSequence) -> dict[str, bytes]:
    """The state of every recurrent layer that the next call would read, as it is in memory."""
    assert isinstance(sequence, StateTable)
    state = sequence._last(sequence.length)
    assert state is not None
    assert state.at == sequence.length
    assert state.block is not None
    tables = {name: array for name, (array, _) in engine._bound.items() if "state_table" in name}
    assert tables
    return {name: array[state.block].tobytes() for name, array in tables.items()}


class SeenState(NamedTuple):
    """The state of all recurrent layers that a call read in an answer."""

    text: tuple[int, tuple[int, ...]]
    """Tokens of the prompt, and all tokens before the state."""
    rows: int
    """Rows that were accepted last."""
    shared: bool
    """Whether the sequence began with a prefix of another."""
    state: int
    """Hash of its bytes."""


@contextmanager
def states_seen(engine: OpenVinoEngine) -> Iterator[list[SeenState]]:
    """Collects the states that calls read in answers, of all sequences."""
    seen: list[SeenState] = []
    accepted: dict[int, int] = {}
    shared: set[int] = set()
    commit, fork, state_rows = StateTable.commit, StateTable.fork, StateTable.state_rows

    def watched_commit(self: StateTable, rows: int) -> None:
        commit(self, rows)
        accepted[id(self)] = rows

    def watched_fork(self: StateTable, length: int) -> StateTable:
        forked = fork(self, length)
        (shared.add if forked.length else shared.discard)(id(forked))
        return forked

    def watched_rows(self: StateTable, rows: int, past: int) -> StateRows:
        if self.shareable_length < past == self.length:
            text = self.shareable_length, tuple(self._tokens)
            state = _hash(state_of(engine, self))
            seen.append(SeenState(text, accepted[id(self)], id(self) in shared, state))
        return state_rows(self, rows, past)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateTable, "commit", watched_commit)
        patch.setattr(StateTable, "fork", watched_fork)
        patch.setattr(StateTable, "state_rows", watched_rows)
        yield seen


def plain_states(
    engine: OpenVinoEngine, seen: Sequence[SeenState]
) -> dict[tuple[int, tuple[int, ...]], int]:
    """Hashes of the same states in plain decoding: alone, one row a call."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for prompt, text in sorted({item.text for item in seen}, reverse=True):  # longer texts first
        if (prompt, text) in known:
            continue
        with closing(engine.open()) as sequence:
            feed(engine, sequence, text[:prompt])
            for at in range(prompt, len(text)):
                run(engine, (sequence, [text[at]], 1))
                sequence.commit(1)
                known[prompt, text[: at + 1]] = _hash(state_of(engine, sequence))
    return known


def _hash(state: Mapping[str, bytes]) -> int:
    return hash(tuple(sorted(state.items())))
