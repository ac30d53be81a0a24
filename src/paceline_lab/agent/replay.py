"""Recorded sessions of agents, replayed turn by turn, locally or on a server, and their rows.

A session has one message per line, a JSON object with `role` and `content`. A turn is an answer of
the assistant; the messages before it are its prompt. Tool calls and their results are text in
messages, so that every chat template renders them.

Locally, each row of logits is computed, and the recorded token is taken. So every model does the
work of the real session, even one with random weights, and drafts are verified against the
recorded answer. All else is the code of `serve`: scheduler, prefix cache, drafters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline.decoding.types import Best, Block
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.errors import InvalidRequest, PacelineError
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.storage.files import json_lines
from paceline.storage.report import Table
from paceline.storage.validation import validated
from paceline.verify.suite import packaged, prompt_for
from paceline_lab.bench.ab_test import PLAIN, interleaved
from paceline_lab.bench.record import Row
from paceline_lab.client import ServedModel, closed_loop

SESSIONS = ("coding", "documents")
"""Built-in sessions, of ten turns each."""

SECONDS, FIRST = "seconds", "first_token_seconds"


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    content: str


class SessionTurn(NamedTuple):
    """A recorded answer, and the messages before it."""

    name: str
    number: int
    """Number of the turn, from 1."""
    messages: list[dict[str, Any]]
    prompt: list[int]
    """The messages in the model's chat template, encoded."""
    answer: list[int]
    """The recorded answer, encoded, with the token that ends it."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    name: str
    messages: list[dict[str, Any]]
    sha256: str

    def turns(self, model: Model) -> list[SessionTurn]:
        encode = model.files.tokenizer.encode
        turns: list[SessionTurn] = []
        for place, message in enumerate(self.messages):
            if message["role"] == "assistant":
                number, before = len(turns) + 1, self.messages[:place]
                prompt = model.tokens(prompt_for(model.files, before))
                answer = [*encode(message["content"]), *model.files.stop_token_ids[:1]]
                name = f"{self.name}, turn {number}"
                turns.append(SessionTurn(name, number, before, prompt, answer))
        return turns


def load_sessions(path: Path | None) -> list[AgentSession]:
    """Return the session in a file, or the built-in ones. Raises InvalidRequest, with the line."""
    if path is None:
        names = ((name, f"agent_{name}.jsonl") for name in SESSIONS)
        return [_parsed(name, packaged("paceline_lab.agent", file), file) for name, file in names]
    try:
        return [_parsed(path.stem, path.read_bytes(), str(path))]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _parsed(name: str, content: bytes, file: str) -> AgentSession:
    messages: list[dict[str, Any]] = []
    for where, entry in json_lines(content, file):
        messages.append(asdict(validated(_Message, entry, where)))
        if messages[0]["role"] == "assistant":
            raise InvalidRequest(f"{where} is an answer; expected a message before it")
    if "assistant" not in [message["role"] for message in messages]:
        raise InvalidRequest(
            f"{file} has no answer to replay; expected one message with role and content per "
            "line, some of them by the assistant"
        )
    return AgentSession(name, messages, sha256(content).hexdigest())


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


def measure_session(
    session: str,
    turns: Sequence[SessionTurn],
    replays: Mapping[str, Callable[[], list[Replayed]]],
    rounds: int,
) -> list[Row]:
    """Replay a session with all contenders in turn; return one row per turn and contender."""
    answers = interleaved(replays, rounds)
    rows = []
    for place, turn in enumerate(turns):
        plain = [replayed[place] for replayed in answers[PLAIN]]
        for contender in answers:
            replayed = [by_turn[place] for by_turn in answers[contender]]
            rows.append(_row(session, turn, contender, replayed, plain))
    return rows


def _row(
    session: str,
    turn: SessionTurn,
    contender: str,
    replayed: Sequence[Replayed],
    plain: Sequence[Replayed],
) -> Row:
    """Return a turn's row for a contender; if a round failed, the facts have the error."""
    first = replayed[0]
    pairs = [*zip(plain, replayed, strict=True)]
    measures = {
        SECONDS: [answer.seconds for answer in replayed],
        FIRST: [answer.first_token_seconds for answer in replayed],
    }
    if all(base.decode_seconds > 0 < answer.decode_seconds for base, answer in pairs):
        measures |= {
            "ratio": [base.decode_seconds / answer.decode_seconds for base, answer in pairs],
            "ratio_with_prefill": [base.seconds / answer.seconds for base, answer in pairs],
        }
    error = next((answer.error for answer in replayed if answer.error), "")
    facts = {
        "tokens": first.tokens,
        "prompt_tokens": len(turn.prompt),
        "cached_tokens": first.cached_tokens,
        **({} if first.same is None else {"same_tokens": all(one.same for one in replayed)}),
        **({"error": error} if error else {}),
    }
    counts = {"steps": sum(answer.steps for answer in replayed)}
    return Row(turn.name, session, contender, measures, {"turn": turn.number}, counts, facts)


def totals_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return contender -> figures of its successful turns; times are medians over the rounds."""
    totals: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name and "error" not in row.facts]
        seconds = sum(median(row.measures[SECONDS]) for row in own)
        tokens, prompt, reused = (
            sum(row.facts[fact] for row in own)
            for fact in ("tokens", "prompt_tokens", "cached_tokens")
        )
        totals[name] = {
            "turns": len(own),
            SECONDS: seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "prompt_tokens_computed": prompt - reused,
            "prompt_tokens_reused": reused,
        }
    return totals


def tables_of(
    session: str, rows: Sequence[Row], totals: Mapping[str, Mapping[str, float]]
) -> Iterator[Table]:
    head = ["contender", "turns", "seconds", "tokens/s", "prompt computed", "reused"]
    figures = [
        [name, *(f"{value:,.2f}".removesuffix(".00") for value in total.values())]
        for name, total in totals.items()
    ]
    yield f"{session}: all turns", head, figures
    turns: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == session:
            cells = turns.setdefault(row.case, [row.case, f"{row.facts['prompt_tokens']:,}"])
            cells.append("-" if "error" in row.facts else f"{median(row.measures[FIRST]):.2f}")
    yield "seconds to the first token", ["turn", "prompt", *totals], [*turns.values()]
