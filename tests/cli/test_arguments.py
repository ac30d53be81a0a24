"""Ranges of numeric options, for every option of every command."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.cli.app import main
from paceline.cli.declare import THREADS, json_object
from paceline.engines import EngineSettings
from paceline.engines.costs import MAX_ROWS
from paceline.errors import InvalidRequest
from paceline.options import RANGES
from paceline.server.settings import Settings
from paceline.system.machine import cpu_cores
from support.words import commands, parse

TEXT = (None, str, Path, json_object)
"""Parsers of options that are not numeric."""

NO_NUMBERS = ("", " ", "x", "nan", "-inf", "1e400", "9" * 5000, "0x1", "1,x")

HIGH = {
    **{"--port": ("65536",), "--seed": (str(2**64),), "--top-p": ("1.1",)},
    **{"--threads": ("1000",), "--clients": ("100000",)},
}
"""Options -> values beyond a range that is not open."""

ZERO = {
    *(
        "--port",
        "--shutdown-timeout",
        "--seed",
        "--temperature",
        "--top-k",
        "--min-p",
        "--max-divergence",
    ),
    *("--presence-penalty", "--frequency-penalty"),
    *("bench sweep --depth", "convert --taps", "coreml probe --layer", "generate --tokens"),
    "verify --rounds",
}
"""Options that may be 0."""

NEGATIVE = {
    *("--presence-penalty", "--frequency-penalty", "generate --max-tokens", "chat --max-tokens"),
    "batch --max-tokens",
}
"""Options that may be -1."""


def parser_of(option: Any) -> Any:
    return option.type_descriptor.parameter_info.parser


def options() -> Iterator[tuple[str, str, list[str]]]:
    """Yield command and name of each numeric option, and a command line without its value."""
    for name, command in commands():
        for option in command.params:
            if parser_of(option) in TEXT or option.param_type_name == "argument":
                continue
            required = [
                other.opts[0] if getattr(other, "is_flag", False) else f"{other.opts[0]}=coreml"
                for other in command.params
                if other.required
            ]
            word = option.opts[-1]
            yield f"{' '.join(name)} {word}", word, [*name, *required, f"{word}="]


OPTIONS = list(options())


def test_options_of_all_commands_are_found():
    found = {option for option, _, _ in OPTIONS}
    assert found >= {"serve --timeout", "bench sweep --depth", "plan --threads"}


def test_no_argument_has_a_type_without_a_range():
    for name, made in commands():
        bare = [
            option.name
            for option in made.params
            if option.type_descriptor.annotation in (int, float, list[int], list[float])
            and parser_of(option) in TEXT
        ]
        assert not bare, f"{name}: {bare}; use the parsers of cli/declare.py"


def test_a_numeric_option_outside_its_finite_range_is_rejected(capsys: pytest.CaptureFixture[str]):
    faults = []
    for option, name, line in OPTIONS:
        wrong = [*NO_NUMBERS, *HIGH.get(name, ())]
        wrong += [] if {option, name} & ZERO else ["0"]
        wrong += [] if {option, name} & NEGATIVE else ["-1"]
        if name == "--logit-bias":
            wrong += [f"1={value}" for value in NO_NUMBERS]
        for value in wrong:
            code = main([*line[:-1], line[-1] + value])
            said = capsys.readouterr().err
            right = name in said and len(said) < 400 and said.count("\n") == 1
            faults += [] if (code, right) == (2, True) else [(option, value[:20], code, said[:200])]
    assert faults == []


def test_the_minimum_of_a_numeric_option_is_accepted():
    for option, name, line in OPTIONS:
        least = "0" if {option, name} & ZERO else "2" if "block" in name else "1"
        parse([*line[:-1], line[-1] + ("1=0" if name == "--logit-bias" else least)])


def test_command_line_limits_match_the_library_limits():
    assert RANGES["max_block"].max_value == MAX_ROWS
    assert [THREADS("auto"), THREADS("1")] == [None, 1]
    cpus = cpu_cores()
    EngineSettings(threads=cpus)
    for wrong in (cpus + 1, 1000):
        with pytest.raises(InvalidRequest, match=f"1 to {cpus} "):
            EngineSettings(threads=wrong)
        with pytest.raises(ValueError, match=f"1 to {cpus}, nor auto"):
            THREADS(str(wrong))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that `serve` would start with, without loading or handling signals."""
    found: list[Settings] = []
    monkeypatch.setattr("paceline.cli.crash.report_crashes", lambda: None)
    monkeypatch.setattr("paceline.cli.serve.load_model", lambda *_, **__: Mock())
    monkeypatch.setattr("paceline.server.run.serve", lambda *given, **_: found.append(given[-1]))
    return found


@pytest.mark.parametrize(
    ("words", "think"), [([], None), (["--think"], True), (["--no-think"], False)]
)
def test_serve_turns_reasoning_on_and_off(
    words: list[str], think: bool | None, served: list[Settings]
):
    assert main(["serve", *words]) == 0
    assert [settings.think for settings in served] == [think]


@pytest.mark.parametrize("words", [[], ["--parse-special"]])
def test_serve_parses_special_tokens_in_messages_only_if_enabled(
    words: list[str], served: list[Settings], monkeypatch: pytest.MonkeyPatch
):
    assert main(["serve", *words]) == 0
    assert [settings.parse_special for settings in served] == [bool(words)]
    options: list[list[str]] = []
    monkeypatch.setattr(
        "paceline.server.router.run.serve_all", lambda _, given, *__, **___: options.append(given)
    )
    assert main(["serve", "--all", *words]) == 0
    assert ("--parse-special" in options[0]) == bool(words)
