import os
import signal
import threading
from pathlib import Path

import pytest

from paceline.system.processes import Finished, python, run_child
from support.waiting import until


def script(text: str) -> list[str]:
    return python("-c", text)


def test_a_child_process_returns_both_streams_and_its_code_and_has_no_stdin():
    finished = run_child(
        script(
            "import os, sys; print(repr(sys.stdin.read()), flush=True);"
            r"os.write(2, b'a\xff\xfe\n'); sys.exit(3)"
        )
    )
    assert finished == Finished(3, ("''", "a\ufffd\ufffd"))


def test_a_child_process_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("print('taken in')")
    assert run_child(script("import json; print(json.dumps(1))")).lines == ("1",)


def test_a_failures_reason_is_the_last_nonempty_line_or_the_signal():
    assert Finished(1, ("why", "", " ")).reason == "why"
    assert Finished(1, ()).reason == "it gave no reason"
    assert Finished(-15, ("Terminating",)).reason == "ended by signal 15"
    assert run_child(script("import os; os.kill(os.getpid(), 9)")).reason == "ended by signal 9"
    with pytest.raises(FileNotFoundError):
        run_child(["/nowhere/program"])


def test_ctrl_c_leaves_no_child_process(tmp_path: Path):
    path, main = tmp_path / "pid", threading.get_ident()

    def interrupt() -> None:
        until(path.exists)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_child(
            script(
                "import os, pathlib, time; "
                f"pathlib.Path({str(path) + '.part'!r}).write_text(str(os.getpid())); "
                f"os.rename({str(path) + '.part'!r}, {str(path)!r}); time.sleep(600)"
            )
        )
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
