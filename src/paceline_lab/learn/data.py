"""Generates the data for a table: prompts that the model writes, and its answers to them.

A chat model also writes user messages: it continues the chat template's text before one (Magpie,
arXiv 2406.08464). No other data set is needed. Rounds of prompts and answers alternate until the
time or token limit is reached; an answer is saved in the folder when it has ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from time import monotonic

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest, ModelError
from paceline.models import Progress
from paceline.options import GREEDY, Options
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.model import Model
from paceline.runtime.prompt import Prompt
from paceline.runtime.stream import results_of
from paceline.storage.journals import Append, appending
from paceline.verify.suite import Suite, prompt_for
from paceline_lab.learn.folder import ANSWERS, LearnedFolder, TrainingAnswer
from paceline_lab.learn.openings import WAY_OUT, Opening, follow_ups, mixed, openings
from paceline_lab.learn.variety import Variety

AT_ONCE = 32
"""Sequences per forward pass."""

CACHE_TOKENS = AT_ONCE * 512
"""KV slots: few sequences need more than 512, and those wait until others have ended."""

MAX_TOKENS = 256
"""Maximum tokens of an answer."""

LONGEST_PROMPT = 256
"""Maximum tokens of a written prompt; longer ones are usually incoherent."""

_TEXT = 48
"""Tokens of a prompt for a model without a chat template: the beginning of a text."""

_LONGEST = 768
"""Maximum tokens of a prompt; a second turn has a question and an answer before it."""

_ROUND = 128
"""Prompts to write before they are answered."""

_MAX_UNUSED = 200
"""Consecutive truncated or duplicate prompts that end the writing of prompts."""

_SHORTEST = 12
"""Minimum characters of a prompt."""

_TEMPERATURES = {True: (0.0,), False: (0.0, 0.8)}
"""Whether a model has a chat template -> temperatures of answers, in turn.

Without a template, greedy text repeats itself: 53 of 65 answers of Gemma 3 270M (2026-11-26)."""

_LOOP = {"max_pattern_size": 128, "min_count": 4, "min_tokens": 64}
"""`repetition_detection` of answers. The limits are smaller than those that end a user's answer,
because dropping an answer costs nothing."""

_SHARE = 3
"""First turns per second turn."""

_CHATS = 64
"""Answers of a round that get a second turn in the next one."""

_CHAT_TOKENS = 400
"""Maximum tokens of a question and its answer, before a second turn."""


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    texts: list[str]
    """The user's messages, in order."""
    prompt: Prompt
    kind: str = ""
    seed: int | None = None
    """Seed of the prompt's generation; None: the user gave the prompt."""


def variety_of(folder: LearnedFolder, suites: Iterable[Suite]) -> Variety:
    """Return the variety of earlier runs' prompts, which excludes those of suites."""
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    first = [str(one.get("content", "")) for prompt in prompts for one in prompt.messages]
    variety = Variety([*first, *(turn for prompt in prompts for turn in prompt.turns)])
    for answer in folder.answers():
        if answer.seed is not None:
            variety.add(answer.texts[-1], answer.kind)
    return variety


