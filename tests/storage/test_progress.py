import sys
from io import StringIO

import pytest

from paceline.models import QUIET, Progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Closed(StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_task_without_a_terminal_prints_one_line_or_none_if_quiet():
    stream, quiet = StringIO(), Terminal()
    for progress in (Progress(stream), Progress(quiet, quiet=True)):
        with progress.task("fetching [x] of y", 100) as reach:
            reach(50)
        assert not progress.is_shown
    assert (stream.getvalue(), quiet.getvalue()) == ("fetching [x] of y\n", "")


@pytest.mark.parametrize(("total", "unit"), [(None, "bytes"), (100, "bytes"), (3, "prompts")])
def test_a_terminal_shows_the_task_and_its_progress(total: int | None, unit: str):
    stream = Terminal()
    progress = Progress(stream)
    assert progress.is_shown
    with progress.task("fetching [x]", total, unit=unit) as reach:
        reach(1)
    assert "fetching [x]" in stream.getvalue()
    assert ("3/3" in stream.getvalue()) == (unit == "prompts")


@pytest.mark.parametrize("terminal", [False, True])
def test_exceptions_in_a_task_propagate(terminal: bool):
    with (
        pytest.raises(KeyboardInterrupt),
        Progress(Terminal() if terminal else StringIO()).task("work", 2) as reach,
    ):
        reach(1)
        raise KeyboardInterrupt


def test_a_closed_progress_stream_does_not_stop_the_task():
    for stream in (StringIO(), Closed()):
        if not isinstance(stream, Closed):
            stream.close()
        progress = Progress(stream)
        progress.note("hello")
        with progress.task("work", 1) as reach:
            reach(1)
        assert not progress.is_shown


def test_progress_never_writes_to_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Progress().note("hello")
    with Progress().task("work"):
        pass
    assert capsys.readouterr() == ("", "hello\nwork\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress().task("work"):
        pass
    assert capsys.readouterr().out == ""
    QUIET.note("nothing")
