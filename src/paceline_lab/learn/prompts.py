"""Generates prompts with the target itself.

A chat model also generates user messages: it continues the chat template's text before the first
user message (Magpie, arXiv 2406.08464). No other data set is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles, Progress
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream, as_they_end
from paceline.storage.json_lines import appending, read_entries

LONGEST_PROMPT = 256
"""Tokens of a generated prompt at most; longer ones are usually incoherent."""

TEXT = 48
"""Tokens of a prompt that is the beginning of a text."""

_MARK = "\u2063paceline\u2063"
_SHORTEST = 12

_MAX_UNUSED = 200
"""Truncated or duplicate prompts in a row after which generation stops."""

_SEEDS = 1_000_000_000
"""Generation seeds per `seed` of the caller."""


class NoNewPrompts(InvalidRequest):
    """The target generates nothing but what is there already."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Text that the target continues to a user message."""

    text: str
    """The chat template's text up to the message, and the message's first words."""
    kind: str = ""
    first_words: str = ""
    """Of the message; no space at the end."""
    before: tuple[Mapping[str, str], ...] = ()
    """The messages before it: a question of the user and its answer."""
    is_text: bool = False
    """Begin a text of a model without a chat template: a prompt is its first `TEXT` tokens."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated prompt, as a line of a file that `load_suite` reads."""

    prompt: str
    """The last user message."""
    seed: int
    kind: str = ""
    messages: tuple[dict[str, str], ...] = ()
    """All messages, if there are some before `prompt`."""

    @property
    def texts(self) -> list[str]:
        """What the user says, in order."""
        earlier = [one["content"] for one in self.messages[:-1] if one["role"] == "user"]
        return [*earlier, self.prompt]


def write_prompts(
    model: Model,
    out: Path,
    *,
    count: int,
    seed: int,
    temperature: float,
    at_once: int,
    progress: Progress,
    openings: Sequence[Opening],
    accepts: Callable[[Generated], bool] = lambda _: True,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Generate prompts until `out`, a JSON Lines file, has `count` different ones.

    Prompts in the file count, so a stopped run can continue.

    Args:
        model: the target, with a cache for `at_once` sequences.
        out: the file.
        count: prompts in the file at the end.
        seed: another one gives other prompts.
        temperature: of the prompts.
        at_once: sequences in a batch.
        progress: reports prompts.
        openings: what prompts continue, in turn.
        accepts: called with each complete prompt that is new; False: it is not written.
        stop: called after each; True: end with fewer.

    Returns:
        The number of prompts in the file.

    Raises:
        InvalidRequest: the file has other content, or cannot be written or read.
        NoNewPrompts: the target generates no new ones.
    """
    entries = read_entries(out, Generated)
    seen = {entry.prompt for entry in entries}

    def opening_of(number: int) -> Opening:
        return openings[number % len(openings)]

    def streams() -> Iterator[Stream]:
        first = max((entry.seed for entry in entries), default=seed * _SEEDS - 1) + 1
        for number in itertools.count(first):
            opening = opening_of(number)
            options: Options = {
                **GREEDY,
                "raw": True,
                "drafter": "none",
                "max_tokens": TEXT if opening.is_text else LONGEST_PROMPT,
                "temperature": temperature,
                "top_p": 0.95,
                "seed": number,
            }
            yield model.stream(opening.text, **options)

    label = f"prompts by {model.files.name}"
    with (
        appending(out) as append,
        progress.task(label, count, unit="prompts") as update,
        closing(as_they_end(streams(), at_once)) as ended,
    ):
        unused = 0
        while len(seen) < count and not stop():
            if unused == _MAX_UNUSED:
                raise NoNewPrompts(
                    f"none of the last {_MAX_UNUSED} prompts by {model.files.name} was complete "
                    f"and different from the {len(seen)} before"
                )
            unused += 1
            result = next(ended).result
            opening = opening_of(result.seed)
            prompt = _generated(opening, result.text, result.seed)
            complete = opening.is_text or result.finish_reason == FinishReason.STOP
            is_new = len(prompt.prompt) >= _SHORTEST and prompt.prompt not in seen
            if complete and is_new and accepts(prompt):
                unused = 0
                seen.add(prompt.prompt)
                append(
                    {key: value for key, value in asdict(prompt).items() if value not in ("", ())}
                )
                update(len(seen))
    return len(seen)


def user_opening(files: ModelFiles, before: Sequence[Mapping[str, Any]] = ()) -> str:
    """The chat template's text before a user message, after the messages `before`.

    Raises ModelError if there is no chat template, or it omits the user message.
    """
    text = files.template().render([*before, {"role": "user", "content": _MARK}])
    opening, mark, _ = text.partition(_MARK)
    if not mark:
        raise ModelError(f"the chat template of {files.name} omits the user message")
    return opening


def _generated(opening: Opening, text: str, seed: int) -> Generated:
    prompt = f"{opening.first_words}{text}".strip()
    messages: tuple[dict[str, str], ...] = ()
    if opening.before:
        messages = (*map(dict, opening.before), {"role": "user", "content": prompt})
    return Generated(prompt, seed, opening.kind, messages)
