"""`paceline classify` without a classifier; with one: tests/coreml/engine/test_classifier.py."""

from pathlib import Path

import pytest

from paceline.cli.app import main


def test_a_model_of_another_engine_is_rejected(
    tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["classify", str(tiny_gguf), "text"]) == 2
    assert "expected a Core ML model" in capsys.readouterr().err
