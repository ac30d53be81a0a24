"""The default model's own weights: what the tiny ones cannot show.

Its first layers are enough to show it, and take a fifth of the time; with PACELINE_WHOLE=1 all 30.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.cli.app import main
from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline_coreml.conversion.source import open_source

pytestmark = [pytest.mark.coreml, pytest.mark.real_model, pytest.mark.timeout(900)]

PROMPT = "Write the list of the days of the week, and then write the same list again."
TOKENS = 32
WHOLE = bool(os.environ.get("PACELINE_WHOLE"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face checkpoint."""
    found = open_source("smollm2-135m", tmp_path_factory.mktemp("source"), QUIET)
    folder = found.checkpoint
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 30 if WHOLE else 5
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(found.tokenizer.read_bytes())
    (folder / "chat_template.jinja").write_text(str(found.template))
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With INT8 weights, in calls of four rows, all layers tapped."""
    folder = tmp_path_factory.mktemp("real") / "made"
    topology = "20+10" if WHOLE else "3+2"
    options = ["--topology", topology, "--rows", "4", "--slots", "256", "--taps", "all", "--quiet"]
    assert main(["convert", str(source), "--to", "coreml", "--output", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    yield paceline.load(folder)


def test_the_real_model_has_several_packages(folder: Path):
    names = sorted(path.name for path in folder.glob("*.mlpackage"))
    assert [name.partition("-")[0] for name in names] == ["head"] * 3 + ["layers"] * 2


def test_the_parity_check_and_lint_pass(folder: Path, source: Path):
    assert main(["coreml", "golden", str(folder), "--source", str(source), "--tokens", "12"]) == 0
    assert main(["coreml", "lint", str(folder)]) == 0


def test_speculation_on_core_ml_changes_no_token(model: Model):
    plain = model.generate(PROMPT, max_tokens=TOKENS, drafter="none")
    assert len(plain.token_ids) == TOKENS
    if WHOLE:
        assert plain.text.count("day") > 3
    drafted = model.generate(
        PROMPT, max_tokens=TOKENS, drafter="ngram:min=1", policy="fixed", max_block=4
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0
    assert drafted.stats.steps < plain.stats.steps