class DataMaker:
    """Generates the data of one model, which has `CACHE_TOKENS` and `AT_ONCE` sequences."""

    def __init__(
        self,
        model: Model,
        folder: LearnedFolder,
        variety: Variety,
        *,
        seconds: float,
        tokens: int | None = None,
        progress: Progress,
    ) -> None:
        """Generate answers for the next `seconds`, or until the folder has `tokens` of them."""
        self._model, self._folder, self._variety = model, folder, variety
        self._tokens, self._progress = tokens, progress
        self._end = monotonic() + seconds
        # llama.cpp runs one sequence per forward pass, so rows of drafts are as cheap as in a
        # single answer; in passes of many sequences each row costs as much as a token.
        self._drafter = "auto" if model.engine.name == "llamacpp" else "none"
        earlier = folder.answers()
        self._known = {tuple(answer.prompt) for answer in earlier}
        self._made = sum(len(answer.answer) for answer in earlier)
        self._seed = max((answer.seed or 0 for answer in earlier), default=0)

    def run(self, suites: Iterable[Suite], free: Sequence[Opening] = ()) -> None:
        """Answer the prompts of suites, then those that the model writes.

        The model's prompts continue `free` in turn, by default the `openings`.

        Raises:
            InvalidRequest: the file of answers cannot be written.
            ModelError: the model cannot write prompts, and no suites are given.
        """
        model, given = self._model, False
        with appending(self._folder.path / ANSWERS) as append:
            for suite in suites:
                given = True
                self._answer([*_prompts_of(model, suite)], append)
            try:
                free = free or openings(model.files)
            except ModelError:
                if not given:
                    raise
                return
            chats: Sequence[TrainingAnswer] = ()
            while not self._enough():
                prompts = self._write_prompts(mixed(free, self._second_turns(chats), _SHARE))
                if not prompts:
                    return
                chats = self._answer(prompts, append)

    def _enough(self) -> bool:
        return monotonic() >= self._end or (self._tokens is not None and self._made >= self._tokens)

    def _write_prompts(self, openings: Sequence[Opening]) -> list[WrittenPrompt]:
        """Return the prompts of a round; none if the model writes nothing new.

        Raises InvalidRequest if the model never wrote a prompt.
        """
        count = _ROUND
        if self._tokens is not None:
            count = min(count, max((self._tokens - self._made) // MAX_TOKENS, 8))
        halfway = (monotonic() + self._end) / 2  # the rest is for the answers
        opened: dict[int, Opening] = {}

        def requests() -> Iterator[BatchRequest]:
            while True:
                self._seed += 1
                opening = opened[self._seed] = openings[self._seed % len(openings)]
                options: Options = {
                    **GREEDY,
                    "raw": True,
                    "drafter": "none",
                    "max_tokens": _TEXT if opening.is_text else LONGEST_PROMPT,
                    "temperature": 1.0,
                    "top_p": 0.95,
                    "seed": self._seed,
                }
                yield self._model._batch_request(opening.text, options)

        prompts: list[WrittenPrompt] = []
        unused = 0
        name = self._model.files.name
        with (
            self._progress.task(f"prompts by {name}", count, unit="prompts") as update,
            closing(results_of(self._model._submit, requests(), "prompt", AT_ONCE)) as ended,
        ):
            while len(prompts) < count and monotonic() < halfway and unused < _MAX_UNUSED:
                _, result = next(ended)
                opening = opened.pop(result.seed)
                prompt = self._prompt(opening, result.text, result.seed)
                unused += 1
                complete = opening.is_text or result.finish_reason == FinishReason.STOP
                text = prompt.texts[-1]
                is_prompt = complete and len(text) >= _SHORTEST
                if is_prompt and self._variety.accepts(text, prompt.kind):
                    unused = 0
                    prompts.append(prompt)
                    update(len(prompts))
        if unused == _MAX_UNUSED:
            if not len(self._variety):
                raise InvalidRequest(f"{name} writes no prompt to its end; {WAY_OUT}")
            self._progress.note(
                f"none of the last {_MAX_UNUSED} prompts by {name} was complete and new; learning "
                "from what there is"
            )
        return prompts

    def _prompt(self, opening: Opening, written: str, seed: int) -> WrittenPrompt:
        text = f"{opening.first_words}{written}".strip()
        message = {"role": "user", "content": text}
        texts = [one["content"] for one in opening.before if one["role"] == "user"]
        tokens = prompt_for(self._model.files, [*map(dict, opening.before), message])
        return WrittenPrompt([*texts, text], tokens, opening.kind, seed)

    def _answer(self, prompts: Sequence[WrittenPrompt], append: Append) -> list[TrainingAnswer]:
        """Answer prompts that are new and short enough, until the time is over."""
        model = self._model
        longest = min(_LONGEST, model.engine.context_length - 1)
        temperatures = _TEMPERATURES[model.files.chat_template is not None]
        asked: dict[int, tuple[WrittenPrompt, list[int]]] = {}

        def requests() -> Iterator[BatchRequest]:
            for prompt in prompts:
                tokens = model.tokens(prompt.prompt)
                if len(tokens) > longest or tuple(tokens) in self._known:
                    continue
                number = len(self._known)
                self._known.add(tuple(tokens))
                options: Options = {
                    **GREEDY,
                    "drafter": self._drafter,
                    "max_tokens": MAX_TOKENS,
                    "temperature": temperatures[number % len(temperatures)],
                    "seed": number,
                    "repetition_detection": _LOOP,
                }
                asked[number] = prompt, tokens
                yield model._batch_request(tokens, options)

        answers: list[TrainingAnswer] = []
        label = f"answers of {model.files.name}"
        with (
            self._progress.task(label, len(prompts), unit="answers") as update,
            closing(results_of(model._submit, requests(), "prompt", AT_ONCE)) as ended,
        ):
            for _, result in ended:
                prompt, tokens = asked.pop(result.seed)
                finish = str(result.finish_reason)
                answer = TrainingAnswer(
                    prompt.texts, tokens, result.token_ids, finish, prompt.kind, prompt.seed
                )
                append(asdict(answer))
                answers.append(answer)
                self._made += len(answer.answer)
                update(len(answers))
                if monotonic() >= self._end:
                    break
        return answers

    def _second_turns(self, answers: Sequence[TrainingAnswer]) -> list[Opening]:
        """Return openings after the short answers to first questions."""
        if self._model.files.chat_template is None:
            return []
        chats = [
            (answer.texts[0], self._model.detokenize(answer.answer))
            for answer in answers
            if answer.finish == FinishReason.STOP
            and len(answer.texts) == 1
            and len(answer.tokens) <= _CHAT_TOKENS
        ]
        return follow_ups(self._model.files, chats[:_CHATS])


def _prompts_of(model: Model, suite: Suite) -> Iterator[WrittenPrompt]:
    for prompt in suite.prompts:
        texts = [str(m["content"]) for m in prompt.messages if m.get("role") == "user"]
        yield WrittenPrompt(texts or [""], prompt_for(model.files, prompt.messages), prompt.kind)
