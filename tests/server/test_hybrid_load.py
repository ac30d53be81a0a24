"""Hybrid models under the HTTP server's load: tokens and states are those of plain decoding.

The load is that of `test_exact_under_load.py`. The pool has fewer states than its clients' blocks
need, so that states are evicted and computed again.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import paceline
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.runtime.model import Model
from support.hybrids import HEAD, plain_states, states_seen, with_head
from support.load import SPECULATIONS, Load, check_load, plain_answers
from support.mtp import random_weights
from support.tiny_checkpoints import write_gguf_of

ALL = tuple(
    speculation for speculation in SPECULATIONS if "table" not in speculation.get("drafter", "")
)
OWN: tuple[dict[str, Any], ...] = (
    {"policy": "fixed", "max_block": 5},
    {"policy": "adaptive", "max_block": 8},
)
"""With the drafters that the server was started with."""


FEW = {"logit_bias": {3 + byte: 40.0 for byte in b"the, rain"}}
"""Random models repeat themselves, and some drafts stand, if they have few tokens to pick from."""


class Case(NamedTuple):
    drafter: str
    load: Load


CASES = {
    "lfm2_moe": Case("auto", Load(36, 10, ALL, frozenset({"ngram", "prediction"}), 2, FEW, 0.5)),
    "qwen3_5_text": Case(
        "suffix+mtp",
        Load(36, 10, ALL + OWN, frozenset({"ngram", "prediction", "mtp"}), 2, FEW, 0.5),
    ),
}


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> Model:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    if form == "qwen3_5_text":
        with_head(path, random_weights(HEAD))
    else:
        write_gguf_of(form, path)
    return paceline.load(path, engine="openvino", cache_tokens=4096)


@pytest.mark.parametrize("form", CASES)
def test_answers_and_states_are_those_of_plain_decoding(hybrid: Model, form: str):
    drafter, load = CASES[form]
    engine = hybrid.engine
    assert isinstance(engine, OpenVinoEngine)
    answers = plain_answers(hybrid, load)
    with states_seen(engine) as seen:
        check_load(hybrid, load, answers, drafter)
    expected = plain_states(engine, seen)
    assert all(item.state == expected[item.text] for item in seen)
    assert len({*expected.values()}) == len(expected)
    assert any(item.rows > 1 and item.shared for item in seen)
