"""Hybrid models under the HTTP server's load: tokens and states are those of plain decoding.

The load is that of `test_exact_under_load.py`. The pool has fewer states than its clients' blocks
need, so that states are evicted and computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import paceline
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.engines.state_blocks import StateRows, StateTable
from paceline.runtime.model import Model
from support.engine_rows import feed, run
from support.hybrids import HEAD, state_of, with_head
from support.load import SPECULATIONS, Load, check_load, plain_answers
from support.mtp import random_weights
from support.tiny_checkpoints import write_gguf_of

ALL = tuple(
    speculation for speculation in SPECULATIONS if "table" not in speculation.get("drafter", "")
)
OWN: tuple[dict[str, Any], ...] = (
    {"policy": "fixed", "max_block": 5},
    {"policy": "adaptive", "max_block": 8},
)
"""With the drafters that the server was started with."""


FEW = {"logit_bias": {3 + byte: 40.0 for byte in b"the, rain"}}
"""Random models repeat themselves, and some drafts stand, if they have few tokens to pick from."""


class Case(NamedTuple):
    drafter: str
    load: Load


CASES = {
    "lfm2_moe": Case("auto", Load(36, 10, ALL, frozenset({"ngram", "prediction"}), 2, FEW, 0.5)),
    "qwen3_5_text": Case(
        "suffix",
        Load(36, 10, ALL + OWN, frozenset({"ngram", "prediction"}), 2, FEW, 0.5),
    ),
}


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


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> Model:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    if form == "qwen3_5_text":
        with_head(path, random_weights(HEAD))
    else:
        write_gguf_of(form, path)
    return paceline.load(path, engine="openvino", cache_tokens=4096)


@pytest.mark.parametrize("form", CASES)
def test_answers_and_states_are_those_of_plain_decoding(hybrid: Model, form: str):
    drafter, load = CASES[form]
    engine = hybrid.engine
    assert isinstance(engine, OpenVinoEngine)
    answers = plain_answers(hybrid, load)
    with states_seen(engine) as seen:
        check_load(hybrid, load, answers, drafter)
    expected = plain_states(engine, seen)
    assert all(item.state == expected[item.text] for item in seen)
    assert len({*expected.values()}) == len(expected)
    assert any(item.rows > 1 and item.shared for item in seen)
