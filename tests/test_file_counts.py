"""The number of source files that a token and a request pass: a newcomer's reading list.

docs/architecture.md has the figures. A change that needs more files says why there.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import paceline
from paceline.cli.app import main
from paceline.options import GREEDY
from paceline.runtime.model import Model
from support.scheduling import end_scheduler
from support.server import running

SOURCE = f"{Path(paceline.__file__).parent}/"
TOKEN, GENERATE, CHAT = 23, 76, 54  # one more than were counted: caches decide about one
PROMPT = "the quick brown fox jumps over the quick brown fox"


@contextmanager
def files_called() -> Iterator[set[str]]:
    """Collect the files of paceline whose functions run in the context, in any new thread."""
    names = set[str]()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            names.add(code.co_filename.removeprefix(SOURCE))

    gc.collect()  # models of other tests are freed now, not later
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_token_in_the_loop_passes_a_limited_number_of_files(model: Model):
    model.generate(PROMPT, max_tokens=8, drafter="suffix", **GREEDY)
    end_scheduler(model)  # the next one's thread is watched
    with (
        files_called() as names,
        model.stream(PROMPT, max_tokens=400, drafter="suffix", ignore_eos=True, **GREEDY) as stream,
    ):
        for _ in range(3):
            next(stream)
        names.clear()
        while len(stream.answer) < 300:
            next(stream)
        passed = {*names}
    assert len(passed) <= TOKEN, sorted(passed)


def test_generate_passes_a_limited_number_of_files(
    tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["generate", PROMPT, "--model", str(tiny_gguf), "--max-tokens", "8"]
    assert main(command) == 0  # the machine's costs are measured once, not by every command
    with files_called() as names:
        assert main(command) == 0
    assert capsys.readouterr().out
    assert len(names) <= GENERATE, "\n".join(sorted(names))


def test_a_chat_request_passes_a_limited_number_of_files(model: Model):
    body = {"model": "any", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    with files_called() as names, running(model) as server:
        body["model"] = server.get("/v1/models").json()["data"][0]["id"]
        server.rest()
        names.clear()
        server.events("/v1/chat/completions", body)
        asked = {*names}
    assert len(asked) <= CHAT, sorted(asked)
