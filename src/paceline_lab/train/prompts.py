"""Generates prompts with the target itself.

A chat model also generates user messages: it continues the chat template's text before the first
user message (Magpie, arXiv 2406.08464). No other data set is needed.
"""

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles, Progress
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream, as_they_end
from paceline.storage.json_lines import appending, read_entries

LONGEST_PROMPT = 256
"""Tokens of a generated prompt at most; longer ones are usually incoherent."""

_MARK = "\u2063paceline\u2063"
_SHORTEST = 12

_MAX_UNUSED = 200
"""Truncated or duplicate prompts in a row after which generation stops."""

_SEEDS = 1_000_000_000
"""Generation seeds per `seed` of the caller."""


@dataclass(frozen=True, slots=True)
class _Entry:
    prompt: str
    seed: int


def write_prompts(
    model: Model,
    out: Path,
    *,
    count: int,
    seed: int,
    temperature: float,
    at_once: int,
    progress: Progress,
) -> int:
    """Generate prompts until `out`, a JSON Lines file, has `count` different ones.

    Prompts in the file count, so a stopped run can continue.

    Returns:
        The number of prompts in the file.

    Raises:
        InvalidRequest: the file has other content, or cannot be written or read; or the target
            generates no new ones.
        ModelError: there is no chat template, or it omits the user message.
    """
    opening = user_opening(model.files)
    entries = read_entries(out, _Entry)
    seen = {entry.prompt for entry in entries}

    def streams() -> Iterator[Stream]:
        first = max((entry.seed for entry in entries), default=seed * _SEEDS - 1) + 1
        for number in itertools.count(first):
            options: Options = {
                **GREEDY,
                "raw": True,
                "drafter": "none",
                "max_tokens": LONGEST_PROMPT,
                "temperature": temperature,
                "top_p": 0.95,
                "seed": number,
            }
            yield model.stream(opening, **options)

    label = f"prompts by {model.files.name}"
    with (
        appending(out) as append,
        progress.task(label, count, unit="prompts") as update,
        closing(as_they_end(streams(), at_once)) as ended,
    ):
        unused = 0
        while len(seen) < count:
            if unused == _MAX_UNUSED:
                raise InvalidRequest(
                    f"none of the last {_MAX_UNUSED} prompts by {model.files.name} was complete "
                    f"and different from the {len(seen)} before; raise --temperature"
                )
            unused += 1
            result = next(ended).result
            text = result.text.strip()
            complete = result.finish_reason == FinishReason.STOP
            if complete and len(text) >= _SHORTEST and text not in seen:
                unused = 0
                seen.add(text)
                append({"prompt": text, "seed": result.seed})
                update(len(seen))
    return len(seen)


def user_opening(files: ModelFiles) -> str:
    """The chat template's text before the first user message.

    Raises ModelError if there is no chat template, or it omits the user message.
    """
    text = files.template().render([{"role": "user", "content": _MARK}])
    opening, mark, _ = text.partition(_MARK)
    if not mark:
        raise ModelError(f"the chat template of {files.name} omits the user message")
    return opening
