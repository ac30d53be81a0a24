"""`bench sweep`: contenders, lengths and depths, and going on after a stop."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline import load
from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW, contender_options
from paceline_lab.bench.record import Record, parse_record, read_record
from paceline_lab.cli import sweep as command
from paceline_lab.cli.options import ComparisonArguments
from paceline_lab.cli.sweep import SweepArguments
from paceline_lab.sweep.seeds import seeds_report
from support.errors import raises
from support.reports import report_of
from support.tiny import write_tiny


class Loading:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.times = 0

    def __call__(self, *_: Any, **__: Any) -> Model:
        self.times += 1
        return Model(self.model.files, self.model.engine)


def sweep(model: Model, load: Any = None, **options: Any) -> Report:
    compared = {name: options.pop(name, []) for name in ("drafters", "policies", "blocks")}
    asked: dict[str, Any] = {name: options.pop(name, []) for name in ("length", "depth")}
    measurement = SweepArguments(**{"rounds": 1, "max_tokens": 6, **options})
    comparison = ComparisonArguments(**compared)
    loading = load or Loading(model)
    return report_of(
        command.sweep, loading, comparison=comparison, measurement=measurement, **asked
    )


def record_of(report: Report) -> Record:
    return parse_record(json.loads(json.dumps(report.value)), "it")


@pytest.mark.parametrize(
    ("drafters", "policies", "blocks", "names"),
    [
        ([], [], [], ["auto"]),
        (["suffix", "ngram"], [], [], ["suffix", "ngram"]),
        (["suffix"], ["fixed:4", "kelly:16", "auto"], [], None),
        (["suffix"], ["fixed:4", "kelly"], [8], ["suffix, fixed 4", "suffix, kelly 8"]),
        (["dflash:/some/where/d"], ["auto:8"], [], ["dflash:d, auto 8"]),
    ],
)
def test_a_sweep_combines_every_drafter_policy_and_block_size(
    drafters: list[str], policies: list[str], blocks: list[int], names: list[str] | None
):
    expected = names or ["suffix, fixed 4", "suffix, kelly 16", "suffix"]
    found = contender_options(drafters, policies, blocks)
    assert [*found] == [PLAIN, *expected]
    assert found[PLAIN] == {"drafter": "none"}


def test_a_sweep_by_length_has_rows_for_all(model: Model):
    report = sweep(model, length=[20, 40], drafters=["suffix"], rounds=2)
    assert report.passed
    record = record_of(report)
    assert [(row.at["prompt_tokens"], row.contender) for row in record.rows] == [
        (length, name) for length in (20, 40) for name in (PLAIN, "suffix")
    ]
    for row in record.rows:
        assert row.facts["tokens"] == 6
        assert row.facts["prompt_tokens"] == row.at["prompt_tokens"]
        assert len(row.measures["ratio"]) == 2
    assert record.settings["contenders"][PLAIN] == {"drafter": "none"}
    for _, head, rows in report.tables:
        assert rows
        assert all(len(row) == len(head) for row in rows)


def test_a_sweep_compares_with_single_rows_where_the_engine_has_them(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model.engine, "single_row_fault", "", raising=False)
    load = Loading(model)
    report = sweep(model, load=load, length=[20], drafters=["suffix"])
    assert load.times == 2
    record = record_of(report)
    assert record.contenders == [PLAIN, SINGLE_ROW, "suffix"]
    assert "ratio_single_row" in record.rows[2].measures
    assert re.fullmatch(r"suffix: [\d.]+x the speed of the faster plain decoding", report.text)
    monkeypatch.setattr(model.engine, "single_row_fault", "none", raising=False)
    assert record_of(sweep(model, length=[20])).contenders == [PLAIN, "auto"]


def test_a_sweep_by_depth_has_one_question_per_kind(model: Model, suite_file: Path):
    report = sweep(model, depth=[0, 64], suite=suite_file, limit=2)
    record = record_of(report)
    assert report.passed
    assert {row.kind for row in record.rows} == {"chat", "code"}
    assert {row.at["depth"] for row in record.rows} == {0, 64}
    assert len(record.rows) == 2 * 2 * 2
    assert [row[3] for row in report.tables[1][2]] == ["1.23", "1.79", "2.19", "1.38", "1.96"]


def test_a_stopped_sweep_resumes(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "result.json"
    whole = Model.generate
    asked = 0

    def generate(self: Model, *arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2 + 2 + 1:  # warming up, the first length; then in the second
            raise KeyboardInterrupt
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Model, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, length=[20, 40], output=output)
    report = sweep(model, length=[20, 40], output=output)
    assert asked == 5 + 2 + 2
    assert record_of(report).cases == ["code, 20 tokens", "code, 40 tokens"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"length": [5], "depth": [5]}, "--depth cannot be used with --length"),
        ({"limit": 3}, "are for --depth"),
        ({"drafters": ["magic"]}, "unknown drafter 'magic'"),
        ({"policies": ["fixed:x"]}, "policy 'fixed:x' has no block"),
        ({"policies": ["fixed:99"]}, "max_block is 99"),
    ],
)
def test_invalid_sweeps_are_rejected_before_loading(
    options: dict[str, Any], reason: str, model: Model
):
    load = Loading(model)
    with pytest.raises(InvalidRequest, match=reason):
        sweep(model, load=load, **options)
    assert load.times == 0


@pytest.mark.usefixtures("cache", "tiny_model")
def test_works_from_the_command_line(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    common = ["bench", "sweep", "--model", str(tiny_gguf), "--max-tokens", "4", "--rounds", "1"]
    common += ["--quiet", "--output", str(output)]
    assert main([*common, "--length", "9", "--length", "max", "--block", "4"]) == 0
    assert "auto, fixed 4" in capsys.readouterr().out
    record = read_record(output)
    assert record.contenders == [PLAIN, "auto, fixed 4"]
    assert [row.at["prompt_tokens"] for row in record.rows[::2]] == [9, 508]
    assert [*tmp_path.iterdir()] == [output], "what kept the work is not needed any more"
    # What a sweep writes can be laid side by side, and drawn.
    copy = tmp_path / "copy.json"
    copy.write_bytes(output.read_bytes())
    assert main(["bench", "compare", str(output), str(copy)]) == 0
    assert main(["bench", "report", str(output), "--output", str(tmp_path / "x.html")]) == 0
    assert main([*common, "--length", "99999"]) == 2
    assert "a prompt of 99999 tokens does not fit; expected at most 508" in capsys.readouterr().err
    assert main([*common, "--length", "x"]) == 2
    assert "'x' is not a whole number of 1 or more, nor max" in capsys.readouterr().err


def test_seeds_tables_show_our_rows_next_to_published_ones(tmp_path: Path, cache: Path):
    model = load(write_tiny(tmp_path / "tiny.gguf", fields={"llama.context_length": 4096}))
    report = seeds_report(Loading(model), drafters=["suffix"], rounds=1, progress=QUIET)
    assert report.passed
    code, dense = report.tables[:2]
    assert [title for title, _, _ in report.tables[2:]] == [
        "code prompts, by suffix",
        "after dense code, by suffix",
    ]
    *ours, whole, phi, zaya, translation = code[2]
    assert len(ours) == 5
    counts = [[int(cell) for cell in row[5:9]] for row in (*ours, whole)]
    assert [sum(column) for column in zip(*counts[:5], strict=True)] == counts[5]
    for calls, drafted, accepted, fallbacks in counts:
        assert calls + accepted >= 19  # a call gives the target's token and what it accepted
        assert drafted <= 3 * calls
        assert fallbacks <= calls
    assert phi[4:6] == ["1.28", "-"]
    assert zaya[1:] == ["39", "8.6", "2.7", "0.31", "29", "87", "10", "28", "499.1", "never"]
    assert translation[1:5] == ["-", "34.0", "-", "-"]
    assert [row[4] for row in dense[2][-4:]] == ["1.19", "1.24", "1.50", "1.62"]
    assert record_of(report).rows[1].counts["fallbacks"] >= counts[0][3]
    small = load(write_tiny(tmp_path / "small.gguf"))
    with raises(InvalidRequest, "has 512 tokens", "needs 6"):
        seeds_report(Loading(small), drafters=[], rounds=1, progress=QUIET)


def test_seeds_tables_reject_options_that_they_set_themselves(capsys: pytest.CaptureFixture[str]):
    words = ["--policy", "fixed", "--temperature", "1", "--seed", "3", "--max-tokens", "9"]
    assert main(["bench", "run", "--suite", "seeds", *words]) == 2
    assert "--policy, --temperature, --seed, --max-tokens" in capsys.readouterr().err
