"""`paceline chat` when a turn does not go as it should: at a terminal, and in a script."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.runtime.conversation import Conversation
from paceline.runtime.load import load
from support.process import Run
from support.tiny import TEMPLATE, write_tiny
from support.waiting import PATIENCE, until

COMMAND = [sys.executable, "-m", "paceline", "chat"]
QUESTION = "[s]ave first: "
SMALL = ["--cache-tokens", "160", "--max-tokens", "30", "--ignore-eos", "--drafter", "none"]


@pytest.fixture
def environment(cache: Path, tiny_model: Any) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "TERM": "dumb"}


class Terminal:
    """A command at a terminal: what is typed, and what it shows."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.shown = ""

    def type(self, line: str) -> None:
        self.shown = ""
        os.write(self._master, line.encode() + b"\n")

    def wait_for(self, *texts: str) -> str:
        """Read until one of `texts` is shown; all that was since the last line was typed."""
        while not any(text in self.shown for text in texts):
            ready, _, _ = select.select([self._master], [], [], PATIENCE)
            assert ready, self.shown
            try:
                read = os.read(self._master, 4096)
            except OSError:  # the other side is closed
                read = b""
            assert read, self.shown
            self.shown += read.decode(errors="replace").replace("\r\n", "\n")
        return self.shown

    def interrupt(self, child: "subprocess.Popen[bytes]") -> None:
        """Press Ctrl-C once the command waits for a line.

        Python's `input` loses one that comes between the prompt and the wait (8 of 150 here).
        """
        until(lambda: _state(child.pid).startswith("S"))
        self.shown = ""
        os.killpg(child.pid, signal.SIGINT)

    def answer_to(self, message: str) -> str:
        """Send a message, and wait for the prompt after its answer."""
        self.type(message)
        return self.wait_for("tokens per step")


def _state(pid: int) -> str:
    """State of a process, as `ps` shows it; S: it waits for an event."""
    asked = ["ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def terminal(environment: dict[str, str], model: Path, *arguments: str) -> Iterator[Any]:
    """A chat on a pseudo-terminal, and its process; killed if it does not end."""
    master, inner = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, "--model", str(model), *arguments],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=environment,
        start_new_session=True,
    )
    os.close(inner)
    found = Terminal(master)
    try:
        found.wait_for("> ")
        yield found, child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(master)


def fill(found: Terminal) -> str:
    """Talk until the chat asks whether turns may be dropped; what it shows."""
    for turn in range(20):
        found.type(f"Hello {turn}")
        if QUESTION in found.wait_for(QUESTION, "tokens per step"):
            return found.shown
    raise AssertionError("the context never gets full")


def test_a_full_context_at_a_terminal_asks_and_goes_on_with_turns_dropped(
    environment: dict[str, str], tiny_gguf: Path
):
    with terminal(environment, tiny_gguf, *SMALL, "--system", "one") as (found, child):
        shown = fill(found)
        assert "of 160 tokens" in shown
        found.type("maybe")
        found.wait_for(QUESTION)
        found.type("y")
        shown = found.wait_for("tokens per step")
        assert "[30 tokens" in shown, "the message that asked is answered"
        found.wait_for("> ")
        found.type("")
        assert child.wait(PATIENCE) == 0


