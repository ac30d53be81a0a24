"""Kept answers in the server: requests with a salt, and those without an answer, take no part."""

from pathlib import Path
from typing import Any

import pytest

from paceline.runtime import kept as kept_module
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.drafting import Drafting
from paceline.runtime.kept import all_kept
from paceline.runtime.model import Model
from support.scheduling import Submitted

PROMPT = "the rain in the rain in the"
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "drafter": "auto"}


@pytest.fixture
def keeping(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(kept_module, "due", lambda tokens, counted: tokens > counted)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return Model(model.files, model.engine, drafting=Drafting(model.files, keep=True))


def test_a_request_with_a_salt_is_neither_kept_nor_drafted_from_kept_answers(keeping: Model):
    scheduler = Scheduler(keeping)
    scheduler.start()
    try:
        salted = Submitted(scheduler, PROMPT, salt="a", **OPTIONS).result()
        assert all_kept() == []
        first = Submitted(scheduler, PROMPT, **OPTIONS).result()
        assert len(all_kept()) == 1
        keeping.settle()
        second = Submitted(scheduler, PROMPT, **OPTIONS).result()
        again = Submitted(scheduler, PROMPT, salt="a", **OPTIONS).result()
        named = {**OPTIONS, "drafter": "kept"}  # as the server may have been started with
        assert Submitted(scheduler, PROMPT, **named).result().stats.drafted > 0
        assert Submitted(scheduler, PROMPT, salt="a", **named).result().stats.drafted == 0
    finally:
        scheduler.close()
    drafters = [item.drafter for item in (salted, first, second, again)]
    assert drafters == ["suffix", "suffix", "suffix+kept", "suffix"]
    assert salted.token_ids == first.token_ids == second.token_ids == again.token_ids
