"""Makes prompts and answers, round by round, until time or tokens are used up."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import InvalidRequest, ModelError
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.verify.suite import load_suite
from paceline_lab.learn.answers import Settings, make_answers
from paceline_lab.learn.budget import Budget
from paceline_lab.learn.folder import LearntFolder, Round
from paceline_lab.learn.openings import WAY_OUT, follow_ups, mixed, openings
from paceline_lab.learn.prompts import NoNewPrompts, Opening, write_prompts
from paceline_lab.learn.variety import Variety

AT_ONCE = 32
"""Sequences of a call."""

MAX_TOKENS = 256
"""Of an answer."""

LONGEST = 768
"""Tokens of a prompt; a second turn has a question and an answer before it."""

_SLOTS = 512
"""KV slots for each sequence of a call: few need more, and they wait until others have ended."""

_ROUND = 64, 512
"""Prompts of the first round, and at most: each has twice those before."""

_TEMPERATURE = 1.0
"""Of prompts."""

_TEMPERATURES = {True: (0.0,), False: (0.0, 0.8)}
"""Whether a model has a chat template -> temperatures of answers, in turn.

Without one, greedy text goes round in circles: 53 of 65 answers of Gemma 3 270M (2026-11-26)."""

_SHARE = 3
"""First turns for each second turn."""

_CHATS = 64
"""Answers of a round that get a second turn in the next one."""

_CHAT_TOKENS = 400
"""Tokens of a question and its answer at most, before a second turn."""


class DataMaker:
    """Makes the data of one model."""

    def __init__(
        self,
        model: Model,
        folder: LearntFolder,
        variety: Variety,
        *,
        budget: Budget,
        share: float,
        progress: Progress,
    ) -> None:
        """Prepare; `model` has a cache of `cache_tokens`, `share` is that of the time."""
        self._model, self._folder, self._variety = model, folder, variety
        self._budget, self._share, self._progress = budget, share, progress
        self._over = budget.stop_after(share)
        # Calls of llama.cpp's libraries have one sequence, so that rows of drafts are as cheap as
        # in a single answer; in calls of many sequences each row costs what a token does.
        self._drafter = "auto" if model.engine.name == "llamacpp" else "none"

    def run(self, files: Sequence[Path], free: Sequence[Opening] = ()) -> None:
        """Answer prompts of the user, then those of the model.

        Its prompts continue `free` in turn; none: those of `openings`.

        Raises:
            InvalidRequest: a file cannot be read or written.
            ModelError: the model cannot write prompts, and none are given.
        """
        for path in files:
            self._answer(self._folder.user_round(path))
        try:
            free = free or openings(self._model.files)
        except ModelError:
            if not files:
                raise
            return
        while not self._enough():
            number, part = self._folder.next_round()
            if not part.begun and not self._ask(number, part, free):
                return
            self._answer(part)

    def _enough(self) -> bool:
        most = self._budget.tokens
        return self._over() or (most is not None and self._folder.tokens() >= most)

    def _ask(self, number: int, part: Round, free: Sequence[Opening]) -> bool:
        """Let the model write the prompts of a round; False: it writes no new ones."""
        halfway = self._budget.over(0.5, self._share)  # the rest is to answer them
        mix = mixed(free, self._second_turns(number), _SHARE)
        least, most = _ROUND
        count = min(least << min(number, 16), most)
        if self._budget.tokens is not None:
            count = min(count, max(self._budget.tokens // MAX_TOKENS, 8))
        try:
            written = write_prompts(
                self._model,
                part.prompts,
                count=count,
                seed=number,
                temperature=_TEMPERATURE,
                at_once=AT_ONCE,
                progress=self._progress,
                openings=mix,
                accepts=self._variety.accepts,
                stop=lambda: halfway() >= 1,
            )
        except NoNewPrompts as error:
            if not len(self._variety):
                raise InvalidRequest(
                    f"{self._model.files.name} writes no prompt to its end; {WAY_OUT}"
                ) from error
            self._progress.say(f"{error}; learning from what there is")
            return False
        return written > 0

    def _answer(self, part: Round) -> None:
        temperatures = _TEMPERATURES[self._model.files.chat_template is not None]
        settings = Settings(MAX_TOKENS, temperatures, longest_prompt=LONGEST)
        if not part.complete and not self._over():
            make_answers(
                self._model,
                part.prompts,
                part.answers,
                settings,
                at_once=AT_ONCE,
                progress=self._progress,
                drafter=self._drafter,
                stop=self._over,
            )

    def _second_turns(self, number: int) -> list[Opening]:
        """Openings after questions of the round before, and their answers."""
        files = self._model.files
        if number == 0 or files.chat_template is None:
            return []
        part = self._folder.round(number - 1)
        prompts = load_suite(part.prompts).prompts
        chats = []
        for answer in part.answered:
            messages = prompts[answer.number].messages
            is_short = answer.finish == "stop" and len(answer.tokens) <= _CHAT_TOKENS
            if is_short and len(messages) == 1:
                text = self._model.detokenize(answer.answer)
                chats.append((str(messages[0]["content"]), text))
        return follow_ups(files, chats[:_CHATS])


def cache_tokens() -> int:
    """KV slots for `AT_ONCE` sequences."""
    return AT_ONCE * _SLOTS
