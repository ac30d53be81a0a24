"""`bench agent`: recorded sessions are replayed, and what fails is one turn's."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.agent.replay import SESSIONS, load_sessions
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Record, parse_record
from paceline_lab.cli import agent as command
from paceline_lab.client import Access
from support.reports import report_of
from support.server import running

FILE = "one and two, one and two"
MESSAGES = [
    ("system", "this is the one and the user"),
    ("user", f"read: {FILE}"),
    ("assistant", f"write: {FILE}, {FILE}, {FILE}"),
    ("user", "and the user?"),
    ("assistant", f"this is {FILE}"),
    ("user", "the rain"),
    ("assistant", "the rain and the user"),
]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    path = tmp_path / "session.jsonl"
    lines = (json.dumps({"role": role, "content": text, "id": 1}) for role, text in MESSAGES)
    path.write_text("\n".join(lines))
    return path


def agent(model: Model, path: Path | None, **options: Any) -> tuple[Report, Record]:
    settings = {"session": path, "drafter": ["suffix"], "access": Access(), **options}
    report = report_of(command.agent, lambda *_, **__: model, **settings)
    return report, parse_record(json.loads(json.dumps(report.value)), "it")


def test_any_model_replays_the_recorded_responses_with_and_without_drafts(
    model: Model, session: Path
):
    report, record = agent(model, session, rounds=2)
    assert report.passed
    assert record.cases == [f"session, turn {n}" for n in (1, 2, 3)]
    rows = {row.key: row for row in record.rows}
    for turn in load_sessions(session)[0].turns(model):
        plain, drafted = (rows[turn.name, name] for name in (PLAIN, "suffix"))
        assert plain.facts["tokens"] == drafted.facts["tokens"] == len(turn.answer)
        assert plain.counts["steps"] == 2 * (len(turn.answer) - 1)
        assert plain.facts["same_tokens"] is drafted.facts["same_tokens"] is True
        assert plain.facts["prompt_tokens"] == len(turn.prompt)
        assert plain.measures["ratio"] == [1.0, 1.0]
        assert len(drafted.measures["ratio_with_prefill"]) == 2
    first, second = (rows[f"session, turn {n}", "suffix"] for n in (1, 2))
    plain = rows["session, turn 1", PLAIN]
    assert first.counts["steps"] < plain.counts["steps"], "the answer repeats its prompt"
    assert first.facts["cached_tokens"] == 0
    # All of the first prompt is in the second one.
    assert second.facts["cached_tokens"] >= plain.facts["prompt_tokens"] - 1
    total = record.summary["totals"]["session"]["suffix"]
    assert total["turns"] == 3
    assert total["prompt_tokens_reused"] == sum(
        row.facts["cached_tokens"] for row in record.rows if row.contender == "suffix"
    )
    for _, head, lines in report.tables:
        assert lines
        assert all(len(line) == len(head) for line in lines)


def test_a_failed_turn_has_its_error_and_the_run_continues(
    model: Model, session: Path, monkeypatch: pytest.MonkeyPatch
):
    submit, asked = Scheduler.submit, 0

    def failing(self: Scheduler, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise InvalidRequest("no room")
        return submit(self, *arguments)

    monkeypatch.setattr(Scheduler, "submit", failing)
    report, record = agent(model, session)
    assert not report.passed
    assert report.text == "session, turn 2 (plain): no room"
    failed = [(*row.key, "ratio" in row.measures) for row in record.rows if "error" in row.facts]
    assert failed == [("session, turn 2", PLAIN, False)]
    assert record.summary["totals"]["session"][PLAIN]["turns"] == 2


def test_turns_beyond_the_context_are_skipped_and_reported(model: Model):
    report, record = agent(model, None)  # a context of 512 tokens
    assert len(record.summary["skipped"]) == 10 * len(SESSIONS)
    assert "coding, turn 1 skipped: " in report.text
    assert not report.passed, "nothing was replayed"


def test_a_server_gets_the_same_turns_and_generates_its_own_responses(model: Model, session: Path):
    with running(model) as server:
        report, record = agent(model, session, url=f"{server.url}/v1")
    assert report.passed
    rows = [row for row in record.rows if row.contender not in (PLAIN, "suffix")]
    assert len(rows) == 3
    turns = load_sessions(session)[0].turns(model)
    assert [row.facts["tokens"] for row in rows] == [len(turn.answer) for turn in turns]
    assert all("same_tokens" not in row.facts for row in rows)
    assert rows[1].facts["cached_tokens"] > 0


def test_our_own_sessions_have_ten_turns_each():
    for session in load_sessions(None):
        roles = [message["role"] for message in session.messages]
        assert roles == ["system", *["user", "assistant"] * 10]
        assert all(len(message["content"]) > 300 for message in session.messages)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"role": "user", "content": "a"}\n{"role": "assist', "line 2 of .* is not JSON"),
        ('{"role": "user"}', "line 1 of .*content"),
        ('{"role": "user", "content": ["a"]}', "line 1 of .*content"),
        ('{"role": "user", "content": "a"}', "no answer to replay"),
        ("", "no answer to replay"),
        ('\n{"role": "assistant", "content": "a"}', "line 2 of .* is an answer"),
    ],
)
def test_a_corrupt_session_file_is_a_single_error(content: str, reason: str, tmp_path: Path):
    path = tmp_path / "session.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        load_sessions(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_works_from_the_command_line(
    session: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "agent.json"
    words = ["bench", "agent", str(session), "--model", str(tiny_gguf), "--quiet"]
    assert main([*words, "--drafter", "ngram", "--output", str(output)]) == 0
    assert "session, turn 3" in capsys.readouterr().out
    record = parse_record(json.loads(output.read_text()), "it")
    assert (record.kind, record.contenders) == ("agent", [PLAIN, "ngram"])
    assert main(["bench", "agent", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err
