"""A suite's prompts, turn by turn, and the turns that do not fit the context.

The prompt of a later turn has the earlier questions and plain decoding's answers to them, so all
contenders read the same tokens. A turn fits if its prompt plus `max_tokens` does. Other turns are
skipped and listed, and so are the turns after them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.verify.suite import Suite, SuitePrompt, load_suite, prompt_for
from paceline_lab.bench.journal import Measured
from paceline_lab.bench.record import Row


def chosen_prompts(path: Path | None, limit: int | None = None) -> Suite:
    """Return a suite's prompts, or `limit` of them; the hash is that of the file.

    Each kind has the same number of prompts (the first kinds have one more if needed). Of n prompts
    of a kind, prompt i of k is at floor(i n / k). Raises InvalidRequest as `load_suite` does.
    """
    suite = load_suite(path)
    if limit is None:
        return suite
    groups: dict[str, list[SuitePrompt]] = {}
    for prompt in suite.prompts:
        groups.setdefault(prompt.kind, []).append(prompt)
    in_turn = (prompt for row in zip_longest(*groups.values()) for prompt in filter(None, row))
    counts = Counter(prompt.kind for prompt in islice(in_turn, limit))
    chosen = [
        groups[kind][place * len(groups[kind]) // count]
        for kind, count in counts.items()
        for place in range(count)
    ]
    return replace(suite, prompts=chosen)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """A question, after the turns before it."""

    name: str
    """Id of the case."""
    prompt: SuitePrompt
    number: int
    """Number in its conversation, from 1."""
    messages: Sequence[dict[str, Any]]
    tokens: Sequence[int]
    """The messages in the model's chat template, encoded."""


_SPARE = 64
"""Extra tokens that an answer's text may take in the next prompt."""


class Skipped(NamedTuple):
    """A turn that was not answered."""

    case: str
    tokens: int
    """Prompt plus `max_tokens`, of this turn or of the earlier one that did not fit."""
    room: int
    """Maximum tokens of prompt and answer together."""

    def __str__(self) -> str:
        return f"{self.case} skipped: {self.tokens} tokens with its answer, {self.room} fit"


def measure_turns(
    prompts: Sequence[SuitePrompt],
    model: Model,
    *,
    room: int,
    max_tokens: int,
    warm_up: Callable[[PromptTurn], object],
    measure: Callable[[PromptTurn, int], list[Row]],
    measured: Measured,
    progress: Progress,
) -> tuple[list[Row], list[Skipped]]:
    """Return the rows of turns that fit, and the turns that do not; known rows are reused.

    `model` encodes, and its plain answers are part of later turns. `room` is the maximum tokens of
    prompt and answer together. `warm_up` is called first, with the shortest turn; `measure` with a
    turn and its number in the run, from 1; its first row has plain decoding's `token_ids`.
    `measured` is as of `open_journal`. Raises InvalidRequest if no prompt fits.
    """
    firsts = [_turn(model, prompt, 1, prompt.messages) for prompt in prompts]
    shortest = min(firsts, key=lambda turn: len(turn.tokens))
    if len(shortest.tokens) + max_tokens > room:
        raise InvalidRequest(
            f"no prompt fits: prompt and answer may have {room} tokens together; use a smaller "
            "--max-tokens, or load the model with more cache tokens"
        )
    warm_up(shortest)
    total = sum(1 + len(prompt.turns) for prompt in prompts)
    rows: list[Row] = []
    skipped: list[Skipped] = []
    place = 0
    for prompt in prompts:
        messages, size = prompt.messages, 0
        for number in range(1, len(prompt.turns) + 2):
            place += 1
            if size <= room:  # else the turns after it do not fit either
                turn = _turn(model, prompt, number, messages)
                size = len(turn.tokens) + max_tokens
            if size > room:
                skipped.append(Skipped(_name(prompt, number), size, room))
                progress.note(str(skipped[-1]))
                continue
            answered = measured(turn.name, partial(measure, turn, place), f"{place}/{total}")
            rows += answered
            if number <= len(prompt.turns):
                messages = [
                    *messages,
                    {"role": "assistant", "content": _text(model, answered[0].facts["token_ids"])},
                    {"role": "user", "content": prompt.turns[number - 1]},
                ]
    return rows, skipped


def needed_context(prompts: Sequence[SuitePrompt], model: Model, max_tokens: int) -> int:
    """Return the tokens of the longest conversation with answers of `max_tokens`."""
    sizes = []
    for prompt in prompts:
        messages = [*prompt.messages]
        for following in prompt.turns:
            messages += [
                {"role": "assistant", "content": "."},
                {"role": "user", "content": following},
            ]
        answers = max_tokens + len(prompt.turns) * (max_tokens + _SPARE)
        sizes.append(len(model.tokens(prompt_for(model.files, messages))) + answers)
    return max(sizes)


def _turn(
    model: Model, prompt: SuitePrompt, number: int, messages: Sequence[dict[str, Any]]
) -> PromptTurn:
    tokens = model.tokens(prompt_for(model.files, messages))
    return PromptTurn(_name(prompt, number), prompt, number, messages, tokens)


def _name(prompt: SuitePrompt, number: int) -> str:
    """Return the case id of a turn, which counts from 1."""
    return prompt.id if number == 1 else f"{prompt.id}, turn {number}"


def _text(model: Model, tokens: Sequence[int]) -> str:
    """Return the text of plain decoding's answer without a stop token at its end."""
    ended = bool(tokens) and tokens[-1] in model.files.stop_token_ids
    return model.files.tokenizer.continuation([*(tokens[:-1] if ended else tokens)])
