import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.trace import Trace
from support.traces import RecordedTrace

PROMPT = "this is one and the user, this is one and the user, this is"
ASKED: Options = {"max_tokens": 40, "drafter": "suffix", "policy": "fixed", "max_block": 5}


@pytest.fixture
def traced(model: Model, tmp_path: Path) -> Callable[..., Path]:
    def traced(**options: Any) -> Path:
        path = tmp_path / "trace.jsonl"
        asked: Options = {**ASKED, **options}  # type: ignore[typeddict-item]
        with model.stream(PROMPT, **asked) as stream, Trace(path, model, stream, asked) as steps:
            for _ in steps:
                pass
        traced.result = stream.result  # type: ignore[attr-defined]
        return path

    return traced


def test_a_trace_has_every_step(traced: Any, model: Model):
    trace = RecordedTrace(traced(drafter="ngram+suffix"))
    result = traced.result
    stats = result.stats
    assert trace.prompt == model.tokens(PROMPT)
    assert trace.answer == result.token_ids
    assert trace.result == json.loads(json.dumps(result.as_dict()))
    assert len(trace.steps) == stats.steps
    assert sum(len(step.proposed) for step in trace.steps) == stats.drafted > 0
    assert sum(step.stood for step in trace.steps) == stats.accepted
    pieces = [*trace.first.pieces, *(piece for step in trace.steps for piece in step.pieces)]
    assert "".join(pieces) == result.text
    assert trace.first.prefill_seconds == stats.prefill_seconds
    for name in ("draft", "verify", "sample"):
        found = sum(step.seconds[name] for step in trace.steps)
        assert found == pytest.approx(getattr(stats, f"{name}_seconds"))
    whole = sum(step.seconds["whole"] for step in trace.steps)
    assert whole == pytest.approx(stats.decode_seconds)
    for took in (step.seconds for step in trace.steps):
        assert 0 <= took["draft"] <= took["whole"] - took["verify"]
    context = len(trace.prompt)
    for step in trace.steps:
        assert step.context == context
        assert step.rows == len(step.proposed) + 1
        assert list(step.proposed[: step.stood]) == list(step.tokens[: step.stood])
        assert step.stood <= len(step.proposed)
        assert step.guess == model.files.tokenizer().decode(step.proposed)
        context += len(step.tokens)
    assert {step.source for step in trace.steps if step.proposed} <= {"ngram", "suffix"}


def test_a_trace_has_the_request_and_the_model_and_leaves_out_what_json_has_no_form_for(
    traced: Any, model: Model, tmp_path: Path
):
    trace = RecordedTrace(traced(stop=["zzz"], temperature=0.5, seed=3))
    assert trace.about["model"] == model.files.name
    assert trace.about["fingerprint"] == model.files.fingerprint
    assert trace.about["engine"]["engine"] == "llamacpp"
    assert trace.about["settings"] == {**ASKED, "stop": ["zzz"], "temperature": 0.5, "seed": 3}
    assert trace.about["cached"] == 0
    path = tmp_path / "other.jsonl"
    with model.stream(PROMPT, **ASKED) as stream:
        Trace(path, model, stream, {"constraint": object(), "seed": 1}).close()
    assert RecordedTrace(path).about["settings"] == {"seed": 1}


def test_every_line_is_there_when_its_step_is(model: Model, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with model.stream(PROMPT, **ASKED) as stream, Trace(path, model, stream, ASKED) as steps:
        for number, step in enumerate(steps):
            trace = RecordedTrace(path)
            assert len(trace.steps) == number
            assert trace.result is None
            assert trace.answer[-len(step.tokens) :] == list(step.tokens)
            if number == 3:
                break
    trace = RecordedTrace(path)
    assert len(trace.steps) == 3
    assert trace.result is not None
    assert trace.result["finish_reason"] == "cancelled"


def test_an_answer_that_failed_has_no_result(model: Model, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with (
        pytest.raises(ZeroDivisionError),
        model.stream(PROMPT, **ASKED) as stream,
        Trace(path, model, stream) as steps,
    ):
        for _ in steps:
            stream.engine = Broken()  # type: ignore[assignment]
    assert RecordedTrace(path).result is None


class Broken:
    name = "broken"
    min_rows = 2
    free_slots = 1000
    block_size = 32

    def step(self, _work: object) -> None:
        raise ZeroDivisionError


def test_a_trace_that_cannot_be_written_is_one_line(model: Model, tmp_path: Path):
    with model.stream(PROMPT, **ASKED) as stream, pytest.raises(InvalidRequest, match="cannot wr"):
        Trace(tmp_path / "nowhere" / "trace.jsonl", model, stream)


def test_generate_writes_a_trace(
    cache: Path, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "trace.jsonl"
    words = ["generate", PROMPT, "--model", str(tiny_gguf), "--max-tokens", "20", "--json"]
    assert main([*words, "--trace", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    trace = RecordedTrace(path)
    assert trace.answer == answer["token_ids"]
    assert trace.prompt == answer["prompt_token_ids"]
    assert trace.about["settings"]["max_tokens"] == 20
    # A place that cannot be written is found out before the model is loaded.
    assert main(["generate", PROMPT, "--model", "nosuch", "--trace", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_after_ctrl_c_the_trace_is_whole(tiny_gguf: Path, cache: Path, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    # Ctrl-C comes while a step is being printed.
    script = f"""
import signal, sys
from paceline.cli import app, generate
steps = 0
show = generate.step_printer
def step_printer(*arguments):
    inner = show(*arguments)
    def shown(step):
        global steps
        steps += 1
        if steps == 4:
            signal.raise_signal(signal.SIGINT)
        inner(step)
    return shown
generate.step_printer = step_printer
sys.exit(app.main(["generate", {PROMPT!r}, "--model", {str(tiny_gguf)!r}, "--ignore-eos",
    "--max-tokens", "200", "--quiet", "--trace", {str(path)!r}]))
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == 130, found.stderr
    assert found.stderr.strip() == "paceline: stopped"
    trace = RecordedTrace(path)
    assert len(trace.steps) == 3
    assert trace.result is not None
    assert trace.result["finish_reason"] == "cancelled"
    assert trace.result["token_ids"] == trace.answer
