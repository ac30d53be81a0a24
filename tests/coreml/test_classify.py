"""`paceline classify` without a classifier; with one: tests/coreml/engine/test_classifier.py."""

import io
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main


def test_a_model_of_another_engine_is_rejected(
    tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["classify", str(tiny_gguf), "text"]) == 2
    assert "expected a Core ML model" in capsys.readouterr().err


def test_input_that_is_no_text_is_rejected(
    tiny_gguf: Path, cache: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["classify", str(tiny_gguf), "-"]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err
