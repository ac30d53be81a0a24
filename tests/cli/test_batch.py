"""`paceline batch`: a file of requests in, a file of responses out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import Model
from paceline.cli.app import main
from paceline.server.offline import Offline
from support.server import HTTP, running

CHAT = [{"role": "user", "content": "this is one and the user"}]

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6, "seed": 3},
    "/v1/completions": {"prompt": "this is one", "max_tokens": 5, "temperature": 0},
    "/v1/responses": {"input": "one and the user", "max_output_tokens": 4, "temperature": 0},
    "/v1/decisions": {
        "input": "this is one",
        "questions": [{"type": "predicate", "instructions": "the user"}],
    },
}
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "this is two", "max_tokens": 4},
    {"custom_id": "chat", "messages": CHAT, "max_tokens": 5, "temperature": 1.0, "seed": 4},
    {"prompt": "this is", "raw": True, "max_tokens": 3, "stop": "zz"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def batch(
    source: Path, target: Path, tiny_gguf: Path, cache: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Run the command on lines; returns the responses."""

    def batch(*lines: Any, words: tuple[str, ...] = (), code: int = 0) -> list[dict[str, Any]]:
        if lines:
            source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        common = ("batch", str(source), "-o", str(target), "--model", str(tiny_gguf))
        assert main([*common, *words]) == code
        written = target.read_text().splitlines() if target.exists() else []
        return [json.loads(line) for line in written]

    return batch


def posted(url: str, number: int) -> dict[str, Any]:
    return {"custom_id": f"{number} {url}", "method": "POST", "url": url, "body": BODIES[url]}


