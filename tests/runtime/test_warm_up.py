"""Packing of weights while a model is loaded, and a cost profile that answers prove wrong."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.models import QUIET, Progress
from paceline.runtime.drafting import warmed_up
from paceline.runtime.load import load
from paceline.runtime.model import Model
from support.toy import ToyEngine


def test_weights_are_packed_while_loading():
    engine, said = ToyEngine(), StringIO()
    engine.warm_rows = (2, 8)
    slots = engine.free_slots
    warmed_up(engine, Progress(said))
    assert engine.steps == 2
    assert "packing weights" in said.getvalue()
    assert engine.free_slots == slots, "no slot is held"


def test_an_engine_without_slow_first_calls_is_not_called(cache: Path):
    engine, said = ToyEngine(), StringIO()
    assert warmed_up(engine, Progress(said)) is engine
    assert (engine.steps, said.getvalue()) == (0, "")


def test_calls_that_contradict_the_profile_have_it_measured_again_by_the_next_model(model: Model):
    said = StringIO()
    watched = Model(model.files, model.engine, progress=Progress(said))
    cost = watched.measure_profile(again=True).cost
    said.truncate(0)
    stats = SimpleNamespace(prefill_seconds=0.1, decode_seconds=0.1)
    calls = [(2, 256, cost(2) / 10)] * 200
    fast: Any = SimpleNamespace(calls=calls, failed=False, stats=stats)
    watched._profile.learn(fast)
    watched._profile.learn(fast)
    (line,) = said.getvalue().strip("\0").splitlines()
    assert line.startswith("calls of 2 rows take 0.1 times")
    said = StringIO()
    following = Model(model.files, model.engine, progress=Progress(said))
    assert following.profile is not None
    assert said.getvalue().startswith("measuring this machine, again: calls of 2 rows take 0.1")
    said = StringIO()
    last = Model(model.files, model.engine, progress=Progress(said))
    assert last.profile == following.profile
    assert said.getvalue() == ""


def test_an_answer_has_the_calls_that_it_had_alone(model: Model):
    with model.stream("Hello", max_tokens=20, drafter="none", temperature=0.0) as stream:
        steps = [step for step in stream if step.tokens]
    calls = list(stream.calls)
    assert 0 < len(calls) <= len(steps)
    prompt = stream.result.prompt_tokens
    assert [context for _, context, _ in calls] == list(range(prompt, prompt + len(calls)))
    assert {rows for rows, _, _ in calls} == {1}
    assert all(seconds > 0 for _, _, seconds in calls)


def test_loading_says_nothing_when_quiet(tiny_gguf: Path, cache: Path, capfd: Any):
    load(tiny_gguf, progress=QUIET)
    assert capfd.readouterr().err == ""
