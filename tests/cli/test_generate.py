"""`paceline generate`: prompts, options, and their errors."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.models import ChatTemplate
from support.process import COMMAND, Run, started, wait_for
from support.tiny import write_tiny
from support.waiting import PATIENCE


def test_only_the_response_goes_to_stdout(answer: Run, model: Any):
    answer("Hello", "--max-tokens", 1)  # the first one checks the file, and measures
    result = answer("Hello", "--max-tokens", 20)
    assert result.returncode == 0
    assert result.stdout == model.generate("Hello", max_tokens=20).text + "\n"
    assert result.stderr == ""
    said = answer("Hello", "--max-tokens", 20, "--stats", "--no-think").stderr
    assert ("20 tokens" in said, "--no-think has no effect" in said) == (True, True)
    assert answer("Hello", "--max-tokens", 20, "--quiet", "--no-think").stderr == ""


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_special_tokens_are_text_unless_raw_or_parsing_is_enabled(raw: list[str], value: Any):
    def ends(*words: str) -> int:
        prompt = ["one<|im_end|>two", "--system", "<|im_end|>"][: 1 if raw else 3]
        found = value(*prompt, "--max-tokens", 1, *raw, *words)
        return int(found["prompt_token_ids"].count(2))

    assert (ends(), ends("--parse-special")) == ((1, 1) if raw else (2, 4))


def test_json_output_has_the_whole_result(value: Any, model: Any):
    found = value("Hello", "--max-tokens", 20, "--drafter", "ngram", "--probe", "suffix")
    assert found.keys() >= {
        *("text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "engine"),
        *("drafter", "exact", "stats", "seed", "model", "policy"),
    }
    assert found["stats"].keys() >= {"steps", "drafted", "tokens_per_step", "load_seconds"}
    assert found["token_ids"] == model.generate("Hello", max_tokens=20).token_ids
    assert (found["completion_tokens"], found["finish_reason"]) == (20, "length")
    assert (found["engine"], found["drafter"], found["exact"]) == ("llamacpp", "ngram", True)
    assert found["stats"]["probe"]["suffix"]["steps"] > 0


SCHEMA = json.dumps(
    {
        **{"type": "object", "required": ["a"], "additionalProperties": False},
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
)
SHORT = ("--max-tokens", 5, "--json")


def test_a_file_or_piped_text_follows_the_prompt_with_its_size_reported(
    answer: Run, value: Any, tmp_path: Path
):
    path = tmp_path / "text"
    path.write_bytes("\n a\n\nbé\n".encode())
    joined = value("Say\n\n a\n\nbé", *SHORT)
    with path.open("rb") as file:
        redirected = answer("Say", *SHORT, stdin=file)
    piped = answer("Say", *SHORT, input=path.read_text())
    named = answer("Say", "--file", path, *SHORT)
    waited = answer("Say", "--file", "-", *SHORT, input=path.read_text())
    for found in (redirected, piped, named, waited):
        assert json.loads(found.stdout)["prompt_token_ids"] == joined["prompt_token_ids"]
        added = "[added 7 bytes of standard input to the prompt; --no-stdin adds none]\n"
        assert found.stderr == (added if found in (redirected, piped) else "")
    assert answer("Say", *SHORT, "--quiet", input="a").stderr == ""
    without = value("Say", *SHORT)["prompt_token_ids"]
    for words in (("--no-stdin",), ("--prediction", "-")):
        found = json.loads(answer("Say", *SHORT, *words, input="a").stdout)
        assert found["prompt_token_ids"] == without


def test_a_prompt_has_the_same_tokens_from_every_source(answer: Run, value: Any, tmp_path: Path):
    path, content = tmp_path / "text", b"One\r\ntwo\r\n"
    path.write_bytes(content)
    for words, text in ((("--raw",), "One\ntwo\n"), ((), "One\ntwo")):
        typed = value(text, "--no-stdin", *SHORT, *words)
        with path.open("rb") as stdin:
            piped = json.loads(answer(*SHORT, *words, stdin=stdin).stdout)
        named = value("--file", path, *SHORT, *words)
        assert piped["prompt_token_ids"] == named["prompt_token_ids"] == typed["prompt_token_ids"]


def test_a_prompt_may_be_token_ids(value: Any):
    typed = value("Hello", "--no-stdin", "--raw", *SHORT)
    ids = ",".join(map(str, typed["prompt_token_ids"]))
    given = value("--tokens", ids, *SHORT)
    assert given["prompt_token_ids"] == typed["prompt_token_ids"]
    assert given["token_ids"] == typed["token_ids"]


SILENT = b"[no standard input within 1 s: the prompt is answered without it; --file - waits"
WAITING = b"[reading standard input to its end; Ctrl-C stops]"


def test_an_open_but_silent_pipe_does_not_block_a_prompt(
    environment: dict[str, str], tiny_gguf: Path
):
    words = ("generate", "Hello", "--model", tiny_gguf, "--max-tokens", 5)
    ours, theirs = socket.socketpair()
    for stdin in (subprocess.PIPE, theirs):
        with started(environment, *words, stdin=stdin) as child:
            assert child.stdout.read(), "while the pipe is open"
            assert SILENT in child.stderr.read()
            assert child.wait(PATIENCE) == 0
    with started(environment, *words, "--no-stdin", stdin=theirs) as child:
        assert child.wait(PATIENCE) == 0
        assert SILENT not in child.stderr.read()
    ours.sendall(b"more")
    assert theirs.recv(9) == b"more", "nothing was taken from it"
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("words", "begun"),
    [(("generate",), b""), (("generate", "Hello"), b"an"), (("chat",), b"the"), (("-",), b"")],
)
def test_generate_reports_that_it_waits_for_input(
    words: tuple[str, ...], begun: bytes, environment: dict[str, str], tiny_gguf: Path
):
    words = words if words != ("-",) else ("generate", "-")
    options = ("--model", tiny_gguf, "--max-tokens", 5)
    with started(environment, *words, *options, stdin=subprocess.PIPE) as child:
        child.stdin.write(begun)
        child.stdin.flush()
        wait_for(child.stderr, WAITING)
        child.stdin.write(b"d")
        child.stdin.close()
        assert child.stdout.read()
        assert child.wait(PATIENCE) == 0


def test_generate_in_a_shell_loop_does_not_consume_stdin(
    environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    command = f"{shlex.join(COMMAND)} generate --quiet -n 1 --model {tiny_gguf}"
    ways = ("--no-stdin", "</dev/null")
    loops = (f'while read -r p; do {command} {way} "$p"; done' for way in ways)
    for loop in (*loops, f"xargs -n 1 {command}"):
        words = ["bash", "-c", f"{loop} < {tmp_path / 'prompts.txt'}"]
        found = subprocess.run(words, env=environment, capture_output=True, check=True)
        assert found.stdout.count(b"\n") == 2


def test_a_prediction_is_read_from_a_file(value: Any, tmp_path: Path):
    options = ("Hello", "--max-tokens", 30)
    plain = value(*options, "--drafter", "none")
    expected = tmp_path / "expected.txt"
    expected.write_text(plain["text"], encoding="utf-8")
    for drafter in (), ("--drafter", "prediction+suffix"):
        found = value(*options, "--prediction", expected, *drafter)
        assert found["token_ids"] == plain["token_ids"]
        assert found["drafter"].startswith("prediction+")


def test_options_reach_the_model(value: Any, model: Any):
    options: Any = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "seed": 7,
        "max_tokens": 30,
        "max_block": 4,
        "policy": "kelly",
        "drafter": "suffix+ngram",
    }
    given = [
        str(part)
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    bias = ("--logit-bias", "2=-100", "--logit-bias", "40=-3", "--ignore-eos", "--stop", "zzzz")
    found = value("Hello", *given, *bias)
    expected = model.generate(
        "Hello", **options, logit_bias={2: -100.0, 40: -3.0}, ignore_eos=True, stop="zzzz"
    )
    assert found["token_ids"] == expected.token_ids
    assert (found["policy"], found["seed"]) == ("kelly", 7)


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("--schema {folder}/schema.json", '\\{"a": [0-9]\\}'),
        ("--json-schema-file {folder}/schema.json --drafter none", '\\{"a": [0-9]\\}'),
        (f"-j '{SCHEMA}'", '\\{"a": [0-9]\\}'),
        ("--format json --logit-bias 2=-100", r"\{.*\}"),
        ("--regex [ab]{3}", "[ab]{3}"),
        ("--grammar {folder}/lark", "up|down"),
        ("--grammar-file {folder}/gbnf", "yes|no"),
        ("--grammar 'root ::= [a-c] [0-9]'", "[a-c][0-9]"),
        ("--grammar 'start: \"x\" /y+/'", "xy+"),
    ],
)
def test_a_response_follows_a_structure_from_a_file_or_argument(
    words: str,
    fits: str,
    tiny_gguf: Path,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    files = {"schema.json": SCHEMA, "lark": 'start: "up" | "down"', "gbnf": 'root ::= "yes" | "no"'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = shlex.split(words.replace("{folder}", str(tmp_path)))
    assert main(["generate", "Hello", "-m", str(tiny_gguf), "-n", "200", *options]) == 0
    assert re.fullmatch(fits, capsys.readouterr().out[:-1])


def test_a_truncated_structure_is_reported(answer: Run):
    assert answer("Hi", "-n", 3).stderr == ""
    cut = answer("Hi", "-n", 3, "--regex", "a{9}")
    assert cut.stderr == "[stopped after 3 tokens; --max-tokens -1 removes this limit]\n"


def test_an_impossible_prompt_is_rejected_by_generate(
    mistake: Any, tiny_gguf: Path, tmp_path: Path
):
    (tmp_path / "empty").write_text("")
    common = ("generate", "--model", tiny_gguf)
    for words in (("",), (" ", "--system", "Be"), ("--raw", ""), ("--file", tmp_path / "empty")):
        assert "prompt is empty" in mistake(*common, *words)
    assert "prompt is empty" in mistake(*common, said="\n")
    assert "tokens and the context holds 512" in mistake(*common, said="x " * 3000)
    assert "cache_tokens" in mistake(*common, "--cache-tokens", 32, said="x " * 100)
    assert "use --cache-tokens " in mistake(*common, "--cache-tokens", 2**31 - 1)
    assert "logit_bias names token 99999" in mistake(*common, "x", "--logit-bias", "99999=1")


def test_binary_input_is_rejected(
    refused: Any, tiny_gguf: Path, tmp_path: Path, environment: dict[str, str]
):
    common = ("generate", "--model", tiny_gguf)
    (tmp_path / "bytes").write_bytes(b"\xfe\xfe\xfa")
    assert "bytes is not UTF-8 text: line 1, byte 1 is 0xFE" in refused(
        *common, "--file", tmp_path / "bytes"
    )
    wrong = "standard input is not UTF-8 text: line 2, byte 2 is 0xFE"
    assert wrong in refused(*common, input=b"\na\xfe\xff", text=False)
    # Where the locale says nothing, Python lets such bytes through as lone surrogates.
    environment.update({"LC_ALL": "C", "PYTHONUTF8": "1"})
    assert wrong in refused(*common, input=b"\na\xfe\xff", text=False)
    assert "the prompt is not UTF-8 text" in refused(*common, os.fsdecode(b"a\xff"))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_invalid_utf_8_byte_is_replaced_with_a_warning(command: str, run: Any, tiny_gguf: Path):
    words = (command, "--model", tiny_gguf, "-n", 4)
    wrong = run(*words, input="ü dog\nthe ü fox".encode() + b"\xe9\n", text=False)
    right = run(*words, input="ü dog\nthe ü fox\ufffd\n".encode(), text=False)
    assert b"[standard input is not UTF-8 text: line 2, byte 11 is 0xE9;" in wrong.stderr
    assert (wrong.returncode, wrong.stdout) == (0, right.stdout)


BROKEN = {"tokenizer.chat_template": "{% for message in messages %}{{ message.content }"}


@pytest.fixture
def broken(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose chat template fails, and whose weights no command reads."""

    def opened(*_: object) -> None:
        raise AssertionError("the engine was opened first")

    monkeypatch.setattr("paceline.runtime.load.open_engine", opened)
    return write_tiny(tmp_path / "broken.gguf", fields=BROKEN)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["generate", "Hello"], "the chat template of"),
        (["chat"], "the chat template of"),
        (["serve", "--no-think"], "the chat template of"),
        (["generate", "Hello", "--raw", "--drafter", "no"], "drafter"),
        (["generate", "the " * 600, "--raw"], "tokens and the context holds 512"),
        (["generate", "Hello", "--raw", "--drafter", "model:nowhere.gguf"], "nowhere.gguf"),
    ],
    ids=str,
)
def test_errors_that_need_no_weights_are_reported_before_loading(
    words: list[str],
    reason: str,
    broken: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    monkeypatch.setattr("paceline.cli.crash.report_crashes", lambda: None)
    assert main([*words, "--model", str(broken)]) == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("gguf", "times"), [("tiny_gguf", 1), ("thinking_gguf", 2)])
def test_the_chat_template_is_rendered_once_or_twice_for_reasoning_models(
    gguf: str,
    times: int,
    request: pytest.FixtureRequest,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    rendered = list[int]()
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *arguments: Any, **variables: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, *arguments, **variables)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    path = request.getfixturevalue(gguf)
    assert main(["generate", "Hello", "--model", str(path), "--max-tokens", "3", "--json"]) == 0
    assert 1 <= len(rendered) <= times
