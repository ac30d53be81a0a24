"""A new user's first hour: a shell, a browser, the default model, and a home folder with nothing in
it.

One test, as each step starts from what the steps before it left.
"""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pexpect.fdpexpect import fdspawn

from paceline.system.processes import end_session
from support.browser import chromium, ended, opened, send, until
from support.command import free_port
from support.waiting import PATIENCE

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
SENTENCE = "I get up at seven, make a pot of tea and buy some bread."
REWRITE = f"Rewrite in the past tense: {SENTENCE}"
PASTE = "What is in this list?\n\napples\npears\n\n/exit\n"
HAND_SECONDS = 0.05
"""Between two keys: a second Ctrl-C at the same moment is one with the first."""
CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")


class Shell:
    """A shell at a terminal of 100 columns."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def run(self, line: str, status: int = 0) -> str:
        """Run a command line to its end and return its output."""
        self.start(line)
        return self.end(status)

    def start(self, line: str) -> None:
        self._process.expect_exact("$ ")  # text typed before the prompt is shown twice
        self._process.sendline(f'{line}; echo "<$?>"')
        self._process.expect_exact('"<$?>"')

    def end(self, status: int = 0) -> str:
        self._process.expect(r"<(\d+)>\r\n")
        shown = self._shown()
        assert self._process.match.group(1) == str(status), shown
        assert "Traceback" not in shown
        return shown

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown; it, and all that was since the last wait."""
        self._process.expect_exact(text)
        return self._shown() + text

    def press(self, keys: str) -> None:
        time.sleep(HAND_SECONDS)
        self._process.send(keys)

    def _shown(self) -> str:
        return ESCAPES.sub("", self._process.before).replace("\r\n", "\n")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in an empty home folder, with `paceline` and without settings of these tests."""
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "PS1": "$ ",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "HF_HUB_OFFLINE": "1",
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }
    # Not `pexpect.spawn`: it forks a process with all threads of earlier tests, and its copy has
    # crashed before it became a shell. A session without a terminal takes the first it opens.
    master, inner = pty.openpty()
    termios.tcsetwinsize(inner, (40, 100))
    command = 'exec bash --norc --noprofile <"$0" >"$0" 2>&1'
    with subprocess.Popen(
        ["sh", "-c", command, os.ttyname(inner)],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        try:
            yield Shell(fdspawn(master, encoding="utf-8", timeout=PATIENCE))
        finally:
            for side in (inner, master):
                os.close(side)  # the shell ends its jobs and itself, as when a window is closed
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            end_session(process)


def test_the_first_hour_of_a_new_user_works(shell: Shell, tmp_path: Path):
    help_and_mistakes(shell)
    first_answers(shell)
    pipes(shell, tmp_path)
    chat(shell, tmp_path)
    url = server(shell)
    page(url)
    shell.run("kill -INT %1; wait %1")
    scripts(shell)
    models(shell, tmp_path)


def help_and_mistakes(shell: Shell) -> None:
    assert len(shell.run("paceline").splitlines()) <= 40, "help is more than a screen"
    assert "did you mean serve?" in shell.run("paceline serv", status=2)
    assert "--temperature" in shell.run("paceline generate --tempurature 0 Hello", status=2)
    assert "missing.gguf" in shell.run("paceline generate -m missing.gguf Hello", status=2)


def first_answers(shell: Shell) -> None:
    """The first is the README's: it prepares, and says once that its model is one to try."""
    command = f"paceline generate {shlex.quote(REWRITE)} --temperature 0"
    shown = shell.run(command)
    assert "paceline pull" in shown
    answer = shown.splitlines()[-1]
    assert "seven" in answer
    assert " made " in answer
    assert shell.run(command).strip() == answer
    report = json.loads(shell.run(f"{command} --json --quiet"))
    assert report["text"].strip() == answer
    assert report["exact"]
    assert report["stats"]["tokens_per_step"] > 1


