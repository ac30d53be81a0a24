"""A model in a forked child or a pickle raises an error: load it there."""

import copy
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import Model
from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime.load import load
from support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")


def refusal(call: Callable[[], Any], pipe: Any) -> None:
    try:
        pipe.send(f"no error: {call()}")
    except PacelineError as error:
        pipe.send(str(error))


def in_child(call: Callable[[], Any]) -> str:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=refusal, args=(call, theirs))
    child.start()
    try:
        assert ours.poll(PATIENCE), "the child hangs"
        return str(ours.recv())
    finally:
        child.kill()
        child.join(PATIENCE)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_must_load_its_own_model(model: Model, tiny_gguf: Path):
    with model.stream("Hello", max_tokens=4) as stream:
        next(stream)
        answers = model.as_completed(["Hello"] * 3, max_tokens=2)
        next(answers)
        calls: list[Callable[[], Any]] = [
            lambda: model.generate("Hello", max_tokens=2),
            lambda: model.generate(["Hello"], max_tokens=2),
            lambda: model.conversation().send("Hello"),
            lambda: next(stream),
            lambda: next(answers),
            model.exactness_report,
            lambda: load(tiny_gguf),
        ]
        for call in calls:
            assert f"process {os.getpid()} has loaded a model" in in_child(call)
        assert in_child(model.close) == "no error: None"
        assert next(stream).text is not None


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_cannot_be_pickled_or_copied(send: Callable[[Any], Any], model: Model):
    with pytest.raises(InvalidRequest, match="load it there"):
        send(model)
