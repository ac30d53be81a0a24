"""`paceline chat` from a pipe and at a terminal, where no typed input is lost."""

import contextlib
import json
import os
import pty
import select
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.load import load
from support.process import Run, started
from support.waiting import PATIENCE, until

QUESTION = "[s]ave first:"
HINT = "/help has the rest"
CTRL_C, CTRL_D = "\x03", "\x04"
SMALL = ["--cache-tokens", "160", "--max-tokens", "30", "--ignore-eos", "--drafter", "none"]


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


class Terminal:
    """A command at a terminal: its keyboard input and its output."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.shown = ""

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self._master, keys.encode())

    def type(self, line: str) -> None:
        self.press(f"{line}\r")

    def paste(self, text: str) -> None:
        """Paste a text like a terminal with bracketed paste."""
        line_ends = text.replace("\n", "\r")
        self.press(f"\x1b[200~{line_ends}\x1b[201~")

    def wait_for(self, *texts: str) -> str:
        """Read until one of `texts` is shown; return the output since the last typed line."""
        while not any(text in self.shown for text in texts):
            self.read()
        return self.shown

    def read(self) -> str:
        """Read a piece; return the output since the last key press."""
        ready, _, _ = select.select([self._master], [], [], PATIENCE)
        assert ready, self.shown
        try:
            read = os.read(self._master, 4096)
        except OSError:  # the other side is closed
            read = b""
        assert read, self.shown
        self.shown += read.decode(errors="replace").replace("\r\n", "\n")
        return self.shown

    def clear(self) -> None:
        """Press Ctrl-C at a prompt, and wait for the next one.

        Between prompts it is a signal, which needs a terminal that controls the process.
        """
        self.press(CTRL_C)
        self.wait_for("Ctrl-C again")
        while ">" not in self.shown.rpartition("Ctrl-C again")[2]:
            self.read()

    def interrupt(self, child: "subprocess.Popen[bytes]") -> None:
        """Press Ctrl-C once the command waits for a key."""
        until(lambda: _state(child.pid).startswith("S"))
        self.shown = ""
        os.killpg(child.pid, signal.SIGINT)

    def answer_to(self, message: str) -> str:
        """Send a message, and wait for the prompt after the response."""
        self.type(message)
        return self.wait_for("tokens/s")


def _state(pid: int) -> str:
    """State of a process, as `ps` shows it; S: it waits for an event."""
    asked = ["ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def terminal(
    environment: dict[str, str], model: Path, *arguments: str, until: str = HINT
) -> Iterator[Any]:
    """A chat on a pseudo-terminal, and its process; killed if it does not end."""
    master, inner = pty.openpty()
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), inner)
    with started(environment, "chat", "--model", model, *arguments, **pipes) as child:
        os.close(inner)
        found = Terminal(master)
        found.wait_for(until)
        yield found, child
    os.close(master)


def fill(found: Terminal) -> str:
    """Talk until the chat offers to drop turns, and return its output."""
    for turn in range(20):
        found.type(f"Hello {turn}")
        if QUESTION in found.wait_for(QUESTION, "tokens/s"):
            return found.shown
    raise AssertionError("the context never gets full")


def test_a_full_context_offers_to_save_or_drop_turns_and_loses_nothing(
    environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    with terminal(environment, tiny_gguf, *SMALL, "--system", "one") as (found, child):
        assert "of 160 tokens" in fill(found)
        found.type("maybe")
        found.wait_for(QUESTION)
        found.type("s")
        found.wait_for("File:")
        path = tmp_path / "chat.json"
        found.type(str(path))
        found.wait_for(QUESTION)
        found.type("s")
        found.wait_for("File:")
        found.type(str(tmp_path / "no" / "folder"))
        assert "cannot write" in found.wait_for(QUESTION)
        found.type("n")
        found.wait_for("drop the oldest")
        found.wait_for("was not sent")
        messages = json.loads(path.read_text())
        assert [each["role"] for each in messages[:3]] == ["system", "user", "assistant"]
        assert messages[0]["content"] == "one"
        assert len(messages) % 2 == 1
        # Nothing was lost: the same message is refused for the same turns.
        found.type("Hello again, and again")
        assert f"of {len(messages) // 2} turns" in found.wait_for(QUESTION)
        found.interrupt(child)
        found.wait_for("was not sent")
        found.type("Hello again, and again")
        found.wait_for(QUESTION)
        found.type("y")
        shown = found.wait_for("tokens/s")
        assert "[30 tokens" in shown, "the message behind the question gets a response"
        found.press(CTRL_D)
        assert child.wait(PATIENCE) == 0


# -- typed input -----------------------------------------------------------------------------------

FEW = ["--max-tokens", "4", "--ignore-eos"]
PASTE = "\n".join("" if line % 3 == 1 else f"/line {line}" for line in range(21))


def saved(found: Terminal, folder: Path) -> list[str]:
    """Return the user's messages so far."""
    path = folder / f"{len([*folder.iterdir()])}.json"
    found.type(f"/save {path}")
    found.wait_for("messages are in")
    return [each["content"] for each in json.loads(path.read_text()) if each["role"] == "user"]