def test_who_declines_to_drop_turns_loses_nothing_and_can_save_shorten_and_leave(
    environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    with terminal(environment, tiny_gguf, *SMALL, "--system", "one") as (found, child):
        fill(found)
        found.type("s")
        found.wait_for("File: ")
        path = tmp_path / "chat.json"
        found.type(str(path))
        found.wait_for(QUESTION)
        found.type("s")
        found.wait_for("File: ")
        found.type(str(path))
        assert "exists" in found.wait_for(QUESTION)
        found.type("s")
        found.wait_for("File: ")
        found.type(str(tmp_path / "no" / "folder"))
        assert "cannot write" in found.wait_for(QUESTION)
        found.type("n")
        found.wait_for("drop the oldest")
        found.wait_for("\n> ")
        messages = json.loads(path.read_text())
        assert [each["role"] for each in messages[:3]] == ["system", "user", "assistant"]
        assert messages[0]["content"] == "one"
        assert len(messages) % 2 == 1
        # Nothing was lost: the same message is refused for the same turns.
        found.type("Hello again, and again")
        assert f"of {len(messages) // 2} turns" in found.wait_for(QUESTION)
        found.type("n")
        found.wait_for("\n> ")
        found.type("")
        assert child.wait(PATIENCE) == 0


def test_ctrl_c_at_the_question_keeps_the_chat(environment: dict[str, str], tiny_gguf: Path):
    with terminal(environment, tiny_gguf, *SMALL) as (found, child):
        fill(found)
        found.interrupt(child)
        found.wait_for("\n> ")
        found.type("Hello again, and again")
        found.wait_for(QUESTION)
        found.type("yes")
        found.wait_for("tokens per step")
        found.wait_for("\n> ")
        found.type("")
        assert child.wait(PATIENCE) == 0


def test_a_message_that_never_fits_is_a_line_and_the_chat_goes_on(
    environment: dict[str, str], tiny_gguf: Path
):
    with terminal(environment, tiny_gguf, *SMALL) as (found, child):
        found.type("x " * 200)
        found.wait_for("shorten it")
        assert "Traceback" not in found.shown
        assert "Drop" not in found.shown
        found.answer_to("Hello")
        found.wait_for("> ")
        found.type("")
        assert child.wait(PATIENCE) == 0


# -- scripts ---------------------------------------------------------------------------------------


def script(environment: dict[str, str], model: Path, lines: list[str], *arguments: str) -> Any:
    return subprocess.run(
        [*COMMAND, "--model", str(model), *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=PATIENCE,
    )


def test_a_chat_answers_line_by_line_and_ends_with_the_input(
    run: Run, tiny_gguf: Path, cache: Path
):
    found = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--json", input="Hello\nand\n")
    first, second = (json.loads(line) for line in found.stdout.splitlines())
    assert found.returncode == 0
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and"},
    ]
    assert second["token_ids"] == load(tiny_gguf).generate(messages, max_tokens=5).token_ids
    assert second["stats"]["cached_tokens"] > 0
    plain = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--quiet", input="Hello\n\nnot")
    assert plain.stdout == first["text"] + "\n", "an empty line ends it"
    assert plain.stderr == ""


LINES = [f"Hello {turn}" for turn in range(8)]


def test_a_script_in_a_full_context_has_a_line_for_each_message_and_exits_with_2(
    environment: dict[str, str], tiny_gguf: Path
):
    found = script(environment, tiny_gguf, LINES, *SMALL, "--json")
    assert found.returncode == 2
    results = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(results) == len(LINES)
    refused = [result["error"] for result in results if "error" in result]
    assert 1 <= len(refused) < len(LINES)
    assert all("context holds 160" in error for error in refused)
    assert all("--drop-oldest" in error for error in refused)
    said = [line for line in found.stderr.splitlines() if line.startswith("paceline")]
    assert said == [f"paceline: {error}" for error in refused]
    assert "Traceback" not in found.stderr


def test_a_script_that_may_drop_the_oldest_turns_gets_every_answer(
    environment: dict[str, str], tiny_gguf: Path
):
    found = script(environment, tiny_gguf, LINES, *SMALL, "--json", "--drop-oldest")
    assert found.returncode == 0, found.stderr
    results = [json.loads(line) for line in found.stdout.splitlines()]
    assert [result["completion_tokens"] for result in results] == [30] * len(LINES)
    assert "dropped the oldest" in found.stderr
    quiet = script(environment, tiny_gguf, LINES, *SMALL, "--drop-oldest", "--quiet")
    assert quiet.returncode == 0
    assert quiet.stderr == ""


def test_an_answer_that_fills_the_context_says_so_and_ends_with_length(
    environment: dict[str, str], tiny_gguf: Path
):
    room = ["--cache-tokens", "96", "--ignore-eos", "--max-tokens", "500"]
    found = script(environment, tiny_gguf, ["Hello"], *room)
    assert found.returncode == 0
    assert "is full]" in found.stderr
    (result,) = map(
        json.loads, script(environment, tiny_gguf, ["Hello"], *room, "--json").stdout.splitlines()
    )
    assert result["finish_reason"] == "length"


def test_a_template_that_refuses_one_message_is_one_line_and_the_next_is_answered(
    environment: dict[str, str], tmp_path: Path
):
    fails = "{% if messages[-1]['content'] == 'bad' %}{{ 1 // 0 }}{% endif %}" + TEMPLATE
    model = write_tiny(tmp_path / "fails.gguf", fields={"tokenizer.chat_template": fails})
    found = script(environment, model, ["Hello", "bad", "Hello"], "--max-tokens", "5", "--json")
    assert found.returncode == 2
    first, second, third = map(json.loads, found.stdout.splitlines())
    assert "chat template" in second["error"]
    assert third["prompt_tokens"] > first["prompt_tokens"], "the first turn is there"
    assert "Traceback" not in found.stderr


def test_a_fault_in_one_turn_is_one_line_and_the_next_is_answered(
    cache: Path,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    say, calls = Conversation.say, 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a fault\nof ours")
        return say(*arguments, **options)

    monkeypatch.setattr(Conversation, "say", fails)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nHello\nHello\n"))
    code = main(["chat", "--model", str(tiny_gguf), "--max-tokens", "9", "--json"])
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert code == 1
    assert "RuntimeError: a fault of ours" in second["error"]
    assert third["prompt_tokens"] > first["prompt_tokens"], "the first turn is there"


def test_an_option_that_no_turn_can_take_is_found_before_the_model_is_loaded(
    environment: dict[str, str], tmp_path: Path
):
    found = script(environment, tmp_path / "none.gguf", ["Hello"], "--drafter", "no")
    assert found.returncode == 2
    assert "drafter" in found.stderr
    assert found.stderr.count("\n") == 1
