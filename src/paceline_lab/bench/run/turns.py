"""Cases of a suite's prompts, turn by turn, and the turns that do not fit the context.

The prompt of a later turn has the questions before it and plain decoding's answers to them, so all
contenders read the same tokens. A turn fits if its prompt plus `max_tokens` does. One that does not
is skipped and listed, and so are the turns after it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.verify.suite import SuitePrompt, prompt_for
from paceline_lab.bench.ab_test import Case, Contender, max_context, measure, warm_up
from paceline_lab.bench.journal import Journal
from paceline_lab.bench.record import Row


class Skipped(NamedTuple):
    """A turn that was not answered."""

    case: str
    tokens: int
    """Prompt plus `max_tokens`, of this turn or of the one before it that did not fit."""
    room: int
    """Most tokens of prompt and answer together."""

    def __str__(self) -> str:
        return f"{self.case} skipped: {self.tokens} tokens with its answer, {self.room} fit"


class Measured(NamedTuple):
    """Rows of the turns that fit, and the turns that do not."""

    rows: list[Row]
    skipped: list[Skipped]


def check_names(prompts: Sequence[SuitePrompt]) -> None:
    """Raise InvalidRequest if two prompts have the same id: ids identify the rows.

    >>> check_names(load_suite(path).prompts)
    """
    seen = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InvalidRequest(f"two prompts have the id {prompt.id!r}; expected ids that differ")
        seen.add(prompt.id)


def measure_turns(
    prompts: Sequence[SuitePrompt],
    contenders: Sequence[Contender],
    *,
    options: Options,
    rounds: int,
    journal: Journal,
    progress: Progress,
) -> Measured:
    """Answer every turn with all contenders, the first of which is plain decoding.

    `options` are those of all contenders, with a `max_tokens`. Raises InvalidRequest if no prompt
    fits the context.
    """
    room = min(max_context(contender.model) for contender in contenders)
    plain = contenders[0]
    first_turns = [_first_turn(plain.model, prompt, options) for prompt in prompts]
    fitting = next((case for case in first_turns if _size(case, plain) <= room), None)
    if fitting is None:
        raise InvalidRequest(
            f"no prompt fits: prompt and answer may have {room} tokens together; use a smaller "
            "--max-tokens, or load the model with more cache tokens"
        )
    warm_up(contenders, fitting)
    total = sum(1 + len(prompt.turns) for prompt in prompts)
    measured = Measured([], [])
    for prompt, first in zip(prompts, first_turns, strict=True):
        case, messages = first, [*prompt.messages]
        for turn, following in enumerate([*prompt.turns, None], start=1):
            if (size := _size(case, plain)) > room:
                for name in turn_names(prompt, turn):
                    measured.skipped.append(Skipped(name, size, room))
                    progress.say(str(measured.skipped[-1]))
                break
            number = len(measured.rows) // len(contenders) + len(measured.skipped) + 1
            call = partial(measure, case, contenders, rounds=rounds, start=number)
            rows = journal.get_or_measure(case.id, call, progress, f"{number}/{total}")
            measured.rows.extend(rows)
            if following is not None:
                messages += [
                    {"role": "assistant", "content": _answer(plain, rows)},
                    {"role": "user", "content": following},
                ]
                (name, *_) = turn_names(prompt, turn + 1)
                case = Case(
                    name,
                    case.kind,
                    prompt_for(plain.model.files, messages),
                    options,
                    facts={**case.facts, "turn": turn + 1},
                    keep_prompt=False,
                )
    return measured


def _first_turn(model: Model, prompt: SuitePrompt, options: Options) -> Case:
    return Case(
        prompt.id,
        prompt.kind,
        prompt_for(model.files, prompt.messages),
        options,
        facts={"category": prompt.category, "turn": 1} if prompt.category else {},
        keep_prompt=not prompt.category,
    )


def turn_names(prompt: SuitePrompt, turn: int) -> Iterator[str]:
    """Case ids of a prompt's turns from `turn` on, which counts from 1."""
    for number in range(turn, len(prompt.turns) + 2):
        yield prompt.id if number == 1 else f"{prompt.id}, turn {number}"


def _size(case: Case, contender: Contender) -> int:
    """Tokens of the prompt plus `max_tokens`."""
    return len(contender.model.tokens(case.prompt)) + (case.options["max_tokens"] or 0)


def _answer(plain: Contender, rows: Sequence[Row]) -> str:
    """Text of plain decoding's answer without a stop token at its end."""
    tokens: list[int] = rows[0].facts["token_ids"]
    files = plain.model.files
    ended = tokens[-1] in files.stop_token_ids
    return files.tokenizer().continuation(tokens[:-1] if ended else tokens)
