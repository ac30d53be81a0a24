"""Cases of a sweep, and their record: prompts of given lengths, questions at given context depths.

By length: one dense text of code, tiled and cut to the token, without a chat template (the
prompt-length sweep of the Phi-4-mini experiment). By depth: a suite's questions, after text of
other prompts (the context depths of the DFlash-on-MLX experiment).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.verify.suite import Suite, load_suite, packaged
from paceline_lab.bench.ab_test import SINGLE_ROW, Case, Contender, about, max_context, measure
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.record import Record, Row
from paceline_lab.bench.summary import summary

TokenCount = int | Literal["max"]
"""A number of tokens, or as many as fit the context."""

LENGTHS = (100, 200, 372, 800)
"""Tokens of the experiment's prompts."""

_SPARE = 64
"""Tokens that a text may gain by cutting, decoding and encoding it with a question."""


def dense_text() -> tuple[str, str]:
    """Return (text to tile, its SHA-256)."""
    content = packaged("paceline_lab.sweep", "dense_code.txt")
    return content.decode("utf-8"), sha256(content).hexdigest()


def default_lengths(limit: int) -> list[TokenCount]:
    """Return the experiment's lengths, the largest doubled while below `limit`, and `max`."""
    lengths: list[TokenCount] = [length for length in LENGTHS if length < limit]
    further = 2 * LENGTHS[-1]
    while further < limit:
        lengths.append(further)
        further *= 2
    return [*lengths, "max"]


def length_cases(
    model: Model,
    text: str,
    lengths: Sequence[TokenCount],
    tokens: int,
) -> list[Case]:
    """Return cases of the text, tiled and cut, by length; answers have exactly `tokens`.

    Raises InvalidRequest if a length does not fit the context.
    """
    limit = max_context(model) - tokens
    if limit < 1:
        raise InvalidRequest(
            f"{model.files.name} has a context of {max_context(model)} tokens; an answer of "
            f"{tokens} leaves none for the prompt"
        )
    tiled = model.tokens(text, raw=True)
    once = model.files.tokenizer.encode(text)
    cases = []
    for length in _numbers(lengths or default_lengths(limit), limit, "prompt"):
        while len(tiled) < length:
            tiled += once
        options: Options = {"max_tokens": tokens, "ignore_eos": True}
        at = {"prompt_tokens": length}
        cases.append(Case(f"code, {length} tokens", "code", tiled[:length], options, at))
    return cases


def depth_cases(
    model: Model,
    suite: Suite,
    depths: Sequence[TokenCount],
    tokens: int,
) -> list[Case]:
    """Return cases of the suite's prompts, each after about `depth` tokens of other prompts.

    Raises InvalidRequest if a depth does not fit the context.
    """
    tokenizer = model.files.tokenizer
    text = "\n\n".join(str(m["content"]) for p in load_suite().prompts for m in p.messages)
    once = tokenizer.encode(text)
    longest_prompt = max(len(model.tokens(prompt.messages)) for prompt in suite.prompts)
    limit = max_context(model) - tokens - longest_prompt - _SPARE
    cases = []
    for depth in _numbers(depths, limit, "depth"):
        before = tokenizer.decode((once * (depth // len(once) + 1))[:depth])
        for prompt in suite.prompts:
            last: dict[str, Any] = prompt.messages[-1]
            content = f"{before}\n\n{last['content']}" if depth else last["content"]
            messages = [*prompt.messages[:-1], {**last, "content": content}]
            # These words are in recorded results, which `bench compare` matches by case.
            name, options = f"{prompt.id} behind {depth} tokens", Options(max_tokens=tokens)
            cases.append(Case(name, prompt.kind, messages, options, {"depth": depth}))
    return cases


def measured(
    head: Record,
    model: Model,
    options: Mapping[str, Options],
    cases: Sequence[Case],
    *,
    single: Model | None = None,
    rounds: int,
    output: Path | None,
    progress: Progress,
) -> Record:
    """Return the record that `head` begins: all cases, by contenders with these options.

    `single` is the same model with forward passes of one row, for plain decoding.
    """
    head = replace(head, **about(model))
    contenders = [Contender(name, model, settings) for name, settings in options.items()]
    if single is not None:
        contenders.insert(1, Contender(SINGLE_ROW, single, {"drafter": "none"}))
    rows: list[Row] = []
    with open_journal(output, head, progress) as measured:
        for contender in contenders:  # the work of a first request is not measured
            contender.answer(cases[0])
        for number, case in enumerate(cases, start=1):
            call = partial(measure, case, contenders, rounds=rounds, start=number)
            rows += measured(case.id, call, f"{number}/{len(cases)}")
    return replace(head, rows=rows, summary=summary(rows))


def _numbers(counts: Sequence[TokenCount], limit: int, what: str) -> list[int]:
    lengths = [max(limit, 0) if count == "max" else count for count in counts]
    for count in lengths:
        if count > limit:
            raise InvalidRequest(
                f"a {what} of {count} tokens does not fit; expected at most {limit}, or max"
            )
    return list(dict.fromkeys(lengths))
