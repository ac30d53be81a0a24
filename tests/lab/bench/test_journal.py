import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.storage.journals import journal_of
from paceline.storage.progress import Progress
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.record import Record, Row, here

HEAD = Record("run", [], {"rounds": 2, "drafters": ["auto"]}, {"name": "m"}, **here())
ROWS = [Row("one", "chat", name, {"ratio": [1.0, 2.5]}, {"depth": 3}) for name in ("plain", "auto")]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


@pytest.fixture
def journal(output: Path) -> Path:
    return journal_of(output)


def measured(output: Path | None, head: Record, *keys: str) -> list[str]:
    """Measure keys in one run; returns those that were new."""
    new = list[str]()

    def measure(key: str) -> list[Row]:
        new.append(key)
        return ROWS

    with open_journal(output, head, Progress(quiet=True)) as rows_of:
        for key in keys:
            assert rows_of(key, partial(measure, key), "1/1") == ROWS
    return new


def test_measurements_persist_for_the_next_run(output: Path, journal: Path):
    with pytest.raises(KeyboardInterrupt), open_journal(output, HEAD, Progress(quiet=True)) as rows:
        rows("one", lambda: ROWS, "1/2")
        raise KeyboardInterrupt
    # Another process, at another time: of its head that alone may be different.
    later = replace(HEAD, made="later", command="another", summary={"x": 1})
    assert measured(output, later, "one", "two") == ["two"]
    journal.write_bytes(journal.read_bytes()[:-10])  # a torn line
    assert measured(output, HEAD, "one", "two") == ["two"]
    assert len(journal.read_text().splitlines()) == 3


def test_without_an_output_nothing_is_saved(tmp_path: Path):
    assert measured(None, HEAD, "one") == ["one"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"settings": {**HEAD.settings, "rounds": 3}}, "settings (rounds 2, not rounds 3)"),
        ({"suite_sha256": "f"}, "suite_sha256 (None, not f)"),
        ({"machine": {**HEAD.machine, "cores": 99}}, "machine (cores"),
    ],
)
def test_a_run_with_other_settings_is_not_resumed(
    other: dict[str, Any], said: str, output: Path, journal: Path
):
    measured(output, HEAD, "one")
    before = journal.read_bytes()
    with pytest.raises(InvalidRequest, match="has an interrupted run with another") as caught:
        measured(output, replace(HEAD, **other))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"number": 1}', "is not a journal of `paceline bench`"), ("5", "is not a JSON object")],
)
def test_an_unrelated_file_is_left_alone(line: str, reason: str, output: Path, journal: Path):
    journal.write_text(f"{line}\n")
    with pytest.raises(InvalidRequest, match=reason):
        measured(output, HEAD)
    assert journal.read_text() == f"{line}\n"


def test_an_invalid_journal_entry_is_named(output: Path, journal: Path):
    measured(output, HEAD, "a")
    with journal.open("a") as file:
        file.write(json.dumps({"key": 1}) + "\n")
    with pytest.raises(InvalidRequest, match=r"^line 3 of .*\.journal"):
        measured(output, HEAD)
