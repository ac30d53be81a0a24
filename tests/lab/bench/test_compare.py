"""Recorded results side by side."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.storage.report import json_file
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.compare import bench_compare
from paceline_lab.bench.record import Record, Row

Write = Callable[..., Path]


def row(case: str, kind: str, contender: str, *ratio: float) -> Row:
    measures = {"ratio": [*ratio], "acceptance_rate": [0.0 if contender == PLAIN else 0.5]}
    return Row(case, kind, contender, measures)


ROWS = [
    *(row("a", "chat", name, *found) for name, found in ((PLAIN, (1, 1)), ("x", (2, 1, 3)))),
    *(row("b", "code", name, *found) for name, found in ((PLAIN, (1, 1)), ("x", (4, 4, 4)))),
]
RECORD = Record(
    "run",
    ROWS,
    {"max_tokens": 128},
    {"name": "m", "fingerprint": "f" * 64},
    suite_sha256="a" * 64,
    made="2026-01-01T00:00:00+00:00",
    command="paceline bench run",
    paceline="0",
)
FASTER = [
    row("b", "code", "x", 8.0),
    row("a", "chat", "x", 1.0, 2.0, 1.5),
    row("c", "code", "x", 9.0),
    row("a", "chat", "y", 9.0),
]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, record: Record) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_bytes(json_file(record.as_dict()))
        return path

    return write


def compare(*paths: Path, **options: Any) -> dict[str, Any]:
    report = bench_compare(*paths, **{"measure": "ratio", "force": False, **options})
    assert report.passed
    for _, head, rows in report.tables:
        assert all(len(row) == len(head) for row in rows)
    value: dict[str, Any] = json.loads(json.dumps(report.value))
    return value


def test_common_cases_are_compared_side_by_side(write: Write):
    found = compare(write("old", RECORD), write("new", replace(RECORD, rows=FASTER)))
    # Plain is what ratios are taken to; the cases are the first one's.
    assert [(row["case"], row["contender"]) for row in found["rows"]] == [("a", "x"), ("b", "x")]
    a, b = found["rows"]
    assert a["before"] == {"median": 2, "least": 1, "most": 3}
    assert a["after"] == {"median": 1.5, "least": 1.0, "most": 2.0}
    # As wide as it can be: the rounds of two runs do not belong together.
    assert a["quotient"] == {"median": 0.75, "least": 1 / 3, "most": 2.0}
    assert b["quotient"] == {"median": 2.0, "least": 2.0, "most": 2.0}
    means = {each["kind"]: each["quotient"] for each in found["means"]}
    assert means["all"] == {"median": pytest.approx(math.sqrt(1.5)), "least": 0.75, "most": 2.0}
    assert means["chat"]["median"] == pytest.approx(0.75)
    assert [Path(each["file"]).name for each in found["results"]] == ["old.json", "new.json"]


def test_another_measure_is_compared_if_it_has_values(write: Write):
    paths = [write("1", RECORD), write("2", RECORD)]
    found = compare(*paths, measure="acceptance_rate")
    # Nothing over nothing is no number.
    assert {row["contender"] for row in found["rows"]} == {"x"}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": {"name": "m", "fingerprint": "0" * 64}}, "another model"),
        ({"suite_sha256": "b" * 64}, "other prompts"),
        ({"settings": {"max_tokens": 64}}, "answers of another length"),
    ],
)
def test_results_with_different_settings_are_rejected_without_force(
    other: dict[str, Any], reason: str, write: Write
):
    paths = write("old", RECORD), write("new", replace(RECORD, **other))
    with pytest.raises(InvalidRequest, match=f"{reason}") as caught:
        compare(*paths)
    assert "--force" in str(caught.value)
    assert compare(*paths, force=True)["rows"]


def test_results_with_nothing_in_common_are_rejected(write: Write):
    paths = write("old", RECORD), write("new", replace(RECORD, rows=FASTER[2:]))
    with pytest.raises(InvalidRequest, match="no case has ratio by the same contender"):
        compare(*paths)
    with pytest.raises(InvalidRequest, match="beauty"):
        compare(paths[0], paths[0], measure="beauty")
