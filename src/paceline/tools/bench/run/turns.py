"""A suite's prompts as cases, turn by turn, and those that do not fit the context.

The prompt of a later turn holds the questions before it and plain decoding's answers to them, so
that all variants read the same tokens. A turn fits when its prompt and `max_tokens` do; one that
does not is skipped and named, and so is what would follow it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.tools.bench.ab_test import Case, Variant, measure, progress_line, warm_up
from paceline.tools.bench.journal import Journal
from paceline.tools.bench.record import Row
from paceline.tools.bench.sweep.cases import longest
from paceline.tools.suite import SuitePrompt


class Skipped(NamedTuple):
    """A turn that was not asked."""

    case: str
    tokens: int
    """Of its prompt, or of the one before it that did not fit, and the longest answer."""
    room: int
    """Tokens that prompt and answer may have together."""

    def __str__(self) -> str:
        return f"{self.case} skipped: {self.tokens} tokens with its answer, {self.room} fit"


class Asked(NamedTuple):
    """What was measured, and what was not."""

    rows: list[Row]
    skipped: list[Skipped]


def check_names(prompts: Sequence[SuitePrompt]) -> None:
    """Raise InvalidRequest where two prompts have the same id: their rows could not be told apart.

    >>> check_names(load_suite(path).prompts)
    """
    seen = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InvalidRequest(f"two prompts have the id {prompt.id!r}; expected ids that differ")
        seen.add(prompt.id)


def ask(
    prompts: Sequence[SuitePrompt],
    variants: Sequence[Variant],
    *,
    max_tokens: int,
    rounds: int,
    kept: Journal,
    progress: Progress,
) -> Asked:
    """Let all variants answer each turn, the first of them being plain decoding.

    Raises:
        InvalidRequest: not one prompt fits the context.
    """
    room = min(longest(each.model) for each in variants)
    plain = variants[0]
    first = next(
        (case for prompt in prompts if _size(case := _first(prompt, max_tokens), plain) <= room),
        None,
    )
    if first is None:
        raise InvalidRequest(
            f"not one prompt fits: prompt and answer may have {room} tokens together; ask for "
            "shorter answers, or load the model with more cache tokens"
        )
    warm_up(variants, first)
    total = sum(1 + len(prompt.turns) for prompt in prompts)
    found = Asked([], [])
    for prompt in prompts:
        case = _first(prompt, max_tokens)
        for turn, following in enumerate([*prompt.turns, None], start=1):
            if (size := _size(case, plain)) > room:
                for name in _names(prompt, turn):
                    found.skipped.append(Skipped(name, size, room))
                    progress.say(str(found.skipped[-1]))
                break
            number = len(found.rows) // len(variants) + len(found.skipped) + 1
            known = kept.get(case.id)
            rows = known or kept.add(case.id, measure(case, variants, rounds=rounds, start=number))
            found.rows.extend(rows)
            progress.say(progress_line(rows, f"{number}/{total}", before=known is not None))
            if following is not None:
                case = _next(case, prompt, turn, _answer(plain, rows), following)
    return found


def _first(prompt: SuitePrompt, max_tokens: int) -> Case:
    about = {"category": prompt.category, "turn": 1} if prompt.category else {}
    return Case(
        prompt.id,
        prompt.kind,
        prompt.messages,
        {"max_tokens": max_tokens},
        facts=about,
        keep_prompt=not prompt.category,
    )


def _next(case: Case, prompt: SuitePrompt, turn: int, answer: str, question: str) -> Case:
    """The case of the turn after `turn`."""
    before: Any = case.prompt
    messages = [
        *before,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
    (name, *_) = _names(prompt, turn + 1)
    facts = {**case.facts, "turn": turn + 1}
    return Case(name, case.kind, messages, case.options, facts=facts, keep_prompt=False)


def _names(prompt: SuitePrompt, turn: int) -> Iterator[str]:
    """What a question's turns from this one on are called."""
    for number in range(turn, len(prompt.turns) + 2):
        yield prompt.id if number == 1 else f"{prompt.id}, turn {number}"


def _size(case: Case, variant: Variant) -> int:
    """Tokens of prompt and longest answer."""
    return len(variant.model.tokens(case.prompt)) + (case.options["max_tokens"] or 0)


def _answer(plain: Variant, rows: Sequence[Row]) -> str:
    """The text of plain decoding's answer, an ending stop token left out."""
    tokens: list[int] = rows[0].facts["token_ids"]
    files = plain.model.files
    ended = tokens[-1] in files.stop_token_ids
    return files.tokenizer().decode(tokens[:-1] if ended else tokens)
