"""`generate` and `chat` with default options: ends of responses, sampling settings, statistics."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.cli.declare import MAX_TOKENS
from support.tiny import SIZES, write_tiny

LONG = {**SIZES, "context": 20_000}
SAMPLING = {"general.sampling.temp": 0.75, "general.sampling.top_k": 20}

Answer = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def long_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recommended sampling settings, whose responses end only at a limit."""
    path = tmp_path_factory.mktemp("long") / "long.gguf"
    return write_tiny(path, sizes=LONG, fields={**SAMPLING, "tokenizer.ggml.eos_token_id": 319})


@pytest.fixture
def answer(
    long_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> Answer:
    """Runs `generate` and returns standard output and standard error."""

    def answer(*arguments: object, command: str = "generate", said: str = "") -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        words = [command, "--model", long_gguf, *arguments]
        # None of its control tokens may end an answer here.
        ends = [f"--logit-bias={token}=-100" for token in (0, 2, 319)]
        assert main([*map(str, words), *ends]) == 0
        found = capsys.readouterr()
        return found.out, found.err

    return answer


LOOP = ("Hello", "--logit-bias", "40=100")
"""Words of `generate` whose answer repeats itself, which ends it after 256 tokens; without that it
is long in few calls, as its drafts are right."""


def test_a_response_stops_at_2048_tokens_with_a_hint_how_to_continue(answer: Answer):
    assert MAX_TOKENS == 2048
    _, said = answer(*LOOP, "--no-repetition-detection")
    assert said.count("stopped after 2048 tokens; --max-tokens -1") == 1
    settings = json.loads(answer(*LOOP, "--json")[0])["settings"]
    assert settings["max_tokens"] == {"value": 2048, "source": "fallback"}


def test_max_tokens_minus_1_is_limited_only_by_context_and_cache(answer: Answer):
    unlimited = ("--max-tokens", -1)
    _, said = answer(*LOOP, *unlimited, "--cache-tokens", 2240, "--no-repetition-detection")
    value = json.loads(answer(*LOOP, *unlimited, "--json")[0])
    assert f"after {2240 - value['prompt_tokens']} tokens: the context or the key/value" in said
    assert "--max-tokens" not in said
    assert value["settings"]["max_tokens"] == {"value": None, "source": "request"}


def test_repetition_ends_a_response_with_a_notice_unless_disabled(answer: Answer):
    loop = (*LOOP, "--max-tokens", 400)
    value = json.loads(answer(*loop, "--json")[0])
    assert (value["finish_reason"], value["completion_tokens"]) == ("repetition", 256)
    assert "--no-repetition-detection" in answer(*loop)[1]
    for off in ("--no-repetition-detection", "--ignore-eos"):
        value = json.loads(answer(*loop, "--json", off)[0])
        assert (value["finish_reason"], value["completion_tokens"]) == ("length", 400)
    value = json.loads(answer(*loop, "--json", "--ignore-eos", "--repetition-detection")[0])
    assert value["finish_reason"] == "repetition"


def test_the_models_recommended_settings_are_used_printed_and_optional(answer: Answer):
    options = ("Hello", "--max-tokens", 8, "--json")
    value = json.loads(answer(*options)[0])
    assert value["settings"]["temperature"] == {"value": 0.75, "source": "model"}
    assert value["settings"]["top_k"] == {"value": 20, "source": "model"}
    mine = json.loads(answer(*options, "--temperature", 0.5)[0])
    assert mine["settings"]["temperature"] == {"value": 0.5, "source": "request"}
    assert mine["settings"]["top_k"] == {"value": 20, "source": "model"}
    off = json.loads(answer(*options, "--generation-config", "none")[0])
    assert {each["source"] for each in off["settings"].values()} == {"request", "fallback"}
    assert off["settings"]["temperature"]["value"] == 0.0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_random_seed_is_printed_and_reproduces_the_response(command: str, answer: Answer):
    def ask(*options: object) -> tuple[str, str]:
        words: tuple[object, ...] = ("Hello",) if command == "generate" else ()
        words += ("--max-tokens", 12, "--stats")
        return answer(*words, *options, command=command, said="Hello\n")

    text, said = ask()
    seed = re.findall(r"seed (\d+)", said)
    assert len(seed) == 1
    assert len(seed[0]) <= 10  # to be typed
    assert ask("--seed", seed[0])[0] == text
    assert any(ask()[0] != text for _ in range(5)), "another seed, another answer"
    assert "seed" not in ask("--temperature", 0)[1]