def test_a_paste_with_blank_lines_during_loading_is_one_message(
    environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    with terminal(environment, tiny_gguf, *FEW, until="2004h") as (found, child):
        found.paste(PASTE)
        found.press("\r")
        found.wait_for("tokens/s")
        assert saved(found, tmp_path) == [PASTE]
        found.press(CTRL_D)
        assert child.wait(PATIENCE) == 0


@pytest.mark.parametrize("name", ["xterm", "dumb"])
def test_triple_quoted_lines_are_one_message_and_blank_lines_are_ignored(
    name: str, environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    environment["TERM"] = name
    with terminal(environment, tiny_gguf, *FEW) as (found, child):
        for line in ("", "  ", '"""one', "", "two", '"""'):
            found.type(line)
        found.wait_for("tokens/s")
        assert saved(found, tmp_path) == ["one\n\ntwo"]
        found.type("/bye")
        assert child.wait(PATIENCE) == 0


def test_ctrl_c_clears_the_line_for_the_up_key_and_a_second_one_quits(
    environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    up = "\x1b[A"
    with terminal(environment, tiny_gguf, *FEW) as (found, child):
        found.press("not this")
        found.wait_for("not this")
        found.clear()
        found.answer_to("Hello")
        for shown in ("Hello", "not this"):
            found.press(up)
            found.wait_for(shown)
        found.type(", but later")
        found.wait_for("tokens/s")
        assert saved(found, tmp_path) == ["Hello", "not this, but later"]
        found.press("x")
        found.wait_for("x")
        found.clear()
        found.press(CTRL_C)
        assert child.wait(PATIENCE) == 0


def test_keys_typed_during_a_response_appear_at_the_next_prompt(
    environment: dict[str, str], endless_gguf: Path, tmp_path: Path
):
    with terminal(environment, endless_gguf, "--ignore-eos") as (found, child):
        found.type("Hello")
        found.wait_for("Hello")
        until(lambda: len(found.read().rpartition("measuring")[2]) > 400)  # of the answer
        found.press("later")
        until(lambda: len(found.read()) > 100)
        assert "later" not in found.shown
        os.killpg(child.pid, signal.SIGINT)
        found.wait_for("later")
        found.clear()
        assert saved(found, tmp_path) == ["Hello"]
        found.press(CTRL_D)
        assert child.wait(PATIENCE) == 0


def test_chat_keep_saves_input_history_and_forget_removes_it(
    environment: dict[str, str], tiny_gguf: Path, cache: Path, run: Run
):
    for options in ([], ["--keep"]):
        with terminal(environment, tiny_gguf, *FEW, *options) as (found, child):
            found.answer_to("Hello")
            found.press(CTRL_D)
            assert child.wait(PATIENCE) == 0
        assert bool([*cache.glob("history/*")]) == bool(options)
    (path,) = cache.glob("history/*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with terminal(environment, tiny_gguf, *FEW, "--keep") as (found, child):
        found.press("\x1b[A\r")
        found.wait_for("tokens/s")
        found.press(CTRL_D)
        assert child.wait(PATIENCE) == 0
    assert "typed" in run("forget", env=environment).stdout
    assert not path.exists()


# -- from a pipe -----------------------------------------------------------------------------------


def test_piped_input_is_one_message(run: Run, tiny_gguf: Path, cache: Path):
    text = "Hello\n\n/help and\n"
    found = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--json", input=text)
    assert found.returncode == 0
    expected = load(tiny_gguf).generate(text.rstrip("\n"), max_tokens=5)
    assert json.loads(found.stdout)["token_ids"] == expected.token_ids
    plain = run("chat", "--model", tiny_gguf, "--max-tokens", 5, "--quiet", input=text)
    assert (plain.stdout, plain.stderr) == (f"{expected.text}\n", "")


@pytest.mark.parametrize("text", ["", "\n \n", "x " * 200], ids=["empty", "blank", "too long"])
def test_piped_input_without_a_usable_message_is_a_one_line_error(
    text: str, mistake: Any, tiny_gguf: Path
):
    assert mistake("chat", "--model", tiny_gguf, *SMALL, said=text)
