"""The default model, converted and run whole: what the tiny ones cannot show."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coremltools")
pytest.importorskip("transformers", minversion="5.23")

import paceline
from paceline.coreml import commands
from paceline.models import QUIET, Progress
from paceline.runtime import Model

pytestmark = [pytest.mark.coreml, pytest.mark.real_model]

PROMPT = "Write the list of the days of the week, and then write the same list again."
TOKENS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with INT8 weights in calls of up to four rows, all 30 layers tapped."""
    folder = tmp_path_factory.mktemp("real") / "made"
    recipe = {"topology": "20+10", "rows": 4, "slots": 256, "taps": "all"}
    commands.convert(
        "smollm2-135m", recipe=recipe, output=folder, temporary=None, progress=Progress(quiet=True)
    )
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    yield paceline.load(folder)


def test_it_is_in_several_packages(folder: Path):
    names = sorted(path.name for path in folder.glob("*.mlpackage"))
    assert [name.partition("-")[0] for name in names] == ["head"] * 3 + ["layers"] * 2


def test_every_layer_is_near_to_float32(folder: Path):
    report: Any = commands.golden(
        str(folder),
        source="smollm2-135m",
        tokens=12,
        threshold=0.99,
        rounding="f16",
        temporary=None,
        progress=QUIET,
    )
    assert report.passed, report.value


def test_speculation_changes_no_token(model: Model):
    plain = model.generate(PROMPT, max_tokens=TOKENS, drafter="none")
    assert len(plain.token_ids) == TOKENS
    assert plain.text.count("day") > 3
    drafted = model.generate(
        PROMPT, max_tokens=TOKENS, drafter="ngram:min=1", policy="fixed", max_block=4
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0
    assert drafted.stats.steps < plain.stats.steps


def test_lint_finds_nothing_firm(folder: Path):
    assert commands.lint(str(folder)).passed
