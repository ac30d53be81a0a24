import json
import re
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.runtime.trace import FORM
from paceline_lab.trace.command import (
    ACCEPTED,
    BONUS,
    REJECTED,
    draft_source,
    escaped,
    headline,
    totals,
)
from paceline_lab.trace.reader import RecordedTrace, parse_trace


def step(**changes: object) -> dict[str, object]:
    seconds = {"draft": 0.001, "verify": 0.02, "sample": 0.002, "whole": 0.025}
    return {
        "context": 3,
        "rows": 3,
        "source": "suffix",
        "match": 4,
        "chances": [],
        "proposed": [11, 12],
        "guess": " <i>big <b>",
        "stood": 1,
        "tokens": [11, 13],
        "pieces": [" <i>big", "\n<dog>"],
        "seconds": seconds,
        **changes,
    }


LINES = [
    {
        "form": FORM,
        "version": 1,
        "made": "2026-01-01T00:00:00+00:00",
        "model": "tiny",
        "settings": {"drafter": "suffix+table", "stop": ["</p>"]},
        "cached": 0,
        "prompt_token_ids": [1, 2, 3],
    },
    {"tokens": [10], "pieces": ["The"], "prefill_seconds": 0.1},
    step(),
    step(source="none", match=0, proposed=[], guess="", stood=0, tokens=[14], pieces=[" &"]),
    step(source="table", chances=[0.5, 0.4], stood=2, tokens=[11, 12], pieces=["x", "y"]),
    step(source="forced", proposed=[15], guess="{", stood=1, tokens=[15, 16], pieces=["{", "}"]),
]
RESULT = {"result": {"finish_reason": "stop", "policy": "auto", "drafter": "suffix+table"}}


@pytest.fixture
def trace() -> RecordedTrace:
    return parse_trace([json.dumps(line) for line in [*LINES, RESULT]], "this")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*LINES, RESULT]))
    return path


def test_totals(trace: RecordedTrace):
    found = totals(trace)
    assert (found["tokens"], found["steps"], found["ended"]) == (8, 4, True)
    assert found["tokens_per_step"] == 7 / 4
    # Tokens that a grammar forces are no draft.
    assert found["drafted_by"] == {"suffix": 2, "table": 2}
    assert found["accepted_by"] == {"suffix": 1, "table": 2}
    assert found["seconds"]["whole"] == pytest.approx(0.1)
    assert headline(trace) == (
        "tiny: 8 tokens, 1.75 a step in 4 steps, 3 of 4 draft tokens accepted, 70.0 tokens/s"
    )


def test_a_trace_that_was_interrupted_before_the_first_step_is_shown(tmp_path: Path):
    for count in (1, 2):
        trace = parse_trace([json.dumps(line) for line in LINES[:count]], "this")
        assert headline(trace).endswith("0 steps, no drafts; interrupted")


def test_a_draft_source_has_its_match_length_or_probability(trace: RecordedTrace):
    assert [draft_source(each) for each in trace.steps] == [
        "suffix 4",
        "-",
        "table 50%",
        "forced 4",
    ]
    assert escaped("a\n\tb\\") == "a\\n\\tb\\\\"


def test_the_terminal_shows_every_step_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["bench", "trace", str(file)]) == 0
    out = capsys.readouterr().out
    assert "The <i>big\n<dog> &xy{}" in out, "the answer as it is"
    bars = re.findall(f" ([{ACCEPTED}{REJECTED}{BONUS}]+) +", out.partition("draft ms")[2])
    assert bars == [ACCEPTED + REJECTED + BONUS, BONUS, ACCEPTED * 2, ACCEPTED + BONUS]
    assert "<i>big\\n<dog>" in out, "the new tokens of a step, in one line"
    assert "\x1b" not in out
    assert main(["bench", "trace", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "foreign.jsonl"
    path.write_text('{"form": "other"}\n')
    assert main(["bench", "trace", str(path)]) == 2
    said = capsys.readouterr().err
    assert "is no trace" in said
    assert said.count("\n") == 1
