"""Reasoning models in the library and in the commands."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.engines import EngineSettings, open_engine
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, resolve
from paceline.runtime.model import Model
from support.plain import said
from support.scheduling import end_scheduler
from support.scripted import ScriptedEngine
from support.thinking import CLOSE, OPEN, TEMPLATES

THOUGHT, ANSWER = "this is one, is this the one?\nit is", "This is the one. This is the one."
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def files(thinking_gguf: Path, tiny_cache: Path) -> ModelFiles:
    return resolve(str(thinking_gguf), tiny_cache)


@pytest.fixture(scope="module")
def engine(files: ModelFiles) -> Any:
    settings = EngineSettings(cache_tokens=4 * files.context_length)
    return open_engine("llamacpp", files.path, files.context_length, settings)


@pytest.fixture
def thinker(files: ModelFiles, cache: Path) -> Iterator[Model]:
    encode, engine = files.tokenizer.encode, ScriptedEngine(files.context_length)
    engine.script = [OPEN, *encode(f"\n{THOUGHT}\n"), CLOSE, *encode(f"\n\n{ANSWER}")]
    model = Model(files, engine)
    yield model
    end_scheduler(model)


# -- the library -----------------------------------------------------------------------------------


def test_tokens_match_a_raw_prompt_with_the_same_text(engine: Any, files: ModelFiles):
    # The real network, whose greedy answers have whatever marks they have.
    model = Model(files, engine)
    prompt = "<|im_start|>user\nthis is one<|im_end|>\n<|im_start|>assistant\n"
    bias = {OPEN: 8.0, CLOSE: 8.0}
    thoughts = set()
    for seed in range(5):
        options: Any = {"seed": seed, "temperature": 1.2, "max_tokens": 60, "logit_bias": bias}
        raw = model.generate(prompt, raw=True, **options)
        told = model.generate("this is one", **options)
        assert told.token_ids == raw.token_ids
        assert raw.reasoning == ""
        thoughts.add(told.reasoning)
    assert len(thoughts) > 1


def prompt_of(model: Model, **options: Any) -> str:
    with model.stream("2 + 2?", **options) as stream:
        tokens = stream.tokens
    names = {number: name for name, number in model.files.tokenizer.special_tokens().items()}
    decode = model.files.tokenizer.decode
    return "".join(names.get(token) or decode([token]) for token in tokens)


def test_reasoning_is_turned_off_through_the_template(thinker: Model):
    assert not prompt_of(thinker).endswith(EMPTY)
    assert prompt_of(thinker, think=False).endswith(EMPTY)
    assert not prompt_of(thinker, think=True).endswith(EMPTY)
    kwargs = {"enable_thinking": False}
    assert prompt_of(thinker, template_kwargs=kwargs).endswith(EMPTY)
    kwargs["thinking"] = False  # another model's switch
    assert prompt_of(thinker, think=True, template_kwargs=kwargs).endswith(EMPTY)
    with pytest.raises(InvalidRequest, match="did you mean enable_thinking"):
        thinker.generate("2 + 2?", template_kwargs={"enable_thinkin": False})


@pytest.mark.parametrize("options", [{"think": False}, {"template_kwargs": {"x": 1}}])
def test_a_raw_prompt_has_no_reasoning_switch(options: Any, thinker: Model):
    with pytest.raises(InvalidRequest, match="chat template"):
        thinker.generate("2 + 2?", raw=True, **options)
    with pytest.raises(InvalidRequest, match="chat template"):
        thinker.generate([100, 101], **options)


def test_reasoning_can_be_switched_only_if_the_template_supports_it(
    model: Model, files: ModelFiles, engine: Any, cache: Path
):
    answer = model.generate("Hello", max_tokens=3, think=False)
    assert answer.token_ids == model.generate("Hello", max_tokens=3).token_ids
    with pytest.raises(InvalidRequest, match="does not support reasoning"):
        model.generate("Hello", think=True)
    always = Model(replace(files, chat_template=TEMPLATES["deepseek-r1"]), engine)
    with pytest.raises(InvalidRequest, match="the chat template of"):
        always.generate("Hello", think=False)


def test_a_structured_response_is_text_from_its_first_token(
    files: ModelFiles, engine: Any, cache: Path
):
    opened = replace(files, chat_template=TEMPLATES["deepseek-r1"])
    result = Model(opened, engine).generate("2 + 2?", regex="It is [0-9]")
    assert result.text.startswith("It is ")
    assert result.reasoning == ""


def test_a_conversation_keeps_reasoning_apart_and_the_template_decides_its_use(thinker: Model):
    chat = thinker.conversation()
    said(chat.send("2 + 2?"))
    turn = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    assert chat.messages[-1] == turn
    second = chat.send("sure?")
    prompt = thinker.files.tokenizer.decode(second.tokens)
    assert ANSWER in prompt
    assert THOUGHT not in prompt, "Qwen3's template leaves earlier thoughts out"
    assert said(second).text == ANSWER
    chat.close()


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def command(
    thinker: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setattr("paceline.runtime.load.load", lambda *_, **__: thinker)

    def command(*arguments: str, input: str = "") -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        assert main([*arguments]) == 0
        return capsys.readouterr()

    return command


def test_the_response_goes_to_stdout_and_reasoning_to_stderr(command: Any):
    loud = command("generate", "2 + 2?", "--tint")
    assert loud.out == f"{ANSWER}\n"
    assert loud.err.endswith(f"{THOUGHT}\n\n")
    quiet = command("generate", "2 + 2?", "--quiet")
    assert (quiet.out, quiet.err) == (f"{ANSWER}\n", "")
    chat = command("chat", input="2 + 2?\nsure?\n")
    assert chat.out == f"{ANSWER}\n"
    assert chat.err.count(THOUGHT) == 1


def test_reasoning_is_dimmed_on_a_terminal(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    found = command("generate", "2 + 2?")
    assert "\x1b[2m" in found.err
    assert "\x1b[" not in found.out


def test_no_think_and_variables_reach_the_template_and_json_has_the_reasoning(
    command: Any, capsys: pytest.CaptureFixture[str]
):
    def prompt(*arguments: str) -> list[int]:
        answer = json.loads(command("generate", "2 + 2?", "--json", *arguments).out)
        assert (answer["reasoning"], answer["text"]) == (THOUGHT, ANSWER)
        assert 0 < answer["reasoning_tokens"] < answer["completion_tokens"]
        tokens: list[int] = answer["prompt_token_ids"]
        return tokens

    off = prompt("--no-think")
    assert off[-3:].count(CLOSE) == 1
    assert CLOSE not in prompt()
    assert CLOSE not in prompt("--think")
    assert prompt("--chat-template-kwargs", '{"enable_thinking": false}') == off
    for value in ("[]", "{"):
        assert main(["generate", "x", "--chat-template-kwargs", value]) == 2
        assert "is not a JSON object" in capsys.readouterr().err
