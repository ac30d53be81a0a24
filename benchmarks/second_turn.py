"""Time to first token of a conversation's first and second turn, over HTTP.

    python benchmarks/second_turn.py --output benchmarks/results/second-turn.json

The first turn has about 1,000 tokens that miss the prefix cache; the second adds the answer and a
message. For comparison the second turn is also sent without the prefix cache. Every round is
another conversation. Exits with 1 if the second turn takes more than a fifth of the first's time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from clients.server import Server, served

import paceline
from paceline.models import DEFAULT_MODEL, ModelFiles, resolve
from paceline.verify.client import Endpoint, Sample, closed_loop
from paceline.verify.suite import SuitePrompt, load_suite

TOKENS = 1000
ANSWER = 48
MAX_SHARE = 0.2
"""Largest time of the second turn over the first's."""
QUESTION = "Which of these texts is the shortest? Say why."
MORE = "And which is the longest?"

Message = dict[str, str]


class Turns(NamedTuple):
    """Requests of one conversation."""

    first: Sample
    second: Sample
    again: Sample
    """The second turn without the prefix cache."""


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    files = resolve(DEFAULT_MODEL)
    with served() as server:
        _send(server, [_user("Hello")], cached=True)  # warm-up
        rounds = [_conversation(server, files, number) for number in range(options.rounds)]
    result = {
        "command": "python benchmarks/second_turn.py",
        "engine": paceline.load().engine.describe(),
        "rounds": options.rounds,
        **{name: _about([getattr(each, name) for each in rounds]) for name in Turns._fields},
        "second_over_first": _ratio(rounds, "second"),
        "uncached_second_over_first": _ratio(rounds, "again"),
        "same_answers": sum(each.second.text == each.again.text for each in rounds),
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(result["second_over_first"]["median"] > MAX_SHARE)


def _conversation(server: Server, files: ModelFiles, number: int) -> Turns:
    messages = _messages(files, number)
    first = _send(server, messages, cached=True)
    messages += [{"role": "assistant", "content": first.text}, _user(MORE)]
    return Turns(
        first,
        _send(server, messages, cached=True),
        _send(server, messages, cached=False),
    )


def _messages(files: ModelFiles, number: int) -> list[Message]:
    """A first turn of about `TOKENS` tokens, with a unique beginning."""
    prompts = load_suite().prompts
    texts = [str(message["content"]) for prompt in prompts for message in prompt.messages]
    texts = texts[number % len(texts) :] + texts[: number % len(texts)]
    found: list[str] = [f"Conversation {number}."]
    for text in texts:
        paragraphs = "\n\n".join([*found, text])
        found.append(text)
        if len(files.tokenizer().encode(paragraphs)) >= TOKENS:
            break
    tokens = files.tokenizer().encode("\n\n".join(found))[:TOKENS]
    return [_user(f"{files.tokenizer().decode(tokens)}\n\n{QUESTION}")]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _send(server: Server, messages: Sequence[Message], *, cached: bool) -> Sample:
    extra = json.dumps({"cache_prompt": cached})
    endpoint = Endpoint(server.url, DEFAULT_MODEL, ANSWER, extra=extra)
    run = closed_loop(endpoint, [SuitePrompt("turn", "any", messages)], clients=1, requests=1)
    (sample,) = run.samples
    if sample.error or sample.first is None:
        raise RuntimeError(f"the server failed: {sample.error or 'no text came'}")
    return sample


def _about(samples: Sequence[Sample]) -> dict[str, Any]:
    seconds = [sample.first for sample in samples if sample.first is not None]
    return {
        "first_token_seconds": {
            "median": round(median(seconds), 4),
            "least": round(min(seconds), 4),
            "most": round(max(seconds), 4),
        },
        "prompt_tokens": [sample.prompt_tokens for sample in samples],
        "cached_tokens": [sample.cached_tokens for sample in samples],
    }


def _ratio(rounds: Sequence[Turns], name: str) -> dict[str, float]:
    """Ratio of times to first token within each round."""
    found = [getattr(each, name).first / each.first.first for each in rounds]
    return {
        "median": round(median(found), 4),
        "least": round(min(found), 4),
        "most": round(max(found), 4),
    }


if __name__ == "__main__":
    main()
