"""The edges of every option's range, in the library, the command line and the server."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter
from typer.main import get_command

from paceline.cli.answers import AnswerArguments
from paceline.cli.options import command, group
from paceline.errors import InvalidRequest
from paceline.options import BIAS, OPTIONS, RANGES, About, IntRange, Option, Range, described
from paceline.runtime.model import Model
from paceline.runtime.request import Request, check
from paceline.server.body import ChatBody, CompletionBody, GenerationBody, Speculation
from support.server import Running, running
from support.words import parse

STEP = 1e-3
"""How far out of a range of decimals a wrong value is."""

NO_OPTIONS = {"min_tokens", "logprobs"}
"""Not on the command line."""

SERVERS_OWN = [["max_tokens", 0], ["top_k", -1], ["top_p", 0], ["seed", -1]]
"""Values that mean something to clients of OpenAI, vLLM or llama.cpp: the prompt alone, off, the
most likely token, and a new seed."""

Ask = Callable[[str, Any], str]
"""Sends an option through an interface; returns the error, or nothing if the value is accepted."""


def edges(limits: Range) -> Iterator[tuple[Any, bool]]:
    """Values at the ends of a range and outside of them, and whether the range has them."""
    step = 1 if limits.type is int else STEP
    yield limits.min_value, not limits.open
    yield (limits.min_value + step, True) if limits.open else (limits.min_value - step, False)
    if limits.max_value is not None:
        yield from ((limits.max_value, True), (limits.max_value + step, False))


EDGES = [
    *((name, value, allowed) for name in RANGES for value, allowed in edges(RANGES[name])),
    *(("logit_bias", {7: bias}, allowed) for bias, allowed in edges(BIAS)),
    *(("logit_bias", {token: 1.0}, token == 0) for token in (0, -1)),
]


def ask_library(name: str, value: Any) -> str:
    options: Any = {name: value}
    try:
        check(options)
    except InvalidRequest as error:
        return str(error)
    return ""


def ask_command_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        ((token, bias),) = value.items()
        value = f"{token}={bias}"
    try:
        parse(["generate", "x", f"--{name.replace('_', '-')}={value}"])
    except BadParameter as error:
        return f"{name}: {error.message}"
    return ""


@pytest.fixture(scope="module")
def server(tiny_model: Model, tiny_cache: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        with running(tiny_model.without_history()) as server:
            yield server


@pytest.fixture
def interfaces(server: Running) -> dict[str, Ask]:
    def ask_server(name: str, value: Any) -> str:
        option = {"speculation": {name: value}} if name == "max_block" else {name: value}
        reply = server.post("/v1/completions", {"prompt": "the", "max_tokens": 1, **option})
        error = reply.json().get("error")
        if error is None:
            return ""
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"] == name
        return str(error["message"])

    return {"library": ask_library, "command line": ask_command_line, "server": ask_server}


REALS = [name for name in RANGES if RANGES[name].type is float]
NOT_FINITE = (math.nan, math.inf, -math.inf, 10**400)

WRONG: dict[str, tuple[Any, ...]] = {
    "max_tokens": (2.5, "5", True, []),
    "temperature": ("hot", None),
    "top_k": (1.5, "4", True),
    "logit_bias": ({"a": 1}, {1: "x"}, {1: math.nan}, {1.5: 1}, {1: None}, [(1, 2)], "x", 3),
    "seed": (1.5, "x", True),
    "stop": ("", [""], ["a", ""], [5], 5, [None], b"x"),
    **dict.fromkeys(("ignore_eos", "raw", "prompt_logprobs"), (1, "yes", None)),
    "min_tokens": (1.5, None, True),
    "logprobs": (1.5, "x", True),
    "repetition_detection": (
        *(1, "yes", [3], {"max_pattern_size": 3}),
        *({"max_pattern_size": 3, "min_count": count} for count in (1, -2, 2.5, "x")),
        *({"max_pattern_size": size, "min_count": 2} for size in (-1, 10**9, "x")),
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 2, "size": 1},
    ),
    "prediction": ("text", [1.5], [None], 5),
    "drafter": (
        *("", "nothing", "ngram+", "ngram:x=1", "none+ngram", "ngram:min=a", "ngram:min=0"),
        *("ngram:min=5,max=2", "ngram:length=0", "suffix:later", "kept:x", ["ngram"], 5, None),
    ),
    "probe": ("nothing", 5, ["ngram"]),
    "policy": ("", "best", None, 5, ["auto"]),
    "max_block": (2.5, "8", True),
    "generation_config": ("vllm", "", None, True, "None"),
    "think": ("no", 1),
    "template_kwargs": ([], {1: 2}, {"messages": []}, {"self": 1}),
    "system": (3,),
    "json_schema": ("{", "5", "[]", int, 5),
    "regex": ("",),
}
"""Option -> values of the library that are wrong besides those beyond the edges."""


@pytest.mark.parametrize("interface", ["library", "command line", "server"])
def test_a_range_is_the_same_in_every_interface(interface: str, interfaces: dict[str, Ask]):
    faults = []
    for name, value, allowed in EDGES:
        if interface == "command line" and name in NO_OPTIONS:
            continue
        error = interfaces[interface](name, value)
        limits = RANGES.get(name, BIAS)
        expected = str(limits).removeprefix("a ").removeprefix("whole ").removeprefix("number ")
        bound = "greater than or equal to", "less than or equal to"  # pydantic's words
        if allowed or (interface == "server" and [name, value] in SERVERS_OWN):
            right = error == ""
        else:
            says = any(words in error for words in (expected, *bound)) or name == "logit_bias"
            right = name in error and says
        faults += [] if right else [f"{name}={value}: {error!r}"]
    assert faults == []


def test_an_invalid_value_is_rejected_by_name():
    faults = []
    for name, values in [*WRONG.items(), *((name, (*NOT_FINITE, 10**5000)) for name in REALS)]:
        for value in values:
            said = ask_library(name, value)
            named = any(word in said for word in (name, "drafter", "ngram"))
            if "\n" in said or not named or len(said) >= 200:
                faults.append((name, str(type(value)), said))
    assert faults == []


def test_the_server_rejects_a_number_beyond_float_range(interfaces: dict[str, Ask]):
    said = {name: interfaces["server"](name, 10**400) for name in REALS}
    assert [name for name, error in said.items() if name not in error] == []


OF_HTTP = {"stop", "logit_bias", "repetition_detection", "max_tokens", "logprobs", "prediction"}
"""Options that JSON or OpenAI's API write otherwise."""


