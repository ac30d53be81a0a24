"""Prompts that the target makes up itself, for when there are none.

A model trained on conversations can also write the user's part: given the template up to where the
user speaks, it goes on with a question (Magpie, arXiv 2406.08464). Nobody else's text is needed,
and the questions are of the kind that the model knows.
"""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest, ModelError
from paceline.models import Progress
from paceline.models.files import ModelFiles
from paceline.runtime.loop import as_they_end
from paceline.runtime.model import Model
from paceline.runtime.options import GREEDY, Options
from paceline.runtime.stream import Stream
from paceline.storage.json_lines import appending, read_journal

LONGEST_PROMPT = 256
"""Tokens a made-up prompt may have; longer ones have usually lost their way."""

_MARK = "\u2063paceline\u2063"
_SHORTEST = 12

_IN_VAIN = 200
"""So many in a row that are broken off or known already, and there will be nothing new."""

_SEEDS = 1_000_000_000
"""Seeds that belong to one `seed` of the caller's."""


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
    """Let the target write `count` different prompts into `out`, one JSON object a line.

    What is in the file already stays and counts, so a stopped run goes on where it was.

    Returns:
        How many prompts the file has.

    Raises:
        InvalidRequest: the file has other content, or cannot be written or read; or the target
            makes up nothing new.
        ModelError: the chat template has no place where a user speaks.
    """
    opening = user_opening(model.files)
    here = read_journal(out, {"prompt": str, "seed": int})
    seen = {entry["prompt"] for entry in here}

    def streams() -> Iterator[Stream]:
        first = max((entry["seed"] for entry in here), default=seed * _SEEDS - 1) + 1
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

    label = f"prompts that {model.files.name} writes"
    with (
        appending(out) as append,
        progress.task(label, count, unit="prompts") as reach,
        closing(as_they_end(streams(), at_once)) as ended,
    ):
        in_vain = 0
        while len(seen) < count:
            if in_vain == _IN_VAIN:
                raise InvalidRequest(
                    f"{model.files.name} makes up nothing new: none of the last {_IN_VAIN} prompts "
                    f"was whole and different from the {len(seen)} there are; raise --temperature"
                )
            in_vain += 1
            result = next(ended).result
            text = result.text.strip()
            whole = result.finish_reason == FinishReason.STOP
            if whole and len(text) >= _SHORTEST and text not in seen:
                in_vain = 0
                seen.add(text)
                append({"prompt": text, "seed": result.seed})
                reach(len(seen))
    return len(seen)


def user_opening(files: ModelFiles) -> str:
    """The chat template's text up to where the user's first words stand.

    Raises:
        ModelError: there is no chat template, or it does not show the user's words.
    """
    text = files.template().render([{"role": "user", "content": _MARK}])
    opening, found, _ = text.partition(_MARK)
    if not found:
        raise ModelError(f"the chat template of {files.name} does not show what the user says")
    return opening
