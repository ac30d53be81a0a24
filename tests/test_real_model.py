"""Exactness with a real model; everything else is tested on the tiny one."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.llamacpp.libraries import VARIABLE
from paceline.models.names import DEFAULT_MODEL, REGISTRY
from paceline.options import GREEDY, Options
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.verify import checks
from paceline.verify.checks import Verdict, row_checks, run_checks
from support.llamacpp import library, model_of, wheel_file
from support.process import python
from support.scheduling import end_scheduler

pytestmark = pytest.mark.real_model

TOKENS = 48
PROMPTS = [
    "Write this sentence again, three times: the quick brown fox jumps over the lazy dog.",
    "```python\ndef add(a, b):\n    return a + b\n```\nRename the function to `plus`.",
    "What is the capital of France?",
]
SAMPLED: Options = {**GREEDY, "temperature": 0.8, "seed": 5, "top_p": 0.95}
OWN: Options = {"seed": 7}
"""As the registry has it for this model: sampled, with a penalty."""


@pytest.fixture(scope="module", params=["ik_llama.cpp", "llama.cpp"])
def real_model(request: pytest.FixtureRequest) -> Model:
    """The default model in each library that runs it here."""
    if request.param == "llama.cpp":  # which computes the weights of its file, Q4_1
        return model_of(wheel_file(REGISTRY[DEFAULT_MODEL]), request.param, cache_tokens=4096)
    library(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        return load(engine="llamacpp", cache_tokens=4096, threads=1)


@pytest.fixture(scope="module")
def plain(real_model: Model) -> Any:
    """Plain decoding's tokens, by prompt and sampling."""
    known: dict[tuple[str, str], list[int]] = {}

    def plain(prompt: str, sampling: Options) -> list[int]:
        key = (prompt, str(sampling))
        if key not in known:
            result = real_model.generate(prompt, max_tokens=TOKENS, drafter="none", **sampling)
            known[key] = result.token_ids
        return known[key]

    return plain


@pytest.mark.pairs
@pytest.mark.parametrize("drafter", ["auto", "suffix", "ngram"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, OWN], ids=["greedy", "sampled", "own"])
def test_tokens_match_plain_decoding_with_every_drafter(
    drafter: str, sampling: Options, plain: Any, real_model: Model
):
    accepted = 0
    for prompt in PROMPTS:
        # A policy that weighs nothing drafts as often as it can.
        policy = "auto" if drafter == "auto" else "fixed"
        result = real_model.generate(
            prompt, max_tokens=TOKENS, drafter=drafter, policy=policy, **sampling
        )
        assert result.token_ids == plain(prompt, sampling)
        accepted += result.stats.accepted
    assert drafter == "auto" or accepted > 0


@pytest.mark.slow
def test_rows_do_not_depend_on_their_computation(
    real_model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checks, "CONTEXTS", (64,))  # longer ones take long here
    monkeypatch.setattr(checks, "DEPTH", checks.DEPTH._replace(chunks=(3, 16, 31)))
    monkeypatch.setattr(checks, "THRESHOLDS", (512,))
    verdict = Verdict()
    end_scheduler(real_model)  # else the engine would release contexts during the test
    run_checks(row_checks(real_model.engine, verdict))
    assert verdict.rows.rows > 300
    assert verdict.rows.differing == 0


def test_the_model_answers_a_question(real_model: Model):
    # Beyond rounding: a model that was converted wrongly does not know this.
    question = "Which city is the capital of France? Answer with one word."
    assert "Paris" in real_model.generate(question, max_tokens=TOKENS, **GREEDY).text


@pytest.mark.slow
def test_the_readmes_first_command_ends_naturally_without_a_loop(real_model: Model):
    if real_model.engine.name != "llamacpp":
        pytest.skip("the command runs the default engine, whose answer is another one")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^.*\.venv/bin/(paceline generate .*)$", readme, re.MULTILINE)
    assert match is not None
    words = shlex.split(match[1])
    value = json.loads(python("-m", *words, "--json").stdout)
    assert value["finish_reason"] == "stop", value["text"]
    assert value["settings"]["temperature"]["source"] == "registry"
    tokens = value["token_ids"]
    runs = [tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)]
    again = len(runs) - len(set(runs))
    assert again <= 0.3 * len(runs), value["text"]
    assert len(value["text"].split()) >= 20
    # The seed that it names gives the same answer again, also without drafts.
    same = real_model.generate(words[2], seed=value["seed"], drafter="none")
    assert same.token_ids == tokens
