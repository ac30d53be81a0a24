"""Harmful chat templates: limits of time, memory and size."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.models import ChatTemplate, templates
from paceline.models.templates import PROCESS
from paceline.runtime.model import Model
from paceline.system.processes import WorkerProcess
from support.errors import raises
from support.server import running
from support.waiting import PATIENCE, until

USER = [{"role": "user", "content": "Hi"}]
GOOD = "{% for m in messages %}{{ m.content }}{% endfor %}"
DIGITS = "{% for i in range(10000) %}"
LOOPS = DIGITS * 4 + "{% endfor %}" * 4
GROWTH = "{% set ns = namespace(x=X) %}{% for i in range(60) %}{% set ns.x = Y %}{% endfor %}"


def growth(first: str, more: str) -> str:
    """A value that is twice as large after each round."""
    return GROWTH.replace("X", first).replace("Y", more)


OVER: dict[str, tuple[str, str]] = {
    "nested loops": (LOOPS, "0.5 s"),
    "a list that grows in its own loop": (
        "{% set all = [1] %}{% for each in all %}{% set _ = all.append(each) %}{% endfor %}",
        "tiny",
    ),
    "a power": ("{{ (9 ** (9 ** 9)) % 2 }}", "tiny"),
    "a string times a number": ("{{ 'a' * 10**10 }}", "tiny"),
    "an indentation": ("{{ messages|tojson(indent=10**10) }}", "tiny"),
    "a growing string": (growth("'ab'", "ns.x ~ ns.x"), "tiny"),
    "lists in lists": (growth("[1]", "[ns.x, ns.x]") + "{{ ns.x }}", "tiny"),
    "long output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
}
"""Template -> a word of the error; the model's where any of the limits may be the first."""


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is soon."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)


def rendered(source: str, **names: Any) -> str:
    return ChatTemplate(source, model="tiny").render(USER, **names)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("source", "word"), OVER.values(), ids=OVER)
def test_a_template_over_a_limit_is_rejected_and_the_next_one_renders(source: str, word: str):
    with raises((ModelError, InvalidRequest), "tiny", word):
        rendered(source)
    assert rendered(GOOD) == "Hi"


@pytest.mark.parametrize(
    "text", ["", "a\nb\r\u2028\x00", "größe 日本 😀", "\ud800", "x" * 8_000_000]
)
def test_text_round_trips_unchanged(text: str):
    assert ChatTemplate(GOOD).render([{"role": "user", "content": text}]) == text


def test_a_long_chat_renders_up_to_the_size_limit(monkeypatch: pytest.MonkeyPatch):
    messages = [{"role": "user", "content": "x" * 100}] * 10_000
    assert ChatTemplate(GOOD).render(messages) == "x" * 1_000_000
    monkeypatch.setattr(templates, "CHARACTERS", 1000)
    assert len(ChatTemplate(GOOD).render(messages[:10])) == 1000
    with raises(ModelError, "1000 characters"):
        ChatTemplate(GOOD).render(messages[:11])


def test_unserializable_template_input_is_rejected():
    deep: list[Any] = []
    deep.append(deep)
    for value in ({1, 2}, b"bytes", object(), deep):
        with raises(InvalidRequest, "JSON"):
            rendered(GOOD, extra=value)


def test_concurrent_renders_return_their_own_text():
    chat_template = ChatTemplate(GOOD)
    texts = [f"text {n} " * n for n in range(200)]

    def one(text: str) -> str:
        return chat_template.render([{"role": "user", "content": text}])

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(one, texts)] == texts


# -- the process -----------------------------------------------------------------------------------


def test_a_killed_template_process_is_restarted():
    assert rendered(GOOD) == "Hi"
    child = PROCESS._child
    assert child is not None
    child.kill()
    child.wait()
    assert rendered(GOOD) == "Hi"


def test_an_interrupted_render_does_not_leak_into_the_next_one(monkeypatch: pytest.MonkeyPatch):
    chat_template, other = ChatTemplate(GOOD), ChatTemplate("other")
    exchange = sys.modules["paceline.system.processes"]._exchange

    def interrupted(child: Any, request: bytes) -> bytes:
        child.stdin.write(request + b"\n")
        child.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.system.processes._exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat_template.render(USER)
    monkeypatch.setattr("paceline.system.processes._exchange", exchange)
    assert other.render(USER) == "other"


def test_the_template_process_ends_with_its_parent():
    script = (
        "from paceline.models.templates import PROCESS; import os, signal; PROCESS.start();"
        "print(PROCESS._child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    assert process.returncode == -signal.SIGKILL
    until(lambda: not _alive(int(process.stdout)))


def test_a_template_process_that_cannot_start_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with raises(ModelError):
        WorkerProcess(Path(), "is a test").start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"


# -- in the server ---------------------------------------------------------------------------------


def test_a_server_serves_other_requests_while_a_template_runs(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    slow = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}" + GOOD
    monkeypatch.setitem(model.files.__dict__, "template", ChatTemplate(slow, model="tiny"))
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    body = {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}
    with running(model) as server:
        asked: dict[str, httpx.Response] = {}

        def ask(path: str, body: Any) -> None:
            asked[path] = server.post(path, body)

        paths = {
            "/v1/chat/completions": body,
            "/v1/responses": {"input": "slow", "max_output_tokens": 1},
            "/tokenize": {"messages": body["messages"]},
        }
        threads = [threading.Thread(target=ask, args=item) for item in paths.items()]
        for thread in threads:
            thread.start()
        answered = 0
        while len(asked) < len(paths):
            assert server.get("/health").status_code == 200
            answered += 1
        for thread in threads:
            thread.join(PATIENCE)
        assert answered > 10
        assert {path: value.status_code for path, value in asked.items()} == dict.fromkeys(
            paths, 400
        )
        for request in asked.values():
            assert "took longer" in request.json()["error"]["message"]
        good = {"messages": [{"role": "user", "content": "quick"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", good).status_code == 200
