"""Replays the turns of a session, locally or on a server.

Locally, each row of logits is computed, and the recorded token is taken. So every model does the
work of the real session, even one with random weights, and drafts are verified against the
recorded answer. All else is the code of `serve`: scheduler, prefix cache, drafters.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline.decoding.types import Best, Block
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.errors import PacelineError
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline_lab.agent.session import SessionTurn
from paceline_lab.client import ServedModel, closed_loop


class Replayed(NamedTuple):
    seconds: float
    first_token_seconds: float
    tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    steps: int = 0
    same: bool | None = None
    """True if the answer equals the recorded one; None: a server generates its own."""
    error: str = ""

    @property
    def decode_seconds(self) -> float:
        """The time after the first token; 0 for an answer that failed or has one token."""
        return 0.0 if self.error else self.seconds - self.first_token_seconds


class ForcedEngine:
    """An engine that reproduces a recorded text: the best token at each position is the text's.

    text      the, cat, sat, on, a
    block     [cat, sat, by]          at position 1: the last token and a draft
    best       sat, on,  a            the text's tokens at positions 2, 3 and 4
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.text: Sequence[int] = ()
        """Token ids of prompt and answer of the running request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Compute all rows, and replace the best token of each."""
        result = self._engine.step(work)
        return result._replace(best=[self._best(sequence, block) for sequence, block in work])

    def _best(self, sequence: KVSequence, block: Block) -> Best:
        first = sequence.length + len(block.tokens) - block.rows + 1
        tokens = np.zeros(block.rows, np.int64)
        recorded = self.text[first : first + block.rows]
        tokens[: len(recorded)] = recorded
        return Best(tokens, np.zeros(block.rows, np.float32))


def replay_here(model: Model, turns: Sequence[SessionTurn], options: Options) -> list[Replayed]:
    """Answer the turns in order, with nothing left of earlier sessions.

    The error of a failed turn takes the place of its answer, and the next turn continues.
    """
    engine = ForcedEngine(model.engine)
    model = Model(
        model.files, engine, defaults=model.defaults, drafting=model.drafting.without_history()
    )
    try:
        return [_answer(model, engine, turn, options) for turn in turns]
    finally:
        model.scheduler.close()


def _answer(model: Model, engine: ForcedEngine, turn: SessionTurn, options: Options) -> Replayed:
    engine.text = [*turn.prompt, *turn.answer]
    limits: Options = {"max_tokens": len(turn.answer), "ignore_eos": True}
    settings: Options = {**GREEDY, **limits, **options}
    began = perf_counter()
    try:
        result = model.generate(turn.prompt, **settings)
    except PacelineError as error:
        seconds = perf_counter() - began
        return Replayed(seconds, seconds, error=str(error))
    return Replayed(
        perf_counter() - began,
        result.stats.first_token_seconds,
        result.completion_tokens,
        result.stats.cached_tokens,
        result.stats.steps,
        list(result.token_ids) == list(turn.answer),
    )


def replay_there(server: ServedModel, turns: Sequence[SessionTurn]) -> list[Replayed]:
    """Send the turns in order to a server, which generates its own answers of equal length."""
    replayed = []
    fields = {"cache_prompt": True, "ignore_eos": True}
    for turn in turns:
        asked = replace(server, max_tokens=len(turn.answer), fields=fields)
        (sample,) = closed_loop(asked, [(turn.name, turn.messages)], clients=1, requests=1)
        first = sample.seconds if sample.first is None else sample.first
        counts = sample.tokens, sample.cached_tokens
        replayed.append(Replayed(sample.seconds, first, *counts, error=sample.error or ""))
    return replayed