def text_of(body: dict[str, Any]) -> str:
    """The text of a response of any endpoint, or of `generate`."""
    if "answers" in body:
        return str(body["answers"])
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    if "choices" not in body:
        return str(body["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_batch_responses_match_the_server_and_python_in_input_order(
    batch: Callable[..., list[dict[str, Any]]], model: Model, target: Path
):
    lines = [*PROMPTS, *(posted(url, 0) for url in BODIES)]
    found = batch(*lines)
    assert [one["custom_id"] for one in found] == [
        *("line-1", "chat", "line-3"),
        *(f"0 {url}" for url in BODIES),
    ]
    assert {one["response"]["status_code"] for one in found} == {200}
    expected = []
    for line in PROMPTS:
        options = {"max_tokens": 2048, "repetition_detection": True, **line}
        options.pop("custom_id", None)
        prompt = options.pop("prompt", None) or options.pop("messages")
        expected.append(model.generate(prompt, **options).text)
    with running(model) as server:
        for url, body in BODIES.items():
            expected.append(text_of(HTTP.post(server.url + url, json=body).json()))
        server.rest()
    assert [text_of(one["response"]["body"]) for one in found] == expected
    assert batch() == found, "a complete file is left as it is"
    unordered = batch(*lines, words=("--unordered",))
    assert sorted(one["id"] for one in unordered) == sorted(one["id"] for one in found)
    assert [path.name for path in target.parent.glob("out*")] == ["out.jsonl"]


def test_a_stopped_batch_keeps_its_responses_and_resumes(
    batch: Callable[..., list[dict[str, Any]]],
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    lines = [{"prompt": f"this is one {number}", "max_tokens": 3} for number in range(6)]
    calls, answer = list[int](), Offline._answer

    async def stopped(self: Offline, line: Any) -> Any:
        calls.append(line.number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return await answer(self, line)

    monkeypatch.setattr(Offline, "_answer", stopped)
    assert batch(*lines, code=130) == []
    part = target.with_name("out.jsonl.part")
    kept = [json.loads(line) for line in part.read_text().splitlines()]
    assert f"{len(kept)} of 6 responses are in {part}; the same command" in capsys.readouterr().err
    part.write_text(part.read_text() + '{"id": "batch_req_half a li')
    calls[:] = [0] * 4
    found = batch()
    assert calls[4:] and not {*calls[4:]} & {int(one["custom_id"][5:]) for one in kept}
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(1, 7)]
    assert all(one in found for one in kept)
    # Lines that were added are answered, and a file of other requests is not touched.
    assert batch(*lines, {"prompt": "one more", "max_tokens": 2})[:6] == found
    before = target.read_text()
    batch(*lines[:3], code=2)
    batch(words=("--seed", "9"), code=2)
    assert target.read_text() == before
    assert "line 1 of" in (said := capsys.readouterr().err) and "name another --output" in said


def test_invalid_lines_are_reported_up_front_or_written_as_errors(
    batch: Callable[..., list[dict[str, Any]]],
    source: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
):
    faulty: dict[str, str] = {
        "[1]": "is not a JSON object",
        '{"prompt": ': "is not JSON",
        '{"max_tokens": 3}': "expected a prompt, messages, or url and body",
        '{"prompt": "a", "max_tokens": 0}': "max_tokens is 0; expected a whole number",
        '{"prompt": "a", "max_token": 1}': "unknown option 'max_token'",
        '{"prompt": ""}': "the prompt is empty",
        f'{{"prompt": "{"this is " * 3000}"}}': "the context holds",
        '{"custom_id": "", "prompt": "a"}': "custom_id: expected a string",
        '{"url": "/v1/nothing", "body": {}}': "url is '/v1/nothing'; expected /v1/chat",
        '{"url": "/v1/completions", "body": {"prompt": 5}}': "prompt: ",
        '{"url": "/v1/completions", "body": {"prompt": "a", "stream": true}}': "body.stream",
        '{"url": "/v1/completions", "body": {"prompt": "a", "model": "x"}}': "'x' does not exist",
        '{"url": "/v1/embeddings", "body": {"input": "a"}}': "makes no embeddings",
        '{"custom_id": "line-1", "prompt": "a"}': "line 1 has the same custom_id, 'line-1'",
    }
    sound = '{"prompt": "this is one", "max_tokens": 2}'
    source.write_bytes(f"\ufeff{sound}\r\n\r\n".encode() + "\r\n".join(faulty).encode())
    found = batch(words=("--skip-errors",), code=1)
    assert [one["response"]["status_code"] for one in found] == [200, *[400] * len(faulty)]
    for one, fault in zip(found[1:], faulty.values(), strict=True):
        assert fault in one["response"]["body"]["error"]["message"]
    assert "14 of them errors" in capsys.readouterr().out
    source.write_text(f"{sound}\n" + '{"prompt": "a", "max_tokens": 0}\n' * 3)
    target.unlink()
    batch(code=2)
    said = capsys.readouterr().err
    assert "3 faulty lines" in said
    assert "\n  line 4: max_tokens is 0" in said
    assert not target.exists()


def test_unrelated_files_are_not_overwritten_and_errors_are_retried(
    batch: Callable[..., list[dict[str, Any]]], source: Path, target: Path, capsys: Any
):
    line = {"prompt": "this is one", "max_tokens": 2}
    part = target.with_name("out.jsonl.part")
    target.write_text("notes without a line end")
    source.write_text(json.dumps(line))
    common = ("batch", str(source), "-o")
    assert main([*common, str(target)]) == 2
    assert main([*common, str(source), "--unordered"]) == 2
    assert "is not a response to these requests" in capsys.readouterr().err
    assert (target.read_text(), source.read_text()) == (
        "notes without a line end",
        json.dumps(line),
    )
    target.unlink()
    part.write_text("")
    target.write_text('{"id": "of another program"}\n')
    assert main([*common, str(target)]) == 2
    target.unlink()
    part.unlink()
    body = {**BODIES["/v1/completions"], "model": "alias"}
    posted = {"url": "/v1/completions", "body": body}
    (failed,) = batch(posted, words=("--skip-errors",), code=1)
    assert failed["response"]["status_code"] == 400
    (found,) = batch(posted, words=("--alias", "alias"))
    assert found["response"]["status_code"] == 200
    batch(posted, words=("--temperature", "0"), code=2)
    assert "temperature on the command line is for prompts" in capsys.readouterr().err


def test_prompts_come_from_a_csv_file_and_command_line_options(
    batch: Callable[..., list[dict[str, Any]]], source: Path, model: Model, capsys: Any
):
    source.write_text('word,made by\n"one, two",x\nuser,"a ""b"""\n')
    words = ("--template", "this {word} is {made by} {{", "-n", "3", "--temperature", "0")
    found = batch(words=words)
    assert [one["custom_id"] for one in found] == ["line-2", "line-3"]
    prompts = ["this one, two is x {{", 'this user is a "b" {{']
    expected = [model.generate(prompt, max_tokens=3, temperature=0).text for prompt in prompts]
    assert [one["response"]["body"]["text"] for one in found] == expected
    batch(words=("--template", "{nothing}"), code=2)
    assert "the template has {nothing}; the columns are word, made by" in capsys.readouterr().err
    source.write_text("word,made by\nhello, world, again\n")
    batch(words=words, code=2)
    assert "line 2: has other columns than the 2 of the header" in capsys.readouterr().err
    batch(posted("/v1/completions", 1), words=("-n", "3"), code=2)
    assert "max_tokens on the command line is for prompts" in capsys.readouterr().err


def test_a_run_may_change_to_the_order_of_completion_and_back(
    batch: Callable[..., list[dict[str, Any]]], target: Path
):
    ordered = [one["id"] for one in batch(*PROMPTS)]
    part = target.with_name("out.jsonl.part")
    part.write_text(target.read_text().splitlines(keepends=True)[0])
    target.unlink()
    assert {one["id"] for one in batch(words=("--unordered",))} == {*ordered}
    assert [one["id"] for one in batch()] == ordered
    assert not part.exists()
