"""What a sweep asks: prompts of a length, and questions behind so much other text.

Two families. By length: one dense text of code, tiled and cut to the token, without a chat template
(the prompt-length sweep of the Phi-4-mini experiment). By depth: a suite's questions, with other
prompts' text in front of them (the context depths of the DFlash-on-MLX experiment).
"""

from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from paceline.runtime.options import Options
from paceline.tools.bench.ab_test import Case
from paceline.tools.suite import Suite, load_suite

Place = int | Literal["max"]
"""A number of tokens, or as many as the model holds."""

LENGTHS = (100, 200, 372, 800)
"""Tokens of the experiment's prompts."""

_IN_PACKAGE = "dense_code.txt"
_IN_CHECKOUT = Path(__file__).parents[5] / "benchmarks" / "dense_code.txt"

_SPARE = 64
"""Tokens that a text may have more when it has been cut, decoded and encoded with a question."""


def dense_text(path: Path | None = None) -> tuple[str, str]:
    """A text to tile, paceline's own where none is named, and its hash.

    Raises:
        InvalidRequest: it cannot be read, or is empty.
    """
    packaged = files("paceline.tools.bench").joinpath(_IN_PACKAGE)
    try:
        if path is not None:
            content = path.read_bytes()
        else:
            content = packaged.read_bytes() if packaged.is_file() else _IN_CHECKOUT.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {error.filename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text: {error.reason}") from error
    if not text.strip():
        raise InvalidRequest(f"{path} is empty; expected a text to tile")
    return text, sha256(content).hexdigest()


def lengths_for(limit: int) -> list[Place]:
    """The experiment's lengths, then twice as many again and again, and the most there can be."""
    lengths: list[Place] = [length for length in LENGTHS if length < limit]
    further = 2 * LENGTHS[-1]
    while further < limit:
        lengths.append(further)
        further *= 2
    return [*lengths, "max"]


def length_cases(
    model: Model, text: str, lengths: Sequence[Place], temperatures: Sequence[Options], tokens: int
) -> list[Case]:
    """The text, tiled and cut, for each length and temperature; answers of just so many tokens.

    Raises:
        InvalidRequest: a length is more than the model holds.
    """
    limit = longest(model) - tokens
    if limit < 1:
        raise InvalidRequest(
            f"{model.files.name} holds {longest(model)} tokens; no prompt is left beside an answer "
            f"of {tokens}"
        )
    tiled = model.tokens(text, raw=True)
    once = model.files.tokenizer().encode(text)
    cases = []
    for length in _numbers(lengths or lengths_for(limit), limit, "prompt"):
        while len(tiled) < length:
            tiled += once
        for sampling in temperatures:
            options: Options = {**sampling, "max_tokens": tokens, "ignore_eos": True}
            at = {"prompt_tokens": length, **_temperature(sampling)}
            name = f"code, {length} tokens{_suffix(sampling)}"
            cases.append(Case(name, "code", tiled[:length], options, at))
    return cases


def depth_cases(
    model: Model,
    suite: Suite,
    depths: Sequence[Place],
    temperatures: Sequence[Options],
    tokens: int,
) -> list[Case]:
    """The suite's prompts behind so many tokens of other prompts' text (about so many).

    Raises:
        InvalidRequest: a depth is more than the model holds.
    """
    tokenizer = model.files.tokenizer()
    text = "\n\n".join(str(m["content"]) for p in load_suite().prompts for m in p.messages)
    once = tokenizer.encode(text)
    longest_prompt = max(len(model.tokens(prompt.messages)) for prompt in suite.prompts)
    limit = longest(model) - tokens - longest_prompt - _SPARE
    cases = []
    for depth in _numbers(depths, limit, "depth"):
        before = tokenizer.decode((once * (depth // len(once) + 1))[:depth])
        for prompt in suite.prompts:
            last: dict[str, Any] = prompt.messages[-1]
            content = f"{before}\n\n{last['content']}" if depth else last["content"]
            messages = [*prompt.messages[:-1], {**last, "content": content}]
            for sampling in temperatures:
                options: Options = {**sampling, "max_tokens": tokens}
                at = {"depth": depth, **_temperature(sampling)}
                name = f"{prompt.id} behind {depth} tokens{_suffix(sampling)}"
                cases.append(Case(name, prompt.kind, messages, options, at))
    return cases


def longest(model: Model) -> int:
    """Tokens that prompt and answer may have together."""
    return min(model.engine.context_length, model.engine.free_slots)


def _numbers(places: Sequence[Place], limit: int, what: str) -> list[int]:
    found = [max(limit, 0) if place == "max" else place for place in places]
    for place in found:
        if place > limit:
            raise InvalidRequest(
                f"a {what} of {place} tokens does not fit; expected at most {limit}, or max"
            )
    return list(dict.fromkeys(found))


def _temperature(sampling: Options) -> dict[str, float]:
    return {"temperature": sampling["temperature"]} if "temperature" in sampling else {}


def _suffix(sampling: Options) -> str:
    return f", temperature {sampling['temperature']:g}" if "temperature" in sampling else ""
