"""A model's own answers to prompts, to learn from: a file that grows answer by answer.

While it is being made it is a journal beside its name, whose first line says of which prompts,
weights and settings the answers are. A run that was killed loses the answers it was writing; the
next one goes on. The whole file has its name.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.types import FinishReason
from paceline.models import Progress
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.runtime.stream import Stream, as_they_end
from paceline.storage.files import writing
from paceline.storage.json_lines import journal_path, read_journal, resuming
from paceline.storage.validation import validated
from paceline.verify.suite import Suite, load_suite, prompt_for

LOOP_FINISH = "loop"

_LOOP = 32
"""Tokens: an answer that repeats this many tokens is in a loop and ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What answers depend on; the same for a whole file."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """Used in turn, prompt by prompt."""
    seed: int = 0
    longest_prompt: int = 1024
    """In tokens; longer prompts are skipped."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and its answer."""

    number: int
    """Of the prompt in its file, from 0."""
    prompt: list[int]
    answer: list[int]
    finish: str = ""
    """Why it ended: a `FinishReason`, or `LOOP_FINISH`."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


def make_answers(
    model: Model,
    prompts: Path,
    out: Path,
    settings: Settings,
    *,
    at_once: int,
    progress: Progress,
    drafter: str = "none",
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer the prompts of a file into `out`, except those that are answered already.

    An answer ends early when it repeats itself. Prompts of a model without a chat template are
    their text. Duplicates, and prompts that do not fit, are skipped.

    Args:
        model: with a cache for `at_once` sequences.
        prompts: JSON Lines (see `load_suite`).
        out: gets its name when every prompt is answered.
        settings: what answers depend on.
        at_once: sequences in a batch.
        progress: reports answers.
        drafter: for engines whose calls have one sequence, where drafts pay in batches too.
        stop: called after each answer; True: leave the others to a later run.

    Raises:
        InvalidRequest: a setting is out of range, a file cannot be read or written, or what is here
            has answers of another model, other prompts or other settings.
    """
    for temperature in settings.temperatures:
        check(
            {"max_tokens": settings.max_tokens, "temperature": temperature, "seed": settings.seed}
        )
    suite = load_suite(prompts)
    if out.is_file():
        return
    about = {
        "fingerprint": model.files.fingerprint,
        "prompts": suite.sha256,
        **asdict(settings),
        "temperatures": [*settings.temperatures],
    }
    prompt_ids = _prompt_tokens(model, suite, settings.longest_prompt)
    numbers: dict[int, int] = {}

    def streams(done: set[int]) -> Iterator[Stream]:
        for number, tokens in prompt_ids.items():
            if number not in done:
                options: Options = {
                    **GREEDY,
                    "drafter": drafter,
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperatures[number % len(settings.temperatures)],
                    "seed": settings.seed + number,
                }
                stream = model.stream(tokens, **options)
                numbers[id(stream)] = number
                yield stream

    with resuming(out, about) as (entries, append):
        done = {answer.number for answer in _validated(entries, out)}
        with (
            progress.task(
                f"answers of {model.files.name}", len(prompt_ids), unit="answers"
            ) as update,
            closing(as_they_end(streams({*done}), at_once, _end_loops)) as ended,
        ):
            for stream in ended:
                number, result = numbers.pop(id(stream)), stream.result
                done.add(number)
                looped = result.finish_reason == FinishReason.CANCELLED
                finish = LOOP_FINISH if looped else str(result.finish_reason)
                append(asdict(Answer(number, prompt_ids[number], result.token_ids, finish)))
                update(len(done))
                if stop():
                    break
    if len(done) == len(prompt_ids):
        with writing(out):
            _journal(out).replace(out)


def is_begun(path: Path) -> bool:
    """Whether there are answers in `path`, all or some."""
    return path.is_file() or _journal(path).is_file()


def read_answers(path: Path) -> list[Answer]:
    """The answers in `path`, all or some, in the order of their prompts.

    Raises InvalidRequest for a line that is no answer.
    """
    path = path if path.is_file() else _journal(path)
    answers = _validated(enumerate(read_journal(path)[1:], start=2), path)
    return sorted(answers, key=lambda answer: answer.number)


def _validated(entries: Iterable[tuple[int, Any]], path: Path) -> list[Answer]:
    return [validated(Answer, entry, f"line {number} of {path}") for number, entry in entries]


def _journal(path: Path) -> Path:
    journal = journal_path(path)
    assert journal is not None
    return journal


def _end_loops(stream: Stream) -> None:
    answer = stream.answer
    if not answer or len(answer) % _LOOP:
        return
    tail = answer[-_LOOP:]
    if any(answer[at : at + _LOOP] == tail for at in range(len(answer) - _LOOP)):
        stream.close()


def _prompt_tokens(model: Model, suite: Suite, longest: int) -> dict[int, list[int]]:
    """Prompt number -> token ids, without duplicates."""
    seen = set()
    prompt_ids = {}
    longest = min(longest, model.engine.context_length - 1)
    for number, prompt in enumerate(suite.prompts):
        tokens = model.tokens(prompt_for(model.files, prompt.messages))
        if len(tokens) <= longest and tuple(tokens) not in seen:
            seen.add(tuple(tokens))
            prompt_ids[number] = tokens
    return prompt_ids
