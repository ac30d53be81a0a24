"""`paceline.load`: its settings, and the sampling settings that come with a model."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.request import Defaults
from support.plain import PROMPT, plain, said


def test_a_model_loads_by_path_with_its_drafters_and_is_timed(tiny_gguf: Path, cache: Path):
    model = paceline.load(tiny_gguf, drafters=[f"model:{tiny_gguf}"])
    assert isinstance(model, paceline.Model)
    assert [*model.drafting.resources.models] == [str(tiny_gguf)]
    assert model.generate(PROMPT, max_tokens=3).stats.load_seconds == model.load_seconds > 0


def test_single_row_decoding_is_not_exact(tiny_gguf: Path, cache: Path):
    model = load(tiny_gguf, min_rows=1)
    assert not model.generate(PROMPT, max_tokens=3, drafter="none").exact
    assert not model.generate(PROMPT, max_tokens=3, drafter="suffix").exact


def test_a_response_beyond_the_compared_length_is_not_exact(tiny_gguf: Path, cache: Path):
    model = load(tiny_gguf)
    model.engine.compared_keys = model.generate(PROMPT, max_tokens=3).prompt_tokens + 3
    assert model.generate(PROMPT, max_tokens=3).exact
    assert not model.generate(PROMPT, max_tokens=4).exact


def test_nothing_is_reported_as_measured_before_a_response(tiny_gguf: Path, cache: Path):
    class FailingProgress(Progress):
        def note(self, text: str) -> None:
            raise AssertionError(text)

    model = load(tiny_gguf, progress=FailingProgress())
    for drafter in ("none", "auto"):
        assert model.generate(PROMPT, max_tokens=3, drafter=drafter).exact


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rows": 3}, "rows is 3"),
        ({"cache_tokens": 0}, "cache_tokens is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"generation_config": "vllm"}, "generation_config is 'vllm'"),
        ({"engine": "magic"}, "unknown engine 'magic'; expected auto, llamacpp"),
    ],
)
def test_an_out_of_range_setting_is_rejected(
    settings: Any, reason: str, tiny_gguf: Path, cache: Path
):
    with pytest.raises(InvalidRequest, match=reason):
        load(tiny_gguf, **settings)


def test_only_the_public_names_can_be_imported():
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.nothing


# -- sampling settings that come with a model -----------------------------------------------------


OWN = Defaults(
    registry={"temperature": 0.9, "top_p": 0.9}, model={"repetition_penalty": 1.2, "max_tokens": 9}
)


def test_omitted_settings_come_from_the_registry_and_the_model(model: Model):
    own = Model(model.files, model.engine, defaults=OWN)
    found = own.generate("Hello", seed=5, drafter="suffix")
    asked: Options = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "max_tokens": 9}
    expected = model.generate("Hello", seed=5, drafter="none", **asked)
    assert found.token_ids == expected.token_ids != plain(model, "Hello").token_ids[:9]
    assert found.settings["temperature"] == (0.9, "registry")
    assert found.settings["max_tokens"] == (9, "model")
    assert expected.settings["temperature"] == (0.9, "request")
    assert own.without_history().generate("Hello", seed=5).token_ids == found.token_ids
    chat = own.conversation()
    assert said(chat.send("Hello", seed=5)).token_ids == found.token_ids
    chat.close()


def test_one_time_measurements_show_progress(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    shown = StringIO()
    for _ in range(2):
        with load(str(tiny_gguf), progress=Progress(shown)) as model:
            model.generate("Hello", max_tokens=2)
    lines = [line for line in shown.getvalue().splitlines() if "once per model" in line]
    assert [line.split()[1] for line in lines] == ["which", "whether"]
