"""Spec-Bench's questions, as its file has them: two turns, six groups, loops, what does not fit."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.storage.report import json_file
from paceline.verify.suite import CONVERSATION, load_suite
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import parse_record, read_record
from paceline_lab.bench.summary import ALL, is_loop, repeated_share, summary
from paceline_lab.bench.turns import Skipped, chosen_prompts
from support.bench import bench
from support.faulty import FaultyEngine
from support.process import python

QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["Hello", "And the user?"]},
    {"question_id": 91, "category": "roleplay", "turns": ["2 + 2 = 12", "Why?"], "reference": []},
    {"question_id": 101, "category": "translation", "turns": ["this is one and the user"]},
    {"question_id": 102, "category": "translation", "turns": ["a stant and the user"]},
    {"question_id": 201, "category": "rag", "turns": ["assistant and the user"], "reference": "x"},
]


def write(path: Path, questions: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in questions))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "question.jsonl", QUESTIONS)


@pytest.mark.parametrize("turns", [[], "Hello", [5], [""]])
def test_a_question_with_invalid_turns_is_reported_by_line(turns: Any, tmp_path: Path):
    path = write(tmp_path / "bad.jsonl", [QUESTIONS[0], {"question_id": 1, "turns": turns}])
    with pytest.raises(InvalidRequest, match=r"line 2 of .*turns"):
        load_suite(path)


def test_a_limit_samples_each_group_equally_and_evenly(tmp_path: Path):
    path = write(
        tmp_path / "many.jsonl",
        [
            {"question_id": f"{kind}-{n}", "category": kind, "turns": ["a"]}
            for kind, count in (("rag", 10), ("qa", 10), ("summarization", 2))
            for n in range(count)
        ],
    )

    def chosen(limit: int) -> list[str]:
        return [each.id for each in chosen_prompts(path, limit=limit).prompts]

    assert chosen(3) == ["rag-0", "qa-0", "summarization-0"]
    assert chosen(5) == ["rag-0", "rag-5", "qa-0", "qa-5", "summarization-0"]
    assert chosen(10) == [
        *(f"rag-{n}" for n in (0, 2, 5, 7)),
        *(f"qa-{n}" for n in (0, 2, 5, 7)),
        *("summarization-0", "summarization-1"),
    ]
    assert chosen(1) == ["rag-0"]
    assert len(chosen(22)) == len(chosen(1000)) == 22
    assert chosen_prompts(path, 3).sha256 == load_suite(path).sha256


def test_a_second_turn_follows_plain_decodings_first_response(model: Model, questions: Path):
    written = json_file(bench(model, questions).value)
    assert b"prompt_token_ids" not in written
    assert b"And the user" not in written, "prompts are not copied into the record"
    record = parse_record(json.loads(written), "it")
    turns = ["81", "81, turn 2", "91", "91, turn 2", "101", "102", "201"]
    assert record.cases == turns
    rows = {row.key: row for row in record.rows}
    assert [rows[case, PLAIN].kind for case in turns] == [
        *[CONVERSATION] * 4,
        *["translation"] * 2,
        "rag",
    ]
    first = model.generate("Hello", max_tokens=24, drafter="none")
    second = model.generate(
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And the user?"},
        ],
        max_tokens=24,
        drafter="none",
    )
    assert rows["81", PLAIN].facts["token_ids"] == first.token_ids
    assert rows["81, turn 2", PLAIN].facts["token_ids"] == second.token_ids
    for contender in (PLAIN, SINGLE_ROW, "suffix"):
        row = rows["81, turn 2", contender]
        assert row.facts["prompt_tokens"] == second.prompt_tokens
        assert (row.facts["category"], row.facts["turn"]) == ("writing", 2)
    assert record.summary["same_tokens"] is True


def test_a_stopped_run_resumes_between_the_turns_of_a_question(
    model: Model, questions: Path, tmp_path: Path
):
    class Stopped(Progress):
        def note(self, text: str) -> None:
            if text.startswith("3/7"):
                raise KeyboardInterrupt

    whole = bench(model, questions)
    output = tmp_path / "result.json"
    with pytest.raises(KeyboardInterrupt):
        bench(model, questions, output=output, progress=Stopped(quiet=True))
    journal = output.with_name("result.json.journal")
    kept = [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]]
    assert kept == ["81", "81, turn 2", "91"]
    said = StringIO()
    again = bench(model, questions, output=output, progress=Progress(said))
    assert said.getvalue().count("(measured before)") == 3
    for one, two in zip(again.value["rows"], whole.value["rows"], strict=True):
        assert (one["case"], one["contender"]) == (two["case"], two["contender"])
        assert one["facts"] == two["facts"]


def test_questions_beyond_the_context_are_skipped_named_and_counted(model: Model, tmp_path: Path):
    room = model.engine.context_length
    long = "the user " * room
    almost = "the user " * (room // 8)
    path = write(
        tmp_path / "question.jsonl",
        [
            {"question_id": 1, "category": "coding", "turns": [long, "Why?"]},
            {"question_id": 2, "category": "coding", "turns": ["Hello", long]},
            {"question_id": 3, "category": "rag", "turns": [almost]},
        ],
    )
    said = StringIO()
    report = bench(model, path, progress=Progress(said), max_tokens=8)
    assert [each["case"] for each in report.value["summary"]["skipped"]] == [
        "1",
        "1, turn 2",
        "2, turn 2",
    ]
    assert dict.fromkeys(row["case"] for row in report.value["rows"]).keys() == {"2", "3"}
    for skipped in report.value["summary"]["skipped"]:
        line = str(Skipped(**skipped))
        assert line in said.getvalue()
        assert line in report.text
    with pytest.raises(InvalidRequest, match=f"{room} tokens"):
        bench(model, path, max_tokens=room)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([1] * 8, 0.0),
        ([1] * 9, 0.5),
        ([*range(100)], 0.0),
        ([*range(8), *range(8)], 1 / 9),
    ],
)
def test_the_repeated_share_counts_recurring_8_grams(tokens: list[int], share: float):
    assert repeated_share(tokens) == pytest.approx(share)
    assert is_loop(tokens) == (share > 0.3)


def test_a_run_reports_each_group_with_and_without_loops(model: Model, questions: Path):
    report = bench(model, questions, max_tokens=60)
    record = parse_record(json.loads(json.dumps(report.value)), "it")
    circling = {
        row.case
        for row in record.rows
        if row.contender == PLAIN and is_loop(row.facts["token_ids"])
    }
    assert circling, "the tiny model goes round in circles on at least one of these"
    assert circling < {*record.cases}
    assert record.summary["loop_cases"] == [case for case in record.cases if case in circling]
    groups = record.summary["groups"]
    assert [*groups] == [CONVERSATION, "translation", "rag", ALL]
    assert [groups[name]["answers"] for name in groups] == [4, 2, 1, 7]
    assert groups[ALL]["loops"] == len(circling)
    straight = [row for row in record.rows if row.case not in circling]
    assert groups[ALL]["without_loops"] == summary(straight)["groups"][ALL]["with_loops"]
    rows = [row for row in record.rows if row.contender == "suffix"]
    found = groups[ALL]["with_loops"]["suffix"]
    decoded = sum(row.facts["tokens"] - 1 for row in rows)
    assert found["tokens_per_step"] == decoded / sum(row.counts["steps"] for row in rows)  # type: ignore[misc]
    assert found["least_ratio"] == min(row.measures["ratio"][0] for row in rows)
    assert {"ratio", "ratio_single_row", "ratio_with_prefill"} <= found.keys()
    assert groups[ALL]["with_loops"][PLAIN]["tokens_per_step"] == 1
    titles = [title for title, *_ in report.tables]
    assert any(title.startswith("suffix, by kind") for title in titles)
    for _, head, lines in report.tables:
        assert all(len(line) == len(head) for line in lines)


def test_single_row_outputs_that_differ_are_counted(model: Model, questions: Path):
    def other(rows: Any, *_: int) -> None:
        rows *= -1

    def load(*_: Any, min_rows: int, **__: Any) -> Model:
        return model if min_rows == 2 else Model(model.files, FaultyEngine(model.engine, other))

    report = bench(model, questions, load=load, max_tokens=8, policy="auto")
    assert report.passed
    answers = len({row["case"] for row in report.value["rows"]})
    assert report.value["summary"]["single_row_texts_differing"] == answers
    assert f"{answers} of {answers} answers differ" in report.text


@pytest.mark.usefixtures("cache")
def test_the_command_accepts_the_original_spec_bench_file(
    tiny_gguf: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    asked = ["--suite", str(questions), "--limit", "3", "--max-tokens", "8", "--rounds", "1"]
    asked += ["--drafter", "suffix", "--model", str(tiny_gguf), "--output", str(output)]
    assert main(["bench", "run", *asked]) == 0
    assert read_record(output).settings["limit"] == 3
    assert read_record(output).cases == ["81", "81, turn 2", "101", "201"]
    assert "4 answers, " in capsys.readouterr().out
    for wrong in ("0", "-1", "many"):
        assert main(["bench", "run", "--limit", wrong]) == 2


def test_the_readmes_tables_are_printed_from_a_record(
    model: Model, questions: Path, tmp_path: Path
):
    path = tmp_path / "result.json"
    report = bench(model, questions, drafter=["suffix", "ngram"])
    path.write_bytes(json_file(report.value))
    script = Path(__file__).parents[3] / "benchmarks" / "spec_bench_table.py"

    shown = python(script, path, "--drafter", "suffix").stdout
    groups = report.value["summary"]["groups"]
    first = shown.split("\n\n")[0].splitlines()
    assert first[0] == f"|  | {' | '.join(groups)} |"
    speeds = [f"{each['with_loops']['suffix']['ratio']:.2f}" for each in groups.values()]
    assert f"| speed over plain decoding | {' | '.join(speeds)} |" in first
    assert {line.count("|") for line in first} == {len(groups) + 2}
    for name in ("suffix", "ngram", SINGLE_ROW):
        assert f"\n{name}, by kind" in shown
    python(script, path, code=1)  # auto is not in this record