def test_an_http_field_has_the_type_of_its_option():
    shared = {
        (name, field.annotation)
        for kind in (ChatBody, CompletionBody, Speculation)
        for name, field in kind.model_fields.items()
        if name in OPTIONS.keys() - OF_HTTP
    }
    assert {name for name, _ in shared} >= {"temperature", "seed", "min_tokens", "ignore_eos"}
    for name, annotation in shared:
        option = OPTIONS[name].type
        assert annotation in (option, option | None), name


def test_an_option_can_be_added_as_contributing_describes(monkeypatch: pytest.MonkeyPatch):
    declared = Option(int, IntRange(1, 7), About("Answer", "how lucky it is"))
    monkeypatch.setitem(OPTIONS, "luck", declared)  # type: ignore[misc]

    @dataclass(frozen=True)
    class LuckyRequest(Request):
        luck: int = 1

    class LuckyBody(GenerationBody):
        luck: int | None = None

    app = group()

    @command(app)
    def answer(*, answer: AnswerArguments) -> int:
        """Take the options of an answer."""
        return len(answer.options())

    monkeypatch.setattr("paceline.runtime.request.Request", LuckyRequest)
    lucky: Any = check({"luck": 7})  # type: ignore[typeddict-unknown-key]
    assert lucky.luck == LuckyBody(luck=7).options["luck"] == 7
    assert "luck: how lucky it is; a whole number from 1 to 7" in described()
    assert get_command(app).make_context("answer", ["--luck", "7"]).params["luck"] == 7
    with pytest.raises(BadParameter, match="'8' is not a whole number from 1 to 7"):
        get_command(app).make_context("answer", ["--luck", "8"])
    assert "luck is 8; expected a whole number from 1 to 7" in ask_library("luck", 8)