def pipes(shell: Shell, folder: Path) -> None:
    (folder / "note.txt").write_text(f"{SENTENCE}\n")
    question = "Rewrite in the past tense:"
    shown = shell.run(f"cat note.txt | paceline generate '{question}' -t 0 | tee answer.txt")
    assert "[added 56 bytes of standard input to the prompt" in shown
    assert (folder / "answer.txt").read_text().strip() == shown.splitlines()[-1]
    assert " made " in shown
    assert " made " in shell.run(f"(echo '{question}'; cat note.txt) | paceline generate - -t 0")
    shown = shell.run("cat note.txt | paceline chat -t 0 -n 30")
    assert shown.count("tokens/s") <= 1, "each line was a message of its own"


def chat(shell: Shell, folder: Path) -> None:
    """Try a paste, lines between quotes, mistakes, commands, and Ctrl-C, and their effects."""
    shell.start("paceline chat -t 0 -n 30")
    shell.wait_for("/help has the rest")
    shell.press("\r")
    shell.press(f"\x1b[200~{PASTE}\x1b[201~".replace("\n", "\r"))
    shell.press("\r")
    shell.wait_for("tokens/s")
    for line in ('"""', "Is rain", "", 'wet?"""'):
        shell.press(f"{line}\r")
    shell.wait_for("tokens/s")
    shell.press("/sav\r")
    shell.wait_for("/save")
    shell.press("/set max-tokens 2000\r")
    shell.press("Tell a long story that begins with: the dragon\r")
    for _ in range(3):  # the first is the typed one
        shell.wait_for("dragon")
    shell.press(CTRL_C)
    shell.press("not this")
    shell.press(CTRL_C)
    shell.wait_for("Ctrl-C again")
    shell.press("/undo\r")
    shell.press("/save talk.json\r")
    shell.wait_for("messages are in")
    shell.press(CTRL_D)
    shell.end()
    messages = json.loads((folder / "talk.json").read_text())
    asked = [message["content"] for message in messages if message["role"] == "user"]
    assert asked == [PASTE.rstrip(), "Is rain\n\nwet?"]
    shell.start("paceline chat")
    shell.wait_for("/help has the rest")
    shell.press("/load talk.json\r")
    shell.wait_for("4 messages")
    shell.press("/bye\r")
    shell.end()


def server(shell: Shell) -> str:
    """Start it in the background, use it from another command of this shell, return its URL."""
    port = free_port()
    shell.run(f"{{ paceline serve --port {port} 2> serve.log & }}")
    shell.run("until grep 'a page to chat' serve.log; do sleep 0.1; done")
    assert f":{port}/" in shell.run("paceline ps")
    return f"http://127.0.0.1:{port}"


def page(url: str) -> None:
    """An answer, and after a reload the chat is there."""
    with chromium() as browser:
        page = browser.new_page()
        opened(page, url)
        page.get_by_label("Temperature").fill("0")
        send(page, REWRITE)
        ended(page)
        answer = page.locator(".model .words").last.inner_text()
        assert " made " in answer
        page.reload()
        page.get_by_role("button", name=re.compile("^Rewrite")).click()
        until(page, "text => document.querySelector('.model .words')?.innerText === text", answer)


def scripts(shell: Shell) -> None:
    for name in ("01_hello.py", "02_stream.py", "05_json.py"):
        assert shell.run(f"python {ROOT / 'examples' / name}").strip()


def models(shell: Shell, folder: Path) -> None:
    """List installed models and their size, and remove them."""
    assert "smollm2-135m (default)" in shell.run("paceline models")
    assert [*installed(shell)] == ["smollm2-135m"]
    shell.run("paceline rm smollm2-135m")
    assert [*installed(shell)] == []
    left = [path for path in (folder / ".cache" / "paceline").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 2**20, left


def installed(shell: Shell) -> Iterator[str]:
    for model in json.loads(shell.run("paceline models --json")):
        if model["here"]:
            yield model["name"]
