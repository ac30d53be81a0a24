"""Every option's range at its edges, from the library, the command line and the server alike."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from paceline.errors import InvalidRequest
from paceline.options import BIAS, RANGES, Real, Whole
from paceline.runtime.model import Model
from paceline.runtime.request import check
from support.server import Running, running
from support.words import parse

STEP = 1e-3
"""How far out of a range of decimals a wrong value is."""

NO_OPTIONS = {"min_tokens", "logprobs"}
"""Not on the command line."""

SERVERS_OWN = [["max_tokens", 0], ["top_k", -1], ["top_p", 0], ["seed", -1], ["seed", 2**64]]
"""Values that mean something to clients of OpenAI, vLLM or llama.cpp: the prompt alone, off, the
most likely token, and any seed."""

Ask = Callable[[str, Any], str]
"""Sends an option through a door; returns the error, or nothing if the value is accepted."""


def edges(limits: Whole | Real) -> Iterator[tuple[Any, bool]]:
    """Values at the ends of a range and outside of them, and whether the range has them."""
    step = 1 if isinstance(limits, Whole) else STEP
    is_open = isinstance(limits, Real) and limits.open
    yield limits.least, not is_open
    yield (limits.least + step, True) if is_open else (limits.least - step, False)
    if limits.most is not None:
        yield from ((limits.most, True), (limits.most + step, False))


EDGES = [
    *((name, value, fits) for name in RANGES for value, fits in edges(RANGES[name])),
    *(("logit_bias", {7: bias}, fits) for bias, fits in edges(BIAS)),
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
        with running(tiny_model.fresh()) as server:
            yield server


@pytest.fixture
def doors(server: Running) -> dict[str, Ask]:
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


CASES = [
    (door, *edge)
    for edge in EDGES
    for door in ("library", "command line", "server")
    if not (door == "command line" and edge[0] in NO_OPTIONS)
]


@pytest.mark.parametrize(("door", "name", "value", "fits"), CASES, ids=str)
def test_a_range_is_the_same_at_every_door(
    door: str, name: str, value: Any, fits: bool, doors: dict[str, Ask]
):
    error = doors[door](name, value)
    if fits or (door == "server" and [name, value] in SERVERS_OWN):
        assert error == ""
        return
    assert name in error
    limits = RANGES.get(name, BIAS)
    expected = str(limits).removeprefix("a ").removeprefix("whole ").removeprefix("number ")
    bound = "greater than or equal to", "less than or equal to"  # pydantic's words
    assert any(words in error for words in (expected, *bound)) or name == "logit_bias"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [name for name in RANGES if isinstance(RANGES[name], Real)])
def test_a_number_that_is_not_finite_is_rejected(name: str, value: float):
    assert name in ask_library(name, value)
    assert name in ask_command_line(name, value)


@pytest.mark.parametrize("door", ["library", "command line", "server"])
@pytest.mark.parametrize("name", [name for name in RANGES if isinstance(RANGES[name], Real)])
def test_a_whole_number_too_large_for_a_float_is_rejected(
    door: str, name: str, doors: dict[str, Ask]
):
    assert name in doors[door](name, 10**400)


def test_a_number_of_more_digits_than_python_writes_is_rejected():
    assert "top_p" in ask_library("top_p", 10**5000)
