"""Questions of a suite's prompts, turn by turn, for all contenders.

The prompt of a later turn has the questions before it and the answers of paceline's plain decoding,
so all read the same tokens. A turn that does not fit is skipped, and so are those after it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.verify.suite import SuitePrompt, prompt_for
from paceline_lab.bench.journal import Journal
from paceline_lab.bench.run.turns import Measured, Skipped, turn_names
from paceline_lab.peers.base import Question
from paceline_lab.peers.measure import PeerContender, measure

_SPARE = 64
"""Tokens more than an answer had that its text may be in the next prompt."""


def first_questions(prompts: Sequence[SuitePrompt], model: Model) -> list[Question]:
    """The first turn of every prompt."""
    return [_question(prompt, 1, prompt.messages, model) for prompt in prompts]


def needed_context(prompts: Sequence[SuitePrompt], model: Model, max_tokens: int) -> int:
    """Tokens of the longest conversation with answers of `max_tokens`."""
    sizes = []
    for prompt in prompts:
        messages = [*prompt.messages]
        for following in prompt.turns:
            messages += [_says("assistant", "."), _says("user", following)]
        answers = max_tokens + len(prompt.turns) * (max_tokens + _SPARE)
        sizes.append(len(_question(prompt, 1, messages, model).tokens) + answers)
    return max(sizes)


def measure_turns(
    prompts: Sequence[SuitePrompt],
    contenders: Sequence[PeerContender],
    *,
    model: Model,
    room: int,
    rounds: int,
    max_tokens: int,
    journal: Journal,
    progress: Progress,
) -> Measured:
    """Answer every turn with all contenders; rows in the journal are not measured again.

    `room` is the most tokens of prompt and answer together. The first contender is plain decoding
    of `model`.

    Raises:
        InvalidRequest: no prompt fits.
        ModelError: a peer fails.
    """
    measured = Measured([], [])
    total = sum(1 + len(prompt.turns) for prompt in prompts)
    number = 0
    for prompt in prompts:
        messages = [*prompt.messages]
        for turn, following in enumerate([*prompt.turns, None], start=1):
            question = _question(prompt, turn, messages, model)
            if (size := len(question.tokens) + max_tokens) > room:
                for name in turn_names(prompt, turn):
                    number += 1
                    measured.skipped.append(Skipped(name, size, room))
                    progress.say(str(measured.skipped[-1]))
                break
            number += 1
            call = partial(
                measure, question, contenders, rounds=rounds, max_tokens=max_tokens, start=number
            )
            rows = journal.get_or_measure(question.id, call, progress, f"{number}/{total}")
            measured.rows.extend(rows)
            if following is not None:
                text = model.files.tokenizer().continuation(rows[0].facts["token_ids"])
                messages += [_says("assistant", text), _says("user", following)]
    if not measured.rows:
        raise InvalidRequest(
            f"no prompt fits: prompt and answer may have {room} tokens together; use a smaller "
            "--max-tokens, or load the model with more cache tokens"
        )
    return measured


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _question(
    prompt: SuitePrompt, turn: int, messages: Sequence[dict[str, Any]], model: Model
) -> Question:
    (name, *_) = turn_names(prompt, turn)
    tokens = model.tokens(prompt_for(model.files, messages))
    return Question(name, prompt.kind, [*messages], tokens)
