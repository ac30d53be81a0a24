"""Measuring and learning ignore a model's own settings and decode as requested."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.runtime.request import Defaults, Request
from paceline.verify.checks import SAMPLED, Verdict, VerifyCase, run_checks, token_checks
from paceline.verify.suite import load_suite
from paceline_lab.bench.ab_test import Case, Contender
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.learn import data
from paceline_lab.learn.folder import LearnedFolder
from paceline_lab.learn.variety import Variety
from paceline_lab.peers.measure import PacelinePeer
from paceline_lab.sweep.cases import length_cases

HOT = Defaults(
    registry={"temperature": 0.9, "repetition_penalty": 1.4}, model={"top_k": 9, "max_tokens": 2}
)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    messages = [{"role": "user", "content": "this is one and the user"}]
    path.write_text(json.dumps({"id": "one", "kind": "chat", "messages": messages}) + "\n")
    return path


def _run(model: Model, _: Path, __: Path) -> None:
    Contender("x", model, {"drafter": "none"}).answer(Case("a", "a", "Hi", {"max_tokens": 4}))


def _swept(model: Model, _: Path, __: Path) -> None:
    (case,) = length_cases(model, "this is the one", [12], 4)
    Contender("x", model, {"drafter": "suffix"}).answer(case)


def _peers(model: Model, suite: Path, _: Path) -> None:
    turn = PromptTurn("one", load_suite(suite).prompts[0], 1, [], model.tokens("Hi"))
    PacelinePeer(model).answer(turn, 4, "auto")


def _verified(model: Model, suite: Path, _: Path) -> None:
    cases = [VerifyCase("suffix", "fixed", 3, how) for how in ({"temperature": 0.0}, *SAMPLED)]
    verdict = Verdict()
    run_checks(token_checks(model, load_suite(suite), cases, verdict, max_tokens=4, long=0))
    assert verdict.exact


def _answered(model: Model, suite: Path, out: Path) -> None:
    folder = LearnedFolder(model.files, out)
    data.DataMaker(model, folder, Variety(), seconds=0, progress=QUIET).run([load_suite(suite)])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests to a model that has recommended settings in its registry and files."""
    for name, value in {"MAX_TOKENS": 4, "LONGEST_PROMPT": 4, "_MAX_UNUSED": 2}.items():
        monkeypatch.setattr(data, name, value)
    seen, usual = list[Request](), Model._request

    def request(model: Model, options: Any) -> Request:
        seen.append(usual(model, options, HOT))
        return seen[-1]

    monkeypatch.setattr(Model, "_request", request)
    return seen


@pytest.mark.parametrize("work", [_run, _swept, _peers, _verified, _answered])
def test_a_measurement_is_greedy_regardless_of_registry_and_model(
    work: Callable[[Model, Path, Path], None],
    model: Model,
    suite: Path,
    tmp_path: Path,
    seen: list[Request],
):
    work(model, suite, tmp_path / "out")
    assert seen
    for request in seen:
        assert {setting.source for setting in request.settings.values()} <= {"request", "fallback"}
        assert request.max_tokens == 4
        assert request.sampling.greedy or work is _verified


def test_prompts_are_sampled_as_requested_regardless_of_registry_and_model(
    model: Model, tmp_path: Path, seen: list[Request]
):
    folder = LearnedFolder(model.files, tmp_path / "o")
    maker = data.DataMaker(model, folder, Variety(), seconds=99, progress=QUIET)
    with suppress(PacelineError):  # the tiny model's prompts are useless
        maker.run([])
    assert {setting.source for setting in seen[0].settings.values()} <= {"request", "fallback"}
    assert seen[0].sampling.temperature == 1.0
