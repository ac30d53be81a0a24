"""The form of a recorded result: there and back, and everything that is none."""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.storage.report import json_file
from paceline_lab.bench.record import Record, Row, Spread, here, parse_record, read_record, spread

texts = st.text(max_size=8)

ROW = Row("one", "chat", "auto", {"ratio": [1.5, 1.25]}, {"depth": 512}, {"drafted_at": [2, 1]})
RECORD = Record("run", [ROW, replace(ROW, contender="plain")], {"rounds": 2}, **here())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_a_record_round_trips(path: Path):
    path.write_bytes(json_file(RECORD.as_dict()))
    assert read_record(path) == RECORD
    assert [*path.parent.iterdir()] == [path]
    rows = [line for line in path.read_text().splitlines() if line.startswith('  {"case"')]
    assert len(rows) == len(RECORD.rows), "a line each"
    for other in (replace(RECORD, rows=[]), replace(RECORD, summary={"rows": []})):
        path.write_bytes(json_file(other.as_dict()))
        assert read_record(path) == other


def test_a_record_has_its_command_versions_and_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["/some/where/paceline", "bench", "run", "--suite", "a b"])
    monkeypatch.setattr("paceline_lab.bench.record.PACKAGES", ("numpy", "no-such-package"))
    found = here()
    assert found["command"] == "paceline bench run --suite 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["made"])
    assert found["versions"].keys() == {"python", "numpy"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["processor"]
    head = [*Record("run", [], **found).as_dict()]
    assert head[:6] == ["form", "version", "kind", "made", "command", "paceline"]
    assert head[-1] == "rows"


def test_a_spread_has_median_minimum_and_maximum():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert ROW.spread("ratio") == Spread(1.375, 1.25, 1.5)
    assert ROW.spread("tokens_per_step") is None
    assert str(Spread(1.0, 0.5, 2.25)) == "1.00 (0.50 to 2.25)"


# -- what is no record -----------------------------------------------------------------------------


def rejected(path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_record(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_a_truncated_record_is_rejected(path: Path):
    path.write_bytes(json_file(RECORD.as_dict()))
    whole = path.read_bytes().rstrip()
    for kept in range(0, len(whole), 7):
        path.write_bytes(whole[:kept])
        assert "is not a result of `paceline bench`, or is truncated: " in rejected(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "is UTF-16 text"),
        (b"\xff", "is not UTF-8 text"),
        (b"", "truncated"),
        (b"5", "expected a JSON object"),
        (b"{}", '"form": "paceline-bench"'),
        (b'{"form": "paceline-bench", "version": 2}', "has version 2 of the form"),
        (b'{"form": "paceline-bench", "x": NaN}', "NaN is not a JSON number"),
    ],
)
def test_a_file_that_is_not_a_record_is_rejected(content: bytes, reason: str, path: Path):
    path.write_bytes(content)
    assert reason in rejected(path)


def test_an_unreadable_record_is_named(tmp_path: Path):
    assert "cannot read" in rejected(tmp_path)
    assert "cannot read" in rejected(tmp_path / "none")


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda v: v.pop("kind"), ["kind: "]),
        (lambda v: v.pop("made"), ["made: .* not None"]),
        (lambda v: v.update(engine={"threads": 2}), ["engine.threads: .* not 2"]),
        (lambda v: v["rows"][0].pop("case"), ["rows.0.case: "]),
        (lambda v: v["rows"][0].update(measures={"x": []}), ["rows.0: measures.x is empty"]),
        (lambda v: v["rows"][0].update(measures={"x": [10**400]}), ["rows.0.measures.x.0: .*fin"]),
        (lambda v: v["rows"][0].update(measures={"x": [1e308]}), ["rows.0.measures.x.0: .*less"]),
        (lambda v: v["rows"][0].update(measures={"ratio": [1, 0]}), ["ratio is 0.*more than 0"]),
        (lambda v: v["rows"][0].update(counts={"steps": 1.5}), ["rows.0.counts.steps.*: .* 1.5"]),
        (lambda v: v["rows"].append(v["rows"][0]), ["'one' by 'auto' is there twice"]),
        (
            lambda v: (v["rows"].extend([{}] * 4), v.update(made=5)),
            [f"rows.{n}.{name}: " for n in (2, 3, 4, 5) for name in ("case", "kind", "contender")]
            + ["made: "],
        ),
    ],
)
def test_every_error_in_a_record_has_a_line(change: Change, lines: list[str], path: Path):
    value = json.loads(json.dumps(RECORD.as_dict()))
    change(value)
    path.write_text(json.dumps(value))
    message = rejected(path)
    for line in lines:
        assert re.search(line, message), line


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(value=junk, place=st.sampled_from([*RECORD.as_dict(), *ROW.as_dict(), "facts", ""]))
@example(value={"\n": None}, place="measures")
@example(value="\ud800", place="facts")
def test_any_json_value_in_a_record_is_accepted_or_an_error(value: Any, place: str):
    changed = json.loads(json.dumps(RECORD.as_dict()))
    if place == "":
        changed = value
    else:
        target = changed if place in changed and place != "kind" else changed["rows"][0]
        target[place] = value
    with contextlib.suppress(InvalidRequest):
        found = parse_record(changed, "it")
        assert parse_record(json.loads(json.dumps(found.as_dict())), "it") == found
