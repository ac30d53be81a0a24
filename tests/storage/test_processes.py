import os
from pathlib import Path

import pytest

from paceline.storage import processes
from paceline.storage.processes import KEPT_LINES, Finished, python, run_child


def script(text: str) -> list[str]:
    return python("-c", text)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_both_streams_are_heard_line_by_line_and_the_code_comes_back():
    heard: list[str] = []
    finished = run_child(
        script(
            "import os, sys; print(repr(sys.stdin.read()), flush=True);"
            r"os.write(2, b'a\xff\xfe\n'); sys.exit(3)"
        ),
        on_line=heard.append,
    )
    assert finished == Finished(3, ("''", "a\ufffd\ufffd"))
    assert heard == [*finished.lines]
    assert finished.reason == heard[-1]


def test_only_the_last_lines_are_kept_and_all_are_heard():
    heard: list[str] = []
    finished = run_child(script("for i in range(1000): print(i)"), on_line=heard.append)
    assert len(heard) == 1000
    assert finished.lines == tuple(heard[-KEPT_LINES:])


def test_the_environment_is_the_one_given():
    finished = run_child(
        script("import os; print(os.environ.get('MARK'))"), env={**os.environ, "MARK": "here"}
    )
    assert finished.lines == ("here",)


def test_a_child_of_ours_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("print('taken in')")
    assert run_child(script("import json; print(json.dumps(1))")).lines == ("1",)


def test_the_reason_is_the_last_line_with_words_or_the_signal():
    assert Finished(1, ("why", "", " ")).reason == "why"
    assert Finished(1, ()).reason == "it gave no reason"
    assert Finished(-15, ("Terminating",)).reason == "ended by signal 15"
    assert run_child(script("import os; os.kill(os.getpid(), 9)")).reason == "ended by signal 9"


def test_a_program_that_is_not_there_is_an_oserror():
    with pytest.raises(FileNotFoundError):
        run_child(["/nowhere/program"])


@pytest.mark.parametrize(("error", "stubborn"), [(KeyboardInterrupt, True), (OSError, False)])
def test_however_the_call_ends_no_child_is_left_running(
    error: type[BaseException], stubborn: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.1)
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        raise error

    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    with pytest.raises(error):
        run_child(
            script(
                f"import os, signal, time; {deaf} print(os.getpid(), flush=True); time.sleep(600)"
            ),
            on_line=on_line,
        )
    assert not is_running(pids[0])
