"""Control characters from files and models, on terminals and in pipes; paths in every locale."""

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.process import COMMAND, Run
from support.tiny import vocabulary
from support.waiting import PATIENCE

ESCAPE = vocabulary()[0].index("\u011b")  # the token of the byte 0x1b
NO_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ASCII = {"PYTHONIOENCODING": "ascii"}
RAW_NAME = "[red]é\x1b[31m\udcff.gguf"
SHOWN_NAME = r"[red]é\x1b[31m\xff.gguf"


@pytest.fixture
def terminal(environment: dict[str, str]) -> Callable[..., str]:
    """Run a command at a new terminal and return the terminal's output."""

    def run(*arguments: object) -> str:
        ours, theirs = pty.openpty()
        words = [*COMMAND, *map(str, arguments)]
        environment.update({"TERM": "xterm-256color", "COLUMNS": "1000"})
        with subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        ) as child:
            os.close(theirs)
            parts = []
            try:
                while part := os.read(ours, 4096):
                    parts.append(part)
            except OSError:  # the end, on Linux
                pass
            assert child.wait(PATIENCE) == 0, b"".join(parts)
        os.close(ours)
        return b"".join(parts).decode()

    return run


@pytest.fixture
def odd_gguf(tiny_gguf: Path, tmp_path: Path) -> Path:
    """The tiny model under a name with rich's markup, an escape, and a byte that is not UTF-8."""
    path = tmp_path / RAW_NAME
    path.write_bytes(tiny_gguf.read_bytes())
    return path


def test_control_characters_are_escaped_on_a_terminal_and_kept_in_a_pipe(
    answer: Run, terminal: Callable[..., str], tiny_gguf: Path
):
    words = ("Hello", "-n", 3, "--logit-bias", f"{ESCAPE}=1000", "--no-repetition-detection")
    assert answer(*words).stdout == "\x1b\x1b\x1b\n"
    assert json.loads(answer(*words, "--json").stdout)["text"] == "\x1b\x1b\x1b"
    common = ("generate", *words, "--model", tiny_gguf, "--quiet")
    assert terminal(*common) == r"\x1b\x1b\x1b" + "\r\n"
    assert r"\x1b\x1b\x1b" in terminal(*common, "--tint")


def test_file_names_are_escaped_in_progress_tables_and_errors(
    run: Run, refused: Callable[..., str], terminal: Callable[..., str], odd_gguf: Path
):
    shown = terminal("generate", "Hello", "-n", 1, "--model", odd_gguf)
    assert f"checksums of {odd_gguf.parent}/{SHOWN_NAME}" in shown
    assert "\x1b[31m" not in shown
    assert SHOWN_NAME in (table := terminal("models"))
    assert "\x1b[31m" not in table + run("models").stdout
    gone = refused("generate", "Hello", "--model", f"{odd_gguf}\npaceline: all is well.gguf")
    assert gone.endswith(SHOWN_NAME + r"\npaceline: all is well.gguf not found")
    assert refused("\x1b[31m").isprintable()


@pytest.mark.parametrize("locale", [{}, NO_LOCALE, ASCII], ids=["", "C", "ascii"])
def test_files_pipes_and_paths_work_the_same_in_every_locale(
    locale: dict[str, str],
    run: Run,
    environment: dict[str, str],
    tiny_gguf: Path,
    odd_gguf: Path,
    tmp_path: Path,
):
    prompt = "Hellö"
    expected = run("generate", prompt, "-n", 4, "--json", "--model", tiny_gguf, encoding="utf-8")
    (tmp_path / "prömpt").write_text("\ufeff" + prompt, encoding="utf-8")
    environment.update({**locale, "PACELINE_CACHE": str(tmp_path / "çache")})
    words = ("generate", "-n", 4, "--json", "--model")
    ids = json.loads(expected.stdout)["prompt_token_ids"]
    for more, given in (((prompt,), ""), (("--file", tmp_path / "prömpt"), ""), ((), prompt)):
        answer = run(*words, odd_gguf, *more, input=given, encoding="utf-8")
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["prompt_token_ids"] == ids
    shown = run("models", "--json", encoding="utf-8")
    assert shown.returncode == 0, shown.stderr
    (listed,) = (entry for entry in json.loads(shown.stdout) if entry["here"])
    assert listed["file"] == str(odd_gguf)
    assert run(*words, listed["name"], prompt, encoding="utf-8").returncode == 0


def test_json_is_ascii_if_the_terminal_is_not_utf_8(
    terminal: Callable[..., str], environment: dict[str, str], tiny_gguf: Path
):
    environment.update(ASCII)
    words = ("generate", "Hello", "-n", 1, "--quiet", "--model", tiny_gguf)
    letter = ("--logit-bias", "200=1000")  # the byte of a letter that is not whole
    assert json.loads(terminal(*words, *letter, "--json"))["text"] == "\ufffd"
    assert terminal(*words, *letter) == r"\ufffd" + "\r\n"
