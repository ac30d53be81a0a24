import re
from pathlib import Path

import pytest

from paceline.cli.answers import highlighter
from paceline.cli.app import main
from paceline.decoding.types import NO_PROPOSAL, Piece, Proposal, Step
from paceline.runtime.model import Model

UNDERLINE = "\x1b[4m"
GREEN = "\x1b[4;32m"
CODES = re.compile(r"\x1b\[[0-9;]*m")


def step(texts: list[str], draft: Proposal = NO_PROPOSAL, accepted: int = 0) -> Step:
    sources = [draft.source] * accepted + [None] * (len(texts) - accepted)
    pieces = [Piece(7, text, text, source=one) for text, one in zip(texts, sources, strict=True)]
    return Step(len(texts), pieces, draft)


STEPS = [
    step(["a"]),
    step(["\n", "b", " the"], Proposal([28, 1, 2], "suffix"), 2),
    step(["d"], Proposal([4], "suffix"), 0),
    step(["f", "g"], Proposal([5], "forced"), 1),
]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def printed(steps: list[Step] = STEPS, **environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        show = highlighter()
        for step in steps:
            show(step)
        return capsys.readouterr().out

    return printed


def test_accepted_draft_tokens_are_underlined_and_green_on_a_terminal(printed):
    assert printed() == "a\nb thedfg"
    assert printed(FORCE_COLOR="1") == f"a{GREEN}\nb\x1b[0m thedfg"
    assert printed(FORCE_COLOR="1", NO_COLOR="1") == f"a{UNDERLINE}\nb\x1b[0m thedfg"


def test_a_long_line_with_tabs_is_unchanged(printed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    texts = ["\tword ", "[red]", "\x07"] * 30
    text = "".join(texts)
    steps = [step(texts, Proposal([7] * 50, "suffix"), 50)]
    assert printed(steps) == text
    assert CODES.sub("", printed(steps, FORCE_COLOR="1")) == text


def test_highlighting_does_not_change_the_printed_text(
    cache: Path,
    tiny_gguf: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    prompt = "this is one and the user, this is one and the user, this is"
    expected = model.generate(prompt, max_tokens=30, drafter="suffix", policy="fixed")
    assert expected.stats.accepted > 0
    words = ["generate", prompt, "--model", str(tiny_gguf), "--max-tokens", "30", "--quiet"]
    words += ["--drafter", "suffix", "--policy", "fixed", "--tint"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert CODES.sub("", out) == expected.text + "\n"
    assert GREEN in out
